"""Which rule stands behind a user's optimizer."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from penstock.errors import ConfigError
from penstock.rules.adam import Adam
from penstock.rules.rule import Rule

#: By exact class, since a subclass may compute anything.
RULES: Mapping[type[torch.optim.Optimizer], Rule] = {
    torch.optim.AdamW: Adam("adamw"),
    torch.optim.Adam: Adam("adam"),
}


def rule_for(optimizer: torch.optim.Optimizer) -> Rule:
    """Return the rule that computes what `optimizer` would.

    Args:
        optimizer: exactly a `torch.optim.AdamW` or `torch.optim.Adam`, not a subclass. `foreach` and `fused` only
            choose among torch's back ends and have no effect here.

    Raises:
        ConfigError: the class is not supported, or a parameter group sets an option that the rule does not honour; the
            message names it.

    Example:
        >>> rule_for(torch.optim.AdamW(model.parameters(), lr=1e-4)).state_names
        ('exp_avg', 'exp_avg_sq')
    """
    rule = RULES.get(type(optimizer))
    if rule is None:
        supported = ", ".join(f"torch.optim.{cls.__name__}" for cls in RULES)
        raise ConfigError(
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__} is not supported. "
            f"Use exactly one of {supported}; a subclass may compute something else."
        )
    for index, group in enumerate(optimizer.param_groups):
        try:
            rule.hyper(group, step=1)
        except ConfigError as error:
            raise ConfigError(f"Parameter group {index}: {error}") from None
    return rule
