"""fp16: the loss scale, steps that overflow, and gradients that are shown unscaled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.engine.step.context import LossScale
from penstock.errors import ConfigError, EngineError
from penstock.runtime.streams import Streams
from tests.lib.engines import adamw, assert_same_state, loss_of, prepared, squared, state
from tests.lib.models import batch_of, stack
from tests.lib.streams import inline, separate, simulated


def half(streams: Any = inline, **how: Any) -> tuple[nn.Sequential, penstock.Optimizer]:
    return prepared(stack, streams, precision="fp16", **how)


def test_the_scale_follows_torchs_grad_scaler() -> None:
    ours = LossScale(65536.0, dynamic=True)
    theirs = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=LossScale.GROWTH_INTERVAL)
    parameter = nn.Parameter(torch.ones(1))
    sgd = torch.optim.SGD([parameter], lr=0.0)
    finite = [True] * 3 + [False] * 2 + [True] * (LossScale.GROWTH_INTERVAL + 1) + [False]
    for number, is_finite in enumerate(finite):
        parameter.grad = torch.tensor([1.0 if is_finite else float("inf")])
        theirs.scale(torch.ones(()))
        theirs.step(sgd)
        theirs.update()
        ours.update(finite=is_finite)
        ours.renew()
        assert ours.value == theirs.get_scale(), number


def test_a_new_scale_counts_once_the_summed_gradients_are_dropped() -> None:
    scale = LossScale(8.0, dynamic=True)
    scale.update(finite=False)
    assert scale.value == 8.0
    scale.renew()
    assert scale.value == 4.0


@pytest.mark.parametrize("streams", [inline, separate, simulated])
def test_an_overflow_skips_the_step_and_keeps_every_bit(streams: Callable[[], Streams]) -> None:
    model, optimizer = half(streams, grads="cpu", optimizer={"device": 0.5, "cpu": 0.5})
    optimizer.backward(loss_of(model, 0))
    optimizer.step()
    optimizer.zero_grad()
    before = state(model, optimizer)
    optimizer.backward(loss_of(model, 1) * 1e6)
    result = optimizer.step()
    assert (result.skipped, result.loss_scale) == (True, 65536.0)
    optimizer.zero_grad()
    assert_same_state(state(model, optimizer), before)
    optimizer.backward(loss_of(model, 1))
    result = optimizer.step()
    assert (result.skipped, result.loss_scale) == (False, 32768.0)
    optimizer.close()


def test_gradients_are_shown_and_set_unscaled() -> None:
    model, optimizer = half(initial_loss_scale=1024.0)
    optimizer.backward(loss_of(model, 0))
    weight = model[0].weight
    reference = stack().half()
    squared(reference(batch_of(reference, 0).half())).backward()
    found = optimizer.full_grad(weight)
    torch.testing.assert_close(found, reference[0].weight.grad.float(), rtol=1e-2, atol=1e-5)
    optimizer.set_full_grad(weight, found * 2)
    torch.testing.assert_close(optimizer.full_grad(weight), found * 2, rtol=1e-3, atol=1e-6)
    optimizer.close()


def test_a_backward_of_an_unscaled_loss_is_refused() -> None:
    model, optimizer = half()
    with pytest.raises(EngineError, match=r"optimizer\.backward\(loss\)"):
        loss_of(model, 0).backward()
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, 0))
    assert not optimizer.step().skipped
    optimizer.close()


def test_a_static_scale_stays_and_may_raise() -> None:
    model, optimizer = half(initial_loss_scale=2.0**24, dynamic_loss_scale=False, on_nonfinite="raise")
    optimizer.backward(loss_of(model, 0))
    with pytest.raises(EngineError, match="not finite"):
        optimizer.step()
    optimizer.close()


def test_updates_in_backward_need_a_static_scale() -> None:
    with pytest.raises(ConfigError, match="static loss scale"):
        penstock.prepare(model := stack(), adamw(model.parameters()), precision="fp16", overlap="backward")
    model, optimizer = half(overlap="backward", dynamic_loss_scale=False, initial_loss_scale=128.0)
    optimizer.backward(loss_of(model, 0))
    assert not optimizer.step().skipped
    optimizer.close()
