"""Copies of a prepared model, by `copy.deepcopy`, `AveragedModel`, pickle or `torch.save`: plain ones, or none.

Where the parameters are there (inside `gathered`, or read in place), a copy is a model as before `prepare`: parameters
with memory of their own, and nothing of ours. Where they are not, it would be full of NaN, and is refused by name.
`copy.copy` makes another name for the same modules and parameters, and is left alone.
"""

import copy
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol
from weakref import ref

import torch
from torch import nn

from penstock.engine.passes.anchor import HOOK_ID
from penstock.engine.passes.planted import Planted
from penstock.engine.units.parameter import UnitParameter
from penstock.engine.units.released import Owner
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


class Attached(Protocol):
    """What was set on modules."""

    def clean(self, module: nn.Module, state: dict[str, Any]) -> None:
        """Take what is ours out of a copy of a module's attributes."""


class Copies:
    """Copies modules and parameters of a model.

    Arguments:
        places: the unit and the seam of each parameter.
        attached: what else is set on modules.
    """

    def __init__(self, places: Places, attached: Sequence[Attached]) -> None:
        self._places = places
        self._attached = attached
        self.state_hooks: set[int] = set()  # identities of our hooks on state dicts

    def plant(self, planted: Planted, modules: Iterable[nn.Module]) -> None:
        """Have modules and parameters be copied here. Parameters refer to it weakly: people keep them."""
        for module in modules:
            planted.plant(module, "__reduce_ex__", partial(self.reduce_module, module))
        for parameter in self._places:
            copied = CopiedParameter(self, parameter)
            planted.plant(parameter, "__deepcopy__", copied.deepcopy)
            planted.plant(parameter, "__reduce_ex__", copied.reduce)

    def reduce_module(self, module: nn.Module, protocol: Any) -> Any:
        """Take a module apart for a copy, as its class does, without what is ours."""
        parts = type(module).__reduce_ex__(module, protocol)
        if sys._getframe(1).f_code is copy.copy.__code__:
            return parts
        self.check_shown(module.parameters())
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

    def check_shown(self, parameters: Iterable[nn.Parameter]) -> None:
        """Refuse to copy parameters that are not there.

        Raises:
            EngineError: names the first.
        """
        for parameter in parameters:
            unit, own = self._places.get(parameter, (None, None))
            if unit is not None and own is not None and own.is_hidden:
                raise EngineError(
                    f"A prepared model cannot be copied or pickled while its parameters are released (copy.deepcopy, "
                    f"AveragedModel, torch.save(model)): '{own.name}' {tuple(parameter.shape)} would be NaN. Copy it "
                    "before prepare(), or inside optimizer.gathered(), on every rank: such a copy is a plain model. An "
                    "average of the parameters is penstock.EMA; to keep the model, use optimizer.save()."
                )
            if unit is not None and own is not None and unit.is_rounded:
                raise EngineError(
                    f"A prepared model cannot be copied or pickled here: '{own.name}' {tuple(parameter.shape)} shows "
                    "what its gather carried, which Options(gather_format=) rounds. Copy it inside "
                    "optimizer.gathered(), on every rank: such a copy is a plain model with the exact values."
                )


class CopiedParameter:
    """What copies one parameter. It keeps neither alive.

    Arguments:
        copies: knows whether the parameter is there.
        parameter: the one that is copied.
    """

    def __init__(self, copies: Copies, parameter: nn.Parameter) -> None:
        self._copies = ref(copies)
        self._parameter = ref(parameter)

    def _checked(self) -> nn.Parameter:
        parameter, copies = self._parameter(), self._copies()
        assert parameter is not None, "it is called as an attribute of the parameter"
        if copies is not None:
            copies.check_shown([parameter])
        return parameter

    def deepcopy(self, memo: dict[int, Any]) -> Any:
        """Copy the parameter, as its class does."""
        parameter = self._checked()
        return type(parameter).__deepcopy__(parameter, memo)  # type: ignore[no-untyped-call]

    def reduce(self, protocol: Any) -> Any:
        """Take a copy of the parameter apart: its own memory is the whole unit's, which would be saved with it."""
        parameter = self._checked()
        with torch.no_grad():
            plain = type(parameter).__deepcopy__(parameter, {})  # type: ignore[no-untyped-call]
        vars(plain).update({name: value for name, value in vars(parameter).items() if not _is_ours(value)})
        return plain.__reduce_ex__(protocol)


def _is_ours(value: object) -> bool:
    return isinstance(value, Owner) or isinstance(getattr(value, "__self__", None), CopiedParameter)
