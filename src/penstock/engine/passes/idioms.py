"""What people call on any module, on a prepared one: it works, or an error names what to call instead.

state_dict        of parameters that are not gathered would be NaN.
load_state_dict   into what no update starts from would be lost; with `assign=True` it replaces parameters.
to, half, cuda    and whatever else gives parameters other memory would be undone by the next gather.
deepcopy, pickle  are plain copies, where there is something to copy (`copying`).
DDP, DataParallel would combine gradients, and give parameters other memory, beside the engine.
"""

import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from penstock.engine.passes.copying import Copies
from penstock.engine.passes.hooks import Hooks
from penstock.engine.passes.planted import Planted
from penstock.engine.units.released import OWNER, Owner
from penstock.engine.units.unit import Unit
from penstock.errors import EngineError


def is_owned(parameter: nn.Parameter) -> bool:
    """Whether a prepared model has the parameter."""
    owner = parameter.__dict__.get(OWNER)
    return owner is not None and owner.is_alive()


class Idioms:
    """The hooks and the methods of a model that stand before torch's own.

    Arguments:
        model: the prepared model.
        units: the units of all its parameters.
        hooks: knows whether a forward is under way, and what stands for gradients.
        planted: takes the methods, and removes them.
        replaced: what else is set on its modules, to be left out of copies.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], hooks: Hooks, planted: Planted, replaced: Planted
    ) -> None:
        self._hooks = hooks
        self._places = {p.tensor: (unit, p) for unit in units for p in unit.parameters}
        self._handles: list[RemovableHandle] = []
        self._copies = Copies(self._places, [replaced, planted])
        modules = list(model.modules())
        for module in modules:
            if next(module.parameters(recurse=False), None) is not None:
                saves = module.register_state_dict_pre_hook(self._before_state_dict)  # type: ignore[no-untyped-call]
                loads = module.register_load_state_dict_pre_hook(self._before_load)  # type: ignore[no-untyped-call]
                self._handles += [saves, loads]
            planted.plant(module, "_apply", partial(self._apply, module))
            planted.plant(module, "_ddp_params_and_buffers_to_ignore", Unwrappable(module))
            planted.plant(module, "_replicate_for_data_parallel", partial(refuse_wrapper, module, "DataParallel"))
        self._copies.state_hooks = {handle.id for handle in self._handles}
        self._copies.plant(planted, modules)
        for parameter, (_, own) in self._places.items():
            planted.plant(parameter, OWNER, Owner(self, own.name))

    def remove(self) -> None:
        """Remove the hooks, so that torch's own are left."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def read(self, parameter: nn.Parameter) -> None:
        """Gather a released parameter that an operation reads, if a forward of the model is under way in this thread.

        Raises:
            EngineError: an update has failed, or this process is the child of a fork.
        """
        unit, _ = self._places[parameter]
        unit.params.written.check()
        self._hooks.read(unit)

    def _before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        del prefix, keep_vars
        if absent := self._copies.absent(module.parameters(recurse=False)):
            raise EngineError(
                f"state_dict(): {absent}. Call it inside optimizer.gathered(), on every rank, or use optimizer.save() "
                "and penstock.export()."
            )

    def _before_load(self, module: nn.Module, state_dict: Any, prefix: str, metadata: Any, *_: Any) -> None:
        assign = bool(metadata.get("assign_to_params_buffers", False))
        for own_name, parameter in module._parameters.items():
            if parameter is None or parameter not in self._places or prefix + own_name not in state_dict:
                continue
            unit, own = self._places[parameter]
            if assign:
                raise EngineError(
                    f"load_state_dict(assign=True) would put another parameter in place of '{own.name}', which nothing "
                    "would train. Call it without assign, inside optimizer.gathered(modify=True)."
                )
            is_there = unit.resident and unit.is_whole and not own.is_hidden
            if not (unit.holding.blocks or is_there):
                raise EngineError(
                    f"load_state_dict(): parameter '{own.name}' {tuple(parameter.shape)} is not there as a whole. "
                    "Call it inside optimizer.gathered(modify=True), on every rank; a checkpoint is read by "
                    "optimizer.load()."
                )

    def _apply(self, module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Replace `Module._apply`, which `to`, `half`, `cuda`, `to_empty`, `share_memory` and others go through.

        What would leave parameters where and as they are is done to buffers; all else is refused. A module that
        converts itself for the time of its forward, as routers do, is let.
        """
        if self._hooks.in_forward:
            with_gradient = [own for own in self._parameters_of(module, recurse=False) if own.shows_gradient]
            for own in with_gradient:  # torch would convert them as well
                own.hide_gradient()
            type(module)._apply(module, fn, recurse)  # type: ignore[no-untyped-call]
            for own in with_gradient:
                self._hooks.handles.show(own)
            return module
        kinds = {(own.tensor.dtype, own.tensor.device) for own in self._parameters_of(module, recurse=recurse)}
        for dtype, device in kinds:
            if not _leaves_alone(fn, dtype, device):
                raise EngineError(
                    f"to(), half(), float(), cuda(), to_empty(), share_memory() or the like on a prepared model: its "
                    f"parameters are {dtype} on {device} until close(), and their memory is the engine's. The compute "
                    "dtype is prepare(precision=)."
                )
        for part in module.modules() if recurse else [module]:
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = fn(buffer)
        return module

    def _parameters_of(self, module: nn.Module, *, recurse: bool) -> Iterator[Any]:
        places = (self._places.get(parameter) for parameter in module.parameters(recurse))
        return (place[1] for place in places if place is not None)


def _leaves_alone(fn: Callable[[Tensor], Tensor], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a function of `Module._apply` gives tensors back as they are, or a copy on the same device.

    `to("cpu:0")` makes a copy for torch, and changes nothing. `to_empty` makes one without the values, which must not
    be there by chance.
    """
    probe = torch.tensor(list(secrets.token_bytes(8)), dtype=torch.uint8, device=device).view(dtype)
    address, was_shared = probe.data_ptr(), probe.is_shared()  # type: ignore[no-untyped-call]
    made = fn(probe)
    if made.dtype != dtype or made.device != device:
        return False
    if made.data_ptr() == address:
        return True
    is_shared = made.is_shared()  # type: ignore[no-untyped-call]
    return is_shared == was_shared and torch.equal(made.view(torch.uint8), probe.view(torch.uint8))


class Unwrappable:
    """What `DistributedDataParallel` asks a module for, first of all: which of its parameters it is to leave alone.

    Arguments:
        module: the prepared one.
    """

    def __init__(self, module: nn.Module) -> None:
        self._kind = type(module).__name__

    def __iter__(self) -> Iterator[str]:
        """Refuse."""
        refuse_wrapper(self._kind, "DistributedDataParallel")


def refuse_wrapper(module: nn.Module | str, wrapper: str) -> NoReturn:
    """Refuse what would train a prepared model beside its engine."""
    kind = module if isinstance(module, str) else type(module).__name__
    raise EngineError(
        f"{wrapper} was put around a prepared {kind}. The optimizer that prepare() returned averages its gradients "
        "over ranks, and keeps its parameters the same on all of them: use the model as it is."
    )
