"""Rules that a user registers for an optimizer class: tried out beside the class before they are believed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError, PenstockError, one_line
from penstock.ext.matrix.whole import Shape, Whole
from penstock.optim.matrix import MatrixRule, states_of
from penstock.rules.rule import Rule
from penstock.rules.running import Ran, Running, options_of, same, tried_group
from penstock.rules.several import Several
from penstock.rules.storage import StateFormat

_SIDES = (6, 4, 3, 2, 5, 7)
_STEPS = 3
_RTOL, _ATOL = 1e-4, 1e-6

#: The states of every shape of an optimizer's parameters under the options of one group, as text.
Signature = Callable[[Mapping[str, Any]], str]


class _ByStates(Several):
    """The rule of groups whose options call for other states of the same parameters.

    Arguments:
        name: the rule's name in reports and checkpoints.
        signature: tells the groups of one part from those of others.
        parts: the parts by signature.
    """

    def __init__(self, name: str, signature: Signature, parts: Mapping[str, Rule]) -> None:
        super().__init__(name, "states", parts)
        self._signature = signature

    def part(self, group: Mapping[str, Any]) -> Rule:
        """Return the part that has the states of the group.

        Raises:
            ConfigError: no group had such states when the optimizer was prepared.
        """
        found = self._parts.get(self._signature(options_of(group)))
        if found is None:
            raise ConfigError(
                f"The rule of {self.name} names other states for the options of a parameter group than for those of "
                "all groups that were prepared. Prepare again with them."
            )
        return found


def believed(optimizer: torch.optim.Optimizer, rule: MatrixRule, format_: StateFormat) -> Rule:
    """Make the rule of a class that one was registered for.

    Arguments:
        optimizer: an optimizer of the class; the options of its groups are tried out.
        rule: the registered one.
        format_: how states of the parameter's shape are stored.

    Raises:
        ConfigError: the rule ends elsewhere than the class; by how much.
    """
    running, name, title = Running(optimizer), type(optimizer).__name__.lower(), type(optimizer).__qualname__
    shapes = dict.fromkeys(tuple(p.shape) for group in optimizer.param_groups for p in group["params"])

    def signature(group: Mapping[str, Any]) -> str:
        """Name the states of each shape; a shape that the rule refuses under these options has none."""
        named = []
        for shape in shapes:
            try:
                named.append((shape, sorted(states_of(rule, shape, group).items())))
            except Exception:  # whoever has such a parameter hears of it from `Whole`
                continue
        return str(named)

    own: dict[str, list[Shape]] = {}
    options: dict[str, dict[str, Any]] = {}
    writes: list[Shape] = []
    for group in optimizer.param_groups:
        given = options_of(group)
        dims = sorted({p.dim() for p in group["params"] if p.dim() <= len(_SIDES)})
        # Two of each: a class that looks at several parameters at once ends elsewhere than its rule.
        if _try_out(title, running, rule, tried_group(group), [_SIDES[:dim] for dim in dims for _ in range(2)]):
            writes.append(_SIDES[: dims[0]])
        options.setdefault(key := signature(given), given)
        own.setdefault(key, []).extend(tuple(p.shape) for p in group["params"])
    written = (lambda group: running.written(group, writes[0])) if writes else None
    parts = {key: Whole(name, title, rule, format_, own[key], options[key], written=written) for key in own}
    return next(iter(parts.values())) if len(parts) == 1 else _ByStates(name, signature, parts)


def _try_out(title: str, running: Running, rule: MatrixRule, group: dict[str, Any], shapes: Sequence[Shape]) -> bool:
    """Take the same steps by the class, on all shapes together, and by the rule; refuse a difference.

    Returns:
        Whether the class writes into its group.
    """
    if not shapes:
        return False
    generator = torch.Generator("cpu").manual_seed(0)
    values, *grads = [
        [torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") for shape in shapes]
        for _ in range(1 + _STEPS)
    ]
    ran = running.trial(group, [value.clone() for value in values], [[g.clone() for g in row] for row in grads])
    running.check_written(group, ran, _STEPS, shapes[0])
    for k, shape in enumerate(shapes):
        try:
            states = _by_rule(title, running, rule, group, values[k], [row[k] for row in grads])
        except PenstockError:
            raise
        except Exception as error:
            raise ConfigError(
                f"The rule that was registered for {title} failed beside it on a parameter of shape {shape}: "
                f"{one_line(error)}"
            ) from error
        _compare(title, ran, k, values[k], states)
    return bool(ran.written)


def _by_rule(
    title: str, running: Running, rule: MatrixRule, group: Mapping[str, Any], value: Tensor, grads: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Update a parameter in place by the rule, and return its states.

    Raises:
        ConfigError: the rule changes the gradient or the group.
    """
    options = dict(group)
    named = states_of(rule, tuple(value.shape), options)
    states = {name: torch.zeros(tuple(form), device="cpu") for name, form in named.items()}
    for step, grad in enumerate(grads, 1):
        seen, given = grad.clone(), {**options}
        with torch.no_grad():
            rule.update(value, seen, states, given, step)
        if not torch.equal(grad, seen):
            raise ConfigError(f"The rule that was registered for {title} changes the gradient: let it copy it.")
        if given.keys() != options.keys() or not all(same(given[name], options[name]) for name in given):
            raise ConfigError(f"The rule that was registered for {title} changes the group, which is all ranks'.")
        options |= running.written(options, tuple(value.shape))
    return states


def _compare(title: str, ran: Ran, k: int, value: Tensor, states: Mapping[str, Tensor]) -> None:
    """Refuse a rule whose parameter, or a state that the class keeps in the same form, differs from the class's."""
    kept = ran.states[k]
    pairs = {"the parameter": (ran.values[k], value)}
    for name, state in states.items():
        if isinstance(theirs := kept.get(name), Tensor) and theirs.shape == state.shape:
            pairs[repr(name)] = theirs, state
    for what, (theirs, mine) in pairs.items():
        if not torch.allclose(theirs, mine, rtol=_RTOL, atol=_ATOL, equal_nan=True):
            most = (theirs - mine).abs().max().item()
            raise ConfigError(
                f"The rule that was registered for {title} computes something else than the class: after {_STEPS} "
                f"updates of a parameter of shape {tuple(value.shape)}, {what} differs by up to {most:.3g}."
            )
