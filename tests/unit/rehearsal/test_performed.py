"""Operations that run for real in a rehearsal: control flow that depends on values finds some."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.blueprint import request_for
from penstock.errors import ConfigError
from penstock.rehearsal.rehearse import Rehearsal, Scene, rehearse


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.relu(block(x))
        return x


class Deciding(Plain):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * 2 if x.sum() > 0 else x


def rehearsed(model: nn.Module, *, performs: bool, back_end: Any = "threads") -> Rehearsal:
    placement = penstock.Placement(params="cpu", grads="cpu", optimizer="cpu")
    request = request_for(model, placement=placement, precision="fp32", overlap="forward", units=(nn.Linear,))
    scene = Scene(model, torch.optim.AdamW, lambda: torch.ones(4, 32), back_end=back_end)
    return rehearse(replace(scene, performs=performs), request)


@pytest.mark.parametrize("back_end", ["threads", "inline", "accelerator"])
def test_what_is_performed_is_what_is_rehearsed(back_end: str) -> None:
    model = Plain()
    hollow = rehearsed(model, performs=False, back_end=back_end).program
    real = rehearsed(model, performs=True, back_end=back_end).program
    assert real.jobs == hollow.jobs
    assert real.steps == hollow.steps

    def counted(program: Any) -> dict[tuple[str, int], int]:
        found: dict[tuple[str, int], int] = {}
        for segment in program.segments:
            for number, count in segment:
                op = program.ops[number]
                found[op.name, op.flops] = found.get((op.name, op.flops), 0) + count
        return found

    assert counted(real) == counted(hollow)


def test_values_that_decide_are_there_where_operations_are_performed() -> None:
    with pytest.raises(ConfigError, match="--measure"):
        rehearsed(Deciding(), performs=False)
    found = rehearsed(Deciding(), performs=True)
    assert any(op.name.startswith("aten._local_scalar_dense") for op in found.program.ops)


def test_the_state_of_random_numbers_stays() -> None:
    model = Plain()
    before = torch.get_rng_state()
    rehearsed(model, performs=True)
    assert torch.equal(torch.get_rng_state(), before)
