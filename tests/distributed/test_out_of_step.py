"""Ranks that run different units: an error that names ranks and units, before anything is updated."""

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from penstock.config import TierName
from penstock.errors import EngineError
from penstock.runtime import control_group
from tests.lib.engines import loss_of, prepared
from tests.lib.models import WIDTH, Blocks, stack
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline

LAYERS = 4
# Longer than any rank is held up by what else the machine does; a group of the test's own waits for longer still.
LIMIT_S = 20.0
LONGER = timedelta(seconds=240)


class Walk(nn.Module):
    """Of four units; whoever chooses may be another module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(stack(layers=LAYERS))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x


class Routed(nn.Module):
    """Each rank sends all it has to one expert."""

    def __init__(self) -> None:
        super().__init__()
        self.mixture = Walk()

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        return self.mixture(x, order)


def walk(
    rank: int,
    orders: list[list[int]],
    make: Callable[[], nn.Module] = Walk,
    units: Sequence[type[nn.Module]] = (nn.Linear,),
) -> tuple[str, bool]:
    model, optimizer = prepared(make, inline, units=units, timeout_s=LIMIT_S)
    before = [p.clone() for p in make().parameters()]
    said = ""
    try:
        optimizer.backward(model(torch.ones(2, WIDTH), orders[rank]).sum())
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


# A forward that one rank runs alone


@torch.no_grad()
def estimate_loss(model: nn.Module) -> None:
    """As nanoGPT does, of several batches."""
    model.eval()
    for _ in range(3):
        loss_of(model).item()
    model.train()


def evaluated_alone(rank: int, tier: TierName, where: str, stage: Literal[2, 3] = 3) -> "Told":
    """Rank 0 alone evaluates, in nanoGPT's loop. What each rank is told, and the losses of the steps around it.

    Units are of several sizes: gloo aborts the process where a gather meets a larger one.
    """
    how = {"params": tier, "grads": tier, "optimizer": tier}
    model, optimizer = prepared(Blocks, inline, stage=stage, timeout_s=LIMIT_S, **how)
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


def every_evaluation(rank: int) -> dict[str, Told]:
    runs: dict[str, tuple[TierName, str, Literal[2, 3]]] = {
        "cpu": ("cpu", "before", 3),
        "nvme": ("nvme", "before", 3),
        "before its step": ("cpu", "between", 3),
        "none": ("cpu", "nowhere", 3),
        "gathered": ("cpu", "gathered", 3),
        "stage 2, none": ("cpu", "nowhere", 2),
        "stage 2": ("cpu", "before", 2),
    }
    return {name: evaluated_alone(rank, *run) for name, run in runs.items()}


def test_an_evaluation_under_if_rank_0_is_named_on_all_ranks_unless_it_needs_no_other() -> None:
    """The training steps around it are made: the error has changed nothing."""
    forward = "a forward with gradients"
    for found in run_ranks(every_evaluation, 2):
        for case, other in (("cpu", forward), ("nvme", forward), ("before its step", "step()")):
            said, losses = found[case]
            assert [text.partition("). ")[0] for text in said] == [f"{EVALUATES}{other}"]
            assert "Run a forward on every rank, also an evaluation under `if rank == 0`." in said[0]
            assert "inside of `with optimizer.gathered():`, which every rank enters" in said[0]
            assert losses == pytest.approx(found["none"][1][:2])
        for case, none in (("gathered", "none"), ("stage 2", "stage 2, none")):
            assert found[case] == found[none]
            assert not found[case][0]


# What no collective tells at once: ranks wait until a limit is over


def unheard(rank: int, work: Callable[..., Any], *args: Any) -> Any:
    """In a process of its own: the words of the other rank are waited for as long as there are any to come."""
    control_group.HEARING_S = LIMIT_S
    return work(rank, *args)


@pytest.fixture(scope="module")
def waits() -> Iterator[dict[str, "Future[list[Any]]"]]:
    """Both at the same time."""
    with ThreadPoolExecutor(2) as pool:
        start = partial(pool.submit, run_ranks, unheard, 2, timeout=LONGER, fresh=True)
        yield {
            "skipped": start(walk, [[0, 1], [1]], Routed),
            "recorded": start(evaluated_alone, "cpu", "recorded"),
        }


def test_a_layer_that_one_rank_skips_and_the_module_that_chooses_are_named(waits: dict) -> None:
    for rank, (said, _) in enumerate(waits["skipped"].result()):
        assert re.search(rf"Rank {rank} could not finish the (gather|reduction) of unit 'mixture.layers\.", said)
        assert f"rank {1 - rank} could not finish" in said
        assert "' (run by Walk)" in said
        assert "must lie inside a unit: units=(<class of the module that chooses>,)." in said
        assert f"Ranks wait for {LIMIT_S:g} s at most: Options(timeout_s=)." in said


def test_a_forward_too_many_on_one_rank_ends_all_of_them_by_its_name(waits: dict) -> None:
    """Both have begun a forward with gradients; rank 0 begins another, and rank 1 its backward."""
    (first, _), (second, _) = waits["recorded"].result()
    assert "Rank 0 of 2 hears nothing from another one in a forward with gradients" in first[0]
    assert re.search(r"Rank 1 could not finish the \w+ of unit '[\w.]+'", second[0])
    assert "rank 0 could not finish a forward with gradients" in second[0]
