"""What `penstock.prepare` returned for a module: one handle, or one for each part that has an optimizer of its own."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import penstock
from penstock.errors import ConfigError
from penstock.integrations.arguments import prepare_arguments
from penstock.integrations.lightning.parts import Part, Rest, divide, gather_state, put_state
from penstock.integrations.lightning.precision import ComputePrecision

#: Keywords of a strategy that are Lightning's: how processes start, and talk.
_OF_LIGHTNING = (
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "process_group_backend",
    "timeout",
    "start_method",
)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Prepared:
    """A prepared module. Collective, as all its methods.

    Arguments:
        module: the user's.
        optimizers: those that train it; none for inference.
        device: where it computes.
        precision: the compute precision.
        arguments: further ones of `penstock.prepare`. Without `weights`, a module that is on the meta device as a whole
            is initialised by its modules (`weights="init"`).

    Raises:
        ConfigError: several optimizers share a submodule, or are in fp16; or `prepare` refuses. Nothing has changed.

    Attributes:
        module: the user's.
        parts: what was prepared; one with an empty name is the whole.
        handles: what `penstock.prepare` returned, for each part; those that train first, as the optimizers were.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Any],
        *,
        device: torch.device,
        precision: ComputePrecision,
        arguments: Mapping[str, Any],
    ) -> None:
        if len(optimizers) > 1 and precision == "fp16":
            raise ConfigError(
                f"{len(optimizers)} optimizers in fp16: each has a loss scale of its own, and a loss is scaled by one. "
                "Use precision='bf16-mixed', or one optimizer with param groups."
            )
        chosen = dict(arguments)
        if "weights" not in chosen and all(p.is_meta for p in module.parameters()):
            chosen["weights"] = "init"
        if device.type == "cpu" and "mesh" not in chosen and torch.distributed.is_initialized():
            # Where there is another device as well, the type of the mesh says that this one is meant.
            chosen["mesh"] = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        self.module = module
        self.parts: list[Part] = divide(module, optimizers)
        self.handles: list[Any] = []
        with contextlib.ExitStack() as undo:
            for part in self.parts:
                handle = penstock.prepare(part.module, part.optimizer, precision=precision, **chosen)
                undo.callback(handle.close)
                self.handles.append(handle)
            undo.pop_all()
        self._rest = Rest(module, self.parts, device, _DTYPES[precision])

    @property
    def is_whole(self) -> bool:
        """Whether the module itself was prepared, not submodules of it."""
        return not self.parts[0].name

    @property
    def optimizers(self) -> list[Any]:
        """The handles that train."""
        return [handle for part, handle in zip(self.parts, self.handles, strict=True) if part.optimizer is not None]

    def owners(self) -> list[tuple[nn.Module, Any]]:
        """List the modules that were prepared, each with its handle."""
        return [(part.module, handle) for part, handle in zip(self.parts, self.handles, strict=True)]

    @contextlib.contextmanager
    def gathered(self, *, modify: bool = False) -> Iterator[None]:
        """Show whole parameters inside a `with` block, on every rank, as `Optimizer.gathered` does."""
        with contextlib.ExitStack() as stack:
            for handle in self.handles:
                stack.enter_context(handle.gathered(modify=modify))
            yield

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Sum micro-batches on this rank inside a `with` block, as `Optimizer.no_sync` does."""
        with contextlib.ExitStack() as stack:
            for handle in self.optimizers:
                stack.enter_context(handle.no_sync())
            yield

    def state(self, *, keep: bool) -> dict[str, torch.Tensor]:
        """Gather the module's weights, one after the other; empty on ranks that do not keep them."""
        return gather_state(self.module, self.owners(), keep=keep)

    def put(self, state: dict[str, torch.Tensor], *, strict: bool) -> None:
        """Overwrite the module's weights with whole ones.

        Raises:
            ConfigError: they are not of this module. Nothing has changed.
        """
        put_state(self.module, self.owners(), state, strict=strict)

    def close(self, *, keep_params: bool = True) -> None:
        """Close every handle; the module has whole parameters then, unless it is not to keep them."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._rest.restore)
            for handle in self.handles:
                stack.callback(handle.close, keep_params=keep_params)


def divide_arguments(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide a strategy's keywords into Lightning's and those of `penstock.prepare`, which may be as files hold them.

    Raises:
        ConfigError: neither of them has it, or a value stands for nothing.
    """
    launch = {name: value for name, value in arguments.items() if name in _OF_LIGHTNING}
    rest = {name: value for name, value in arguments.items() if name not in _OF_LIGHTNING}
    return launch, prepare_arguments(rest, source="the strategy")


def meta_where(empty_init: bool | None, arguments: Mapping[str, Any]) -> Any:
    """Choose where modules are made: on the meta device where their values come from elsewhere, else on the cpu."""
    return torch.device("meta") if empty_init or "weights" in arguments else contextlib.nullcontext()
