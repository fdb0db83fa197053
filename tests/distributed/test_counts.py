"""Communication as exact counts: two ranks, a model of a root unit and two blocks."""

from contextlib import nullcontext

import torch
from torch import nn

from penstock.runtime.streams import Streams
from tests.lib import engines
from tests.lib.engines import prepare_on
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline, separate
from tests.parity.rows import PLACEMENTS, Arithmetic, Movement, batches, loss_of, prepared

UNITS, BLOCKS = 3, 2
EVERYTHING_ON_CPU = PLACEMENTS[2]


def counts_of_one_step(
    rank: int,
    how: Movement,
    *,
    streams: Streams | None = None,
    accumulation: int = 1,
    no_sync: bool = False,
) -> dict[str, int]:
    """Collectives of the second step: the first one learns the order."""
    what = Arithmetic(accumulation=accumulation, clip=0.5)
    model, optimizer = prepared(what, how, streams or inline())
    counts = optimizer._engine.context.ranks.counts
    for micro_batches in batches(2, accumulation)[:2]:
        counts.clear()
        for number, ranks in enumerate(micro_batches):
            with optimizer.no_sync() if no_sync and number < accumulation - 1 else nullcontext():
                optimizer.backward(loss_of(model, ranks[rank]))
        optimizer.step()
        optimizer.zero_grad()
    found = dict(counts)
    optimizer.close()
    return found


def counts_of_looks(rank: int) -> dict[str, dict[str, int]]:
    model, optimizer = prepared(Arithmetic(), Movement(stage=3))
    counts = optimizer._engine.context.ranks.counts
    found = {}

    def note(name: str) -> None:
        found[name] = dict(counts)
        counts.clear()

    counts.clear()
    with torch.no_grad():
        model(batches(2, 1)[0][0][rank][0])
    note("forward")
    with optimizer.gathered():
        pass
    note("gathered")
    with optimizer.gathered(modify=True):
        pass
    note("gathered to modify")
    with optimizer.gathered([model.first.weight]):
        pass
    note("one gathered")
    whole_in_one_shard, cut = model.blocks[0].up.weight, model.blocks[0].down.weight
    optimizer.full_param(whole_in_one_shard)
    note("full_param")
    optimizer.full_param(cut)
    note("full_param of a parameter that a shard border cuts")
    optimizer.locations()
    optimizer.synchronize()
    optimizer.zero_grad()
    note("nothing to say")
    optimizer.close()
    return found


def counts(rank: int) -> dict[str, dict[str, int]]:
    """What one micro-batch has at each stage and mesh is in `test_volume.py`."""
    found = {}
    for stage in (0, 1, 2, 3):
        found[f"stage {stage}"] = counts_of_one_step(rank, Movement(stage=stage), accumulation=4)
        found[f"stage {stage}, no_sync"] = counts_of_one_step(rank, Movement(stage=stage), accumulation=4, no_sync=True)
    for stage in (1, 3):
        how = EVERYTHING_ON_CPU.but(stage=stage)
        found[f"stage {stage}, all on cpu"] = counts_of_one_step(rank, how, streams=separate(), accumulation=4)
        how = how.but(prefetch_bytes=0)
        found[f"stage {stage}, no prefetch"] = counts_of_one_step(rank, how, streams=separate(), accumulation=4)
    how = Movement(stage=3).but(persistent_bytes=1 << 20)
    found["stage 3, persistent"] = counts_of_one_step(rank, how, accumulation=4)
    return {**found, **counts_of_looks(rank)}


GATHERS = UNITS + BLOCKS  # each unit in forward, each block again in backward; the root stays between them
EXPECTED = {
    "stage 0": {"all_reduce": 4 * UNITS + 1},
    "stage 0, no_sync": {"all_reduce": UNITS + 1},
    "stage 1": {"all_gather": UNITS, "reduce_scatter": 4 * UNITS, "all_reduce": 1},
    "stage 1, no_sync": {"all_gather": UNITS, "reduce_scatter": UNITS, "all_reduce": 1},
    "stage 2": {"all_gather": UNITS, "reduce_scatter": 4 * UNITS, "all_reduce": 1},
    "stage 2, no_sync": {"all_gather": UNITS, "reduce_scatter": 4 * UNITS, "all_reduce": 1},
    "stage 3": {"all_gather": 4 * GATHERS, "reduce_scatter": 4 * UNITS, "all_reduce": 1},
    "stage 3, no_sync": {"all_gather": 4 * GATHERS, "reduce_scatter": 4 * UNITS, "all_reduce": 1},
    # a replicated home is made whole by the first gather after a step
    "stage 1, all on cpu": {"all_gather": UNITS, "reduce_scatter": 4 * UNITS, "all_reduce": 1},
    "stage 1, no prefetch": {"all_gather": UNITS, "reduce_scatter": 4 * UNITS, "all_reduce": 1},
    "stage 3, all on cpu": {"all_gather": 4 * GATHERS, "reduce_scatter": 4 * UNITS, "all_reduce": 1},
    "stage 3, no prefetch": {"all_gather": 4 * GATHERS, "reduce_scatter": 4 * UNITS, "all_reduce": 1},
    "stage 3, persistent": {"all_gather": 1, "reduce_scatter": 4, "all_reduce": 1},  # one unit of small parameters
    "forward": {"all_gather": UNITS},
    "gathered": {"all_gather": UNITS},
    "gathered to modify": {"all_gather": UNITS, "broadcast": UNITS},
    "one gathered": {"all_gather": 1},
    "full_param": {"broadcast": 1},
    "full_param of a parameter that a shard border cuts": {"broadcast": 2},
    "nothing to say": {},
}


def test_every_collective_of_two_ranks_is_accounted_for() -> None:
    assert run_ranks(counts, 2) == [EXPECTED] * 2


def counts_of_a_small_unit(rank: int) -> dict[str, int]:
    model, optimizer = engines.prepared(nn.Linear(4, 2, bias=False), stage=1)
    engines.train(model, optimizer)
    optimizer._engine.context.ranks.counts.clear()
    engines.train(model, optimizer)
    found = dict(optimizer._engine.context.ranks.counts)
    optimizer.close()
    return found


def test_a_rank_that_updates_nothing_of_a_unit_gathers_what_others_updated() -> None:
    """A shard may be padding alone. Who did not gather would leave the others waiting."""
    expected = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1}
    assert run_ranks(counts_of_a_small_unit, 2) == [expected] * 2


class Recurrent(nn.Module):
    """Two blocks by turns, and a third whose output nobody needs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(self.blocks[1](self.blocks[0](x)))
        self.blocks[2](x)
        return x


def reductions_of_blocks_used_by_turns(rank: int) -> list[int]:
    model = Recurrent()
    optimizer = prepare_on(separate(), model, torch.optim.AdamW(model.parameters()))
    found = []
    for frozen in (False, True):
        model.blocks[1].requires_grad_(not frozen)
        optimizer._engine.context.ranks.counts.clear()
        optimizer.backward(model(torch.ones(1, 8)).float().sum())
        found.append(optimizer._engine.context.ranks.counts["reduce_scatter"])
    optimizer.close()
    return found


def test_a_block_used_several_times_is_reduced_once_and_a_frozen_one_never() -> None:
    """With its last use, which is when its gradients come; what backward does not come to is not reduced."""
    assert run_ranks(reductions_of_blocks_used_by_turns, 2) == [[2, 1]] * 2
