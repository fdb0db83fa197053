"""The learning rate over a run: linear warm-up, then a cosine down to a tenth of the peak."""

import math
from collections.abc import Callable

FLOOR = 0.1


def warmup_cosine(*, warmup: int, steps: int) -> Callable[[int], float]:
    """The factor of the peak learning rate at step s = 0 .. steps - 1, for `torch.optim.lr_scheduler.LambdaLR`.

    (s + 1) / warmup while s < warmup, then FLOOR + (1 - FLOOR) (1 + cos(pi (s - warmup) / (steps - warmup))) / 2.

    Source: SGDR (Loshchilov and Hutter, 2017), one period.
    """

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, steps - warmup))
        return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor
