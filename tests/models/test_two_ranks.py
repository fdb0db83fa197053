"""The families on two ranks with data of their own: plain torch on both ranks' data, with averaged gradients."""

import pytest
import torch
from torch import Tensor, nn

from tests.lib.ranks import run_ranks
from tests.lib.streams import simulated
from tests.models.adapters_rows import ADAPTERS
from tests.models.contract import (
    ON_CPU,
    ON_DEVICE,
    assert_close,
    assert_gradients,
    penstock_run,
    plain_run,
)
from tests.models.family import Family
from tests.models.graphs_rows import GRAPHS
from tests.models.modules_rows import MODULES, WIDTH, Stack, on_floats
from tests.models.transformers_rows import TRANSFORMERS

#: Of each family one in turn.
RUNS = [(ON_CPU, 3), (ON_DEVICE, 1)]


class Experts(nn.Module):
    """One of two experts, by the data: each rank has a gradient for another one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({"even": nn.Linear(WIDTH, WIDTH), "odd": nn.Linear(WIDTH, WIDTH)})
        self.never = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        even = bool(int(x.detach().float().sum() * 1000) % 2 == 0)
        return x + torch.tanh(self.experts["even" if even else "odd"](x))


class Routed(Stack):
    def __init__(self) -> None:
        super().__init__([Experts() for _ in range(3)])


TABLES = {
    "transformers": TRANSFORMERS,
    "modules": MODULES,
    "adapters": ADAPTERS,
    "graphs": [*GRAPHS, Family("routed", Routed, on_floats(4, 8), prepare={"units": (Experts,)})],
}


def compare(rank: int, table: str) -> list[str]:
    failures = []
    for number, family in enumerate(TABLES[table]):
        plain = plain_run(family, "fp32", world_size=2)
        placement, stage = RUNS[number % 2]
        ours = penstock_run(family, simulated(), placement, stage, "fp32", rank=rank, world_size=2)
        try:
            if rank > 0:  # the reference kept the losses of the first rank
                ours.observed = plain.observed
            # Not bit for bit: micro-batches are reduced one by one, plain torch adds them up first.
            assert_gradients(ours, plain, exact=False, relative=1e-6)
            assert_close(ours, plain, relative=1e-6)
        except AssertionError as error:
            failures.append(f"{family}, stage {stage}: {error}")
    return failures


@pytest.mark.parametrize("table", TABLES)
def test_two_ranks_equal_plain_torch_with_averaged_gradients(table):
    failures = [failure for of_rank in run_ranks(compare, 2, table) for failure in of_rank]
    assert not failures, "\n\n".join(failures)
