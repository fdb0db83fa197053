"""Rules that a user registers for an optimizer class: tried out beside the class before they are believed."""

from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError, PenstockError, one_line
from penstock.optim.matrix import MatrixRule
from penstock.rules.running import Running, options_of
from penstock.rules.storage import StateFormat
from penstock.rules.whole import Shape, Whole

_SIDES = (6, 4, 3, 2)
_STEPS = 2
_RTOL, _ATOL = 1e-4, 1e-6


def believed(optimizer: torch.optim.Optimizer, rule: MatrixRule, format_: StateFormat) -> Whole:
    """Make the rule of a class that one was registered for.

    Arguments:
        optimizer: an optimizer of the class; the options of its groups are tried out.
        rule: the registered one.
        format_: how states of the parameter's shape are stored.

    Raises:
        ConfigError: the rule ends elsewhere than the class; by how much.
    """
    title = type(optimizer).__qualname__
    running = Running(optimizer)
    shapes: list[Shape] = []
    for group in optimizer.param_groups:
        shapes += [tuple(parameter.shape) for parameter in group["params"]]
        for dims in sorted({parameter.dim() for parameter in group["params"]}):
            if dims <= len(_SIDES):
                _compare(title, running, rule, options_of(group), _SIDES[:dims])
    name = type(optimizer).__name__.lower()
    return Whole(name, title, rule, format_, shapes)


def _compare(title: str, running: Running, rule: MatrixRule, group: dict[str, Any], shape: Shape) -> None:
    """Take the same steps by the class and by the rule, and refuse a difference."""
    generator = torch.Generator("cpu").manual_seed(0)
    value, *grads = torch.randn((1 + _STEPS, *shape), generator=generator, dtype=torch.float32, device="cpu").unbind()
    try:
        values, kept = running.steps(group, [value.clone()], [[grad.clone()] for grad in grads])
        ours = value.clone()
        states = {name: torch.zeros(tuple(form), device="cpu") for name, form in rule.states(shape).items()}
        with torch.no_grad():
            for step, grad in enumerate(grads, 1):
                before = grad.clone()
                rule.update(ours, grad, states, group, step)
                if not torch.equal(before, grad):
                    raise ConfigError(f"The rule that was registered for {title} changes the gradient: let it copy it.")
    except PenstockError:
        raise
    except Exception as error:
        raise ConfigError(
            f"The rule that was registered for {title} failed beside it on a parameter of shape {shape}: "
            f"{one_line(error)}"
        ) from error
    pairs = {"the parameter": (values[0], ours)}
    pairs |= {f"{name!r}": (kept[0][name], state) for name, state in states.items() if _is_like(kept[0], name, state)}
    for what, (theirs, mine) in pairs.items():
        if not torch.allclose(theirs, mine, rtol=_RTOL, atol=_ATOL, equal_nan=True):
            most = (theirs - mine).abs().max().item()
            raise ConfigError(
                f"The rule that was registered for {title} computes something else than the class: after {_STEPS} "
                f"updates of a parameter of shape {shape}, {what} differs by up to {most:.3g}."
            )


def _is_like(kept: dict[str, Any], name: str, state: Tensor) -> bool:
    """Whether the class keeps a state of the same name and shape, which may be compared."""
    theirs = kept.get(name)
    return isinstance(theirs, Tensor) and theirs.shape == state.shape
