"""Copies of a prepared model, by `copy.deepcopy`, `AveragedModel`, pickle or `torch.save`: plain ones, or none.

Where the parameters are there (inside `gathered`, or read in place), a copy is a model as before `prepare`, without
anything of ours. Where they are not, it would be full of NaN, and is refused by name. Parameters are copied by torch:
`deepcopy` gives each memory of its own, a pickle keeps that of the whole unit. `copy.copy` makes another name for the
same modules and parameters, and is left alone.
"""

import copy
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from penstock.engine.passes.anchor import HOOK_ID
from penstock.engine.passes.planted import Planted
from penstock.engine.units.parameter import UnitParameter
from penstock.engine.units.unit import Unit
from penstock.errors import EngineError

#: Where modules keep the hooks that an anchor registers.
_FORWARD_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
_STATE_HOOKS = ("_state_dict_pre_hooks", "_load_state_dict_pre_hooks")

Places = Mapping[nn.Parameter, tuple[Unit, UnitParameter]]


class Copies:
    """Copies modules of a model.

    Arguments:
        places: the unit and the seam of each parameter.
        attached: what is set on modules.
    """

    def __init__(self, places: Places, attached: Sequence[Planted]) -> None:
        self._places = places
        self._attached = attached
        self.state_hooks: set[int] = set()  # identities of our hooks on state dicts

    def plant(self, planted: Planted, modules: Iterable[nn.Module]) -> None:
        """Have modules be copied here. A parameter alone is copied by its class, or refuses to be read."""
        for module in modules:
            planted.plant(module, "__reduce_ex__", partial(self.reduce_module, module))

    def reduce_module(self, module: nn.Module, protocol: Any) -> Any:
        """Take a module apart for a copy, as its class does, without what is ours."""
        parts = type(module).__reduce_ex__(module, protocol)
        if sys._getframe(1).f_code is copy.copy.__code__:
            return parts
        if absent := self.absent(module.parameters()):
            raise EngineError(
                f"A prepared model cannot be copied or pickled here (copy.deepcopy, AveragedModel, torch.save(model)): "
                f"{absent}. Copy it before prepare(), or inside optimizer.gathered(), on every rank: such a copy is a "
                "plain model with the exact values. An average of the parameters is penstock.EMA; to keep the model, "
                "use optimizer.save()."
            )
        if not (isinstance(parts, tuple) and len(parts) > 2 and isinstance(parts[2], dict)):
            return parts  # by a class that takes itself apart: it says what it is made of
        function, arguments, state, *rest = parts
        state = dict(state)
        for part in self._attached:
            part.clean(module, state)
        for names, ours in ((_FORWARD_HOOKS, {HOOK_ID}), (_STATE_HOOKS, self.state_hooks)):
            for name in names:
                if name in state:
                    state[name] = OrderedDict((key, hook) for key, hook in state[name].items() if key not in ours)
        state["_parameters"] = dict(state.get("_parameters", {}))
        return function, arguments, state, *rest

    def absent(self, parameters: Iterable[nn.Parameter]) -> str | None:
        """Name the first parameter whose values are not there, or not exactly, and say why; `None` if all are."""
        for parameter in parameters:
            unit, own = self._places.get(parameter, (None, None))
            if unit is None or own is None or not (own.is_hidden or unit.is_rounded):
                continue
            why = "is not gathered and would read as NaN"
            if not own.is_hidden:
                why = "shows what its gather carried, which Options(gather_format=) rounds"
            return f"parameter '{own.name}' {tuple(parameter.shape)} {why}"
        return None
