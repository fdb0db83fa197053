"""A checkpoint that was written before parameters could be in parts: its tables have no regions, and it loads."""

import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import penstock
from penstock.checkpoint.reader import Checkpoint

PACKED = Path(__file__).parents[2] / "data" / "checkpoints" / "two-ranks-bf16.tar.xz"


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    with tarfile.open(PACKED) as file:
        file.extractall(tmp_path, filter="data")
    return tmp_path


def test_it_is_loaded_and_exported_bit_for_bit(unpacked: Path) -> None:
    expected = load_file(unpacked / "values.safetensors")
    slots = [slot for table in Checkpoint.open(unpacked).tables for unit in table.units for slot in unit.slots]
    assert slots
    assert all(slot.region is None for slot in slots)
    penstock.export(unpacked / "step-2", unpacked / "out", dtype="fp32")
    exported = load_file(unpacked / "out" / "model.safetensors")
    model = nn.Linear(7, 5)
    optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters()))
    assert optimizer.load(unpacked / "step-2") == {"step": 2}
    for name, parameter in model.named_parameters():
        assert torch.equal(exported[name], expected[name]), name
        assert torch.equal(optimizer.full_param(parameter), expected[name]), name
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.full_state(parameter, kind), expected[f"{name} {kind}"]), name
    optimizer.close()
