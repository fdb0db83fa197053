"""Whether modules still hold the parameters that were prepared, and those the memory that the engine gave them.

A parameter that somebody put into a module after `prepare` is computed with and never trained; values that somebody
put under a parameter (`parameter.data = ...`) go with its next gather. Torch tells nobody of either, so this is looked
up at the beginning of each forward of the model and of each step.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_, methodcaller
from types import FrameType

import torch
from torch import nn

from penstock.engine.units.dtensors import is_divided, own_elements
from penstock.engine.units.parameter import UnitParameter
from penstock.engine.units.unit import Unit
from penstock.errors import EngineError

_PARAMETERS = attrgetter("_parameters")
_VALUES = methodcaller("values")  # not those of `dict`: what a script holds is no dict


class Membership:
    """What modules held when the model was prepared, and since.

    Arguments:
        model: the prepared one.
        units: all units, which hold all of its parameters.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self._model = model
        self._places = [
            (unit, unit.spec.parameters, [slot.start * unit.spec.dtype.itemsize for slot in unit.layout.slots])
            for unit in units
        ]
        self._divided = {unit for unit in units if any(map(is_divided, unit.spec.parameters))}
        self._known = {parameter for unit in units for parameter in unit.spec.parameters}
        self._note()

    def _note(self) -> None:
        modules = list(self._model.modules())
        # Modules, not their dicts: one whose parameters are hidden has another.
        self._modules = modules
        self._children = [module._modules for module in modules if module._modules]
        self._held, self._held_children = _held_by(map(_PARAMETERS, modules)), _held_by(self._children)

    def check(self) -> None:
        """Refuse what would not be trained, or not be computed with.

        Raises:
            EngineError: names the parameter, and what to call instead.
        """
        same = _are_the_same(_held_by(map(_PARAMETERS, self._modules)), self._held)
        if not (same and _are_the_same(_held_by(self._children), self._held_children)):
            self._look_for_strangers()
        for unit, parameters, offsets in self._places:
            if unit.holding.blocks:
                continue
            held = map(own_elements, parameters) if unit in self._divided else parameters
            addresses = [parameter.data_ptr() for parameter in held]
            hidden = unit.placeholder.data_ptr()
            if addresses.count(hidden) < len(addresses):
                first = unit.shown.data_ptr()
                if addresses != [first + offset for offset in offsets]:
                    self._look_at_memory(unit, addresses)

    def _look_for_strangers(self) -> None:
        """Refuse parameters that have come since `prepare`. Modules may change places, be wrapped, and go."""
        if _in_functional_call():  # which puts others in their place, for this call
            return
        for name, module in self._model.named_modules():
            for own_name, parameter in module._parameters.items():
                if isinstance(parameter, nn.Parameter) and parameter not in self._known:
                    full_name = f"{name}.{own_name}" if name else own_name
                    raise EngineError(
                        f"Parameter '{full_name}' {tuple(parameter.shape)} of {type(module).__name__} was put there "
                        "after prepare(), so nothing would train it. A new one is trained from "
                        "optimizer.add_param_group({'params': [...]}) on. Where it is to replace a prepared one, give "
                        "that one its values with optimizer.set_full_param(), or inside "
                        "optimizer.gathered(modify=True) (load_state_dict() without assign=True)."
                    )
        self._note()

    def _look_at_memory(self, unit: Unit, addresses: Sequence[int]) -> None:
        hidden, first, size = unit.placeholder.data_ptr(), unit.shown.data_ptr(), unit.spec.dtype.itemsize
        for index, (slot, address) in enumerate(zip(unit.layout.slots, addresses, strict=True)):
            if address not in (hidden, first + slot.start * size) and slot.stop > slot.start:
                self._take_in(unit, index)

    @torch.no_grad()
    def _take_in(self, unit: Unit, index: int) -> None:
        """Take over the values of a parameter that was given other memory, where that loses nothing; else refuse."""
        parameter = unit.parameters[index]
        given = parameter.memory
        if given.shape != parameter.slot.shape or given.device != unit.full.device or not unit.resident:
            raise _lost(parameter)
        own = parameter.view_in(unit.full)
        values = given.detach().to(own.dtype)
        if not torch.equal(values, own):  # else a module has converted it for its own forward
            if not unit.is_whole or given.dtype != own.dtype:
                raise _lost(parameter)
            own.copy_(values)
        parameter.expose(unit.full)


# In no loop of Python's, both: they pass over all parameters and modules twice a step.


def _held_by(dicts: Iterable[Mapping[str, object]]) -> list[object]:
    return list(chain.from_iterable(map(_VALUES, dicts)))


def _are_the_same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether these are the same objects, in the same order."""
    return len(some) == len(others) and all(map(is_, some, others))


def _lost(parameter: UnitParameter) -> EngineError:
    given = parameter.memory
    return EngineError(
        f"Parameter '{parameter.name}' {tuple(parameter.slot.shape)} was given other memory ({given.dtype} "
        f"{tuple(given.shape)} on {given.device}) after prepare(), by 'parameter.data = ...' or by to() of a "
        "part of the model: its next gather would drop that. Set values with optimizer.set_full_param(), or inside "
        "optimizer.gathered(modify=True); dtype and device are those of prepare() until close()."
    )


def _in_functional_call() -> bool:
    """Whether `torch.func.functional_call` is running: parameters are the caller's meanwhile."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not torch.nn.utils.stateless._functional_call.__code__:
        frame = frame.f_back
    return frame is not None
