"""A value between two bf16 numbers becomes the same parameter on every way: ties go away from zero."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import penstock
from penstock.rules import split_master

MASTERS = ["remainder", "fp32", "none"]


def ties() -> Tensor:
    """Values in the middle of two bf16 numbers: both signs, even and odd below, subnormal, and the largest."""
    highs = torch.tensor([0x0000, 0x0001, 0x0002, 0x007F, 0x0080, 0x3BA2, 0x3BA3, 0x3F80, 0x3F81, 0x7F7E])
    bits = torch.cat([highs, highs | 0x8000]) << 16 | 0x8000
    around = torch.cat([bits - 1, bits, bits + 1])  # the neighbours go to the nearer number
    largest = torch.tensor([0x7F7F7FFF, 0xFF7F7FFF])
    return torch.cat([around, largest]).to(torch.int32).view(torch.float32)


def away_from_zero(value: Tensor) -> Tensor:
    """The rule by fp64: the nearer of the two neighbours, and of two that are as near the one further from zero."""
    bits = value.view(torch.int32) & -0x10000
    below = bits.view(torch.float32).double()
    above = (bits + 0x10000).view(torch.float32).double()  # further from zero, whatever the sign
    rounded = torch.where((above - value).abs() <= (value - below).abs(), above, below)
    return rounded.to(torch.bfloat16)


class Ties(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(ties())

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def prepared(master: str, **more: Any) -> tuple[nn.Module, Any]:
    model = Ties()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    placement = penstock.Placement(params="cpu", grads="cpu", optimizer="cpu")
    return model, penstock.prepare(model, optimizer, placement=placement, precision="bf16", master=master, **more)


def shown(model: nn.Module, optimizer: Any) -> Tensor:
    with optimizer.gathered():
        return model.get_parameter("weight").detach().clone()


def same(actual: Tensor, expected: Tensor) -> bool:
    return torch.equal(actual.view(torch.int16), expected.view(torch.int16))


def test_the_rule_is_not_that_of_torch() -> None:
    value, wanted = ties(), away_from_zero(ties())
    assert 0 < (wanted != value.bfloat16()).sum() <= 20
    assert same(split_master(value)[0], wanted)


@pytest.mark.parametrize("master", MASTERS)
def test_ties_are_the_same_parameter_on_every_way(master: str, tmp_path: Path) -> None:
    wanted = away_from_zero(ties())
    model, optimizer = prepared(master)
    assert same(shown(model, optimizer), wanted), "prepare"

    optimizer.set_full_param(model.get_parameter("weight"), torch.zeros_like(ties()))
    optimizer.set_full_param(model.get_parameter("weight"), ties())
    assert same(shown(model, optimizer), wanted), "set_full_param"

    optimizer.backward((model(torch.ones(1)) * 0).sum())
    optimizer.step()  # at a rate of 0
    assert same(shown(model, optimizer), wanted), "update"

    optimizer.save(tmp_path / "saved")
    penstock.export(tmp_path / "saved", tmp_path / "out", dtype="bf16")
    assert same(load_file(tmp_path / "out" / "model.safetensors")["weight"], wanted), "export"
    for other in MASTERS:
        again, second = prepared(other)
        second.set_full_param(again.get_parameter("weight"), torch.zeros_like(ties()))
        second.load(tmp_path / "saved")
        assert same(shown(again, second), wanted), f"load into {other}"
        second.close()


@pytest.mark.parametrize("master", MASTERS)
def test_an_average_is_shown_and_exported_by_the_same_rule(master: str, tmp_path: Path) -> None:
    model, optimizer = prepared(master)
    ema = penstock.EMA(optimizer)
    name = "weight"
    optimizer.save(tmp_path / "saved")
    with ema.applied():
        inside = shown(model, optimizer)
    penstock.export(tmp_path / "saved", tmp_path / "out", dtype="bf16", average=True)
    assert same(inside, away_from_zero(ties()))
    assert same(load_file(tmp_path / "out" / "model.safetensors")[name], inside)


def test_a_frozen_parameter_and_one_that_is_given_back() -> None:
    model = Ties().requires_grad_(False)
    optimizer: Any = penstock.prepare(model, None, precision="bf16", placement=penstock.Placement(params="cpu"))
    assert same(shown(model, optimizer), away_from_zero(ties()))
    optimizer.close()

    model = Ties().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = penstock.prepare(model, optimizer, precision="bf16", placement=penstock.Placement(params="cpu"))
    optimizer.set_full_param(model.get_parameter("weight"), ties())
    optimizer.close()
    assert same(model.get_parameter("weight").detach(), away_from_zero(ties())), "as compute read it before"
