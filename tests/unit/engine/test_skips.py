"""Steps that are skipped: the first is said, the last is an error, and both name parameters."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.engine.step.context import LossScale
from penstock.errors import ConfigError, EngineError
from penstock.runtime.streams import Streams
from tests.lib.engines import adamw, assert_same_state, loss_of, prepared, sgd, squared, state
from tests.lib.models import batch_of, stack
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline, separate, simulated

WIDTH = 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.good, self.bad = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return self.good(x).float().sum() + self.bad(x).float().sum() * factor


def net(precision: str = "fp32", **options: Any) -> tuple[Net, penstock.Optimizer]:
    return prepared(Net, stock=sgd, precision=precision, **options)


def step(model: Net, optimizer: penstock.Optimizer, factor: float) -> penstock.StepResult:
    optimizer.zero_grad()
    optimizer.backward(model(torch.ones(1, WIDTH), factor))
    return optimizer.step()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_first_skipped_step_is_said_once_and_names_its_parameters(precision: str) -> None:
    model, optimizer = net(precision)
    with pytest.warns(UserWarning, match=r"Not finite: of 'bad\.weight', 'bad\.bias'\. ") as caught:
        assert step(model, optimizer, math.nan).skipped
    assert len(caught) == 1
    assert "100 in a row are an error" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not step(model, optimizer, 1.0).skipped
        assert step(model, optimizer, math.inf).skipped


@pytest.mark.filterwarnings("ignore:The step was skipped")
def test_too_many_in_a_row_are_an_error_and_nothing_was_updated() -> None:
    model, optimizer = net(max_skipped_steps=3)
    before = [optimizer.full_param(p) for p in model.parameters()]
    for factor in (math.nan, math.nan):
        assert step(model, optimizer, factor).skipped
    with pytest.raises(EngineError, match=r"^3 steps in a row were skipped, .* Not finite: of 'bad\.weight', 'bad\."):
        step(model, optimizer, math.nan)
    assert all(torch.equal(optimizer.full_param(p), q) for p, q in zip(model.parameters(), before, strict=True))
    assert not step(model, optimizer, 1.0).skipped  # the count begins anew
    assert step(model, optimizer, math.nan).skipped
    optimizer.close()
    model, optimizer = net(max_skipped_steps=None)
    assert all(step(model, optimizer, math.nan).skipped for _ in range(5))


def test_a_loss_scale_never_falls_to_zero() -> None:
    """It did after 1,090 steps, and the next one divided by it."""
    scale = LossScale(65536.0, dynamic=True)
    for _ in range(2000):
        scale.update(finite=False)
        scale.renew()
    assert scale.value == LossScale.LEAST == 1.0
    small = LossScale(0.25, dynamic=True)  # a start below the least scale stays
    small.update(finite=False)
    small.renew()
    assert small.value == 0.25


def test_endless_nan_in_fp16_ends_in_an_error() -> None:
    model, optimizer = net("fp16", max_skipped_steps=2, initial_loss_scale=4.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert step(model, optimizer, math.nan).skipped
    with pytest.warns(UserWarning, match="The loss scale is 1, and does not fall any further"):
        assert step(model, optimizer, math.nan).skipped
    with pytest.raises(EngineError, match="The loss scale is 1, "):
        step(model, optimizer, math.nan)


def bad_on_the_second(rank: int) -> list[str]:
    model, optimizer = net(max_skipped_steps=2)
    said = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(model, optimizer, math.nan if rank == 1 else 1.0)
    said += [str(w.message) for w in caught if "skipped" in str(w.message)]
    with pytest.raises(EngineError) as error:
        step(model, optimizer, math.nan if rank == 1 else 1.0)
    optimizer.close()
    return [*said, str(error.value)]


def test_every_rank_names_the_parameters_of_the_one_that_has_them() -> None:
    first, second = run_ranks(bad_on_the_second, 2)
    assert first == second
    assert len(first) == 2
    assert all("Not finite: of 'bad.weight', 'bad.bias'. " in text for text in first)


def test_the_norm_is_the_same_however_parameters_are_grouped_and_wherever_they_are() -> None:
    """To the last bit: sums are rounded once."""

    def norms(**how: Any) -> list[float]:
        model, optimizer = prepared(lambda: stack(layers=6, width=24), simulated, **how)
        found = []
        for seed in range(4):
            optimizer.backward(loss_of(model, seed))
            found.append(optimizer.step().grad_norm)
            optimizer.zero_grad()
        optimizer.close()
        return found

    expected = norms()
    for how in ({"persistent_bytes": 128}, {"persistent_bytes": 1 << 20}, {"grads": {"device": 0.5, "cpu": 0.5}}):
        assert norms(**how) == expected
    assert norms(units=lambda name, module: name in ("1", "3")) == expected


# fp16: the loss scale, steps that overflow, and gradients that are shown unscaled


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


def test_a_backward_of_an_unscaled_loss_is_refused() -> None:
    model, optimizer = half()
    with pytest.raises(EngineError, match=r"optimizer\.backward\(loss\)"):
        loss_of(model, 0).backward()
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, 0))
    assert not optimizer.step().skipped


def test_a_static_scale_stays_and_may_raise() -> None:
    model, optimizer = half(initial_loss_scale=2.0**24, dynamic_loss_scale=False, on_nonfinite="raise")
    optimizer.backward(loss_of(model, 0))
    with pytest.raises(EngineError, match="not finite"):
        optimizer.step()


def test_updates_in_backward_need_a_static_scale() -> None:
    with pytest.raises(ConfigError, match="static loss scale"):
        penstock.prepare(model := stack(), adamw(model.parameters()), precision="fp16", overlap="backward")
    model, optimizer = half(overlap="backward", dynamic_loss_scale=False, initial_loss_scale=128.0)
    optimizer.backward(loss_of(model, 0))
    assert not optimizer.step().skipped
