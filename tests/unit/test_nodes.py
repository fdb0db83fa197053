"""What nodes take, told before anything is taken."""

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import ConfigError
from penstock.footprint import Footprint, footprint
from penstock.memory_budget import GATHERED
from penstock.rules.wire import WireFormat


def counted(**options: object) -> Footprint:
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    stock = torch.optim.AdamW(model.parameters())
    return footprint(
        model, stock, world_size=4, units=(nn.Linear,), precision="bf16", options=penstock.Options(**options)
    )


NUMEL = 256 * 256


def test_parts_that_are_kept_are_counted() -> None:
    plain, kept = counted(), counted(secondary_shard=2)
    assert kept.at_rest.bytes(kind="secondary", tier="device") == 4 * NUMEL * 2 // 2
    assert kept.device.nbytes - plain.device.nbytes == 4 * NUMEL * 2 // 2
    assert kept.device.parts[GATHERED] == plain.device.parts[GATHERED]
    assert kept.checkpoint_bytes == plain.checkpoint_bytes
    with pytest.raises(ConfigError, match="4 shard ranks are no whole nodes of 3"):
        counted(secondary_shard=3)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_what_sums_pass_is_counted(name: str) -> None:
    """Codes to send and to receive, and sums in fp32 of what a rank sums first; of one unit at a time."""
    codes = 2 * WireFormat(name).packed_bytes(NUMEL)  # type: ignore[arg-type]
    before = counted().device.nbytes
    assert counted(reduce_format=name).device.nbytes - before == codes + 4 * NUMEL // 4
    both = counted(reduce_format=name, secondary_shard=2).device.nbytes - counted(secondary_shard=2).device.nbytes
    assert both == codes + 4 * NUMEL // 2
