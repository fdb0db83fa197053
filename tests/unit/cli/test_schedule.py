"""Every schedule is transformers' own, step by step, from its beginning and from its middle."""

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from penstock.cli.training.config import TrainConfig
from penstock.cli.training.learning.schedule import rate_factor
from penstock.cli.training.recipe import Course, recipe_for
from penstock.cli.training.settings.learning import SCHEDULES
from penstock.errors import ConfigError

LR = 0.02
#: transformers' name and arguments, by ours.
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "cosine": ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
    "cosine_with_min_lr": ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
    "wsd": ("warmup_stable_decay", {"min_lr_ratio": 0.1, "num_decay_steps": 4}),
    "warmup_stable_decay": ("warmup_stable_decay", {"min_lr_ratio": 0.1, "num_decay_steps": 4}),
}


def course_of(config: TrainConfig) -> Course:
    return recipe_for(config, positions=None, world_size=1).over(config, 1)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1)], lr=LR)


def rates(scheduler: LambdaLR, count: int) -> list[float]:
    found = []
    for _ in range(count):
        found.append(float(scheduler.get_last_lr()[0]))
        scheduler.optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("warmup", [0, 1, 5])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_that_of_transformers(name: str, warmup: int) -> None:
    steps = 23
    config = TrainConfig(schedule=name, warmup=warmup, steps=steps, lr=LR)
    theirs, more = THEIRS.get(name, (name, {}))
    if name == "constant" and warmup:
        theirs = "constant_with_warmup"
    plain: Any = get_scheduler(
        theirs, optimizer(), num_warmup_steps=warmup, num_training_steps=steps, scheduler_specific_kwargs=more
    )
    wanted = rates(plain, steps)
    assert wanted[0] == (0 if warmup and "wsd" not in name and "stable" not in name else wanted[0])
    assert wanted[warmup] == pytest.approx(LR), "after the warmup the rate is the full one, also after none"
    factor = rate_factor(config, course_of(config))
    assert rates(LambdaLR(optimizer(), factor), steps) == wanted
    for start in (1, warmup, 11, steps - 1):
        alone = optimizer()
        alone.param_groups[0]["initial_lr"] = LR
        assert rates(LambdaLR(alone, factor, last_epoch=start - 1), steps - start) == wanted[start:], start


def test_cosine_and_wsd_end_at_their_share() -> None:
    for name in ("cosine", "wsd"):
        config = TrainConfig(schedule=name, warmup=0, steps=1000, lr=LR, min_lr=0.25)
        factor = rate_factor(config, course_of(config))
        assert factor(999) == pytest.approx(0.25, abs=1e-3)
        assert factor(799) == 1 or name == "cosine"
        assert factor(801) < 1


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (5, 5), (9, 10)])
def test_short_runs(name: str, warmup: int, steps: int) -> None:
    config = TrainConfig(schedule=name, warmup=warmup, steps=steps, lr=LR)
    factor = rate_factor(config, course_of(config))
    assert all(0 <= factor(step) <= 1 for step in range(steps + 1))
    if warmup < steps:
        assert factor(warmup) == 1


def test_numbers_that_a_schedule_does_not_take() -> None:
    config = TrainConfig(schedule="polynomial", steps=5, lr=1e-8)
    with pytest.raises(ConfigError, match=r"^--schedule polynomial does not do with --lr 1e-08: lr_end "):
        rate_factor(config, course_of(config))
