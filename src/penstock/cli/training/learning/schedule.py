"""The learning rate from step to step: transformers' own schedules, by the names that people know them by."""

from collections.abc import Callable
from typing import Any

import torch

from penstock.cli.training.config import TrainConfig
from penstock.cli.training.recipe import Course
from penstock.errors import ConfigError, one_line

#: The part of all steps in which the rate of wsd goes down.
DECAY_SHARE = 0.2
_WSD = ("wsd", "warmup_stable_decay")
_COSINE = ("cosine", "cosine_with_min_lr")


def rate_factor(config: TrainConfig, course: Course) -> Callable[[int], float]:
    """Make the learning rate's factor at step s = 0 .. steps - 1, for `torch.optim.lr_scheduler.LambdaLR`.

    It is the function that transformers' Trainer uses for a schedule of that name, so that runs can be compared: with a
    warmup of w steps, s / w while s < w. A function of the step alone, so a run can go on anywhere.

    Arguments:
        config: the settings: which schedule, and where it ends.
        course: how many steps there are, of which the first warm up, and the peak.

    Raises:
        ConfigError: the schedule does not take these numbers.
    """
    from transformers import get_scheduler

    name, more = _named(config, course)
    alone = torch.optim.SGD([torch.zeros(1)], lr=course.lr)
    try:
        scheduler: Any = get_scheduler(
            name,
            alone,
            num_warmup_steps=course.warmup_steps,
            num_training_steps=course.steps,
            scheduler_specific_kwargs=more,
        )
    except Exception as error:
        raise ConfigError(
            f"--schedule {config.schedule} does not do with --lr {course.lr:g}: {one_line(error)}. Use another."
        ) from error
    factor = scheduler.lr_lambdas[0]
    last = course.steps - 1
    # torch asks for one step more than are made, and not every schedule has it.
    return lambda step: float(factor(min(step, last)))


def _named(config: TrainConfig, course: Course) -> tuple[str, dict[str, Any]]:
    """Find transformers' name of a schedule, and the arguments that are its own."""
    name, more = config.schedule, dict[str, Any]()
    if name in _COSINE:
        name, more = "cosine_with_min_lr", {"min_lr_rate": config.min_lr}
    elif name in _WSD:
        # A long warmup leaves less: what would be cut off is the beginning of the way down.
        decay_steps = min(int(DECAY_SHARE * course.steps), course.steps - course.warmup_steps)
        name, more = "warmup_stable_decay", {"num_decay_steps": decay_steps, "min_lr_ratio": config.min_lr}
    elif name == "constant" and course.warmup_steps:
        name = "constant_with_warmup"
    return name, more
