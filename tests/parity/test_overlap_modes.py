"""When updates run changes no bit: every overlap mode gives what `overlap="none"` gives."""

from collections.abc import Callable, Iterator

import pytest

from penstock.runtime.streams import Streams
from tests.lib.streams import inline, separate, simulated
from tests.parity.compare import otherwise
from tests.parity.rows import Arithmetic, Movement, changed, shares
from tests.support import run_ranks, thorough

STEPS = 2
SMALL = {"tile_bytes": 4 << 10}  # a block is 7 tiles in fp32
AT_ONCE = Movement(overlap="none")
HALF, THREE_WAYS = shares(device=0.5, cpu=0.5), shares(device=0.3, cpu=0.4, nvme=0.3)
PLACEMENTS = (
    Movement(),
    Movement(optimizer="cpu"),
    Movement(params="cpu", grads="cpu", optimizer="cpu"),
    Movement(params="cpu", grads="cpu"),
    Movement(optimizer="nvme"),
    Movement(params="nvme", grads="nvme", optimizer="nvme"),
    Movement(grads=HALF, optimizer=shares(device=0.6, cpu=0.4)),
    Movement(params=THREE_WAYS, grads=THREE_WAYS, optimizer=THREE_WAYS),
)
ROWS = (
    Arithmetic(accumulation=3, no_sync=True, groups=True, schedule=True),
    Arithmetic(precision="bf16", groups=True, schedule=True),
    Arithmetic(precision="bf16", accumulation=2, no_sync=True, reduce_op="sum"),
)
CLIPPED = (
    Arithmetic(accumulation=3, clip=0.5, schedule=True),
    Arithmetic(precision="bf16", accumulation=3, clip=0.5, no_sync=True),
)


def late() -> Streams:
    return simulated(most_seconds=0.0005)


def movements(*overlaps: str, stage: int = 3, first: int = 0) -> Iterator[tuple[Callable[[], Streams], Movement]]:
    """Every placement in every mode, on the kinds of streams in turn from the first."""
    streams = (inline, separate, late)
    for turn, placement in enumerate(PLACEMENTS):
        for number, overlap in enumerate(overlaps):
            how = Movement(stage, placement.params, placement.grads, placement.optimizer, overlap).but(**SMALL)
            yield streams[(first + turn + number) % 3], how


@pytest.mark.parametrize("what", [*map(thorough, ROWS[:2]), ROWS[2]], ids=changed)
def test_no_mode_changes_a_bit(what: Arithmetic) -> None:
    rows = movements("forward", "backward", "auto", first=ROWS.index(what))
    assert otherwise(what, rows, AT_ONCE, steps=STEPS) == []


@pytest.mark.parametrize("what", [thorough(CLIPPED[0]), CLIPPED[1]], ids=changed)
def test_no_mode_that_clips_changes_a_bit(what: Arithmetic) -> None:
    assert otherwise(what, movements("none", "forward"), AT_ONCE, steps=STEPS) == []


def otherwise_on_rank(rank: int, stages: tuple[int, ...]) -> list[str]:
    failures = []
    for stage in stages:
        what = ROWS[stage % len(ROWS)]
        rows = movements("backward", stage=stage, first=stage)
        failures += otherwise(what, rows, AT_ONCE, rank=rank, world_size=2, steps=STEPS)
    return failures


@pytest.mark.parametrize("stages", [(3,), thorough((2, 1, 0))], ids=str)
def test_no_mode_changes_a_bit_on_two_ranks(stages: tuple[int, ...]) -> None:
    assert run_ranks(otherwise_on_rank, 2, stages) == [[], []]
