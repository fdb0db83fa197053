"""The parity table on streams that run late: random delays, buffers that are NaN outside their lease."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch

from tests.lib.streams import inline, released, simulated
from tests.parity.rows import Arithmetic, Movement, Trace, changed, train
from tests.support import run_ranks, sampled, thorough

STEPS = 2
KIB = 1 << 10
ROWS = (
    Arithmetic(accumulation=3, clip=0.5),
    Arithmetic(precision="bf16"),
    Arithmetic(precision="bf16", accumulation=3, clip=0.5, accumulation_dtype=torch.float32),
    Arithmetic(precision="bf16", accumulation=3, no_sync=True, groups=True),
)


def movements(stage: int, world_size: int) -> Iterator[Movement]:
    tiers = ("device", "cpu")
    placements = list(product(tiers, repeat=3))
    if world_size > 1:  # each path once: an update beside its gradient or far from it, beside its parameters or not
        placements = [("device", "device", "cpu"), ("cpu", "cpu", "device"), ("device", "cpu", "cpu")]
    for params, grads, optimizer in placements:
        yield Movement(stage, params, grads, optimizer).but(tile_bytes=4 * KIB)
    everything_on_cpu = Movement(stage, "cpu", "cpu", "cpu")
    yield everything_on_cpu.but(prefetch_bytes=0)
    yield everything_on_cpu.but(live_bytes=40 * KIB)


def everything(trace: Trace) -> list[object]:
    return [trace.losses, trace.norms, *(t.tolist() for values in trace.final.values() for t in values)]


def late_is_otherwise(rows: tuple[Arithmetic, ...], stages: tuple[int, ...], rank: int, world_size: int) -> list[str]:
    """Rows that give other bits late than at once."""
    failures = []
    for what, stage in product(rows, stages):
        common = {"rank": rank, "world_size": world_size, "steps": STEPS}
        at_once = everything(train(what, Movement(stage), streams=inline(), **common))
        for seed, how in enumerate(movements(stage, world_size)):
            # Every other one with everything released after use, also what compute could read in place.
            streams = (simulated, released)[seed % 2](seed, most_seconds=0.001)
            late = train(what, how, streams=streams, **common)
            if everything(late) != at_once:
                failures.append(f"{changed(what)} | {changed(how)}")
    return failures


@pytest.mark.parametrize("what", sampled(ROWS, every=2), ids=changed)
def test_late_streams_change_no_bit(what: Arithmetic) -> None:
    assert late_is_otherwise((what,), (3,), 0, 1) == []


def late_on_rank(rank: int, rows: tuple[Arithmetic, ...], stages: tuple[int, ...]) -> list[str]:
    return late_is_otherwise(rows, stages, rank, 2)


@pytest.mark.parametrize("stage", [thorough(0), thorough(1), thorough(2), 3])
def test_late_streams_change_no_bit_on_two_ranks(stage: int) -> None:
    rows = (ROWS[0], ROWS[3]) if stage in (1, 3) else ROWS[:1]
    assert run_ranks(late_on_rank, 2, rows, (stage,)) == [[], []]
