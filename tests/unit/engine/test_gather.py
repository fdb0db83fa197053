"""Gathers within their budgets, in the order that was learned."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.engine.forward_backward.gather import Gatherer
from penstock.engine.unit.unit import Unit, UnitState
from tests.lib.engines import ON_CPU, prepared
from tests.lib.streams import is_released

WIDTH, BLOCKS = 64, 4
BLOCK_BYTES = (WIDTH * WIDTH + 256) * 4  # a weight and a bias, aligned, in fp32
ROOT_BYTES = BLOCK_BYTES


class Chain(nn.Module):
    """A root layer, then blocks of equal size in an order of choice. `watch` is called while each block computes."""

    def __init__(self, watch: Callable[[int], None] = lambda number: None) -> None:
        super().__init__()
        self.root = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.order = list(range(BLOCKS))
        self.watch = watch

    def forward(self, x: Tensor) -> Tensor:
        x = self.root(x)
        for number in self.order:
            self.watch(number)  # after the block before has been released, before this one is needed
            x = torch.relu(self.blocks[number](x))
        return x


def chain(**how: Any) -> tuple[Chain, penstock.Optimizer]:
    return prepared(Chain(), **{**ON_CPU, **how})


def gatherer_of(optimizer: penstock.Optimizer) -> Gatherer:
    return optimizer._engine.gatherer


def unit(optimizer: penstock.Optimizer, name: str) -> Unit:
    return next(unit for unit in optimizer._engine.context.units if unit.name == name)


def train(model: Chain, optimizer: penstock.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.backward(model(torch.ones(2, WIDTH)).sum())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("blocks_at_once", [1, 2, BLOCKS])
def test_live_bytes_are_never_exceeded_and_used_as_far_as_they_go(blocks_at_once: int) -> None:
    budget = ROOT_BYTES + blocks_at_once * BLOCK_BYTES
    model, optimizer = chain(live_bytes=budget)
    gatherer = gatherer_of(optimizer)
    seen = []
    model.watch = lambda number: seen.append(gatherer.live_bytes)
    train(model, optimizer)
    assert gatherer.peak_live_bytes == budget
    assert max(seen) <= budget
    assert gatherer.live_bytes == 0


@pytest.mark.parametrize("blocks_ahead", [0, 1, 2])
def test_prefetch_bytes_bound_what_is_gathered_ahead(blocks_ahead: int) -> None:
    model, optimizer = chain(prefetch_bytes=blocks_ahead * BLOCK_BYTES)
    ahead: list[int] = []

    def watch(number: int) -> None:
        units = [unit(optimizer, f"blocks.{n}") for n in range(BLOCKS)]
        ahead.append(sum(u.holding.unit_state is not UnitState.RELEASED for u in units))

    model.watch = watch
    train(model, optimizer, steps=1)
    # before the first block is needed, the root has gathered ahead; then each block in its place
    assert ahead == [min(blocks_ahead, BLOCKS - number) for number in range(BLOCKS)]


def test_a_unit_larger_than_the_default_budget_grows_it_but_not_one_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needed = ROOT_BYTES + BLOCK_BYTES
    model, optimizer = chain(live_bytes=needed)
    train(model, optimizer, steps=1)
    optimizer.close()
    with pytest.raises(penstock.MemoryBudgetError, match=rf"is 1 bytes too small.* take {needed:,} bytes"):
        chain(live_bytes=needed - 1)
    monkeypatch.setattr("penstock.checks.DEFAULT_LIVE_BYTES", BLOCK_BYTES)
    model, optimizer = chain(live_bytes=BLOCK_BYTES)  # what nobody asked for
    train(model, optimizer, steps=1)
    assert gatherer_of(optimizer).peak_live_bytes == needed


def test_the_order_of_the_last_forward_and_backward_is_expected_next() -> None:
    model, optimizer = chain(prefetch_bytes=BLOCK_BYTES)
    expected: list[tuple[int, bool]] = []

    def watch(number: int) -> None:
        expected.append((number, unit(optimizer, f"blocks.{number}").holding.unit_state is not UnitState.RELEASED))

    model.watch = watch
    train(model, optimizer, steps=1)
    model.order = [2, 0, 3, 1]
    expected.clear()
    train(model, optimizer, steps=1)
    assert not all(hit for _, hit in expected), "another order than before is a surprise"
    expected.clear()
    train(model, optimizer, steps=1)
    assert expected == [(2, True), (0, True), (3, True), (1, True)]
    hooks = optimizer._engine.hooks
    assert [u.name for u in hooks.passes.forward.learned] == ["root", "blocks.2", "blocks.0", "blocks.3", "blocks.1"]
    assert [u.name for u in hooks.passes.backward.learned] == ["root", "blocks.1", "blocks.3", "blocks.0", "blocks.2"]


def test_what_is_gathered_ahead_and_not_used_is_taken_back() -> None:
    model, optimizer = chain()
    train(model, optimizer, steps=1)
    model.order = [0]
    with torch.no_grad():
        model(torch.ones(1, WIDTH))
    assert gatherer_of(optimizer).live_bytes == 0
    assert all(u.holding.unit_state is UnitState.RELEASED for u in optimizer._engine.context.units)
    assert is_released(model.blocks[3].weight)
    assert model.blocks[3].weight.shape == (WIDTH, WIDTH)


def test_a_unit_that_is_read_in_place_takes_nothing_of_what_may_be_gathered_ahead() -> None:
    """Whether it is up to date when `step` returns differs between ranks; what they gather ahead of use must not."""
    half = {"device": 0.5, "cpu": 0.5}
    _, optimizer = chain(params=half, grads="device", prefetch_bytes=2 * BLOCK_BYTES)
    gatherer, units = gatherer_of(optimizer), optimizer._engine.context.units
    in_place = next(u for u in units if u.resident)
    others = [u for u in units if not u.resident]
    in_place.holding.become(UnitState.OUTDATED)
    gatherer.prefetch(iter([in_place, others[0]]))
    gatherer.prefetch(iter([others[1]]))
    assert [u.holding.unit_state for u in (in_place, *others[:2])] == [UnitState.GATHERING] * 3
    gatherer.drop_unused()
