"""The parity table on two ranks (and once on four), each pair of ranks running many rows."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

from tests.lib.streams import inline, separate
from tests.parity.compare import against_plain_by_step, against_plain_run, different_bits
from tests.parity.rows import (
    CORE,
    EXTRA,
    PLACEMENTS,
    Arithmetic,
    Movement,
    changed,
    train,
)
from tests.support import run_ranks, thorough

STEPS_OF_A_REFERENCE = 3
STEPS_OF_A_MOVEMENT = 2
KIB = 1 << 10
EVERYTHING_ON_CPU = PLACEMENTS[2]


def movements(stages: tuple[int, ...], every: bool) -> Iterator[tuple[Any, Movement]]:
    for stage in stages:
        for placement in PLACEMENTS:
            yield separate, placement.but(stage=stage, tile_bytes=4 * KIB)
        if every:
            for placement in PLACEMENTS:
                yield inline, placement.but(stage=stage)
            yield separate, Movement(stage=stage, params="cpu")
            yield separate, Movement(stage=stage, optimizer="cpu")
            yield separate, EVERYTHING_ON_CPU.but(stage=stage, prefetch_bytes=0)
            yield separate, EVERYTHING_ON_CPU.but(stage=stage, live_bytes=32 * KIB)


#: the form of the master says nothing about ranks: its full copy is in one row
ROWS = [w for w in (*CORE, *EXTRA) if w.master == "remainder" or w == Arithmetic(precision="bf16", master="fp32")]
BUSY = [w for w in CORE if w in ROWS and w.accumulation > 1 and w.clip is not None]


def check_rows(rank: int, rows: list[Arithmetic], stages: tuple[int, ...]) -> list[str]:
    """Every row against plain torch at the first stage, bit by bit at the others and in every movement."""
    failures = []
    for what in rows:
        reference = train(
            what, Movement(stage=stages[0]), rank=rank, world_size=2, look=True, steps=STEPS_OF_A_REFERENCE
        )
        failures += [f"{changed(what)}: {m}" for m in against_plain_by_step(what, reference, rank, world_size=2)]
        for streams, how in movements(stages, every=what in BUSY):
            trace = train(what, how, rank=rank, world_size=2, streams=streams(), steps=STEPS_OF_A_MOVEMENT)
            found = different_bits(trace, reference, STEPS_OF_A_MOVEMENT, what.accumulation)
            if found:
                failures.append(f"{changed(what)} | {streams.__name__} {changed(how)}: {', '.join(found)}")
    return failures


REST = [w for w in ROWS if w not in BUSY and not w.no_sync]
#: stages 0 and 1 share their arithmetic with the others: the plain rows, and what they alone can do
HOLDING_BACK = [w for w in ROWS if w in CORE or w.no_sync or w.reduce_op == "sum"]


@pytest.mark.parametrize(
    ("stages", "rows"),
    [
        pytest.param((3, 2, 1), BUSY, id="stages 1 to 3"),
        pytest.param(
            (3, 2), [w for w in REST if w.precision == "fp32"], id="stages 2 and 3, fp32", marks=pytest.mark.thorough
        ),
        pytest.param(
            (3, 2), [w for w in REST if w.precision == "bf16"], id="stages 2 and 3, bf16", marks=pytest.mark.thorough
        ),
        thorough((1,), HOLDING_BACK, id="stage 1"),
        thorough((0,), HOLDING_BACK, id="stage 0"),
    ],
)
def test_steps_are_plain_torchs_and_movement_changes_no_bit(stages: tuple[int, ...], rows: list[Arithmetic]) -> None:
    for rank, failures in enumerate(run_ranks(check_rows, 2, rows, stages)):
        assert not failures, f"rank {rank}:\n" + "\n".join(failures)


def check_meshes(rank: int, shapes: list[tuple[int, int]]) -> list[str]:
    failures = []
    world_size = math.prod(shapes[0])
    for shape in shapes:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        common = {"rank": rank, "world_size": world_size, "mesh": mesh}
        for what in (Arithmetic(accumulation=2, clip=0.5), Arithmetic(precision="bf16", clip=0.5)):
            reference = train(what, Movement(), look=True, steps=STEPS_OF_A_REFERENCE, **common)
            found = list(against_plain_by_step(what, reference, rank, world_size))
            for stage, placement in ((3, EVERYTHING_ON_CPU), (1, PLACEMENTS[1])):
                how = placement.but(stage=stage, tile_bytes=4 * KIB)
                trace = train(what, how, streams=separate(), steps=STEPS_OF_A_MOVEMENT, **common)
                different = different_bits(trace, reference, STEPS_OF_A_MOVEMENT, what.accumulation)
                found += [f"{changed(how)}: {message}" for message in different]
            failures += [f"mesh {shape} | {changed(what)}: {message}" for message in found]
    return failures


@pytest.mark.parametrize("shapes", [[(2, 1), (1, 2)], thorough([(2, 2)])], ids=["two ranks", "four ranks"])
def test_replicated_shards_train_as_plain_torch_does(shapes: list[tuple[int, int]]) -> None:
    for rank, failures in enumerate(run_ranks(check_meshes, math.prod(shapes[0]), shapes)):
        assert not failures, f"rank {rank}:\n" + "\n".join(failures)


def check_run(rank: int, world_size: int) -> list[str]:
    what = Arithmetic(accumulation=2, clip=0.5)
    how = EVERYTHING_ON_CPU.but(stage=3, tile_bytes=4 * KIB)
    trace = train(what, how, rank=rank, world_size=world_size, streams=separate())
    return list(against_plain_run(what, trace, world_size, of_largest=1e-3))


def test_ten_steps_stay_with_plain_torch_on_the_whole_batch() -> None:
    """The mean over two ranks' batches of one size is the mean over the batches put together, summed otherwise.

    Adam divides the difference by the size of the gradient, which is near zero for some elements.
    """
    for rank, failures in enumerate(run_ranks(check_run, 2, 2)):
        assert not failures, f"rank {rank}:\n" + "\n".join(failures)
