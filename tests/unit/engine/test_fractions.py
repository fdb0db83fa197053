"""Fractions as bytes: each tier holds its share to within a tile, the first units in forward order on the fastest."""

import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.config import Tier
from penstock.engine.step.update import Updater
from penstock.runtime.simulated import SimulatedStreams
from penstock.runtime.streams import UPLOAD, Event, Work
from tests.lib.engines import prepared as prepare
from tests.lib.models import stack
from tests.lib.streams import SeparateStreams, is_released, separate

WIDTH, BLOCKS = 96, 4  # five tiles each
TILE_BYTES = 4096
SHARES = (0, 0.25, 0.8, 1)
BYTES = {"param": 2, "grad": 2, "master": 2, "exp_avg": 4, "exp_avg_sq": 4}  # per parameter, in bf16
KINDS = {"params": ["param"], "grads": ["grad"], "optimizer": ["master", "exp_avg", "exp_avg_sq"]}


def prepared(streams: Any, **how: Any) -> tuple[nn.Sequential, penstock.Optimizer]:
    return prepare(stack(layers=BLOCKS, width=WIDTH), streams, precision="bf16", tile_bytes=TILE_BYTES, **how)


def backward(model: nn.Module, optimizer: penstock.Optimizer) -> None:
    optimizer.backward(model(torch.ones(2, WIDTH)).float().square().sum())


def on_tiers(what: str, storage: dict[str, float]) -> list[dict[str, int]]:
    """For each kind, its bytes on each tier."""
    _, optimizer = prepared(separate(), **{what: storage})
    report = optimizer.locations()
    optimizer.close()
    return [
        {tier: sum(row.nbytes for row in report.rows if (row.kind, row.tier) == (kind, tier)) for tier in Tier}
        for kind in KINDS[what]
    ]


def sweep(first: str, second: str, third: str) -> list[dict[str, float]]:
    """Shares of the first tier from 0 to 1; the others have what is left, the third a third of that."""
    return [{first: share, second: (1 - share) * 2 / 3, third: (1 - share) / 3} for share in SHARES]


SWEEPS = [("device", "cpu", "nvme"), ("cpu", "nvme", "device")]


@pytest.mark.parametrize(("what", "tiers"), list(zip(KINDS, SWEEPS * 2, strict=False)))
def test_bytes_on_each_tier_are_the_fraction_to_within_a_tile(what: str, tiers: Sequence[str]) -> None:
    # Beside the remainder, where the update does not reach the parameters.
    param_staging = 2 if what == "optimizer" else 0
    tile_numel = TILE_BYTES // 2
    of_first = []
    for storage in sweep(*tiers):
        found = on_tiers(what, storage)
        for kind, nbytes in zip(KINDS[what], found, strict=True):
            per_parameter = BYTES[kind]
            if kind == "master":
                nbytes = {**nbytes, Tier.CPU: nbytes[Tier.CPU] * BYTES[kind] // (BYTES[kind] + param_staging)}
            total, tile = sum(nbytes.values()), tile_numel * per_parameter
            assert total == per_parameter * BLOCKS * (WIDTH * WIDTH + 256)
            for tier in Tier:
                assert abs(nbytes[tier] - storage.get(tier, 0.0) * total) <= tile, (kind, tier, storage)
        of_first.append(found[0][Tier(tiers[0])])
    assert of_first == sorted(of_first), "more is never less"
    assert all(a < b for a, b in pairwise(of_first)), "tiles are small enough to tell them apart"


@pytest.mark.parametrize("what", KINDS)
def test_the_first_units_in_forward_order_are_on_the_fastest_tier(what: str) -> None:
    _, optimizer = prepared(separate(), **{what: {"nvme": 0.2, "cpu": 0.3, "device": 0.5}})
    report = optimizer.locations()
    tiers = [
        [row.tier for row in report.rows if row.unit == str(number) and row.kind == KINDS[what][-1]]
        for number in range(BLOCKS)
    ]
    assert tiers == [["device"], ["device"], ["cpu"], ["cpu", "nvme"]]


class Counting(SeparateStreams):
    """Counts what is submitted, by stream."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.counts: dict[str, int] = {}

    def submit(self, stream: str, work: Work, **rest: Any) -> Event:
        self.counts[stream] = self.counts.get(stream, 0) + 1
        return super().submit(stream, work, **rest)


def uploads_of_a_forward(params: dict[str, float]) -> int:
    streams = Counting()
    model, optimizer = prepared(streams, params=params)
    streams.counts.clear()
    with torch.no_grad():
        model(torch.ones(1, WIDTH))
    optimizer.close()
    return streams.counts.get(UPLOAD, 0)


def test_units_that_are_wholly_on_the_device_stay_resident() -> None:
    """A unit on a cut is gathered from its sections, one copy each, and one beyond it from the one that it is."""
    assert uploads_of_a_forward({"device": 1.0}) == 0
    assert uploads_of_a_forward({"device": 0.5, "cpu": 0.5}) == 2
    assert uploads_of_a_forward({"device": 0.65, "cpu": 0.35}) == 2 + 1
    assert uploads_of_a_forward({"cpu": 1.0}) == BLOCKS


def test_a_unit_that_is_resident_beside_gathered_ones_shows_its_parameters() -> None:
    model, _ = prepared(separate(), params={"device": 0.5, "cpu": 0.5})
    shown = [not is_released(p) for p in model.parameters()]
    assert shown == [True] * 4 + [False] * 4


class Sides:
    """The device's updates and the host's: each goes on once the other has begun, or fails after a while."""

    def __init__(self) -> None:
        self.began = {side: threading.Event() for side in ("device", "host")}
        self.tiles = dict.fromkeys(self.began, 0)

    def meet(self, side: str, tiles: int = 1) -> None:
        self.tiles[side] += tiles
        self.began[side].set()
        (other,) = self.began.keys() - {side}
        assert self.began[other].wait(120), f"the {side}'s updates ran, and none of the {other}'s had begun"

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        apply, together = Updater._apply, Updater._update_in_place

        def watched(updater: Updater, tile: Any, *rest: Any) -> None:
            self.meet("device" if tile.beside is Tier.DEVICE else "host", tile.count)
            apply(updater, tile, *rest)

        def watched_together(updater: Updater, tiles: Any, what: Any) -> None:
            self.meet("device", sum(tile.count for tile in tiles))
            together(updater, tiles, what)

        patch.setattr(Updater, "_apply", watched)
        patch.setattr(Updater, "_update_in_place", watched_together)


HALF = {"device": 0.5, "cpu": 0.5}


@pytest.mark.parametrize(
    "storages",
    [
        pytest.param({"optimizer": HALF}, id="the optimizer"),
        pytest.param({"optimizer": HALF, "params": "cpu", "grads": "cpu"}, id="the optimizer, the rest on the cpu"),
        pytest.param({"params": HALF, "grads": HALF, "optimizer": HALF}, id="everything"),
    ],
)
@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_tiles_of_the_device_and_of_the_host_are_updated_at_the_same_time(
    storages: Any, overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = prepared(SimulatedStreams(lambda stream, nbytes: 0.0), overlap=overlap, **storages)
    backward(model, optimizer)
    sides = Sides()
    sides.watch(monkeypatch)
    optimizer.step()
    optimizer.synchronize()
    optimizer.close()
    assert sum(sides.tiles.values()) == 5 * BLOCKS
    assert min(sides.tiles.values()) >= 5 * BLOCKS // 2
