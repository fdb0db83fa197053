"""A base that is read from a folder into any placement and sharding, in numbers and in codes: the same, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.integrations.lora import Lora, LoraWeights, add_adapters
from tests.lib.engines import assert_same_state
from tests.lib.ranks import run_ranks
from tests.models.contract import ON_CPU, ON_DEVICE
from tests.models.test_adapters import ALL_ON_NVME, MIXED, ON_NVME
from tests.models.transformers_rows import llama

pytest.importorskip("peft")

PLACEMENTS = {"device": ON_DEVICE, "cpu": ON_CPU, "nvme": ON_NVME, "all on nvme": ALL_ON_NVME, "mixed": MIXED}
IDS = torch.arange(16).reshape(4, 4)


def adapted(folder: Path, base: Any, **how: Any) -> tuple[nn.Module, penstock.Optimizer]:
    lora = Lora(r=2, alpha=4, dropout=0.1, base=base)
    with torch.device("meta"):
        empty = llama()
    model = add_adapters(empty, lora, seed=5)
    owned = [p for p in model.parameters() if p.requires_grad]
    optimizer = penstock.prepare(
        model, torch.optim.AdamW(owned, lr=1e-2), weights=LoraWeights(folder, model, seed=5), **how
    )
    assert not any(p.is_meta for p in model.parameters())
    return model, optimizer


def run(folder: Path, base: Any, *, rank: int = 0, **how: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of a few steps, and the parameters before and after them."""
    model, optimizer = adapted(folder, base, **how)
    values = {f"first {name}": optimizer.full_param(p) for name, p in model.named_parameters()}
    losses = []
    torch.manual_seed(rank)  # of dropout
    for _ in range(3):
        loss = model(input_ids=IDS, labels=IDS).loss
        losses.append(loss.item())
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    values |= {name: optimizer.full_param(p) for name, p in model.named_parameters()}
    optimizer.close()
    return losses, values


def assert_same(found: tuple[list[float], dict[str, Tensor]], expected: tuple[list[float], dict[str, Tensor]]) -> None:
    assert found[0] == expected[0]
    assert_same_state(found[1], expected[1])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    llama().save_pretrained(tmp_path / "base", max_shard_size="20KB")
    return tmp_path / "base"


@pytest.mark.parametrize(
    ("base", "precision", "stage"),
    [("auto", "bf16", 3), ("int8", "bf16", 2), ("auto", "fp32", 1)],
)
def test_streamed_from_any_tier(base: str, precision: str, stage: int, folder: Path) -> None:
    expected = run(folder, base, precision=precision, stage=0)
    for placement in list(PLACEMENTS.values())[stage - 1 :: 2]:
        assert_same(run(folder, base, precision=precision, stage=stage, placement=placement), expected)


def on_two_ranks(rank: int, folder: Path) -> dict[str, Tensor]:
    rows = [run(folder, "int8", rank=rank, precision="bf16", stage=stage, placement=PLACEMENTS[name])
            for stage, name in ((0, "cpu"), (2, "mixed"), (3, "all on nvme"))]  # fmt: skip
    for row in rows[1:]:
        assert_same(row, rows[0])
    return {name: value for name, value in rows[0][1].items() if name.startswith("first ")}


def test_two_ranks_begin_with_what_one_has(folder: Path) -> None:
    expected = run(folder, "int8", precision="bf16")[1]
    one, other = run_ranks(on_two_ranks, 2, folder)
    assert_same_state(one, other)
    assert_same_state(one, {name: expected[name] for name in one})
