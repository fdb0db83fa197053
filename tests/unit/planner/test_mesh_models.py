"""Plans of models of which each rank has a part: what is computed, what links cost, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.blueprint import request_for
from penstock.errors import ConfigError
from penstock.planner import plan, simulated_mesh
from penstock.planner.cost import MachineCosts
from penstock.planner.plan_request import PlanRequest
from penstock.planner.simulation.program import OF_MODEL, Program
from penstock.planner.simulation.retime import retime
from penstock.planner.simulation.simulate import Setup, simulate
from penstock.runtime.topology import Grid
from tests.lib.planning import ON_HOST, asked, desktop

WIDTH, TOKENS = 64, 32


class Net(nn.Module):
    """Two products around an activation, of which ranks have parts of the width in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def divided(mesh: Any) -> nn.Module:
    from torch.distributed.tensor import parallel

    return parallel.parallelize_module(
        Net(), mesh["tp"], {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
    )


def batch() -> Tensor:
    return torch.zeros(TOKENS, WIDTH)


def program_of(model: nn.Module, grid: Grid) -> Program:
    setup = Setup(model, torch.optim.AdamW, batch, grid=grid, back_end="accelerator")
    return simulate(setup, request_for(model)).program


def flops(program: Program) -> int:
    return sum(program.ops[op].flops * count for segment in program.segments for op, count in segment)


def test_a_rank_computes_its_part_and_waits_for_the_others() -> None:
    whole = program_of(Net(), Grid(shards=2))
    with simulated_mesh({"tp": 4}) as mesh:
        part = program_of(divided(mesh), Grid(shards=2, tp=4))
    assert flops(part) * 4 == flops(whole) > 0
    own = [job for job in part.jobs if job.stream == OF_MODEL]
    # A sum of what `down` gives in each forward; `up` needs no gradient of the batch.
    assert [(each.name, each.nbytes, each.ranks, each.dimension) for job in own for each in job.collectives] == [
        ("all_reduce", TOKENS * WIDTH * 2, 4, "tp")
    ] * 2
    machine = desktop()  # of one device: ranks are on hosts of their own
    steps = [retime(part, MachineCosts(machine.replace(net_seconds=seconds))).step_s for seconds in (1.0, 2.0)]
    # A sum goes around twice. Beside that of the model there is one of norms over each dimension.
    assert steps[1] - steps[0] >= 2 * 1.0 * 3


def test_a_plan_of_a_model_with_dtensors_is_that_of_a_function_that_makes_it() -> None:
    mesh = {"dp_shard": 2, "tp": 2}
    asking: dict[str, Any] = {"machine": desktop(), "mesh": mesh, "placement": ON_HOST}
    with simulated_mesh(mesh) as there:
        made = plan(lambda: divided(there), torch.optim.AdamW, batch, **asking)
        given = plan(divided(there), torch.optim.AdamW, batch, **asking)
    assert given == made
    assert made.mesh == {"dp_replicate": 1, "dp_shard": 2, "tp": 2}
    assert "one of 4 ranks, dp_shard 2 x tp 2" in " ".join(str(made).split())


REFUSED: dict[str, tuple[dict[str, int] | None, str]] = {
    "no mesh": (None, "Parameter 'up.weight' is a DTensor of 2 ranks, and mesh divides parameters over 1. Give the"),
    "another mesh": ({"dp_shard": 2, "tp": 3}, "is a DTensor of 2 ranks, and mesh divides parameters over 3."),
    "no tp": ({"dp_shard": 2}, "is a DTensor of 2 ranks, and mesh divides parameters over 1."),
}


def test_a_model_that_is_divided_otherwise_than_the_mesh_is_refused() -> None:
    with simulated_mesh({"tp": 2}) as mesh:
        model = divided(mesh)
        for case, (sizes, words) in REFUSED.items():
            with pytest.raises(ConfigError) as refused:
                asked(model, mesh=sizes)
            assert words in str(refused.value), case
            assert "\n" not in str(refused.value), case


def test_ranks_of_a_line_have_the_batch_of_one() -> None:
    with simulated_mesh({"tp": 2}) as mesh:
        request: PlanRequest = asked(divided(mesh), mesh={"dp_shard": 4, "tp": 2}, batch=batch)
    assert (request.setup.grid.data_size, request.setup.grid.world_size) == (4, 8)
