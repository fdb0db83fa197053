"""The parity table with kinds split between tiers: the same bits as with everything on the device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from penstock.runtime.streams import Streams
from tests.lib.streams import inline, separate, simulated
from tests.parity.compare import otherwise
from tests.parity.rows import CORE, EXTRA, Arithmetic, Movement, batches, changed, loss_of, prepared, shares
from tests.support import run_ranks, sampled, thorough

STEPS = 2
KIB = 1 << 10
ON_DEVICE = Movement()
HALF = shares(device=0.5, cpu=0.5)
TWIN_FLOW = shares(device=0.6, cpu=0.4)
THREE_WAYS = shares(device=0.3, cpu=0.4, nvme=0.3)
NARROW = shares(device=0.25, cpu=0.15, nvme=0.6)  # both cuts are in the first block
SMALL = {"tile_bytes": 4 * KIB}  # a block is 7 tiles in fp32, and a parameter lies in several

# Each kind alone and all at once, with equal cuts and others, stage, overlap, tile size, and kind of streams.
MOVEMENTS: tuple[tuple[Callable[[], Streams], Movement], ...] = (
    (inline, Movement(3, optimizer=TWIN_FLOW).but(**SMALL)),
    (separate, Movement(3, optimizer=TWIN_FLOW).but(**SMALL)),
    (separate, Movement(1, "cpu", "cpu", HALF).but(**SMALL)),
    (separate, Movement(2, params=HALF).but(**SMALL)),
    (separate, Movement(0, params=shares(device=0.7, cpu=0.3), optimizer="cpu").but(tile_bytes=5 * KIB)),
    (separate, Movement(3, grads=HALF, overlap="none").but(**SMALL)),
    (separate, Movement(1, HALF, HALF, HALF, "none").but(**SMALL)),
    (separate, Movement(3, shares(device=0.7, cpu=0.3), shares(device=0.2, cpu=0.8), HALF).but(**SMALL)),
    (inline, Movement(2, shares(device=0.2, cpu=0.8), HALF, shares(device=0.7, cpu=0.3), "forward").but(**SMALL)),
    (inline, Movement(3, THREE_WAYS, THREE_WAYS, THREE_WAYS).but(**SMALL, update_threads=3)),
    (separate, Movement(3, THREE_WAYS, shares(cpu=0.5, nvme=0.5), shares(device=0.5, cpu=0.2, nvme=0.3)).but(**SMALL)),
    (separate, Movement(3, NARROW, NARROW, NARROW).but(**SMALL)),
    (separate, Movement(1, NARROW, THREE_WAYS, shares(device=0.35, cpu=0.05, nvme=0.6), "forward").but(**SMALL)),
    (separate, Movement(0, shares(device=0.5, nvme=0.5), "device", THREE_WAYS, "forward", disks=2).but(**SMALL)),
    (separate, Movement(1, "device", THREE_WAYS, shares(cpu=0.5, nvme=0.5), "none").but(tile_bytes=6 * KIB)),
    (separate, Movement(2, "nvme", shares(device=0.5, nvme=0.5), HALF, "forward").but(**SMALL)),
    (separate, Movement(3, HALF, "cpu", "nvme").but(**SMALL, prefetch_bytes=0)),
    (separate, Movement(3, HALF, HALF, TWIN_FLOW).but(tile_bytes=4 << 20)),  # a unit is a tile: cuts between units
    (separate, Movement(2, HALF, HALF, THREE_WAYS).but(**SMALL, live_bytes=32 * KIB)),
    (separate, Movement(3, THREE_WAYS, HALF, TWIN_FLOW).but(**SMALL, persistent_bytes=512)),
)
ALL_ARITHMETIC = (*CORE, *EXTRA)
BUSY = [what for what in CORE if what.accumulation > 1 and what.clip is not None]


@pytest.mark.parametrize("what", sampled(ALL_ARITHMETIC, every=3), ids=changed)
def test_splits_change_no_bit(what: Arithmetic) -> None:
    turn = 2 * ALL_ARITHMETIC.index(what)  # every arithmetic meets some movements, the busiest all of them
    rows = MOVEMENTS if what in BUSY else [MOVEMENTS[(turn + k) % len(MOVEMENTS)] for k in range(2)]
    assert otherwise(what, rows, ON_DEVICE, steps=STEPS) == []


def late() -> Streams:
    return simulated(most_seconds=0.0005)


LATE = [how for streams, how in MOVEMENTS if streams is separate]


@pytest.mark.parametrize("what", [thorough(BUSY[0]), Arithmetic(precision="bf16", groups=True)], ids=changed)
def test_splits_on_late_streams_change_no_bit(what: Arithmetic) -> None:
    assert otherwise(what, [(late, how) for how in LATE], ON_DEVICE, steps=STEPS) == []


def otherwise_on_rank(rank: int, stages: tuple[int, ...]) -> list[str]:
    failures = []
    for stage in stages:
        what = Arithmetic(precision="bf16", accumulation=3, clip=0.5, no_sync=stage % 2 == 0)
        rows = [(streams, how.but(stage=stage)) for streams, how in MOVEMENTS[stage % 3 :: 3]]
        rows += [(late, how.but(stage=stage)) for how in LATE[stage::6]]
        failures += otherwise(what, rows, ON_DEVICE, rank=rank, world_size=2, steps=STEPS)
    return failures


@pytest.mark.parametrize("stages", [(3,), thorough((2, 1, 0))], ids=str)
def test_splits_change_no_bit_on_two_ranks(stages: tuple[int, ...]) -> None:
    assert run_ranks(otherwise_on_rank, 2, stages) == [[], []]


def otherwise_on_a_mesh(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    common = {"rank": rank, "world_size": 4, "mesh": mesh, "steps": STEPS}
    return otherwise(BUSY[2], MOVEMENTS[::6], ON_DEVICE, **common)


@pytest.mark.thorough
def test_splits_change_no_bit_on_replicated_shards() -> None:
    assert run_ranks(otherwise_on_a_mesh, 4) == [[]] * 4


# What a user does with single parameters, some of which lie in several sections.

SPLIT_ROWS = (
    (inline, Movement(3, THREE_WAYS, THREE_WAYS, THREE_WAYS).but(**SMALL)),
    (separate, Movement(3, shares(device=0.7, cpu=0.3), shares(device=0.2, cpu=0.8), HALF).but(**SMALL)),
    (separate, Movement(1, THREE_WAYS, shares(cpu=0.5, nvme=0.5), THREE_WAYS).but(**SMALL)),
    (late, Movement(2, shares(device=0.4, nvme=0.6), HALF, THREE_WAYS).but(**SMALL)),
    (separate, Movement(3, NARROW, NARROW, NARROW).but(**SMALL)),
)
NAMES = [f"{streams.__name__} {changed(how)}" for streams, how in SPLIT_ROWS]


def with_a_schedule(streams: Streams, how: Movement, rank: int = 0, world_size: int = 1) -> list[Tensor]:
    """Another learning rate in every step, and of each of two groups."""
    what = Arithmetic(groups=True, precision="bf16")
    model, optimizer = prepared(what, how, streams)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 1 + step])
    for (ranks,) in batches(world_size, 1)[:4]:
        optimizer.backward(loss_of(model, ranks[rank]))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    seen = [optimizer.full_param(p) for p in model.parameters()]
    optimizer.close()
    return seen


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize(("streams", "how"), SPLIT_ROWS, ids=NAMES)
def test_the_learning_rate_of_each_step_and_group_reaches_every_tile(
    streams: Callable[[], Streams], how: Movement
) -> None:
    assert equal(with_a_schedule(streams(), how), with_a_schedule(inline(), ON_DEVICE))


def looked_at_and_changed(streams: Streams, how: Movement, rank: int = 0, world_size: int = 1) -> list[Tensor]:
    """Everything of every parameter is read, replaced and trained on."""
    model, optimizer = prepared(Arithmetic(precision="bf16", clip=0.5), how, streams)
    parameters = list(model.parameters())
    generator = torch.Generator().manual_seed(1)
    seen: list[Tensor] = []

    def look() -> None:
        for p in parameters:
            seen.extend((optimizer.full_param(p), optimizer.full_grad(p)))
            seen.extend(optimizer.full_state(p, name) for name in ("exp_avg", "exp_avg_sq", "step"))

    def noise(p: Tensor) -> Tensor:
        return torch.rand(p.shape, generator=generator)

    first, second, third = (ranks[rank] for (ranks,) in batches(world_size, 1)[:3])
    optimizer.backward(loss_of(model, first))
    look()
    optimizer.step()
    look()
    for p in parameters:
        optimizer.set_full_state(p, "exp_avg", noise(p))
        optimizer.set_full_state(p, "exp_avg_sq", noise(p))
        optimizer.set_full_param(p, noise(p))
        optimizer.set_full_grad(p, noise(p))
        expected = optimizer.full_param(p), optimizer.full_grad(p)
        seen.extend(expected)
    optimizer.step()
    look()
    with optimizer.gathered(modify=True), torch.no_grad():
        for p in parameters:
            p[..., ::3] *= 2  # the others keep what their master has beside them
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, second))
    optimizer.step()
    look()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.backward(loss_of(model, third))
    optimizer.step()
    look()
    optimizer.close()
    return [*seen, *(p.detach().clone() for p in parameters)]


@pytest.mark.parametrize(("streams", "how"), SPLIT_ROWS, ids=NAMES)
def test_state_is_read_and_changed_across_the_borders_of_sections(
    streams: Callable[[], Streams], how: Movement
) -> None:
    assert equal(looked_at_and_changed(streams(), how), looked_at_and_changed(inline(), ON_DEVICE))


def looks_of_a_rank(rank: int) -> list[bool]:
    work: tuple[Any, ...] = (with_a_schedule, looked_at_and_changed)
    references = [life(inline(), ON_DEVICE, rank, 2) for life in work]
    return [
        equal(life(streams(), how, rank, 2), reference)
        for streams, how in SPLIT_ROWS
        for life, reference in zip(work, references, strict=True)
    ]


@pytest.mark.thorough
def test_state_is_read_and_changed_across_sections_and_ranks() -> None:
    assert run_ranks(looks_of_a_rank, 2) == [[True] * 2 * len(SPLIT_ROWS)] * 2
