"""What a simulation's engine is built of."""

import warnings

import torch
from torch import nn

from penstock import Placement
from penstock.planner import Machine, plan


def test_who_plans_is_not_warned_of_memory_that_is_not_pinned() -> None:
    machine = Machine.read("rtx4090-desktop").replace(pinnable_memory=1 << 20)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        slow = plan(
            model,
            torch.optim.AdamW,
            lambda: torch.zeros(8, 512),
            machine=machine,
            placement=Placement(params="cpu", grads="cpu", optimizer="cpu"),
        )
    assert slow.fits
