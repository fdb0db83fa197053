"""Checkpoints that earlier code has written, with the values that they hold beside them: each loads bit for bit."""

import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import penstock
from penstock.checkpoint.reader import Checkpoint
from tests.lib.ranks import run_ranks

PACKED = Path(__file__).parents[2] / "data" / "checkpoints"


def unpack(name: str, folder: Path) -> dict[str, Tensor]:
    """Unpack a checkpoint and its values, which are returned."""
    with tarfile.open(PACKED / f"{name}.tar.xz") as file:
        file.extractall(folder, filter="data")
    return load_file(folder / "values.safetensors")


class Small(nn.Module):
    """Model of the second checkpoint: a frozen unit, a parameter of several tiles, a buffer that differs by rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 300)
        self.frozen = nn.Linear(300, 16).requires_grad_(False)
        self.last = nn.Linear(16, 3)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.mean(0)[:2]
        return self.last(torch.tanh(self.frozen(torch.tanh(self.first(x)))))


def prepared(stage: int = 3) -> tuple[Small, penstock.Optimizer, penstock.EMA]:
    """Prepare the model as it was for the save."""
    model = Small()
    groups = [{"params": model.first.parameters(), "lr": 1e-2}, {"params": model.last.parameters(), "lr": 3e-3}]
    optimizer = penstock.prepare(
        model,
        torch.optim.AdamW(groups, betas=(0.8, 0.9)),
        stage=stage,
        precision="bf16",
        master="fp32",
        units=(nn.Linear,),
        options=penstock.Options(tile_bytes=4096),
    )
    return model, optimizer, penstock.EMA(optimizer, 0.75)


def values_of(model: Small, optimizer: penstock.Optimizer, ema: penstock.EMA) -> dict[str, Tensor]:
    """Read everything that a checkpoint keeps by parameter."""
    values = {name: optimizer.full_param(parameter) for name, parameter in model.named_parameters()}
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    for name, parameter in trained:
        for kind in ("exp_avg", "exp_avg_sq", "step"):
            values[f"{name} {kind}"] = optimizer.full_state(parameter, kind)
    with ema.applied():
        values |= {f"{name} ema": optimizer.full_param(parameter) for name, parameter in trained}
    return values


def loaded(rank: int, folder: str, stage: int) -> dict[str, Tensor]:
    """Load the checkpoint on one rank, and read what it has given."""
    torch.manual_seed(99)
    model, optimizer, ema = prepared(stage)
    extra = optimizer.load(folder)
    assert torch.equal(extra.pop("seen"), torch.arange(4))
    assert extra == {"step": 3, "shape": (1, 2), "raw": b"\x00\xff"}
    assert [(group["lr"], group["betas"]) for group in optimizer.param_groups] == [
        (2e-3, (0.8, 0.9)),
        (3e-3, (0.8, 0.9)),
    ]
    found = {f"drawn {rank}": torch.rand(4), f"seen {rank}": model.seen.clone()}
    found |= values_of(model, optimizer, ema)
    optimizer.close()
    return found


def test_one_of_before_regions_is_loaded_and_exported_bit_for_bit(tmp_path):
    expected = unpack("two-ranks-bf16", tmp_path)
    slots = [slot for table in Checkpoint.open(tmp_path).tables for unit in table.units for slot in unit.slots]
    assert slots
    assert all(slot.region is None for slot in slots)
    penstock.export(tmp_path / "step-2", tmp_path / "out", dtype="fp32")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    model = nn.Linear(7, 5)
    optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters()))
    assert optimizer.load(tmp_path / "step-2") == {"step": 2}
    for name, parameter in model.named_parameters():
        assert torch.equal(exported[name], expected[name]), name
        assert torch.equal(optimizer.full_param(parameter), expected[name]), name
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.full_state(parameter, kind), expected[f"{name} {kind}"]), name
    optimizer.close()


@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 0)])
def test_one_of_two_ranks_with_an_average_and_a_frozen_unit_is_loaded_bit_for_bit(tmp_path, world_size, stage):
    expected = unpack("two-ranks-fp32-master", tmp_path)
    if world_size == 1:
        ranks = [loaded(0, str(tmp_path / "step-3"), stage)]
    else:
        ranks = run_ranks(loaded, world_size, str(tmp_path / "step-3"), stage)
    for found in ranks:
        assert len(found) == len([name for name in expected if not name.startswith(("drawn", "seen"))]) + 2
        for name, value in found.items():
            assert torch.equal(value, expected[name]), name
