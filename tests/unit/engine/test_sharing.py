"""The tiles that the host and the device share, and at which share both are done at once."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.config import STAGING, Tier
from penstock.engine.step import update
from penstock.engine.step.update import MEASURED_STEPS, WARM_UP_STEPS, TileUpdate, UpdateRun, UpdateSharing
from penstock.errors import ConfigError
from penstock.rules import UpdateSlice
from penstock.runtime.hardware import Clock
from penstock.runtime.streams import DEVICE_UPDATE, DONE, UPDATE, Event, Work
from penstock.tiers import staging, transfer
from tests.lib.engines import prepared, train
from tests.lib.models import stack
from tests.lib.streams import SeparateStreams, inline, separate

STEPS = WARM_UP_STEPS + MEASURED_STEPS


def tiles(count: int, beside: Tier = Tier.CPU) -> list[TileUpdate]:
    run = UpdateRun(0, 1000, step_scalars=None)  # type: ignore[arg-type]
    divisible = beside is Tier.CPU
    return [TileUpdate(None, n, beside, [run], 1.0, DONE, divisible=divisible) for n in range(count)]  # type: ignore[arg-type]


class Side(Clock):
    """The clock of one side, which goes on where that works."""

    now = 0.0

    def mark(self) -> float:
        return self.now


@dataclass
class Sides:
    """The seconds that a side takes for a tile, and its clock: of the host, and of the device."""

    host_seconds: float
    device_seconds: float
    host: Side = field(default_factory=Side)
    device: Side = field(default_factory=Side)

    def begin(self, patch: pytest.MonkeyPatch) -> None:
        """Begin a step: on both sides at once."""
        self.host.now = self.device.now = max(self.host.now, self.device.now)
        patch.setattr(update, "Clock", lambda: self.host)

    def take(self, *, streamed: bool) -> None:
        """Take the time of a tile."""
        if streamed:
            self.device.now += self.device_seconds
        else:
            self.host.now += self.host_seconds


class TimedStreams(SeparateStreams):
    """Nothing is asynchronous; updates take the time of their side."""

    def __init__(self, sides: Sides) -> None:
        super().__init__(torch.device("cpu"))
        self.sides = sides

    def device_clock(self) -> Clock:
        return self.sides.device

    def submit(self, stream: str, work: Work, **rest: Any) -> Event:
        def timed() -> Any:
            self.sides.take(streamed=stream == DEVICE_UPDATE)
            return work()

        return super().submit(stream, timed if stream in (UPDATE, DEVICE_UPDATE) else work, **rest)


@pytest.mark.parametrize("share", [-0.1, 1.5, "half", None, True, float("nan")])
def test_other_shares_are_refused(share: object) -> None:
    with pytest.raises(ConfigError, match=r"streamed_updates=.*number from 0 to 1"):
        penstock.Options(streamed_updates=share)  # type: ignore[arg-type]


# With an engine around it.

BLOCKS, WIDTH = 8, 64
NUMEL = WIDTH * WIDTH


def sharing_engine(streams: Any, share: object, **how: Any) -> tuple[Any, penstock.Optimizer]:
    """Of tiles of a block each, unless it is told otherwise."""
    where = {"params": "cpu", "grads": "cpu", "optimizer": "cpu", "tile_bytes": 4 << 20, **how}
    model = stack(layers=BLOCKS, width=WIDTH, bias=False)
    return prepared(model, streams, precision="bf16", overlap="none", streamed_updates=share, **where)


@pytest.mark.parametrize(
    ("host_seconds", "device_seconds", "share"),
    [(4.0, 1.0, 4 / 5), (1.0, 10.0, 1 / 11)],
    ids=["slow host", "fast host"],
)
def test_a_slow_host_is_relieved_and_a_fast_one_keeps_its_tiles(
    host_seconds: float, device_seconds: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where every other step goes through the tiles backwards."""
    sides = Sides(host_seconds, device_seconds)
    model, optimizer = sharing_engine(TimedStreams(sides), "auto")
    for step in range(STEPS + 1):
        sides.begin(monkeypatch)
        before = sides.host.now, sides.device.now
        train(model, optimizer, first=step)
    took = [(now - then) for now, then in zip((sides.host.now, sides.device.now), before, strict=True)]
    sharing = optimizer._engine.stepper._sharing
    optimizer.close()
    assert sharing is not None
    assert sharing.share == pytest.approx(share)
    streamed = int(share * BLOCKS)
    assert took == [(BLOCKS - streamed) * host_seconds, streamed * device_seconds]


def test_three_tiles_of_device_memory_are_taken() -> None:
    for tier, slots in (("cpu", 3), ("nvme", 0)):
        _, optimizer = sharing_engine(separate, 0.5, optimizer=tier)
        near = optimizer.locations().bytes(kind=STAGING, tier="device")
        optimizer.close()
        tile = NUMEL * (2 + 2 + 2 + 8)  # gradient, parameter, remainder, moments
        assert near == slots * tile if slots else near >= 4 * tile


def test_nothing_is_taken_where_the_device_is_a_cpu() -> None:
    _, optimizer = prepared(stack, inline, precision="bf16", optimizer="cpu", streamed_updates="auto")
    assert optimizer.locations().bytes(kind=STAGING) == 0


# Tiles that the device takes at once.


def stretched(share: float, count: int, at_once: int, beside: Tier = Tier.CPU) -> str:
    divided = UpdateSharing(share, separate(), lambda _: at_once).divide(tiles(count, beside))
    assert [tile.number for tile in divided] == [sum(t.count for t in divided[:k]) for k in range(len(divided))]
    return "".join(f"D{tile.count}" if tile.streamed else "h" * tile.count for tile in divided)


