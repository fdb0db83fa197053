"""The rules of `torch.optim.Muon` and `penstock.optim.MuonAdamW`."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.ext.matrix.whole import Whole
from penstock.optim.muon import MuonRule, check_options, sizes_of
from penstock.rules.adam import Adam
from penstock.rules.several import Several
from penstock.rules.storage import StateFormat
from penstock.rules.versions import unknown_options

#: What the arithmetic obeys, what an optimizer's machinery adds to a group, and who updates it.
_KNOWN = frozenset(("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"))
_OURS = frozenset(("split", "ns_dtype"))


def muon(optimizer: torch.optim.Optimizer, format_: StateFormat) -> Whole:
    """Make the rule of `torch.optim.Muon`.

    Raises:
        ConfigError: a group has options that the rule does not know.
    """
    unknown = {name for name in optimizer.defaults if name not in _KNOWN}
    return _muon("muon", "torch.optim.Muon", optimizer.param_groups, format_, unknown)


def muon_adamw(optimizer: torch.optim.Optimizer, format_: StateFormat) -> Several:
    """Make the rule of `penstock.optim.MuonAdamW`, whose parts are Muon's and AdamW's.

    Raises:
        ConfigError: a group has options that its part does not know.
    """
    groups = {rule: [g for g in optimizer.param_groups if g.get("rule") == rule] for rule in ("muon", "adamw")}
    adamw = Adam("adamw", format_, amsgrad=any(group["amsgrad"] for group in groups["adamw"]))
    stock = torch.optim.AdamW
    options = stock([torch.zeros(1)]).defaults
    return Several(
        "muon_adamw",
        "rule",
        {
            "muon": _muon("muon", "penstock.optim.MuonAdamW", groups["muon"], format_, set()),
            "adamw": replace(adamw, unknown=unknown_options(adamw, options, stock)),
        },
    )


def _muon(name: str, title: str, groups: Iterable[Mapping[str, Any]], format_: StateFormat, unknown: set[str]) -> Whole:
    """Make Muon's rule over some groups, and refuse parameters that it cannot cut."""
    stock = not title.startswith("penstock")

    def check(group: Mapping[str, Any]) -> None:
        """Refuse what the arithmetic does not know."""
        for option in sorted(unknown):
            if group.get(option):
                raise ConfigError(
                    f"{option}={group[option]!r} is an option of this version of {title} that Penstock does not know. "
                    f"Set {option} to None or False in every parameter group."
                )
        for option in sorted(_KNOWN - {"lr"}):
            if isinstance(group[option], Tensor):
                raise ConfigError(f"{option} is a tensor, which Penstock's {name} does not support. Make it a float.")
        for option in sorted(_OURS & group.keys() if stock else ()):
            raise ConfigError(f"{option} is an option of penstock.optim.MuonAdamW, not of {title}.")
        check_options(group)

    shapes = []
    for group in groups:
        check(group)
        for parameter in group["params"]:
            shapes.append(tuple(parameter.shape))
            sizes_of(shapes[-1], group.get("split"))
    # Without a parameter there are states all the same: a group that is added later may have some.
    return Whole(name, title, MuonRule(), format_, shapes or [(1, 1)], check=check)
