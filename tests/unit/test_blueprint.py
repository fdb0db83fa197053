"""The blueprint: what an engine will have on each tier, told before anything is taken."""

from pathlib import Path

import pytest
import torch
from torch import nn

import penstock
from penstock.blueprint import Blueprint, PrepareRequest, draw_blueprint
from penstock.config import Tier
from penstock.runtime.host_memory import Arena
from penstock.runtime.streams import Streams
from penstock.runtime.topology import Grid
from penstock.tiers.host import DeviceTier, HostTier
from penstock.tiers.nvme import NvmeTier
from penstock.tiers.tier import bytes_on
from tests.accounts import allocations
from tests.lib.engines import prepare_on
from tests.lib.streams import inline, separate

WIDTH = 64
EVERYWHERE = penstock.Placement(
    params="cpu", grads={"device": 0.5, "cpu": 0.5}, optimizer={"device": 0.25, "cpu": 0.5, "nvme": 0.25}
)


def net(device: str = "cpu") -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, device=device) for _ in range(4)))


def drawn(model: nn.Module, placement: penstock.Placement, streams: Streams) -> Blueprint:
    request = PrepareRequest(placement=placement, overlap="none", options=penstock.Options(tile_bytes=4 << 10))
    return draw_blueprint(model, torch.optim.AdamW(model.parameters()), request, Grid(), streams.reach)


@pytest.fixture
def nothing_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("a blueprint takes no memory")

    for tier in (DeviceTier, HostTier, NvmeTier):
        monkeypatch.setattr(tier, "reserve", forbidden)
    monkeypatch.setattr(Arena, "__init__", forbidden)


@pytest.mark.usefixtures("nothing_taken")
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_it_is_drawn_without_memory_and_without_values(device: str, tmp_path: Path) -> None:
    placement = penstock.Placement(**{**vars(EVERYWHERE), "nvme_path": tmp_path})
    blueprint = drawn(net(device), placement, separate())
    numel = 4 * WIDTH * (WIDTH + 1)
    assert all(bytes_on(blueprint.segments, tier) > 0 for tier in Tier)
    storages = ("param", "grad", "master", "optimizer")
    at_rest = sum(bytes_on([s for s in blueprint.segments if s.storage in storages], tier) for tier in Tier)
    assert 14 * numel <= at_rest < 1.5 * 14 * numel, "what a shard is padded to, and whole pages"
    assert blueprint.gathered_bytes >= 2 * numel
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("streams", [inline, separate])
def test_its_totals_are_those_of_what_is_built(streams: type[Streams], tmp_path: Path) -> None:
    placement = penstock.Placement(**{**vars(EVERYWHERE), "nvme_path": tmp_path})
    blueprint = drawn(net(), placement, streams())
    model = net()
    optimizer = prepare_on(
        streams(),
        model,
        torch.optim.AdamW(model.parameters()),
        placement=placement,
        options=penstock.Options(tile_bytes=4 << 10),
    )
    table = optimizer.locations()
    for tier in Tier:
        cells = [cell for segment in blueprint.segments for cell in segment.cells if segment.tier is tier]
        assert sum(cell.nbytes for cell in cells) == table.bytes(tier=tier.value)
        assert bytes_on(blueprint.segments, tier) >= table.bytes(tier=tier.value), "pages are whole"
    assert bytes_on(blueprint.segments, Tier.CPU) == sum(arena.capacity for arena in allocations(optimizer)), (
        "to the byte"
    )
    optimizer.close()
