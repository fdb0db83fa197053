"""What Fabric takes: `Fabric(strategy=PenstockFabricStrategy(placement=...))`, or `strategy="penstock"`."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.plugins.precision.utils import _convert_fp_tensor
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

import penstock
from penstock.errors import CheckpointError, ConfigError, no_gradient
from penstock.integrations.engine_internals import MARKER
from penstock.integrations.lightning.checkpoints import read_file
from penstock.integrations.lightning.precision import (
    ComputePrecision,
    by_value,
    checked,
    compute_of,
    name_of,
    of_step,
    scaled_backward,
)
from penstock.integrations.lightning.prepared import Prepared, divide_arguments, meta_where

_KEPT = "fabric"


class PenstockFabricPrecision(Precision):
    """The precision of `PenstockFabricStrategy`: the engine casts what goes in; what comes out is in torch's default.

    Arguments:
        precision: the compute dtype: `"fp32"`, `"bf16"` or `"fp16"`.

    Attributes:
        compute: the compute dtype, as `penstock.prepare` takes it.
    """

    def __init__(self, precision: ComputePrecision = "bf16") -> None:
        self.compute = checked(precision)
        self.precision = name_of(precision)

    def convert_output(self, data: Any) -> Any:
        """Cast floating-point outputs to torch's default dtype, as Lightning's mixed precisions do."""
        return apply_to_collection(data, function=_convert_fp_tensor, dtype=Tensor, dst_type=torch.get_default_dtype())

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Run the closure where there is one, then the step.

        Returns:
            What the closure returned; without one, what `penstock.Optimizer.step` returns.
        """
        closure = kwargs.pop("closure", None)
        if kwargs:
            raise of_step(kwargs)
        if closure is None:
            return optimizer.step()
        with torch.enable_grad():
            returned = closure()
        optimizer.step()
        return returned


