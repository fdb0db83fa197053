"""Which rule stands behind a user's optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from penstock.errors import ConfigError
from penstock.rules.adam import Adam
from penstock.rules.adam import refuse_unsupported as refuse_unsupported_adam
from penstock.rules.rule import Rule

#: By exact class, since a subclass may compute anything: the rule, and the check of one parameter group.
RULES: Mapping[type[torch.optim.Optimizer], tuple[Rule, Callable[[Mapping[str, Any]], None]]] = {
    torch.optim.AdamW: (Adam("adamw"), refuse_unsupported_adam),
    torch.optim.Adam: (Adam("adam"), refuse_unsupported_adam),
}


def rule_for(optimizer: torch.optim.Optimizer) -> Rule:
    """Return the rule that computes what `optimizer` would.

    Args:
        optimizer: exactly a `torch.optim.AdamW` or `torch.optim.Adam`, not a subclass. `foreach` and `fused` only choose
            among torch's back ends and have no effect here.

    Raises:
        ConfigError: the class is not supported, or a parameter group sets an option that the rule does not honour; the
            message names it.
    """
    found = RULES.get(type(optimizer))
    if found is None:
        supported = ", ".join(f"torch.optim.{cls.__name__}" for cls in RULES)
        raise ConfigError(
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__} is not supported. "
            f"Use exactly one of {supported}; a subclass may compute something else."
        )
    rule, refuse_unsupported = found
    for index, group in enumerate(optimizer.param_groups):
        try:
            refuse_unsupported(group)
        except ConfigError as error:
            raise ConfigError(f"Parameter group {index}: {error}") from None
    return rule
