"""Ranks that run different units: an error that names ranks and units, before anything is updated."""

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import penstock
from penstock.errors import EngineError
from tests.support import run_ranks

LAYERS = 4


class Walk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(LAYERS))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x


def walk(
    rank: int,
    orders: list[list[int]],
    make: Callable[[], nn.Module] = Walk,
    units: Sequence[type[nn.Module]] = (nn.Linear,),
) -> tuple[str, bool]:
    model = make()
    options = penstock.Options(timeout_s=6)
    stock = torch.optim.AdamW(model.parameters())
    optimizer = penstock.prepare(model, stock, units=units, precision="fp32", options=options)
    before = [p.clone() for p in make().parameters()]
    said = ""
    try:
        optimizer.backward(model(torch.ones(2, 32), orders[rank]).sum())
        optimizer.step()
    except EngineError as error:
        said = str(error)
    if "could not finish" in said:
        return said, True
    same = all(torch.equal(optimizer.full_param(p), b) for p, b in zip(model.parameters(), before, strict=True))
    return said, same


def test_units_of_equal_size_in_another_order_are_not_mixed_up() -> None:
    for said, unchanged in run_ranks(walk, 2, [[0, 1, 2, 3], [0, 2, 1, 3]]):
        assert "rank 0: the gather of unit 'layers.2'" in said or "rank 0: the gather of unit 'layers.1'" in said
        assert "out of step" in said
        assert unchanged


def test_a_layer_that_one_rank_skips_is_named() -> None:
    orders = [[0, 1, 2, 3], [0, 1, 3]]
    for rank, (said, _) in enumerate(run_ranks(walk, 2, orders)):
        assert re.search(rf"Rank {rank} could not finish the (gather|reduction) of unit 'layers\.", said)
        assert re.search(rf"rank {1 - rank} (could not finish|waits in) the", said)
        assert "Ranks wait for 6 s at most: Options(timeout_s=)." in said


class Routed(nn.Module):
    """Each rank sends all it has to one expert."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mixture = Mixture()

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        return self.mixture(x, order)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(LAYERS))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for index in order:
            x = torch.tanh(self.experts[index](x))
        return x


def test_the_module_that_chooses_an_expert_is_named() -> None:
    orders = [[0, 1], [1]]
    for rank, (said, _) in enumerate(run_ranks(walk, 2, orders, Routed, [nn.Linear])):
        assert re.search(rf"Rank {rank} could not finish the", said)
        assert "of unit 'mixture.experts." in said
        assert "' (run by Mixture)" in said
        assert "must lie inside a unit: units=(<class of the module that chooses>,)." in said


def test_which_expert_is_run_inside_a_unit_is_no_error() -> None:
    assert [said for said, _ in run_ranks(walk, 2, [[0], [1]], Routed, [Mixture])] == ["", ""]


def test_the_same_order_on_every_rank_is_no_error_whatever_it_is() -> None:
    orders = [[3, 1, 0], [3, 1, 0]]
    assert [said for said, _ in run_ranks(walk, 2, orders)] == ["", ""]
