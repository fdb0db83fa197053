"""The choice of the rule that computes what a user's optimizer would."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module

import torch

from penstock.errors import ConfigError
from penstock.optim.matrix import rule_of
from penstock.rules.adagrad import Adagrad
from penstock.rules.adam import Adam
from penstock.rules.fused import Fused
from penstock.rules.generic import Generic, is_declared
from penstock.rules.lion import Lion
from penstock.rules.rule import Rule
from penstock.rules.sgd import Sgd
from penstock.rules.storage import StateFormat
from penstock.rules.versions import unknown_options

Make = Callable[[torch.optim.Optimizer, StateFormat], Fused]


def _uses(optimizer: torch.optim.Optimizer, option: str) -> bool:
    """Whether some parameter group has an option on."""
    return any(group[option] for group in optimizer.param_groups)


def _lion_of_lion_pytorch(optimizer: torch.optim.Optimizer, format_: StateFormat) -> Fused:
    """Make the rule of `lion_pytorch.Lion`; refuse an option of the class that no parameter group shows."""
    if getattr(optimizer, "decoupled_wd", False):
        raise ConfigError("lion_pytorch.Lion(decoupled_weight_decay=True) is not supported. Use penstock.optim.Lion.")
    return Lion("lion", format_)


#: How a rule with native kernels is made, by the full name of the exact class: a subclass may compute anything, and the
#: package of the class need not be imported.
FUSED: Mapping[str, Make] = {
    "torch.optim.adamw.AdamW": lambda o, f: Adam("adamw", f, amsgrad=_uses(o, "amsgrad")),
    "torch.optim.adam.Adam": lambda o, f: Adam("adam", f, amsgrad=_uses(o, "amsgrad")),
    "torch.optim.sgd.SGD": lambda o, f: Sgd("sgd", f, momentum=_uses(o, "momentum")),
    "torch.optim.adagrad.Adagrad": lambda _, f: Adagrad("adagrad", f),
    "penstock.optim.lion.Lion": lambda _, f: Lion("lion", f),
    "lion_pytorch.lion_pytorch.Lion": _lion_of_lion_pytorch,
}

#: Torch's classes that the generic rule runs.
ELEMENTWISE = frozenset(
    f"torch.optim.{name.lower()}.{name}"
    for name in ("RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop")
)

#: Classes that look at whole parameters, by the full name of the exact class: what makes the rule, in `ext/matrix`.
WHOLE: Mapping[str, str] = {
    "torch.optim.Muon": "muon.muon",
    "penstock.optim.muon_adamw.MuonAdamW": "muon.muon_adamw",
    "torch.optim.Adafactor": "adafactor.adafactor",
}

#: Classes that compute across parameters, and why they do not fit.
UNFIT: Mapping[str, str] = {
    "torch.optim.lbfgs.LBFGS": "it looks at all parameters at once and calls a closure several times per step",
    "torch.optim.sparse_adam.SparseAdam": "it takes sparse gradients, and Penstock reduces dense ones",
}


def _of_matrices(place: str) -> Callable[..., Rule]:
    """Load what makes a rule over whole parameters: most runs have none."""
    module, name = place.split(".")
    make: Callable[..., Rule] = getattr(import_module(f"penstock.ext.matrix.{module}"), name)
    return make


#: The rule of a model that nothing trains: it has no states, and is never applied.
NO_RULE: Rule = Sgd("none")


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
        rule = replace(fused, unknown=unknown_options(fused, optimizer.defaults, cls))
    elif name in WHOLE:
        rule = _of_matrices(WHOLE[name])(optimizer, format_)
    elif registered := rule_of(cls):
        rule = _of_matrices("registered.believed")(optimizer, registered, format_)
    elif name in ELEMENTWISE or is_declared(cls):
        rule = Generic(optimizer, format_)
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
            rule.hyper(group, step=1)
        except ConfigError as error:
            raise ConfigError(f"Parameter group {index}: {error}") from None
    return rule
