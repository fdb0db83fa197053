"""A user's own optimizer class, run on tensors of nobody else."""

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.rules.rule import Hyper, Scalars

#: What a class keeps of a parameter, by name.
State = dict[str, Any]


@dataclass(frozen=True, eq=False)
class GenericHyper(Hyper):
    """A group's options at one step, and the scalars of the parameters that share them.

    Arguments:
        group: the group's options, without its parameters.
        step: the number of the update, 1 at the first.
        scalars: the parameters' own scalars, as they are before the update.
    """

    group: Mapping[str, Any]
    step: int
    scalars: Scalars

    @property
    def keeps_zeros(self) -> bool:
        """Whether zeros stay zero: nothing is known of what the class makes of them."""
        return False

    def __eq__(self, other: object) -> bool:
        """Whether the update is the same: a step asks it of what began in backward."""
        if not isinstance(other, GenericHyper):
            return NotImplemented
        return self.step == other.step and _alike(self.group, other.group) and _alike(self.scalars, other.scalars)

    def __hash__(self) -> int:
        return hash(self.step)


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether options are the same, by value; an option that cannot be compared is the same where it is one object."""
    if one.keys() != other.keys():
        return False
    for name, value in one.items():
        given = other[name]
        if isinstance(value, Tensor) or isinstance(given, Tensor):
            if type(value) is not type(given) or value.shape != given.shape or not torch.equal(value, given):
                return False
        elif value is not given and value != given:
            return False
    return True


class Running:
    """An optimizer class without its constructor, whose arguments nobody knows.

    Arguments:
        optimizer: an optimizer of that class; what the constructor has set on it is copied.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.cls = type(optimizer)
        # LR schedulers replace `step` on the object; the class's own is wanted here.
        hidden = ("state", "param_groups", "step")
        self._attributes = {name: value for name, value in vars(optimizer).items() if name not in hidden}
        # Hooks of the user's optimizer are for whole steps: they would run for every piece.
        self._attributes |= {name: OrderedDict() for name in self._attributes if name.endswith("_hooks")}

    def steps(
        self,
        group: Mapping[str, Any],
        values: Sequence[Tensor],
        grads: Sequence[Sequence[Tensor]],
        state: State | None = None,
    ) -> tuple[list[Tensor], list[State]]:
        """Run the class on parameters of one group. Return their values and what is kept of each afterwards.

        Arguments:
            group: the group's options.
            values: the parameters before; changed in place.
            grads: for each step the gradients, one for each parameter; the class may change them in place.
            state: what the class keeps of each parameter before; nothing at the first update.
        """
        optimizer: torch.optim.Optimizer = object.__new__(self.cls)
        vars(optimizer).update(self._attributes)
        parameters = [nn.Parameter(value) for value in values]
        optimizer.param_groups = [{**group, "params": parameters}]
        optimizer.state = defaultdict(dict)
        if state:
            optimizer.state |= {parameter: dict(state) for parameter in parameters}
        with torch.no_grad():
            for step in grads:
                for parameter, grad in zip(parameters, step, strict=True):
                    parameter.grad = grad
                optimizer.step()
        return [parameter.detach() for parameter in parameters], [dict(optimizer.state[p]) for p in parameters]


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group without its parameters; refuse options that change how a class runs, not what it computes.

    Raises:
        ConfigError: it names the first such option.
    """
    for option in ("capturable", "differentiable"):
        if group.get(option):
            raise ConfigError(f"{option}=True is not supported. Set {option}=False in every parameter group.")
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def number(value: Any) -> Any:
    """Return a scalar as a Python number."""
    return value.item() if isinstance(value, Tensor) else value