@pytest.mark.parametrize(
    ("share", "tiles", "expected"),
    [
        (0.0, "hhhhhhhh", "h" * 16),
        (0.25, "hhhDhhhD", "hhhhhhhhhhhhD4"),
        (0.5, "hDhDhDhD", "hhhhD4hhhhD4"),
        (0.75, "hDDDhDDD", "hhhhD4D4D4"),
        (1.0, "DDDDDDDD", "D4D4D4D4"),
    ],
)
def test_the_sides_are_mixed_evenly_and_stretches_are_one_update_of_the_device(
    share: float, tiles: str, expected: str
) -> None:
    assert stretched(share, 8, 1) == tiles.replace("D", "D1")
    assert stretched(share, 16, 4) == expected


def test_a_stretch_ends_where_the_device_takes_no_more_and_a_rest_is_shorter() -> None:
    assert stretched(1.0, 10, 4) == "D4D4D2"
    assert stretched(1.0, 8, 4, Tier.DEVICE) == "h" * 8, "the device's own"


TILE = 2048  # elements
#: A ring beside the host for gradients in two slots, and one on the device for all of an update in three.
RINGS = {"cpu": (0.0, "device", 2 * TILE * 2), "device": (1.0, "cpu", 3 * TILE * (2 + 2 + 2 + 8))}


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("at_once", [4, 2, 1])
def test_rings_hold_stretches_as_far_as_their_memory_goes(
    ring: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 16 tiles a quarter at once, where no more than four stretches are asked for. What the plan says is taken.

    Gradients that rest on the device come down to an update on the host a stretch at a time.
    """
    share, other_tier, nbytes = RINGS[ring]
    monkeypatch.setattr(staging, "LEAST_STRETCHES", 4)
    monkeypatch.setattr(staging, "STRETCH_RING_BYTES", {4: 1 << 30, 2: 2 * nbytes, 1: 0}[at_once])
    model, optimizer = sharing_engine(separate, share, params=other_tier, grads=other_tier, tile_bytes=4096)
    report = optimizer.locations()
    assert report.bytes(kind=STAGING, tier=ring) == at_once * nbytes
    if ring == "cpu":
        assert report.bytes(kind=STAGING, tier="device") == 0
    train(model, optimizer)


# Updates in stretches of tiles, where compute reaches them

SIDE, LAYERS = 64, 3
TILE_BYTES = 4096  # a weight of 16 KiB in fp32 is 4 tiles


def stretched_engine(streams: Any = separate, groups: int = 1, **how: Any) -> tuple[nn.Sequential, penstock.Optimizer]:
    def in_groups(parameters: Sequence[nn.Parameter]) -> torch.optim.AdamW:
        return torch.optim.AdamW([{"params": parameters[k::groups], "lr": 1e-2 / (k + 1)} for k in range(groups)])

    model = stack(layers=LAYERS, width=SIDE)
    return prepared(model, streams, stock=in_groups, tile_bytes=TILE_BYTES, **{"overlap": "none", **how})


class Calls:
    """The calls of the rule: of each the elements of its segments."""

    def __init__(self, patch: pytest.MonkeyPatch, optimizer: penstock.Optimizer) -> None:
        self.numels: list[list[int]] = []
        rule = optimizer._engine.context.rule
        update_many = rule.update_many

        def note(update_slices: Any, *rest: Any) -> None:
            found: Sequence[tuple[UpdateSlice, Any]] = list(update_slices)
            self.numels.append([update_slice.param.numel() for update_slice, _ in found])
            update_many(found, *rest)

        patch.setattr(type(rule), "update_many", lambda _, *given: note(*given))


def stepped(model: nn.Module, optimizer: penstock.Optimizer, used: int = LAYERS) -> None:
    x = torch.ones(2, SIDE)
    for block in list(model)[:used]:  # type: ignore[call-overload]
        x = block(x)
    optimizer.backward(x.square().mean())
    optimizer.step()
    optimizer.zero_grad()


def calls_across_a_cut(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[list[int], list[list[int]]]:
    """Of a stepped: the segments of the call for all that is on the device, and those of the host's calls."""
    half = {"device": 0.5, "cpu": 0.5}
    model, optimizer = stretched_engine(optimizer=half, grads=half, **options)
    calls = Calls(monkeypatch, optimizer)
    stepped(model, optimizer)
    units = len(optimizer._engine.context.units)
    optimizer.close()
    on_device = max(calls.numels, key=sum)  # half of the model, and no unit is more
    on_host = [numels for numels in calls.numels if numels is not on_device]
    tile = TILE_BYTES // 4
    assert sum(on_device) == pytest.approx(sum(map(sum, on_host)), abs=2 * tile)
    assert len(on_device) <= units
    return on_device, on_host


def test_beyond_a_cut_the_host_updates_what_it_has_of_a_unit_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    _, on_host = calls_across_a_cut(monkeypatch)
    assert len(on_host) <= LAYERS
    assert all(len(numels) == 1 for numels in on_host)


def test_a_call_of_the_host_has_no_more_elements_than_a_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = TILE_BYTES // 4
    monkeypatch.setattr(transfer, "STRETCH_NUMEL", 2 * tile)
    _, on_host = calls_across_a_cut(monkeypatch)
    assert max(map(sum, on_host)) == 2 * tile
