"""A user's own optimizer class, run on tensors of nobody else."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, one_line
from penstock.rules.rule import Hyper, Scalars

#: What a class keeps of a parameter, by name.
State = dict[str, Any]


#: The least learning rate and weight decay of a trial.
_LEAST_LR, _LEAST_DECAY = 1e-2, 0.1


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
    """Return True if options are the same by value."""
    return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())


def same(one: Any, other: Any) -> bool:
    """Return True if two values are equal; values that cannot be compared are equal if they are one object."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return type(one) is type(other) and one.shape == other.shape and torch.equal(one, other)
    try:
        return one is other or bool(one == other)
    except (TypeError, ValueError, RuntimeError):  # such as arrays, or lists of tensors
        return False


class Ran(NamedTuple):
    """Result of some steps of a class.

    Attributes:
        values: the parameters afterwards.
        states: what the class keeps of each parameter.
        written: the entries of the group that the class has added or changed, by name.
    """

    values: list[Tensor]
    states: list[State]
    written: dict[str, Any]


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
    ) -> Ran:
        """Run the class on parameters of one group.

        Arguments:
            group: the group's options. They do not change.
            values: the parameters before; changed in place.
            grads: for each step the gradients, one for each parameter; the class may change them in place.
            state: what the class keeps of each parameter before; nothing at the first update.
        """
        optimizer, parameters = self._made(group, values)
        if state:
            optimizer.state |= {parameter: dict(state) for parameter in parameters}
        return _run(optimizer, parameters, group, grads)

    def trial(self, group: Mapping[str, Any], values: Sequence[Tensor], grads: Sequence[Sequence[Tensor]]) -> Ran:
        """Run the class as `steps` does, and refuse a class that keeps values where the next piece cannot find them.

        Raises:
            ConfigError: the class fails; it keeps values on the optimizer itself or in a state of no parameter; or it
                writes something into its group that is no number, string or None.
        """
        title = self.cls.__qualname__
        try:
            optimizer, parameters = self._made(group, values)
            before = {name: _copied(value, copy) for name, value in vars(optimizer).items()}
            ran = _run(optimizer, parameters, group, grads)
        except Exception as error:
            raise ConfigError(f"{title} failed on small parameters: {one_line(error)}") from error
        for name, value in vars(optimizer).items():
            if name not in ("state", "param_groups") and not (name in before and same(before[name], value)):
                raise ConfigError(
                    f"{title} keeps {name!r} on the optimizer itself, where Penstock, which runs the class on one "
                    "piece after the other, would lose it. Keep it in the parameter group."
                )
        for key in optimizer.state:
            if key not in {*parameters}:
                raise ConfigError(
                    f"{title} keeps {key!r} in its state, which is of no parameter. Keep it in the parameter group."
                )
        for name, value in ran.written.items():
            if not isinstance(value, bool | int | float | str | None):
                raise ConfigError(
                    f"{title} writes {name!r} into its parameter group, a {type(value).__name__}: Penstock can carry "
                    "numbers, strings and None there."
                )
        return ran

    def written(self, group: Mapping[str, Any], shape: tuple[int, ...] = (1,)) -> dict[str, Any]:
        """Return what one step writes into its group, as a step on a parameter of zeros of that shape does."""
        zero = torch.zeros(shape, dtype=torch.float32, device="cpu")
        try:
            return self.steps(group, [zero], [[zero.clone()]]).written
        except Exception as error:
            raise ConfigError(
                f"{self.cls.__qualname__} failed on a parameter of zeros, on which Penstock learns what a step writes "
                f"into the parameter group: {one_line(error)}"
            ) from error

    def check_written(self, group: Mapping[str, Any], ran: Ran, steps: int, shape: tuple[int, ...] = (1,)) -> None:
        """Refuse values in the group that some steps on data left otherwise than as many steps on zeros.

        Raises:
            ConfigError: names the entry.
        """
        options = dict(group)
        for _ in range(steps):
            options |= self.written(options, shape)
        after = {**group, **ran.written}
        for name in {**options, **after}:
            if name not in options or name not in after or not same(options[name], after[name]):
                raise ConfigError(
                    f"{self.cls.__qualname__} writes {name!r} into its parameter group, and the value depends on more "
                    "than the number of the step: pieces of a parameter and ranks would have different ones. Keep it "
                    "in the state of each parameter."
                )

    def _made(
        self, group: Mapping[str, Any], values: Sequence[Tensor]
    ) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
        """Make an optimizer of the class, with one group of these parameters."""
        optimizer: torch.optim.Optimizer = object.__new__(self.cls)
        vars(optimizer).update(self._attributes)
        parameters = [nn.Parameter(value) for value in values]
        optimizer.param_groups = [{**{n: _copied(v, deepcopy) for n, v in group.items()}, "params": parameters}]
        optimizer.state = defaultdict(dict)
        return optimizer, parameters


def _run(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    group: Mapping[str, Any],
    grads: Sequence[Sequence[Tensor]],
) -> Ran:
    """Take a step for each row of gradients."""
    with torch.no_grad():
        for step in grads:
            for parameter, grad in zip(parameters, step, strict=True):
                parameter.grad = grad
            optimizer.step()
    after = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    written = {name: v for name, v in after.items() if name not in group or not same(group[name], v)}
    return Ran([p.detach() for p in parameters], [dict(optimizer.state[p]) for p in parameters], written)


def _copied(value: Any, how: Callable[[Any], Any]) -> Any:
    """Copy a value that a class might change in place; `copy` for what may hold a whole model."""
    if isinstance(value, Tensor):
        return value.clone() if value.numel() == 1 else value
    return how(value) if isinstance(value, list | dict | set) else value


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group without its parameters; refuse options that change how a class runs, not what it computes.

    Raises:
        ConfigError: it names the first such option.
    """
    for option in ("capturable", "differentiable"):
        if group.get(option):
            raise ConfigError(f"{option}=True is not supported. Set {option}=False in every parameter group.")
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def tried_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's options to try a class out with; raises what `options_of` does.

    A learning rate or a weight decay that moves next to nothing, as at the begin of a warm-up, would hide what the
    class computes: it is raised.
    """
    options = options_of(group)
    lr, decay = options.get("lr"), options.get("weight_decay")
    if isinstance(lr, int | float | Tensor) and not abs(float(lr)) >= _LEAST_LR:
        options["lr"] = torch.full_like(lr, _LEAST_LR) if isinstance(lr, Tensor) else _LEAST_LR
    if isinstance(decay, int | float) and 0 < decay < _LEAST_DECAY:
        options["weight_decay"] = _LEAST_DECAY
    return options


def number(value: Any) -> Any:
    """Return a scalar as a Python number."""
    return value.item() if isinstance(value, Tensor) else value
