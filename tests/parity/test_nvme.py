"""The parity table with files: whatever rests on the nvme tier, the same bits as with everything in memory."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import penstock
from penstock.runtime.simulated import SimulatedStreams
from penstock.runtime.streams import DOWNLOAD, UPDATE, UPLOAD, Streams
from tests.lib.engines import prepare_on
from tests.lib.streams import inline, separate, simulated
from tests.parity.compare import otherwise
from tests.parity.rows import CORE, EXTRA, INPUTS, OUTPUTS, Arithmetic, Movement, changed
from tests.support import run_ranks, sampled, thorough

STEPS = 2
KIB = 1 << 10
NVME = "nvme"
SMALL = {"tile_bytes": 4 * KIB}

# Every pair of a kind on the nvme tier and another anywhere, stage, overlap, tile size, and kind of streams.
MOVEMENTS: tuple[tuple[Callable[[], Streams], Movement], ...] = (
    (inline, Movement(3, NVME, NVME, NVME).but(**SMALL)),
    (separate, Movement(3, NVME, NVME, NVME, disks=3).but(tile_bytes=5 * KIB, checksums=False)),
    (inline, Movement(1, NVME, NVME, NVME, "forward", disks=2).but(**SMALL, io_queue_depth=1, update_threads=3)),
    (separate, Movement(2, NVME, NVME, NVME, "none").but(tile_bytes=4 << 20)),
    (inline, Movement(0, optimizer=NVME, overlap="forward").but(tile_bytes=8 * KIB)),
    (separate, Movement(1, optimizer=NVME, overlap="forward").but(**SMALL)),
    (separate, Movement(3, "cpu", "device", NVME, "none").but(**SMALL)),
    (inline, Movement(2, "cpu", "cpu", NVME).but(**SMALL)),
    (inline, Movement(1, params=NVME, overlap="none").but(**SMALL)),
    (separate, Movement(3, params=NVME, overlap="forward").but(**SMALL)),
    (separate, Movement(0, NVME, "cpu", "cpu").but(**SMALL)),
    (inline, Movement(1, grads=NVME, overlap="forward").but(tile_bytes=4 << 20)),
    (separate, Movement(2, grads=NVME, overlap="none", disks=2).but(**SMALL)),
    (separate, Movement(3, "device", NVME, "cpu").but(**SMALL, checksums=False)),
    (separate, Movement(3, "cpu", NVME, "device", "forward").but(**SMALL)),
    (inline, Movement(3, NVME, NVME, "cpu").but(tile_bytes=8 * KIB)),
    (separate, Movement(2, NVME, "device", NVME, "forward").but(**SMALL, live_bytes=32 * KIB)),
    (separate, Movement(1, "device", NVME, NVME).but(**SMALL)),
    (inline, Movement(3, NVME, NVME, NVME).but(**SMALL, persistent_bytes=512, prefetch_bytes=0)),
)
ALL_ARITHMETIC = (*CORE, *EXTRA)
BUSY = [what for what in CORE if what.accumulation > 1 and what.clip is not None]


EVERYTHING_ON_CPU = Movement(params="cpu", grads="cpu", optimizer="cpu")


@pytest.mark.parametrize("what", sampled(ALL_ARITHMETIC, every=2), ids=changed)
def test_files_change_no_bit(what: Arithmetic) -> None:
    turn = 2 * ALL_ARITHMETIC.index(what)  # every arithmetic meets some movements, the busiest all of them
    rows = MOVEMENTS if what in BUSY else [MOVEMENTS[(turn + k) % len(MOVEMENTS)] for k in range(2)]
    assert otherwise(what, rows, EVERYTHING_ON_CPU, steps=STEPS) == []


LATE = (
    Movement(3, NVME, NVME, NVME).but(**SMALL),
    Movement(3, NVME, NVME, "device", "none").but(**SMALL),
    Movement(3, "device", "device", NVME, "forward").but(**SMALL),
    Movement(3, "device", "cpu", NVME).but(**SMALL),
    Movement(3, NVME, "cpu", "cpu", "forward").but(**SMALL),
    Movement(3, "cpu", NVME, NVME, "none").but(**SMALL),
    Movement(3, "cpu", NVME, "device", "forward").but(**SMALL, prefetch_bytes=0),
)


def late() -> Streams:
    return simulated(most_seconds=0.0005)


@pytest.mark.parametrize("what", [thorough(BUSY[0]), Arithmetic(precision="bf16", groups=True)], ids=changed)
def test_files_on_late_streams_change_no_bit(what: Arithmetic) -> None:
    assert otherwise(what, [(late, how) for how in LATE], EVERYTHING_ON_CPU, steps=STEPS) == []


def otherwise_on_rank(rank: int, stages: tuple[int, ...]) -> list[str]:
    failures = []
    for stage in stages:
        what = Arithmetic(precision="bf16", accumulation=3, clip=0.5, no_sync=stage % 2 == 0)
        rows = [(streams, how.but(stage=stage)) for streams, how in MOVEMENTS[stage::4]]
        rows.append((late, LATE[stage].but(stage=stage)))
        failures += otherwise(what, rows, EVERYTHING_ON_CPU, rank=rank, world_size=2, steps=STEPS)
    return failures


@pytest.mark.parametrize("stages", [(3,), thorough((2, 1, 0))], ids=str)
def test_files_change_no_bit_on_two_ranks(stages: tuple[int, ...]) -> None:
    assert run_ranks(otherwise_on_rank, 2, stages) == [[], []]


def otherwise_on_a_mesh(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    common = {"rank": rank, "world_size": 4, "mesh": mesh, "steps": STEPS}
    return otherwise(BUSY[2], MOVEMENTS[::6], EVERYTHING_ON_CPU, **common)


@pytest.mark.thorough
def test_files_change_no_bit_on_replicated_shards() -> None:
    assert run_ranks(otherwise_on_a_mesh, 4) == [[]] * 4


# A life of a model with more in it than steps.


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Of three parts the first is frozen, the last may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(INPUTS, 32), nn.Linear(32, OUTPUTS)
        self.parts = nn.ModuleList(Part() for _ in range(3))
        self.parts[0].requires_grad_(False)
        self.parts_used = 3

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for part in self.parts[: self.parts_used]:
            x = part(x)
        return self.last(x)


def life(streams: Streams, how: Movement, precision: str = "bf16", optimizer: Any = torch.optim.AdamW) -> list[Any]:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = Model()
    trained = [p for p in model.parameters() if p.requires_grad]
    prepared = prepare_on(
        streams,
        model,
        optimizer(trained, lr=1e-2),
        stage=how.stage,
        placement=how.placement,
        precision=precision,
        max_grad_norm=1.0,
        overlap=how.overlap,
        options=penstock.Options(**dict(how.options)),
    )
    generator = torch.Generator().manual_seed(4)
    seen: list[Any] = []

    def backward(scale: float = 1.0) -> None:
        x, y = torch.randn(8, INPUTS, generator=generator), torch.randn(8, OUTPUTS, generator=generator)
        loss = (model(x).float() - y).square().mean() * scale
        prepared.backward(loss)
        seen.append(loss.item())

    def step() -> None:
        seen.append(prepared.step().grad_norm)

    backward()
    seen.extend(prepared.full_grad(p).tolist() for p in trained)
    backward()
    step()
    step()  # the same gradients again, at once
    prepared.zero_grad()
    model.parts_used = 2  # the last part gets no gradient: not touched
    backward()
    step()
    prepared.zero_grad()
    backward(float("inf"))
    norm = prepared.step().grad_norm
    seen.append(math.isnan(norm))
    prepared.zero_grad()
    model.parts_used = 3
    with torch.no_grad():
        seen.append(model(torch.ones(1, INPUTS)).tolist())
    prepared.set_full_param(model.last.weight, torch.full((OUTPUTS, 32), 0.25))
    prepared.set_full_param(model.parts[0].up.bias, torch.full((64,), 0.125))
    prepared.set_full_grad(model.parts[1].up.bias, torch.full((64,), 0.5))
    step()
    with prepared.gathered(modify=True), torch.no_grad():
        model.parts[2].down.weight[:3] *= 2
        model.parts[0].down.weight[:3] *= 2
    backward()
    step()
    prepared.load_state_dict(prepared.state_dict())
    prepared.zero_grad()
    backward()
    step()
    seen.extend(prepared.full_param(p).tolist() for p in model.parameters())
    seen.extend(prepared.full_state(p, name).tolist() for p in trained for name in prepared.state_dict()["state"][0])
    prepared.close()
    seen.extend(p.tolist() for p in model.parameters())
    return seen


def same(ours: list[Any], theirs: list[Any]) -> bool:
    return repr(ours) == repr(theirs)  # NaN is NaN


@pytest.mark.parametrize("precision", [thorough("fp32"), "bf16"])
def test_lives_are_the_same(precision: str) -> None:
    expected = life(inline(), Movement(), precision)
    for streams, how in MOVEMENTS[:-1] if precision == "bf16" else MOVEMENTS[:-1:3]:
        assert same(life(streams(), how, precision), expected), (streams.__name__, changed(how))


@pytest.mark.parametrize("how", sampled(LATE, every=3), ids=changed)
def test_lives_on_late_streams_are_the_same(how: Movement) -> None:
    assert same(life(late(), how), life(inline(), Movement()))


def steps_at_once(streams: Streams, how: Movement) -> list[Any]:
    """Three steps with one gradient: nothing but the next step waits for the last one."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = Model()
    trained = [p for p in model.parameters() if p.requires_grad]
    options = penstock.Options(**dict(how.options))
    stock = torch.optim.AdamW(trained, lr=1e-2)
    optimizer = prepare_on(streams, model, stock, placement=how.placement, overlap="forward", options=options)
    optimizer.backward(model(torch.ones(1, INPUTS)).float().square().sum())
    for _ in range(3):
        optimizer.step()
    found = [optimizer.full_param(p).tolist() for p in trained]
    optimizer.close()
    return found


@pytest.mark.parametrize("how", LATE, ids=changed)
@pytest.mark.parametrize("slow", [UPLOAD, DOWNLOAD, UPDATE])
def test_a_step_right_after_a_step_starts_from_what_that_leaves(slow: str, how: Movement) -> None:
    streams = SimulatedStreams(lambda stream, nbytes: 0.002 if stream == slow else 0.0)
    assert steps_at_once(streams, how) == steps_at_once(inline(), Movement())


def test_an_optimizer_without_state_has_nothing_on_the_nvme_tier() -> None:
    expected = life(inline(), Movement(), "fp32", torch.optim.SGD)
    for streams, how in MOVEMENTS[:6:2]:
        assert same(life(streams(), how, "fp32", torch.optim.SGD), expected), (streams.__name__, changed(how))
