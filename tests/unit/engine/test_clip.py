"""`clip_grad_norm_`: torch's norms, and the same step as clipping by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import ConfigError, EngineError
from tests.lib.engines import prepared as prepare
from tests.lib.engines import sgd
from tests.lib.models import stack

WIDTH = 48
NORMS = [2.0, 1.0, 3.0, math.inf]


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    return model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))).square().sum()


def prepared(**how: Any) -> tuple[nn.Module, penstock.Optimizer]:
    return prepare(stack(width=WIDTH), stock=sgd, **how)


@pytest.mark.parametrize("norm_type", NORMS)
def test_it_is_torchs(norm_type: float) -> None:
    reference = stack(width=WIDTH)
    stock = sgd(reference.parameters())
    model, optimizer = prepared(grads={"device": 0.5, "cpu": 0.5})
    for seed in range(2):
        loss_of(reference, seed).backward()
        optimizer.backward(loss_of(model, seed))
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5, norm_type)
    found = optimizer.clip_grad_norm_(0.5, norm_type)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.0)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(optimizer.full_grad(p), q.grad, rtol=1e-5, atol=1e-8)
    stock.step()
    optimizer.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(optimizer.full_param(p), q.detach(), rtol=1e-6, atol=1e-7)
    optimizer.close()


def test_torchs_word_for_the_greatest_is_read_too() -> None:
    model, optimizer = prepared()
    optimizer.backward(loss_of(model))
    expected = max(float(optimizer.full_grad(p).abs().max()) for p in model.parameters())
    assert float(optimizer.clip_grad_norm_(0.5, norm_type="inf")) == expected
    for wrong in ("largest", None, "-inf"):
        with pytest.raises(ConfigError, match=r"clip_grad_norm_\(norm_type="):
            optimizer.clip_grad_norm_(0.5, norm_type=wrong)
    optimizer.close()


def test_it_is_the_same_as_prepares() -> None:
    def run(clip: float | None, by_hand: bool) -> list[Tensor]:
        model, optimizer = prepared(max_grad_norm=clip)
        for seed in range(3):
            optimizer.backward(loss_of(model, seed))
            if by_hand:
                optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        found = [optimizer.full_param(p) for p in model.parameters()]
        optimizer.close()
        return found

    assert all(torch.equal(a, b) for a, b in zip(run(0.5, False), run(None, True), strict=True))


def test_a_norm_below_the_limit_changes_nothing_and_the_next_step_starts_anew() -> None:
    model, optimizer = prepared()
    optimizer.backward(loss_of(model))
    before = optimizer.full_grad(model[0].weight)
    norm = float(optimizer.clip_grad_norm_(1e9))
    assert torch.equal(optimizer.full_grad(model[0].weight), before)
    optimizer.clip_grad_norm_(norm / 2)
    optimizer.zero_grad()
    optimizer.backward(loss_of(model))
    assert torch.equal(optimizer.full_grad(model[0].weight), before)
    optimizer.close()


def test_what_is_refused_changes_nothing() -> None:
    model, optimizer = prepared()
    optimizer.backward(loss_of(model))
    for wrong in (0.0, -1.0, math.nan):
        with pytest.raises(ConfigError, match="clip_grad_norm_"):
            optimizer.clip_grad_norm_(wrong)
    optimizer.clip_grad_norm_(0.5)
    before = [optimizer.full_grad(p) for p in model.parameters()]
    for backward in (optimizer.backward, Tensor.backward):
        with pytest.raises(EngineError, match="comes last"):
            backward(loss_of(model, 1))
    assert all(torch.equal(optimizer.full_grad(p), g) for p, g in zip(model.parameters(), before, strict=True))
    assert not optimizer.step().skipped
    optimizer.close()
