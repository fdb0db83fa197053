"""Plans of models of which each rank has a part: what is computed, what links cost, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.planner import plan, simulated_mesh
from penstock.planner.plan_request import PlanRequest
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
