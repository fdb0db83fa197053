"""Ranks that run different units: an error that names ranks and units, before anything is updated."""

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.config import TierName
from penstock.errors import EngineError
from tests.lib.ranks import run_ranks

LAYERS = 4
PATIENCE_S = 10.0


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
    options = penstock.Options(timeout_s=PATIENCE_S)
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
    optimizer.close()
    return said, same


def in_other_orders(rank: int) -> None:
    """Units of equal size in another order are not mixed up; the same order is no error, whatever it is."""
    said, unchanged = walk(rank, [[0, 1, 2, 3], [0, 2, 1, 3]])
    assert re.search(r"rank 0: the (gather|reduction) of unit 'layers\.[12]'", said)
    assert "out of step" in said
    assert unchanged
    assert not walk(rank, [[3, 1, 0], [3, 1, 0]])[0]
    # Which expert is run inside a unit is no error.
    assert not walk(rank, [[0], [1]], Routed, [Walk])[0]


def test_units_in_another_order_are_named_and_nothing_is_updated() -> None:
    run_ranks(in_other_orders, 2)


class Routed(nn.Module):
    """Each rank sends all it has to one expert."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mixture = Walk()

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        return self.mixture(x, order)


def test_a_layer_that_one_rank_skips_and_the_module_that_chooses_are_named() -> None:
    orders = [[0, 1], [1]]
    for rank, (said, _) in enumerate(run_ranks(walk, 2, orders, Routed, [nn.Linear], fresh=True)):
        assert re.search(rf"Rank {rank} could not finish the (gather|reduction) of unit 'mixture.layers\.", said)
        assert f"rank {1 - rank} could not finish" in said
        assert "' (run by Walk)" in said
        assert "must lie inside a unit: units=(<class of the module that chooses>,)." in said
        assert f"Ranks wait for {PATIENCE_S:g} s at most: Options(timeout_s=)." in said


# A forward that one rank runs alone


class Gpt(nn.Module):
    """Units of several sizes: gloo aborts the process where a gather meets a larger one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(200, 32)
        self.h = nn.ModuleList(nn.Linear(32, 32) for _ in range(LAYERS))
        self.lm_head = nn.Linear(32, 200)

    def forward(self, x: Tensor) -> Tensor:
        x = self.wte(x)
        for block in self.h:
            x = x + torch.tanh(block(x))
        return self.lm_head(x)


TOKENS = torch.arange(8)[None]


def loss_of(model: nn.Module) -> Tensor:
    return model(TOKENS).square().mean()


@torch.no_grad()
def estimate_loss(model: nn.Module) -> None:
    """As nanoGPT does, of several batches."""
    model.eval()
    for _ in range(3):
        loss_of(model).item()
    model.train()


def evaluated_alone(rank: int, tier: TierName, where: str, folder: str, stage: Literal[2, 3] = 3) -> "Told":
    """Rank 0 alone evaluates, in nanoGPT's loop. What each rank is told, and the losses of the steps around it."""
    model = Gpt()
    placement = penstock.Placement(params=tier, grads=tier, optimizer=tier, nvme_path=folder)
    optimizer = penstock.prepare(
        model,
        torch.optim.AdamW(model.parameters()),
        stage=stage,
        units=(nn.Linear, nn.Embedding),
        precision="fp32",
        placement=placement,
        options=penstock.Options(timeout_s=PATIENCE_S if where == "recorded" else 60),
    )
    said, losses = [], []
    for iteration in range(3):
        try:
            with optimizer.gathered() if where == "gathered" else nullcontext():
                if rank == 0 and iteration == 1 and where in ("before", "gathered"):
                    estimate_loss(model)
            if rank == 0 and iteration == 1 and where == "recorded":
                loss_of(model)
            loss = loss_of(model)
            optimizer.backward(loss)
            if rank == 0 and iteration == 1 and where == "between":
                estimate_loss(model)
            optimizer.step()
            losses.append(loss.item())
        except EngineError as error:
            said.append(str(error))
            if where == "recorded":
                return said, losses
        optimizer.zero_grad()
    optimizer.close()
    return said, losses


EVALUATES = "Ranks are out of step: they have called different methods (rank 0: a forward without gradients; rank 1: "
Told = tuple[list[str], list[float]]


def every_evaluation(rank: int, folder: str) -> dict[str, Told]:
    runs: dict[str, tuple[TierName, str, Literal[2, 3]]] = {
        "cpu": ("cpu", "before", 3),
        "nvme": ("nvme", "before", 3),
        "before its step": ("cpu", "between", 3),
        "none": ("cpu", "nowhere", 3),
        "gathered": ("cpu", "gathered", 3),
        "stage 2, none": ("cpu", "nowhere", 2),
        "stage 2": ("cpu", "before", 2),
    }
    return {name: evaluated_alone(rank, tier, where, folder, stage) for name, (tier, where, stage) in runs.items()}


def test_an_evaluation_under_if_rank_0_is_named_on_all_ranks_unless_it_needs_no_other(tmp_path: Path) -> None:
    """The training steps around it are made: the error has changed nothing."""
    forward = "a forward with gradients"
    for found in run_ranks(every_evaluation, 2, str(tmp_path)):
        for case, other in (("cpu", forward), ("nvme", forward), ("before its step", "step()")):
            said, losses = found[case]
            assert [text.partition("). ")[0] for text in said] == [f"{EVALUATES}{other}"]
            assert "Run a forward on every rank, also an evaluation under `if rank == 0`." in said[0]
            assert "inside of `with optimizer.gathered():`, which every rank enters" in said[0]
            assert losses == pytest.approx(found["none"][1][:2])
        for case, none in (("gathered", "none"), ("stage 2", "stage 2, none")):
            assert found[case] == found[none]
            assert not found[case][0]


def test_a_forward_too_many_on_one_rank_ends_all_of_them_by_its_name() -> None:
    """Both have begun a forward with gradients; rank 0 begins another, and rank 1 its backward."""
    (first, _), (second, _) = run_ranks(evaluated_alone, 2, "cpu", "recorded", "", fresh=True)
    assert "Rank 0 of 2 hears nothing from another one in a forward with gradients" in first[0]
    assert re.search(r"Rank 1 could not finish the \w+ of unit '\w+'", second[0])
    assert "rank 0 could not finish a forward with gradients" in second[0]