class PenstockFabricStrategy(DDPStrategy):
    """Prepares what `fabric.setup(model, optimizer)` is given. Processes start as those of DDP do.

    `fabric.setup(model)` alone prepares for inference. `fabric.save` writes folders. At the end,
    `fabric.strategy.teardown()` closes what was prepared, and models have whole parameters.

    Arguments:
        precision: a `PenstockFabricPrecision`, or a compute precision; `None` for what Fabric's `precision=` says.
        arguments: those of `penstock.prepare`, by their types or as files hold them, and of `DDPStrategy` how processes
            start.

    Raises:
        ConfigError: `precision` is not what Fabric was given.

    Example:
        >>> fabric = Fabric(strategy=PenstockFabricStrategy(stage=2), precision="bf16-mixed")  # doctest: +SKIP
        >>> model, optimizer = fabric.setup(model, optimizer)  # doctest: +SKIP
    """

    def __init__(self, *, precision: Any = None, **arguments: Any) -> None:
        launch, self._arguments = divide_arguments(arguments)
        is_plugin = isinstance(precision, Precision)
        self._wanted = None if precision is None or is_plugin else checked(precision)
        self._prepared: list[Prepared] = []
        super().__init__(precision=precision if is_plugin else None, **launch)
        self._backward_sync_control = _NoSync(self)

    @property
    def precision(self) -> PenstockFabricPrecision:
        """What maps precisions and clips."""
        if self._precision is None:
            return PenstockFabricPrecision(self._wanted or "fp32")
        plugin: PenstockFabricPrecision = self._precision
        return plugin

    @precision.setter
    def precision(self, plugin: Any) -> None:
        if plugin is None:
            self._precision = None
            return
        compute = compute_of(plugin, self._wanted)
        self._precision = plugin if isinstance(plugin, PenstockFabricPrecision) else PenstockFabricPrecision(compute)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        """How loaders are divided over ranks; `None` on one rank, which has the loader's own batches."""
        return super().distributed_sampler_kwargs if self.world_size > 1 else None

    # Models and optimizers

    def module_to_device(self, module: nn.Module) -> None:
        """Leave a module where it is: `prepare` puts each byte where it belongs."""

    def module_init_context(self, empty_init: bool | None = None) -> Any:
        """Make modules on the cpu; on the meta device where `weights=` says what is in them, or `empty_init`."""
        return meta_where(empty_init, self._arguments)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Any], scheduler: Any = None
    ) -> tuple[nn.Module, list[Any], Any]:
        """Prepare a module with its optimizers; several train one submodule each. Collective.

        Raises:
            ConfigError: as `penstock.prepare` does, or several optimizers share a submodule.
        """
        return module, self._prepare(module, optimizers).optimizers, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Prepare a module for inference. Collective."""
        self._prepare(module, [])
        return module

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Refuse it: an optimizer is prepared with its model.

        Raises:
            ConfigError: always.
        """
        del optimizer
        raise ConfigError(self._err_msg_joint_setup_required())

    def _prepare(self, module: nn.Module, optimizers: list[Any]) -> Prepared:
        prepared = Prepared(
            module,
            optimizers,
            device=self.root_device,
            precision=self.precision.compute,
            arguments=self._arguments,
        )
        self._prepared.append(prepared)
        return prepared

    def of(self, module: Any) -> Prepared | None:
        """Find what was prepared for a module."""
        return next((prepared for prepared in self._prepared if prepared.module is module), None)

    def teardown(self) -> None:
        """Close everything that was prepared, so that models have whole parameters. Collective."""
        with contextlib.ExitStack() as stack:
            stack.callback(super().teardown)
            for prepared in self._prepared:
                stack.callback(prepared.close)
            self._prepared = []

    # Backward and step

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run a backward; in fp16 that of the optimizer, which scales the loss.

        Raises:
            ConfigError: in fp16, several models were prepared and `fabric.backward(loss, model=)` names none.
            EngineError: the loss does not require a gradient, as that of a model which was set up without an optimizer.
        """
        if not tensor.requires_grad:
            raise no_gradient()
        if self.precision.compute != "fp16":
            super().backward(tensor, module, *args, **kwargs)
            return
        trained = [p for p in self._prepared if p.parts[0].optimizer is not None and module in (None, p.module)]
        if len(trained) != 1:
            raise ConfigError("fabric.backward(loss) in fp16 with several models: name one, as backward(loss, model=).")
        scaled_backward(trained[0].handles[0], tensor, *args, **kwargs)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the norm of the gradient over all parameters of the optimizer, and all ranks. Collective.

        Returns:
            The norm before.

        Raises:
            RuntimeError: it is not finite, and `error_if_nonfinite`.
        """
        del module
        norm: Tensor = optimizer.clip_grad_norm_(max_norm, norm_type)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients is not finite, so it cannot be clipped. "
                "error_if_nonfinite=False leaves it to step(), which skips."
            )
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        """Refuse it: gradients are sharded, and are not changed one by one.

        Raises:
            ConfigError: always.
        """
        raise by_value()

    # Checkpoints

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Gather a module's weights in the host memory of the first rank; empty on others. Collective."""
        prepared = self.of(module)
        state: dict[str, Any] = module.state_dict() if prepared is None else prepared.state(keep=self.is_global_zero)
        return state

    def load_module_state_dict(self, module: nn.Module, state_dict: Any, strict: bool = True) -> None:
        """Overwrite a module's weights with whole ones, the same on every rank. Collective."""
        prepared = self.of(module)
        if prepared is None:
            module.load_state_dict(state_dict, strict=strict)
        else:
            prepared.put(state_dict, strict=strict)

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save models, their optimizers, and what else is in `state`, as a folder. Collective.

        A model is saved with its optimizers, whether `state` has them or not: they are one checkpoint. Without a
        prepared model in it, `state` is a file, as with other strategies.

        Raises:
            ConfigError: `storage_options` or a filter; or a value that is no JSON-like one or tensor.
            CheckpointError: something could not be written.
        """
        handles = self._handles_in(state)
        if not handles:
            super().save_checkpoint(path, state, storage_options=storage_options, filter=filter)
            return
        if storage_options is not None or filter:
            raise ConfigError("fabric.save(storage_options=, filter=) of a prepared model: leave them out.")
        folder = Path(self.broadcast(path))
        ours = [id(each) for _, handle, module in handles for each in (handle, module)]
        kept = {
            key: value.state_dict() if hasattr(value, "state_dict") else value
            for key, value in state.items()
            if id(value) not in ours and not self._is_prepared(value)
        }
        for number in reversed(range(len(handles))):  # the first last: with it the checkpoint counts
            name, handle, _ = handles[number]
            extra = {_KEPT: kept} if number == 0 else {}
            handle.save(folder if len(handles) == 1 else folder / name, extra=extra)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load what `save_checkpoint` wrote into the models, optimizers and objects in `state`. Collective.

        Files are read too: tensors and plain values, never code.

        Returns:
            What was saved and is not in `state`.

        Raises:
            CheckpointError: it is damaged, of other models, or lacks what `state` names and `strict` asks for.
        """
        del weights_only  # never anything else
        folder = Path(self.broadcast(path))
        if not folder.is_dir():
            return self._load_file(folder, state, strict)
        if not isinstance(state, dict) or not (handles := self._handles_in(state)):
            raise CheckpointError(
                f"{folder} is loaded into the model and the optimizer that were set up: fabric.load(path, "
                "{'model': model, 'optimizer': optimizer}).",
                file=str(folder),
            )
        single = (folder / MARKER).is_file()
        extras = [handle.load(folder if single else folder / name) for name, handle, _ in handles]
        kept: dict[str, Any] = dict(extras[0].get(_KEPT, {}))
        for key, value in state.items():
            if self._is_prepared(value):
                continue
            if key not in kept:
                if strict:
                    raise CheckpointError(f"{folder} has no {key!r}. Leave it out, or load with strict=False.")
            elif hasattr(value, "load_state_dict"):
                value.load_state_dict(kept.pop(key))
            else:
                state[key] = kept.pop(key)
        return kept

    def _load_file(self, path: Path, state: Any, strict: bool) -> dict[str, Any]:
        """Load a file of other strategies', or of weights."""
        read = read_file(path, self.checkpoint_io)
        if not state:
            return read
        if isinstance(state, nn.Module):
            self.load_module_state_dict(state, read, strict)
            return {}
        if isinstance(state, torch.optim.Optimizer):
            state.load_state_dict(read)
            return {}
        for key in [key for key in state if key in read or strict]:
            if key not in read:
                raise CheckpointError(f"{path} has no {key!r}. Leave it out, or load with strict=False.")
            value = read.pop(key)
            if isinstance(state[key], nn.Module):
                self.load_module_state_dict(state[key], value, strict)
            elif hasattr(state[key], "load_state_dict"):
                state[key].load_state_dict(value)
            else:
                state[key] = value
        return read

    def _is_prepared(self, value: Any) -> bool:
        """Whether a value is a module that was prepared, or a handle of one."""
        return any(value is p.module or value in p.handles for p in self._prepared)

    def _handles_in(self, state: Mapping[str, Any]) -> list[tuple[str, penstock.Optimizer, nn.Module]]:
        """List the handles of models and optimizers in a state, with a name of each for a folder, in a fixed order."""
        found = []
        for number, prepared in enumerate(self._prepared):
            if any(value is prepared.module or value in prepared.handles for value in state.values()):
                names = [f"model-{number}-part-{n}" for n in range(len(prepared.handles))]
                found += [(n, h, prepared.module) for n, h in zip(names, prepared.handles, strict=True)]
        return found


class _NoSync(_BackwardSyncControl):
    """What `fabric.no_backward_sync(model)` runs."""

    def __init__(self, strategy: PenstockFabricStrategy) -> None:
        self._strategy = strategy

    @contextlib.contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        """Sum micro-batches on this rank inside a `with` block."""
        prepared = self._strategy.of(module)
        with prepared.no_sync() if enabled and prepared is not None else contextlib.nullcontext():
            yield
