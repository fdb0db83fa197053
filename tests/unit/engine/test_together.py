"""First values that ranks have from each other: what is sent together, and what comes out of it."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from penstock.engine.unit.first_values import broadcast_alike, copies_of_first_rank, packs
from penstock.runtime.collectives import Collectives
from penstock.runtime.topology import Grid

MIB = 1 << 20


class FirstRank:
    """Keeps what goes over the wire; the values of the first rank are these, negated."""

    def __init__(self, tp: int = 1) -> None:
        self.grid = Grid(tp=tp)
        self.sent: list[int] = []

    def broadcast(self, tensor: Tensor) -> None:
        self.sent.append(tensor.nbytes)
        tensor.copy_(255 - tensor)

    def broadcast_alike(self, tensor: Tensor) -> None:
        self.broadcast(tensor)


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([], []),
        ([0], [1]),
        ([MIB, 1, MIB], [1, 1, 1]),
        ([3 * MIB, 1, 1, MIB - 2, 1], [1, 3, 1]),
        ([10] * 1000, [1000]),
    ],
)
def test_few_bytes_go_together_and_many_alone(sizes: list[int], groups: list[int]) -> None:
    found = list(packs(sizes))
    assert [len(group) for group in found] == groups
    assert [number for group in found for number in group] == list(range(len(sizes)))


def test_values_of_any_dtype_are_copied_in_order() -> None:
    values: list[Any] = [
        torch.arange(6, dtype=torch.float32),
        torch.tensor([3], dtype=torch.int64),
        torch.zeros(0),
        torch.arange(5, dtype=torch.bfloat16),
        torch.tensor([1, 0, 255], dtype=torch.uint8),
        torch.randn(MIB, dtype=torch.float16),
    ]
    before = [value.clone() for value in values]
    ranks = FirstRank()
    copies = copies_of_first_rank(values, cast(Collectives, ranks), torch.device("cpu"))
    assert ranks.sent == [32 + 16 + 16 + 16, 2 * MIB]  # what is large goes by itself; others begin at multiples of 16
    for copy, value, old in zip(copies, values, before, strict=True):
        assert torch.equal(copy.view(torch.uint8), 255 - old.view(torch.uint8))
        assert torch.equal(value, old)


def test_small_parameters_that_ranks_have_alike_travel_together_into_their_places() -> None:
    buffer = torch.zeros(2 * MIB + 4000, dtype=torch.uint8)
    places = [(0, 3), (8, 8), (16, 1016), (2000, 2000 + 2 * MIB), (2000 + 2 * MIB, 3000 + 2 * MIB)]
    tensors = [buffer[start:stop] for start, stop in places]
    alone, several = FirstRank(), FirstRank(tp=2)
    broadcast_alike(tensors, cast(Collectives, alone))
    assert alone.sent == []  # nobody has other parts
    broadcast_alike(tensors, cast(Collectives, several))
    assert several.sent == [1003, 2 * MIB, 1000]
    expected = torch.zeros_like(buffer)
    for start, stop in places:
        expected[start:stop] = 255
    assert torch.equal(buffer, expected)
