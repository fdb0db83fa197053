"""What operations cost: FLOPs as torch counts them, bytes of what is touched."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from penstock.planner.simulation.fake_operations import FakeOperations
from penstock.planner.simulation.fake_tensor import fake_tensor
from penstock.planner.simulation.model_copy import copy_model
from penstock.planner.simulation.operation_cost import _FORMULAS, aten
from penstock.planner.simulation.program import Op

F32 = 4


def ops_of(work, *tensors: torch.Tensor) -> list[Op]:
    seen: list[Op] = []
    with FakeOperations(seen.append):
        work(*tensors)
    return seen


def h(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return fake_tensor(shape, dtype)


def test_a_product_says_all_of_itself() -> None:
    (op,) = ops_of(lambda x, w: x @ w.t(), h(8, 4, dtype=torch.bfloat16), h(6, 4, dtype=torch.bfloat16))
    assert op == Op(
        "aten.mm.default",
        flops=2 * 8 * 4 * 6,
        nbytes=2 * (8 * 4 + 4 * 6 + 8 * 6),
        dtype="bfloat16",
        shapes="8x4 bfloat16, 4x6 bfloat16 strided 1x4",
    )


BYTES = {
    "read and written": (lambda x: x + 1, 2 * 64),
    "in place is both": (lambda x: x.mul_(2), 2 * 64),
    "filled is not read": (lambda x: x.fill_(2), 64),
    "copied into is not read": (lambda x: x.copy_(x.t()), 2 * 64),
    "expanded is read once": (lambda x: x[:1].expand(8, 8) + x, 8 + 2 * 64),
    "a scalar": (lambda x: x.sum(), 64 + 1),
    "added at an index": (lambda x: x.index_add_(0, torch.tensor([1]), x[:1].clone()), 16 + 2 + 8 + 16),
    "made": (lambda x: torch.zeros(1 << 20, 2).shape, 1 << 21),
}


@pytest.mark.parametrize(("work", "numbers"), BYTES.values(), ids=BYTES)
def test_bytes_are_those_that_are_touched(work, numbers: int) -> None:
    ops = [op for op in ops_of(work, h(8, 8)) if "lift" not in op.name]
    assert sum(op.nbytes for op in ops) == numbers * F32, ops


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.up = nn.Conv2d(3, 8, 3, groups=1), nn.ConvTranspose2d(8, 2, 2, stride=2)
        self.last = nn.Linear(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.up(self.one(x)).flatten(2).transpose(1, 2)) @ torch.ones(2, 4, 3)


def test_flops_are_those_of_torchs_counter() -> None:
    x = torch.ones(2, 3, 8, 8, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        Convolved()(x).sum().backward()
    model = Convolved()
    model = copy_model(model)
    assert sum(op.flops for op in ops_of(lambda: model(x).sum().backward())) == counter.get_total_flops() > 0


def test_attention_with_grouped_queries_costs_what_its_heads_of_queries_cost() -> None:
    query, key, value = h(2, 8, 16, 64), h(2, 2, 12, 64), h(2, 2, 12, 32)
    packet, scores = aten._scaled_dot_product_flash_attention_for_cpu, 2 * 8 * 16 * 12
    assert _FORMULAS[packet](query, key, value, out_val=None) == 2 * scores * (64 + 32)
    backward = _FORMULAS[aten._scaled_dot_product_flash_attention_for_cpu_backward]
    assert backward(h(2, 8, 16, 32), query, key, value, out_val=None) == 2 * scores * (3 * 64 + 2 * 32)


def test_groups_of_rows_cost_what_all_rows_cost() -> None:
    rows, weights = h(24, 16).requires_grad_(), h(3, 16, 8).requires_grad_()
    ends = torch.tensor([8, 12, 24], dtype=torch.int32)
    ops = ops_of(lambda: nn.functional.grouped_mm(rows, weights, offs=ends).sum().backward())
    assert [op.flops for op in ops if "grouped_mm" in op.name] == [2 * 24 * 16 * 8] * 3


def test_equal_operations_are_one_kind_and_have_one_example() -> None:
    seen: list[Op] = []
    x = h(4, 4)
    with FakeOperations(seen.append) as mode:
        for _ in range(3):
            x @ x
        x @ x.t()
    assert len(seen) == 4
    assert len(set(seen)) == 2
    assert set(mode.recipes) == set(seen)
