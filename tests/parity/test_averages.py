"""Averages of the parameters: those of torch, and the same at every world size. The table has them everywhere."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from tests.lib.ranks import run_ranks
from tests.lib.streams import separate
from tests.parity.rows import Arithmetic, Movement, batches, changed, loss_of, prepared, round_half_away

DECAY = 0.9
STEPS = 3
SMALL = {"tile_bytes": 4 << 10}
FORMS = [
    Arithmetic(),
    Arithmetic(precision="bf16", clip=0.5),
    Arithmetic(precision="bf16", master="fp32"),
    Arithmetic(precision="bf16", master="none"),
]


def train(model: nn.Module, optimizer: penstock.Optimizer, update: Callable[[], object]) -> None:
    for (batch,), *_ in batches(1, 1)[:STEPS]:
        optimizer.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        update()


def values(model: nn.Module, optimizer: penstock.Optimizer) -> list[Tensor]:
    return [optimizer.full_param(p) for p in model.parameters()]


def plain(what: Arithmetic) -> list[Tensor]:
    """The average by torch, of the masters."""
    model, optimizer = prepared(what, Movement())
    average = values(model, optimizer)
    train(model, optimizer, lambda: torch._foreach_lerp_(average, values(model, optimizer), 1 - DECAY))
    optimizer.close()
    return average


@pytest.mark.parametrize("what", FORMS, ids=changed)
def test_it_is_the_one_that_torch_has_of_the_masters(what: Arithmetic) -> None:
    model, optimizer = prepared(what, Movement(grads="cpu", optimizer="cpu").but(**SMALL), separate())
    ema = penstock.EMA(optimizer, DECAY, tier="cpu")
    train(model, optimizer, ema.update)
    with ema.applied():
        found = values(model, optimizer)
    optimizer.close()
    wanted = plain(what)
    if what.master == "none":  # as it is shown: rounded, halfway away from zero
        wanted = [round_half_away(t).float() for t in wanted]
    assert all(map(torch.equal, found, wanted))


# Ranks


def trained_on(
    rank: int, world_size: int, what: Arithmetic, how: Movement, tier: Any, folder: str, load: bool
) -> list[list[float]]:
    model, optimizer = prepared(what, how.but(**SMALL), separate())
    ema = penstock.EMA(optimizer, DECAY, tier=tier)
    if load:
        optimizer.load(folder)
    for (batch, *_), *_ in batches(1, 1)[load : load + 1]:  # the same batch on every rank
        optimizer.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
    if not load:
        optimizer.save(folder)
    with ema.applied():
        with torch.no_grad():
            inside = model(batches(1, 1)[0][0][0][0])
        average = values(model, optimizer)
    with torch.no_grad():
        after = model(batches(1, 1)[0][0][0][0])
    optimizer.close()
    return [tensor.flatten().tolist() for tensor in (*average, inside, after)]


def test_two_ranks_have_the_average_of_one_and_resume_at_another_world_size(tmp_path: Path) -> None:
    how, tier = Movement(params="cpu", grads="cpu", optimizer="nvme"), "nvme"
    what, folder = Arithmetic(precision="bf16"), str(tmp_path / "a")
    one = trained_on(0, 1, what, how, tier, folder, False)
    first, second = run_ranks(trained_on, 2, 2, what, how, tier, str(tmp_path / "b"), False)
    assert first == second == one
    goes_on = trained_on(0, 1, what, Movement(), "device", folder, True)
    for saved in ("a", "b"):
        first, second = run_ranks(trained_on, 2, 2, what, how, tier, str(tmp_path / saved), True)
        assert first == second == goes_on
    assert trained_on(0, 1, what, Movement(), "cpu", str(tmp_path / "b"), True) == goes_on
