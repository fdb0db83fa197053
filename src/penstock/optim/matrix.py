"""Rules over whole parameters: the protocol, their registration, and the step of an optimizer that is nothing else."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.errors import ConfigError

_RULE = "__penstock_matrix_rule__"


class MatrixRule(Protocol):
    """The arithmetic of one optimizer on one whole parameter.

    An update may depend on the parameter, its gradient, its states, the options of its group and the number of the
    update alone; not on other parameters, or on values that the rule keeps itself.

    A rule may have a method `working_bytes(shape: tuple[int, ...]) -> int`: the most bytes of temporaries that one
    update of a parameter of that shape holds at once, beside its arguments. Without it, four fp32 tensors of the
    parameter's shape are assumed.

    Example:
        >>> class NormalisedDescent:
        ...     def states(self, shape, group):
        ...         return {}
        ...     def update(self, matrix, grad, states, group, step):
        ...         matrix.sub_(grad / grad.norm().clamp(min=1e-12), alpha=group["lr"])
    """

    def states(self, shape: tuple[int, ...], group: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
        """Name the states of a parameter, each with its own shape; they begin as zeros.

        A rule whose states are those of every group may leave `group` out.

        Arguments:
            shape: the parameter's shape.
            group: the options of the parameter's group, without its parameters.

        Raises:
            ConfigError: the rule takes no parameters of that shape.
        """

    def update(
        self, matrix: Tensor, grad: Tensor, states: Mapping[str, Tensor], group: Mapping[str, Any], step: int
    ) -> None:
        """Update a parameter and its states in place.

        Arguments:
            matrix: the parameter, fp32, in its own shape.
            grad: its gradient, unscaled and clipped, fp32, of the same shape; not to be changed.
            states: the states by name, fp32, each in the shape that `states` says.
            group: the options of the parameter's group, without its parameters.
            step: how many updates the parameter will have had with this one; 1 at the first.
        """


def register(cls: type[torch.optim.Optimizer], rule: Any = None) -> Any:
    """Register the rule that computes the updates of an optimizer class, so that `prepare` takes the class.

    The rule is tried out before it is believed: three updates of small parameters, beside the class itself with the
    options of each group. A subclass of the class is another one.

    Arguments:
        cls: a class of `torch.optim.Optimizer`.
        rule: a `MatrixRule`, or a class of them that is made without arguments. Left out, this is a decorator of such
            a class.

    Returns:
        The rule as given; the decorator, where none is given.

    Raises:
        ConfigError: one of the two is nothing of the kind.

    Example:
        >>> @register(torch.optim.ASGD)
        ... class Rule:
        ...     def states(self, shape, group): ...
        ...     def update(self, matrix, grad, states, group, step): ...
    """
    given: object = cls
    if not (inspect.isclass(given) and issubclass(given, torch.optim.Optimizer)):
        raise ConfigError(f"register({cls!r}): give a class of torch.optim.Optimizer.")
    if rule is None:
        return lambda given: register(cls, given)
    made = rule() if inspect.isclass(rule) else rule
    if not all(callable(getattr(made, name, None)) for name in ("states", "update")):
        raise ConfigError(f"register({cls.__name__}, {rule!r}): give a rule with the methods `states` and `update`.")
    setattr(cls, _RULE, made)
    return rule


def rule_of(cls: type) -> MatrixRule | None:
    """Return the rule that was registered for the class itself; `None` without one."""
    rule: MatrixRule | None = vars(cls).get(_RULE)
    return rule


def states_of(rule: Any, shape: tuple[int, ...], group: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
    """Name the states of a parameter; a rule whose `states` takes a shape alone is asked without the group."""
    takes_group = len(inspect.signature(rule.states).parameters) > 1
    named: Mapping[str, tuple[int, ...]] = rule.states(shape, group) if takes_group else rule.states(shape)
    return named


def update_by(rule: MatrixRule, groups: Iterable[Mapping[str, Any]], state: Mapping[Tensor, dict[str, Any]]) -> None:
    """Update every parameter that has a gradient by a rule: the step of an optimizer that is nothing else.

    Arguments:
        rule: the rule.
        groups: the groups, whose parameters and states are updated.
        state: the optimizer's state: the states of each parameter, and "step", its count of updates.
    """
    for group in groups:
        options = {name: value for name, value in group.items() if name != "params"}
        for p in group["params"]:
            if p.grad is None:
                continue
            kept = state[p]
            if not kept:
                kept["step"] = 0
                kept |= {name: p.new_zeros(shape) for name, shape in states_of(rule, tuple(p.shape), options).items()}
            kept["step"] += 1
            states = {name: value for name, value in kept.items() if name != "step"}
            rule.update(p, p.grad, states, options, kept["step"])


def run_closure(closure: Callable[[], Any] | None) -> Any:
    """Run the closure of a step with gradients on, if there is one; return the loss."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
