"""Reads of parameters while a forward runs: a released unit is gathered for whoever reads it outside its module's forward.

Attention reads its output projection's weight, a parent its child's, a block runs by its `forward` method alone: no hook
of a module tells. What every read passes is the dict that `Module.__getattr__` looks into.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from penstock.engine.unit import Unit

Notice = Callable[[Unit, nn.Module, str], None]


class WatchedParameters(dict[str, nn.Parameter | None]):
    """A module's parameters by name, telling of each that is looked up. Copies are plain."""

    def __init__(self, module: nn.Module, units: dict[nn.Parameter, Unit], notice: Notice) -> None:
        super().__init__(module._parameters)
        self._module = module
        self._units = units
        self._notice = notice

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        unit = self._units.get(parameter) if parameter is not None else None
        if unit is not None and not unit.resident:
            self._notice(unit, self._module, name)
        return parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, nn.Parameter | None]:
        from copy import deepcopy

        return deepcopy(dict(self), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def watch_reads(model: nn.Module, units: Iterable[Unit], notice: Notice) -> Callable[[], None]:
    """Have `notice(unit, module, name)` called at every look at a parameter that is not resident. Returns what ends it."""
    of = {parameter: unit for unit in units for parameter in unit.spec.parameters}
    watched = [module for module in model.modules() if any(p in of for p in module._parameters.values())]
    for module in watched:
        module._parameters = WatchedParameters(module, of, notice)

    def end() -> None:
        for module in watched:
            module._parameters = dict(module._parameters)

    return end
