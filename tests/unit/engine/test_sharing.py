"""The tiles that the host and the device share, and at which share both are done at once."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock
from penstock.config import STAGING, Tier
from penstock.engine.step.update import MEASURED_STEPS, WARM_UP_STEPS, TileUpdate, UpdateRun, UpdateSharing
from penstock.errors import ConfigError
from penstock.runtime.simulated import SimulatedStreams
from penstock.runtime.streams import DONE, DOWNLOAD, UPDATE, UPLOAD, Streams
from penstock.tiers import staging
from tests.lib.engines import prepare_on
from tests.lib.streams import separate

STEPS = WARM_UP_STEPS + MEASURED_STEPS


def tiles(count: int, beside: Tier = Tier.CPU) -> list[TileUpdate]:
    run = UpdateRun(0, 1000, step_scalars=None)  # type: ignore[arg-type]
    divisible = beside is Tier.CPU
    return [TileUpdate(None, n, beside, [run], 1.0, DONE, divisible=divisible) for n in range(count)]  # type: ignore[arg-type]


def one(_: TileUpdate) -> int:
    return 1


def divided(share: float, count: int) -> str:
    mixed = tiles(count)
    UpdateSharing(share, separate(), one).divide(mixed)
    return "".join("d" if tile.streamed else "h" for tile in mixed)


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.0, "hhhhhhhh"), (0.25, "hhhdhhhd"), (0.5, "hdhdhdhd"), (0.75, "hdddhddd"), (1.0, "dddddddd")],
)
def test_the_sides_are_mixed_evenly(share: float, expected: str) -> None:
    assert divided(share, 8) == expected


def test_tiles_of_the_device_itself_are_not_streamed() -> None:
    own = tiles(4, Tier.DEVICE)
    UpdateSharing(1.0, separate(), one).divide(own)
    assert not any(tile.streamed for tile in own)


def run(mixed: list[TileUpdate], host_seconds: float, device_seconds: float) -> None:
    """What the sides do, by a clock that waits for nobody."""
    began = time.monotonic()
    took = {False: host_seconds, True: device_seconds}
    ends = {side: began + seconds * sum(t.streamed is side for t in mixed) for side, seconds in took.items()}
    for side in sorted(ends, key=lambda side: ends[side]):
        time.sleep(max(0.0, ends[side] - time.monotonic()))
        for tile in mixed:
            if tile.streamed is side and tile.then is not None:
                tile.then()


def test_the_measured_share_lets_both_sides_end_together() -> None:
    sharing = UpdateSharing("auto", separate(), one)
    for _ in range(STEPS + 1):
        mixed = tiles(40)
        sharing.divide(mixed)
        run(mixed, host_seconds=0.002, device_seconds=0.001)
    assert sharing.share == pytest.approx(2 / 3, abs=0.1)
    kept = sharing.share
    for _ in range(2):
        mixed = tiles(40)
        sharing.divide(mixed)
        assert all(tile.then is None for tile in mixed), "it is not measured any more"
    assert sharing.share == kept


def test_a_side_without_tiles_tells_nothing() -> None:
    sharing = UpdateSharing("auto", separate(), one)
    before = sharing.share
    for _ in range(STEPS):
        mixed = tiles(1)
        sharing.divide(mixed)
        run(mixed, 0.001, 0.001)
    assert sharing.share == before


@pytest.mark.parametrize("share", [-0.1, 1.5, "half", None, True, float("nan")])
def test_other_shares_are_refused(share: object) -> None:
    with pytest.raises(ConfigError, match=r"streamed_updates=.*number from 0 to 1"):
        penstock.Options(streamed_updates=share)  # type: ignore[arg-type]


# With an engine around it.

BLOCKS, WIDTH = 8, 64
NUMEL = WIDTH * WIDTH
BLOCK_BYTES = {UPDATE: 26 * NUMEL, UPLOAD: 14 * NUMEL, DOWNLOAD: 12 * NUMEL}  # of an update on either side


def prepared(
    streams: Streams,
    share: object,
    optimizer_tier: str = "cpu",
    disk: Path | None = None,
    other_tier: str = "cpu",
    **rest: int,
) -> tuple[nn.Module, penstock.Optimizer]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)))
    stock = torch.optim.AdamW(model.parameters(), lr=1e-3)
    placement = penstock.Placement(grads=other_tier, params=other_tier, optimizer=optimizer_tier, nvme_path=disk)  # type: ignore[arg-type]
    options = penstock.Options(streamed_updates=share, **rest)  # type: ignore[arg-type]
    return model, prepare_on(streams, model, stock, placement=placement, overlap="none", options=options)


def step_seconds(model: nn.Module, optimizer: penstock.Optimizer) -> float:
    optimizer.backward(model(torch.ones(1, WIDTH)).float().square().sum())
    start = time.perf_counter()
    optimizer.step()
    seconds = time.perf_counter() - start
    optimizer.zero_grad()
    return seconds


def stated(seconds: dict[str, float]) -> SimulatedStreams:
    """Streams that take so long for what they move of a block."""
    return SimulatedStreams(lambda stream, n: n / BLOCK_BYTES[stream] * seconds[stream] if stream in seconds else 0.0)


def fastest(make: Callable[[], SimulatedStreams], share: object, tier: str = "cpu", disk: Path | None = None) -> float:
    model, optimizer = prepared(make(), share, tier, disk)
    times = [step_seconds(model, optimizer) for _ in range(STEPS + 3)]
    optimizer.close()
    return min(times[-3:])


def test_a_slow_host_is_relieved() -> None:
    """The host takes 20 ms for a block, the device 5 ms each way: it is done in a quarter of the time, or better."""

    def make() -> SimulatedStreams:
        return stated({UPDATE: 0.020, UPLOAD: 0.005, DOWNLOAD: 0.005})

    for _ in range(5):
        host, shared = fastest(make, 0.0), fastest(make, "auto")
        if shared < 0.6 * host:
            return
    pytest.fail(f"{shared:.3f} s, {host:.3f} s by the host alone")


def test_a_fast_host_keeps_its_tiles() -> None:
    streams = stated({UPDATE: 0.002, UPLOAD: 0.020, DOWNLOAD: 0.020})
    model, optimizer = prepared(streams, "auto")
    for _ in range(STEPS + 1):
        step_seconds(model, optimizer)
    sharing = optimizer._engine.stepper._sharing
    optimizer.close()
    assert sharing is not None
    assert sharing.share < 0.25


def test_three_tiles_of_device_memory_are_taken(tmp_path: Path) -> None:
    for tier, slots in (("cpu", 3), ("nvme", 0)):
        _, optimizer = prepared(separate(), 0.5, tier, tmp_path)
        near = optimizer.locations().bytes(kind=STAGING, tier="device")
        optimizer.close()
        tile = NUMEL * (2 + 2 + 2 + 8)  # gradient, parameter, remainder, moments
        assert near == slots * tile if slots else near >= 4 * tile


def test_nothing_is_taken_where_the_device_is_a_cpu() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    stock = torch.optim.AdamW(model.parameters())
    options = penstock.Options(streamed_updates="auto")
    optimizer = penstock.prepare(model, stock, placement=penstock.Placement(optimizer="cpu"), options=options)
    assert optimizer.locations().bytes(kind=STAGING) == 0
    optimizer.close()


# Tiles that the device takes at once.


def stretched(share: float, count: int, at_once: int, beside: Tier = Tier.CPU) -> str:
    divided = UpdateSharing(share, separate(), lambda _: at_once).divide(tiles(count, beside))
    assert [tile.number for tile in divided] == [sum(t.count for t in divided[:k]) for k in range(len(divided))]
    return "".join(f"D{tile.count}" if tile.streamed else "h" * tile.count for tile in divided)


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.0, "h" * 16), (0.25, "hhhhhhhhhhhhD4"), (0.5, "hhhhD4hhhhD4"), (0.75, "hhhhD4D4D4"), (1.0, "D4D4D4D4")],
)
def test_stretches_are_mixed_evenly_and_are_one_update_of_the_device(share: float, expected: str) -> None:
    assert stretched(share, 16, 4) == expected


def test_a_stretch_ends_where_the_device_takes_no_more_and_a_rest_is_shorter() -> None:
    assert stretched(1.0, 10, 4) == "D4D4D2"
    assert stretched(0.5, 8, 1) == "hD1hD1hD1hD1"
    assert stretched(1.0, 8, 4, Tier.DEVICE) == "h" * 8, "the device's own"


def test_a_stretch_of_neighbours_has_their_runs_joined_where_they_meet() -> None:
    (whole,) = UpdateSharing(1.0, separate(), lambda _: 3).divide(
        [
            TileUpdate(None, n, Tier.CPU, [UpdateRun(100 * n, 100 * n + 100, step_scalars)], 1.0, DONE, divisible=True)  # type: ignore[arg-type]
            for n, step_scalars in enumerate("aab")
        ]
    )
    assert [(run.start, run.stop, run.step_scalars) for run in whole.runs] == [(0, 200, "a"), (200, 300, "b")]


@pytest.mark.parametrize(("ring_bytes", "tiles_at_once"), [(1 << 30, 4), (2 * 2 * 2 * 2048, 2), (0, 1)])
def test_the_ring_beside_the_host_holds_stretches_too(
    ring_bytes: int, tiles_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that rest on the device come down to an update on the host a stretch at a time."""
    monkeypatch.setattr(staging, "LEAST_STRETCHES", 4)
    monkeypatch.setattr(staging, "STRETCH_RING_BYTES", ring_bytes)
    model, optimizer = prepared(separate(), 0.0, other_tier="device", tile_bytes=4096)
    assert optimizer.locations().bytes(kind=STAGING, tier="cpu") == 2 * tiles_at_once * 2 * 2048
    assert optimizer.locations().bytes(kind=STAGING, tier="device") == 0
    step_seconds(model, optimizer)
    optimizer.close()


@pytest.mark.parametrize(("ring_bytes", "tiles_at_once"), [(1 << 30, 4), (3 * 2 * 14 * 2048, 2), (0, 1)])
def test_the_ring_holds_stretches_as_far_as_its_memory_goes(
    ring_bytes: int, tiles_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 16 tiles a quarter at once, where no more than four stretches are asked for. What the plan says is taken."""
    monkeypatch.setattr(staging, "LEAST_STRETCHES", 4)
    monkeypatch.setattr(staging, "STRETCH_RING_BYTES", ring_bytes)
    model, optimizer = prepared(separate(), 1.0, tile_bytes=4096)
    tile = 2048 * (2 + 2 + 2 + 8)
    assert optimizer.locations().bytes(kind=STAGING, tier="device") == 3 * tiles_at_once * tile
    step_seconds(model, optimizer)
    optimizer.close()
