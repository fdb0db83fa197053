"""fp16: the loss scale, steps that overflow, and gradients that are shown unscaled."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import penstock
from penstock.engine.step.context import LossScale
from penstock.errors import ConfigError, EngineError
from penstock.runtime.streams import Streams
from tests.lib.engines import prepare_on
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline, separate, simulated

WIDTH = 64


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return model(batch(step)).float().square().mean()


def prepared(
    streams: Streams, placement: penstock.Placement | None = None, **options: object
) -> tuple[nn.Module, penstock.Optimizer]:
    model = stack()
    stock = torch.optim.AdamW(model.parameters(), lr=1e-2)
    chosen = penstock.Options(tile_bytes=4096, **options)
    return model, prepare_on(streams, model, stock, precision="fp16", placement=placement, options=chosen)


def state(model: nn.Module, optimizer: penstock.Optimizer) -> list[torch.Tensor]:
    names = ("exp_avg", "exp_avg_sq", "step")
    parameters = list(model.parameters())
    return [optimizer.full_param(p) for p in parameters] + [
        optimizer.full_state(p, name) for p in parameters for name in names
    ]


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
    placement = penstock.Placement(grads="cpu", optimizer={"device": 0.5, "cpu": 0.5})
    model, optimizer = prepared(streams(), placement)
    optimizer.backward(loss_of(model, 0))
    optimizer.step()
    optimizer.zero_grad()
    before = state(model, optimizer)
    optimizer.backward(loss_of(model, 1) * 1e6)
    result = optimizer.step()
    assert (result.skipped, result.loss_scale) == (True, 65536.0)
    assert all(torch.equal(a, b) for a, b in zip(before, state(model, optimizer), strict=True))
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, 1))
    result = optimizer.step()
    assert (result.skipped, result.loss_scale) == (False, 32768.0)
    optimizer.close()


@pytest.mark.parametrize("streams", [inline, separate, simulated])
@pytest.mark.parametrize(
    "placement", [{"params": "cpu", "grads": "cpu", "optimizer": "cpu"}, {"optimizer": {"device": 0.4, "cpu": 0.6}}]
)
def test_placement_changes_no_bit(streams: Callable[[], Streams], placement: dict[str, object]) -> None:
    def run(on: Streams, where: penstock.Placement) -> list[torch.Tensor]:
        model, optimizer = prepared(on, where, initial_loss_scale=2.0**24)
        skipped = []
        for step in range(4):
            optimizer.backward(loss_of(model, step))
            skipped.append(optimizer.step().skipped)
            optimizer.zero_grad()
        assert skipped[0], "the first scale is too large"
        assert not skipped[-1]
        found = state(model, optimizer)
        optimizer.close()
        return found

    expected = run(inline(), penstock.Placement())
    found = run(streams(), penstock.Placement(**placement))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_gradients_are_shown_and_set_unscaled() -> None:
    model, optimizer = prepared(inline(), initial_loss_scale=1024.0)
    optimizer.backward(loss_of(model, 0))
    weight = model[0][0].weight
    reference = stack().half()
    loss_of_half = reference(batch(0).half()).float().square().mean()
    loss_of_half.backward()
    found = optimizer.full_grad(weight)
    torch.testing.assert_close(found, reference[0][0].weight.grad.float(), rtol=1e-2, atol=1e-5)
    optimizer.set_full_grad(weight, found * 2)
    torch.testing.assert_close(optimizer.full_grad(weight), found * 2, rtol=1e-3, atol=1e-6)
    optimizer.close()


def test_a_backward_of_an_unscaled_loss_is_refused() -> None:
    model, optimizer = prepared(inline())
    with pytest.raises(EngineError, match=r"optimizer\.backward\(loss\)"):
        loss_of(model, 0).backward()
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, 0))
    assert not optimizer.step().skipped
    optimizer.close()


def test_a_static_scale_stays_and_may_raise() -> None:
    model, optimizer = prepared(inline(), initial_loss_scale=2.0**24, dynamic_loss_scale=False, on_nonfinite="raise")
    optimizer.backward(loss_of(model, 0))
    with pytest.raises(EngineError, match="not finite"):
        optimizer.step()
    optimizer.close()


def test_updates_in_backward_need_a_static_scale() -> None:
    model = stack()
    stock = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match="static loss scale"):
        penstock.prepare(model, stock, precision="fp16", overlap="backward")
    options = penstock.Options(dynamic_loss_scale=False, initial_loss_scale=128.0)
    optimizer = penstock.prepare(model, stock, precision="fp16", overlap="backward", options=options)
    optimizer.backward(loss_of(model, 0))
    assert not optimizer.step().skipped
    optimizer.close()


def overflow_on_one_rank(rank: int) -> tuple[bool, bool]:
    model, optimizer = prepared(inline())
    before = state(model, optimizer)
    optimizer.backward(loss_of(model, rank) * (1e6 if rank == 1 else 1.0))
    skipped = optimizer.step().skipped
    same = all(torch.equal(a, b) for a, b in zip(before, state(model, optimizer), strict=True))
    optimizer.close()
    return skipped, same


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    assert run_ranks(overflow_on_one_rank, 2) == [(True, True), (True, True)]
