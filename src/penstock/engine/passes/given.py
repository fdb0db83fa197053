"""The optimizer that was given to `prepare`: it has neither gradients nor state any more, and would do nothing.

Schedulers over it work, made before `prepare` or after it: they read and write its param groups, which are shared, and
look at `step` alone for whether it was called.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from penstock.engine.passes.planted import Planted
from penstock.errors import EngineError

METHODS = (
    *("step", "zero_grad", "add_param_group", "state_dict", "load_state_dict"),
    *("register_step_pre_hook", "register_step_post_hook"),  # they would never be called
)


def retire(optimizer: torch.optim.Optimizer, planted: Planted) -> None:
    """Have the methods of an optimizer refuse, because another one stands for it."""
    for name in METHODS:
        planted.plant(optimizer, name, _refusing(type(optimizer).__name__, name))


def _refusing(kind: str, method: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise EngineError(
            f"{method}() of the {kind} that was given to prepare(): it trains nothing until close(). Call it on the "
            "optimizer that prepare() returned."
        )

    # Schedulers wrap `step` to count its calls, unless that was done: ours counts nothing.
    refuse._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return refuse
