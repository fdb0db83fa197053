"""The choice of the rule of an optimizer."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from typing import Any, TypeVar

import torch

from penstock._native import Pool
from penstock.errors import ConfigError
from penstock.optim.matrix import rule_of
from penstock.rules.formats import StateFormat
from penstock.rules.fused import FusedRule
from penstock.rules.generic import GenericRule, is_declared
from penstock.rules.rule import Rule, Scalars, StateSpec, StepScalars, UpdateSlice, unknown_options
from penstock.rules.standard import AdagradRule, AdamRule, LionUpdateRule, SgdRule

# ----------------------------------------------------------------------------------------------------------------------
# A rule of several parts: an optimizer whose parameter groups have arithmetic of their own.
# ----------------------------------------------------------------------------------------------------------------------


Answer = TypeVar("Answer")


class CombinedRule(Rule):
    """The rule of groups that each say which part is theirs. Updates are asked of the parts.

    Arguments:
        name: the rule's name in reports and checkpoints.
        parts: the parts by key. None has scalars of a parameter's own; a state of a name is the same in all.
        key: returns the key of a group's part.
        refusal: the message for a group without a part.
    """

    states: tuple[StateSpec, ...] = ()

    def __init__(
        self, name: str, parts: Mapping[str, Rule], key: Callable[[Mapping[str, Any]], Any], refusal: str
    ) -> None:
        assert not any(part.scalar_names for part in parts.values())
        self.name = name
        self._key, self._refusal = key, refusal
        self._parts = dict(parts)
        specs: dict[str, StateSpec] = {}
        for part in parts.values():
            for spec in part.states:
                if specs.setdefault(spec.name, spec) != spec:
                    raise ConfigError(
                        f"{name} has a state {spec.name!r} of the parameter's shape in one group and of another "
                        "shape in another. Give it two names, or use Options(state_dtype='fp32')."
                    )
        self.states = tuple(specs.values())
        self.whole = any(part.whole for part in parts.values())

    def part(self, group: Mapping[str, Any]) -> Rule:
        """Return the part of one parameter group; see `Rule.part`.

        Raises:
            ConfigError: the group has none.
        """
        found = self._parts.get(self._key(group))
        if found is None:
            raise ConfigError(self._refusal)
        return found

    def state_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape of a state that some part keeps of such a parameter; a group's part says its own."""
        answers = self._answers(lambda part: part.state_shape(name, shape))
        return next((found for found in answers if found is not None), None)

    def working_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the most bytes that a part needs for a parameter of that shape; a group's part says its own."""
        return max(self._answers(lambda part: part.working_bytes(shape)), default=0)

    def _answers(self, ask: Callable[[Rule], Answer]) -> Iterator[Answer]:
        """Ask those parts that take such a parameter."""
        for part in self._parts.values():
            with suppress(ConfigError):
                yield ask(part)

    def step_scalars(self, group: Mapping[str, Any], step: int, scalars: Scalars = {}) -> StepScalars:  # noqa: B006
        """Read a parameter group by its part; see `Rule.step_scalars`."""
        return self.part(group).step_scalars(group, step, scalars)

    def advance_group(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what the group's part writes into it; see `Rule.advance_group`."""
        return self.part(group).advance_group(group)

    def update(
        self, update_slice: UpdateSlice, step_scalars: StepScalars, grad_scale: float, pool: Pool | None
    ) -> None:
        """Refuse this: a segment has the states of a part."""
        raise NotImplementedError(f"{self.name} has several parts: update by part(group)")


# ----------------------------------------------------------------------------------------------------------------------
# The choice of the rule that computes what a user's optimizer would.
# ----------------------------------------------------------------------------------------------------------------------


Make = Callable[[torch.optim.Optimizer, StateFormat], FusedRule]


def _uses(optimizer: torch.optim.Optimizer, option: str) -> bool:
    """Return True if some parameter group has an option on."""
    return any(group[option] for group in optimizer.param_groups)


def _lion_of_lion_pytorch(optimizer: torch.optim.Optimizer, format_: StateFormat) -> FusedRule:
    """Make the rule of `lion_pytorch.Lion`; refuse an option of the class that no parameter group shows."""
    if getattr(optimizer, "decoupled_wd", False):
        raise ConfigError("lion_pytorch.Lion(decoupled_weight_decay=True) is not supported. Use penstock.optim.Lion.")
    return LionUpdateRule("lion", format_)


#: How a rule with native kernels is made, by the full name of the exact class: a subclass may compute anything, and the
#: package of the class need not be imported.
FUSED: Mapping[str, Make] = {
    "torch.optim.adamw.AdamW": lambda o, f: AdamRule("adamw", f, amsgrad=_uses(o, "amsgrad")),
    "torch.optim.adam.Adam": lambda o, f: AdamRule("adam", f, amsgrad=_uses(o, "amsgrad")),
    "torch.optim.sgd.SGD": lambda o, f: SgdRule("sgd", f, momentum=_uses(o, "momentum")),
    "torch.optim.adagrad.Adagrad": lambda _, f: AdagradRule("adagrad", f),
    "penstock.optim.lion.Lion": lambda _, f: LionUpdateRule("lion", f),
    "lion_pytorch.lion_pytorch.Lion": _lion_of_lion_pytorch,
}

#: Torch's classes that the generic rule runs.
ELEMENTWISE = frozenset(
    f"torch.optim.{name.lower()}.{name}"
    for name in ("RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop")
)

#: Classes that look at whole parameters, by the full name of the exact class: what makes the rule, in `ext/matrix.py`.
WHOLE: Mapping[str, str] = {
    "torch.optim.Muon": "muon",
    "penstock.optim.muon_adamw.MuonAdamW": "muon_adamw",
    "torch.optim.Adafactor": "adafactor",
}

#: Classes that compute across parameters, and why they do not fit.
UNFIT: Mapping[str, str] = {
    "torch.optim.lbfgs.LBFGS": "it looks at all parameters at once and calls a closure several times per step",
    "torch.optim.sparse_adam.SparseAdam": "it takes sparse gradients, and Penstock reduces dense ones",
}


def _of_matrices(name: str) -> Callable[..., Rule]:
    """Load a function of `ext.matrix` that makes a rule over whole parameters: most runs have none."""
    make: Callable[..., Rule] = getattr(import_module("penstock.ext.matrix"), name)
    return make


#: The rule of a model without an optimizer: it has no states, and is never applied.
NO_RULE: Rule = SgdRule("none")


def rule_for(optimizer: torch.optim.Optimizer, format_: StateFormat = StateFormat()) -> Rule:  # noqa: B008
    """Return the rule that computes what `optimizer` would.

    Arguments:
        optimizer: an optimizer of exactly one of the classes in docs/rules.md, not of a subclass. `foreach` and `fused`
            only choose among torch's back ends and have no effect here.
        format_: how its states are to be stored.

    Raises:
        ConfigError: the class is not supported, or a parameter group sets an option that the rule does not honour; the
            message names it.

    Example:
        >>> [spec.name for spec in rule_for(torch.optim.AdamW(model.parameters(), lr=1e-4)).states]
        ['exp_avg', 'exp_avg_sq']
    """
    cls = type(optimizer)
    name = f"{cls.__module__}.{cls.__qualname__}"
    rule: Rule
    if name in FUSED:
        fused = FUSED[name](optimizer, format_)
        rule = replace(fused, unknown=unknown_options(cls, optimizer.defaults, fused.honoured))
    elif name in WHOLE:
        rule = _of_matrices(WHOLE[name])(optimizer, format_)
    elif registered := rule_of(cls):
        rule = _of_matrices("believed")(optimizer, registered, format_)
    elif name in ELEMENTWISE or is_declared(cls):
        rule = GenericRule(optimizer, format_)
    elif name in UNFIT:
        raise ConfigError(f"{name} is not supported: {UNFIT[name]}.")
    else:
        raise ConfigError(
            f"{name} is not supported. Use exactly one of torch.optim.AdamW, Adam, SGD, Adagrad, RMSprop, Adadelta, "
            "Adamax, NAdam, RAdam, ASGD, Rprop, Muon, Adafactor or penstock.optim.Lion, Lamb, MuonAdamW; a subclass "
            "may compute something else. If the class updates every element by itself, say so: "
            "penstock.elementwise(...); else give its arithmetic: penstock.optim.register(...)."
        )
    for index, group in enumerate(optimizer.param_groups):
        try:
            rule.step_scalars(group, step=1)
        except ConfigError as error:
            raise ConfigError(f"Parameter group {index}: {error}") from None
    return rule
