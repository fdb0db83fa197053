"""Gradients that people set, and those of units of which only some parameters got one: none comes back or is lost."""

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.runtime.streams import Streams
from tests.lib.engines import loss_of as mean_square
from tests.lib.engines import prepared
from tests.lib.models import stack
from tests.lib.streams import inline, separate, simulated

WIDTH = 48
MOVES = [
    pytest.param(separate, "device", "nvme", id="device-nvme"),
    pytest.param(simulated, "device", "cpu", id="late"),
    pytest.param(simulated, "cpu", "nvme", id="late-cpu-nvme"),
]


class Net(nn.Module):
    """One unit of three weights, each of which is used or not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        for index in used:
            x = torch.tanh(x @ self.weights[index])
        return x


def loss_of(model: Net, used: list[int], seed: int) -> Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
    return model(x, used).square().sum()


stock = partial(torch.optim.SGD, lr=0.1)


class Pair:
    """The engine and plain torch, side by side."""

    def __init__(self, make: Callable[[], Streams], storage: str, folder: Path, **rest: object) -> None:
        self.plain = Net()
        self.sgd = stock(self.plain.parameters())
        self.model, self.optimizer = prepared(Net, make, stock=stock, grads=storage, nvme_path=folder, **rest)

    def backward(self, used: list[int], seed: int) -> None:
        self.optimizer.backward(loss_of(self.model, used, seed))
        loss_of(self.plain, used, seed).backward()

    def check(self) -> None:
        """Gradients and their norm are plain torch's, and so are the parameters afterwards."""
        theirs = [p.grad for p in self.plain.parameters()]
        for ours, their in zip(self.model.parameters(), theirs, strict=True):
            expected = torch.zeros(WIDTH, WIDTH) if their is None else their
            torch.testing.assert_close(self.optimizer.full_grad(ours), expected, rtol=1e-5, atol=1e-6)
        norm = self.optimizer.step().grad_norm
        assert norm == pytest.approx(float(torch.nn.utils.get_total_norm([g for g in theirs if g is not None])), 1e-5)
        self.sgd.step()
        for ours, their in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            torch.testing.assert_close(self.optimizer.full_param(ours), their.detach(), rtol=1e-5, atol=1e-6)

    def zero(self) -> None:
        self.optimizer.zero_grad()
        self.sgd.zero_grad()


@pytest.mark.parametrize(("make", "storage", "to"), MOVES)
def test_moves_bring_nothing_of_the_last_step_back(
    make: Callable[[], Streams], storage: str, to: Any, tmp_path: Path
) -> None:
    pair = Pair(make, storage, tmp_path)
    pair.backward([0, 1, 2], seed=0)
    pair.check()
    pair.zero()
    # Inside backward: some gradients of a unit have gone straight home, the others come after the move
    moved = []

    def move(parameter: Tensor) -> None:
        if not moved:
            moved.append(parameter)
            pair.optimizer.offload_states({"grad"}, to)

    handle = pair.model.weights[1].register_post_accumulate_grad_hook(move)  # after ours
    pair.backward([0, 1], seed=1)
    handle.remove()
    assert moved
    pair.check()
    pair.zero()
    pair.backward([0, 1, 2], seed=2)
    pair.check()
    pair.zero()
    # One that is set by hand is alone until another comes
    pair.optimizer.reload_states()
    value = torch.randn(WIDTH, WIDTH)
    pair.optimizer.set_full_grad(pair.model.weights[0], value)
    pair.plain.weights[0].grad = value.clone()
    pair.optimizer.offload_states({"grad"}, to)
    with contextlib.suppress(penstock.CheckpointError):
        pair.optimizer.save(tmp_path / "kept")
    pair.backward([0, 1], seed=1)
    pair.check()


@pytest.mark.parametrize(("reduce", "sums"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_gradients_that_are_rounded_on_their_way_begin_at_zero(reduce: torch.dtype, sums: torch.dtype) -> None:
    """They pass a buffer, set ones do not: both ways into one home."""
    model, optimizer = prepared(Net, inline, stock=stock, reduce_dtype=reduce, grad_accumulation_dtype=sums)
    optimizer.backward(loss_of(model, [0, 1, 2], seed=0))
    optimizer.step()
    optimizer.zero_grad()
    optimizer.set_full_grad(model.weights[0], torch.ones(WIDTH, WIDTH))
    optimizer.backward(loss_of(model, [1], seed=1))
    assert torch.equal(optimizer.full_grad(model.weights[0]), torch.ones(WIDTH, WIDTH))
    assert not optimizer.full_grad(model.weights[2]).any()
    whole = torch.stack([optimizer.full_grad(p) for p in model.parameters()]).norm()
    assert optimizer.step().grad_norm == pytest.approx(float(whole), 1e-5)


@pytest.mark.parametrize("storage", ["device", "cpu", "nvme"])
def test_a_gradient_set_by_hand_before_any_backward_is_the_only_one(storage: str, tmp_path: Path) -> None:
    model, optimizer = prepared(stack(5, 3, 7), grads=storage, nvme_path=tmp_path)  # gaps between slots
    optimizer.set_full_grad(model[0].weight, torch.ones(3, 5))
    assert torch.equal(optimizer.full_grad(model[0].weight), torch.ones(3, 5))
    assert not optimizer.full_grad(model[1].weight).any()
    optimizer.backward(model(torch.ones(1, 5)).sum())
    assert optimizer.full_grad(model[1].bias).tolist() == [1.0] * 7
    assert optimizer.step().grad_norm > 0
    assert all(optimizer.full_param(p).isfinite().all() for p in model.parameters())


# Gradients that people put into `.grad`

SMALL = 8


def half_frozen() -> tuple[nn.Sequential, penstock.Optimizer]:
    """A layer, and a frozen one."""
    model = stack(layers=2, width=SMALL)
    model[1].requires_grad_(False)
    return prepared(model, stock=lambda p: torch.optim.SGD(p, lr=0.1))


def test_a_gradient_set_before_a_backward_is_part_of_it() -> None:
    """As in torch, which adds to it."""
    model, optimizer = half_frozen()
    optimizer.backward(mean_square(model))
    alone = optimizer.full_grad(model[0].weight)
    optimizer.zero_grad()
    model[0].weight.grad = torch.ones(SMALL, SMALL)
    model[1].weight.grad = torch.ones(SMALL, SMALL)  # of a frozen parameter: nobody's business
    optimizer.backward(mean_square(model))
    torch.testing.assert_close(optimizer.full_grad(model[0].weight), alone + 1)
    assert not optimizer.step().skipped
