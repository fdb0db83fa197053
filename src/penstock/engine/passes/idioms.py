"""What people call on any module, on a prepared one: it works, or an error names what to call instead.

state_dict        of parameters that are not gathered would be NaN.
load_state_dict   into what no update starts from would be lost; with `assign=True` it replaces parameters.
to, half, cuda    and whatever else gives parameters other memory would be undone by the next gather.
deepcopy, pickle  would copy hooks of this engine (`Anchor`).
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from penstock.engine.units.unit import Unit
from penstock.errors import EngineError

#: What a prepared parameter has until `close`: so that no other optimizer takes it, under whatever module it stands.
OWNER = "_penstock_owner"


def is_owned(parameter: nn.Parameter) -> bool:
    """Whether a prepared model has the parameter."""
    owner = parameter.__dict__.get(OWNER)
    return owner is not None and owner.is_alive()


class Owner:
    """Whose a parameter is, without keeping it alive. Pickled with a parameter, it comes back as nobody's."""

    def __init__(self, idioms: "Idioms | None" = None) -> None:
        self._of = None if idioms is None else ref(idioms)

    def __reduce__(self) -> tuple[type["Owner"], tuple[()]]:
        """The engine stays in this process."""
        return Owner, ()

    def is_alive(self) -> bool:
        """Whether the owner is there still."""
        return self._of is not None and self._of() is not None


class Idioms:
    """The hooks and the method of a model that stand before torch's own.

    Arguments:
        model: the prepared model.
        units: the units of all its parameters.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self._model = model
        self._units = units
        self._places = {p.tensor: (unit, p) for unit in units for p in unit.parameters}
        self._handles: list[RemovableHandle] = []
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                saves = module.register_state_dict_pre_hook(self._before_state_dict)  # type: ignore[no-untyped-call]
                loads = module.register_load_state_dict_pre_hook(self._before_load)  # type: ignore[no-untyped-call]
                self._handles += [saves, loads]
        for parameter in self._places:
            setattr(parameter, OWNER, Owner(self))
        model._apply = self._apply  # type: ignore[method-assign]

    def remove(self) -> None:
        """Remove them, so that torch's own are left."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._model.__dict__.pop("_apply", None)
        for parameter in self._places:
            parameter.__dict__.pop(OWNER, None)

    def _before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        del prefix, keep_vars
        for parameter in module.parameters(recurse=False):
            unit, own = self._places.get(parameter, (None, None))
            if unit is not None and own is not None and own.is_hidden(unit.placeholder):
                raise EngineError(
                    f"state_dict(): parameter '{own.name}' {tuple(parameter.shape)} is not gathered and would read as "
                    "NaN. Call it inside optimizer.gathered(), on every rank, or use optimizer.save() and "
                    "penstock.export()."
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
            is_there = unit.resident and unit.is_whole and not own.is_hidden(unit.placeholder)
            if not (unit.holding.blocks or is_there):
                raise EngineError(
                    f"load_state_dict(): parameter '{own.name}' {tuple(parameter.shape)} is not there as a whole. "
                    "Call it inside optimizer.gathered(modify=True), on every rank; a checkpoint is read by "
                    "optimizer.load()."
                )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Replace `Module._apply`, which `to`, `half`, `cuda`, `to_empty`, `share_memory` and others go through.

        What would leave parameters where and as they are is done to buffers; all else is refused.
        """
        for dtype, device in {(unit.spec.dtype, unit.full.device) for unit in self._units}:
            probe = torch.empty(1, dtype=dtype, device=device)
            address = probe.data_ptr()
            made = fn(probe)
            if made.dtype != dtype or made.device != device or made.data_ptr() != address:
                raise EngineError(
                    f"to(), half(), float(), cuda(), to_empty(), share_memory() or the like on a prepared model: its "
                    f"parameters are {dtype} on {device} until close(), and their memory is the engine's. The compute "
                    "dtype is prepare(precision=)."
                )
        for module in self._model.modules() if recurse else [self._model]:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = fn(buffer)
        return self._model
