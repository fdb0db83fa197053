"""The table of docs/placement.md says what `footprint` counts."""

import re
from pathlib import Path

import pytest
import torch

import penstock
from penstock.footprint import footprint
from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs" / "placement.md").read_text()
ROWS = re.findall(r"^\| (.*?) \| (\d+) \| (\d+) \| (\d+) \| .* \|$", PAGE, re.MULTILINE)
#: Rings that tiles of files pass: in a model this small they are a part of it.
RINGS = 0.6


@pytest.mark.parametrize(("storages", "device", "host", "disk"), ROWS)
def test_bytes_per_parameter(storages: str, device: str, host: str, disk: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(64)])
    named = dict(re.findall(r'(\w+)="(\w+)"', storages))
    placement = penstock.Placement(**named, nvme_path=tmp_path if "nvme" in named.values() else None)
    optimizer = torch.optim.AdamW(model.parameters())
    found = footprint(model, optimizer, weights="init", placement=placement, world_size=1)
    count = sum(parameter.numel() for parameter in model.parameters())
    tiers = {tier: found.at_rest.bytes(tier=tier) / count for tier in ("device", "cpu", "nvme")}
    assert tiers["device"] == pytest.approx(int(device), abs=0.01)
    assert tiers["nvme"] == pytest.approx(int(disk), abs=0.01)
    assert 0 <= tiers["cpu"] - int(host) <= (RINGS if int(disk) else 0.01)


def test_the_table_has_a_row_for_each_step_away_from_the_device() -> None:
    assert len(ROWS) == 6
    assert all(sum(map(int, row[1:])) == 14 for row in ROWS)
