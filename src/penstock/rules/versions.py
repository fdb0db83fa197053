"""Options that only another version of an optimizer class has."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch

from penstock.rules.fused import Fused


def unknown_options(rule: Fused, options: Iterable[str], cls: type[torch.optim.Optimizer]) -> dict[str, Any]:
    """Find options of the user's class that the rule does not know, such as those of a newer torch.

    Arguments:
        rule: the rule.
        options: the options of the class in this version.
        cls: the class.

    Returns:
        The default of the class's constructor for each, at which the option asks for nothing.
    """
    constructor = inspect.signature(cls).parameters
    known = {*rule.honoured, *rule.refused, *rule.without_effect}
    return {name: constructor[name].default if name in constructor else None for name in options if name not in known}
