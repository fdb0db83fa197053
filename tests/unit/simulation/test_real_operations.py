"""Operations that run for real in a simulation: control flow that depends on values finds some."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.blueprint import request_for
from penstock.errors import ConfigError
from penstock.planner.simulation.simulate import Setup, Simulation, simulate
from tests.lib.engines import ON_CPU
from tests.lib.models import stack


class Deciding(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * 2 if x.sum() > 0 else x


def plain() -> nn.Sequential:
    return stack(layers=4, width=32)


def simulated(model: nn.Module, *, runs_operations: bool, back_end: Any = "threads") -> Simulation:
    placement = penstock.Placement(**ON_CPU)
    request = request_for(model, placement=placement, precision="fp32", overlap="forward", units=(nn.Linear,))
    setup = Setup(model, torch.optim.AdamW, lambda: torch.ones(4, 32), back_end=back_end)
    return simulate(replace(setup, runs_operations=runs_operations), request)


@pytest.mark.parametrize("back_end", ["threads", "inline", "accelerator"])
def test_what_is_performed_is_what_is_simulated(back_end: str) -> None:
    model = plain()
    fake_tensor = simulated(model, runs_operations=False, back_end=back_end).program
    random_state = torch.get_rng_state()
    real = simulated(model, runs_operations=True, back_end=back_end).program
    assert torch.equal(torch.get_rng_state(), random_state)
    assert real.jobs == fake_tensor.jobs
    assert real.steps == fake_tensor.steps

    def counted(program: Any) -> Counter[tuple[str, int]]:
        ops = [(program.ops[number], count) for segment in program.segments for number, count in segment]
        return sum((Counter({(op.name, op.flops): count}) for op, count in ops), Counter())

    assert counted(real) == counted(fake_tensor)


def test_values_that_decide_are_there_where_operations_are_performed() -> None:
    with pytest.raises(ConfigError, match="--measure"):
        simulated(Deciding(*plain()), runs_operations=False)
    found = simulated(Deciding(*plain()), runs_operations=True)
    assert any(op.name.startswith("aten._local_scalar_dense") for op in found.program.ops)
