"""What stands in `.grad` after backward: torch's functions and `clip_grad_norm_` clip by it, and nothing is silent."""

import copy
import io
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

import penstock
from penstock.engine.gradients.proxy import GradientProxy
from penstock.errors import ConfigError, EngineError
from penstock.runtime.streams import Streams
from tests.lib.covering import covering, named
from tests.lib.engines import loss_of as loss_of_batch
from tests.lib.engines import prepared as prepare
from tests.lib.engines import sgd
from tests.lib.models import odd_sizes, seeded, stack
from tests.lib.streams import inline, separate

WIDTH = 24
EVERYWHERE: dict[str, tuple[Callable[[], Streams], dict[str, Any]]] = {
    "read in place": (inline, {}),
    "gathered": (separate, {"params": "cpu"}),
    "split": (separate, {"params": "cpu", "grads": {"device": 0.5, "cpu": 0.5}, "optimizer": "cpu"}),
}


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    return model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))).float().square().sum()


def prepared(streams: Any = separate, model: nn.Module | None = None, **how: Any) -> tuple[Any, penstock.Optimizer]:
    return prepare(model or stack(width=WIDTH), streams, stock=sgd, **how)


def plain() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = stack(width=WIDTH)
    return model, sgd(model.parameters())


def step(*optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def assert_same(ours: nn.Module, optimizer: penstock.Optimizer, theirs: nn.Module) -> None:
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(optimizer.full_param(p), q.detach(), rtol=1e-6, atol=1e-7)


def assert_same_gradients(ours: nn.Module, optimizer: penstock.Optimizer, theirs: nn.Module) -> None:
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(optimizer.full_grad(p), q.grad, rtol=1e-5, atol=1e-7)


# Clipping as torch does it


@pytest.mark.parametrize(
    "row",
    covering(
        {"norm_type": [2.0, math.inf, 1.0, 3.0], "clips": ["handle", None, True, False], "where": list(EVERYWHERE)}
    ),
    ids=named,
)
def test_torchs_clip_grad_norm_and_the_handles_clip_as_on_the_plain_model(row: Any) -> None:
    """Torch's with each `foreach`."""
    norm_type, clips = row["norm_type"], row["clips"]
    streams, storages = EVERYWHERE[row["where"]]
    model, optimizer = prepared(streams, **storages)
    reference, stock = plain()
    for seed in range(2):
        norms = []
        for net in (model, reference):
            for loss in (loss_of(net, seed), loss_of(net, seed + 10)):
                loss.backward()
            if net is model and clips == "handle":
                norms.append(optimizer.clip_grad_norm_(0.5, norm_type))
            else:
                foreach = None if clips == "handle" else clips
                norms.append(clip_grad_norm_(net.parameters(), 0.5, norm_type, True, foreach=foreach))
        torch.testing.assert_close(*norms, rtol=1e-6, atol=0)
        assert_same_gradients(model, optimizer, reference)
        step(optimizer, stock)
    assert_same(model, optimizer, reference)


def test_get_total_norm_and_clip_grads_with_norm_() -> None:
    model, optimizer = prepared()
    loss_of(model).backward()
    before = [optimizer.full_grad(p) for p in model.parameters()]
    norm = get_total_norm([p.grad for p in model.parameters()])
    torch.testing.assert_close(norm, get_total_norm(before), rtol=1e-6, atol=0)
    clip_grads_with_norm_(model.parameters(), 0.5, norm)
    torch.testing.assert_close(get_total_norm([p.grad for p in model.parameters()]), torch.tensor(0.5))
    for p, grad in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(optimizer.full_grad(p), grad * (0.5 / norm), rtol=1e-5, atol=1e-8)
    with pytest.raises(EngineError, match="comes last"):
        loss_of(model).backward()
    assert optimizer.step().grad_norm == pytest.approx(0.5, rel=1e-5)


def test_error_if_nonfinite_raises_and_without_it_the_step_is_skipped() -> None:
    model, optimizer = prepared()
    before = [optimizer.full_param(p) for p in model.parameters()]
    for bad in (math.nan, math.inf):
        optimizer.set_full_grad(model[0].bias, torch.full((WIDTH,), bad))
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        assert not clip_grad_norm_(model.parameters(), 1.0).isfinite()
        with pytest.warns(UserWarning, match=r"0\.bias") if math.isnan(bad) else nullcontext():
            assert optimizer.step().skipped
        optimizer.zero_grad()
    assert all(torch.equal(optimizer.full_param(p), q) for p, q in zip(model.parameters(), before, strict=True))


def test_gradients_of_two_engines_and_of_another_module_are_clipped_together() -> None:
    pairs, references = [prepared(), prepared()], [plain(), plain()]
    found: list[list[Tensor]] = []
    for (first, one), (second, two) in (pairs, references):
        other = seeded(lambda: nn.Linear(WIDTH, 3))
        other(second(first(torch.ones(4, WIDTH)))).square().sum().backward()
        parameters = [*first.parameters(), *other.parameters(), *second.parameters()]
        found.append([clip_grad_norm_(parameters, 0.3, foreach=True), other.weight.grad])
        step(one, two)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
    for (model, optimizer), (reference, _) in zip(pairs, references, strict=True):
        assert_same(model, optimizer, reference)


def test_fp16_shows_unscaled_norms() -> None:
    model, optimizer = prepared(precision="fp16")
    optimizer.backward(loss_of(model) / 1000)
    expected = math.sqrt(sum(float(optimizer.full_grad(p).square().sum()) for p in model.parameters()))
    assert float(clip_grad_norm_(model.parameters(), expected / 2)) == pytest.approx(expected, rel=1e-5)
    assert optimizer.step().grad_norm == pytest.approx(expected / 2, rel=1e-4)


def test_a_norm_of_one_gradient_as_loggers_take_it() -> None:
    model, optimizer = prepared(precision="bf16")
    optimizer.backward(loss_of(model))
    for p in model.parameters():
        expected = float(optimizer.full_grad(p).norm())
        for norm in (p.grad.norm(), p.grad.detach().data.norm(2), torch.linalg.vector_norm(p.grad)):
            assert float(norm) == pytest.approx(expected, rel=1e-6)
            assert norm.dtype == torch.float32
        assert float(p.grad.detach().norm(p=math.inf)) == float(optimizer.full_grad(p).abs().max())
        with pytest.raises(EngineError, match="some dimensions"):
            torch.linalg.vector_norm(p.grad, dim=0)
        with pytest.raises(EngineError, match="order above 0"):
            p.grad.norm(0)


# When handles are there


def test_handles_are_one_for_each_parameter_and_hold_no_memory() -> None:
    model, optimizer = prepared()
    loss_of(model).backward()
    first = [p.grad for p in model.parameters()]
    assert all(type(grad) is GradientProxy for grad in first)
    for p, grad in zip(model.parameters(), first, strict=True):
        assert (grad.shape, grad.dtype, grad.device) == (p.shape, p.dtype, p.device)
        assert "0.weight" in repr(first[0])
        assert "full_grad" in f"{grad}"
    for _ in range(2):
        loss_of(model).backward()
        assert all(p.grad is grad for p, grad in zip(model.parameters(), first, strict=True))
        optimizer.step()
        optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.close()
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(EngineError, match="closed"):
        first[0].norm()
    loss_of(model).backward()
    assert all(type(p.grad) is Tensor for p in model.parameters())


def test_parameters_without_a_gradient_have_none() -> None:
    model, optimizer = prepared()
    model[1].weight.requires_grad_(False)
    model[2](model[0](torch.ones(1, WIDTH))).sum().backward()
    assert [p.grad is not None for p in model.parameters()] == [True, True, False, False, True, True]
    optimizer.zero_grad()
    model(torch.ones(1, WIDTH)).sum().backward()
    assert [p.grad is not None for p in model.parameters()] == [True, True, False, True, True, True]


def test_forwards_and_autograd_grad_leave_them() -> None:
    model, _ = prepared()
    loss_of(model).backward()
    norm = get_total_norm([p.grad for p in model.parameters()])
    with torch.no_grad():
        loss_of(model)
    loss = loss_of(model)
    x = torch.ones(1, WIDTH, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x)
    del loss
    assert torch.equal(get_total_norm([p.grad for p in model.parameters()]), norm)


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_parameter_that_the_loss_reads_gets_each_gradient_once(create_graph: bool) -> None:
    """And no forward does."""
    model, optimizer = prepared(inline, model=odd_sizes())
    loss_of_batch(model).backward()
    for count in range(1, 4):
        (model.unused * torch.arange(3)).sum().backward(create_graph=create_graph)
        assert torch.equal(optimizer.full_grad(model.unused), count * torch.arange(3).float())
        assert type(model.unused.grad) is GradientProxy


def test_they_go_with_a_backward_that_fails() -> None:
    model, optimizer = prepared()
    loss_of(model).backward()
    hidden = model[0](torch.ones(1, WIDTH))
    hidden.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.backward(model[2](model[1](hidden)).sum())
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(EngineError, match="did not finish"):
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model).backward()
    assert all(type(p.grad) is GradientProxy for p in model.parameters())


def test_where_updates_begin_in_backward_there_is_nothing_to_clip() -> None:
    model, optimizer = prepared(optimizer="cpu", overlap="backward")
    optimizer.backward(loss_of(model))
    for use in (lambda: clip_grad_norm_(model.parameters(), 1.0), lambda: model[0].weight.grad.mul_(0.5)):
        with pytest.raises(EngineError, match=r"updates have begun in that backward.*overlap='forward'"):
            use()
    optimizer.step()


# What people put into `.grad`


def test_none_counts_as_zeroed() -> None:
    model, optimizer = prepared()
    reference, stock = plain()
    for net in (model, reference):
        loss_of(net).backward()
        net[0].weight.grad = None
        del net[1].bias.grad
    optimizer.step()
    stock.step()
    assert_same(model, optimizer, reference)
    assert torch.equal(optimizer.full_grad(model[0].weight), torch.zeros(WIDTH, WIDTH))
    for net in (model, reference):  # the next is added to those that are left
        loss_of(net, 1).backward()
    assert_same_gradients(model, optimizer, reference)


ZEROING: dict[str, Callable[[nn.Module], Any]] = {
    "p.grad = None": lambda model: [setattr(p, "grad", None) for p in model.parameters()],
    "p.grad.zero_()": lambda model: [p.grad.zero_() for p in model.parameters()],
    "p.grad.detach_(), zero_()": lambda model: [(p.grad.detach_(), p.grad.zero_()) for p in model.parameters()],
    "p.grad.data.zero_()": lambda model: [p.grad.data.zero_() for p in model.parameters()],
    "torch._foreach_zero_": lambda model: torch._foreach_zero_([p.grad for p in model.parameters()]),
    "zero_grad of a parent": lambda model: nn.ModuleList([model]).zero_grad(),
    "zero_grad(False) of a parent": lambda model: nn.ModuleList([model]).zero_grad(set_to_none=False),
    "model.zero_grad": lambda model: model.zero_grad(),
}


@pytest.mark.parametrize("name", ZEROING)
def test_all_of_them_zeroed_is_zero_grad(name: str) -> None:
    model, optimizer = prepared()
    loss_of(model).backward()
    expected = [optimizer.full_grad(p) for p in model.parameters()]
    clip_grad_norm_(model.parameters(), 0.1)
    ZEROING[name](model)
    loss_of(model).backward()
    for p, grad in zip(model.parameters(), expected, strict=True):
        assert torch.equal(optimizer.full_grad(p), grad)
    ZEROING[name](model)
    assert optimizer.step().grad_norm == 0


def test_a_tensor_sets_the_gradient() -> None:
    model, optimizer = prepared()
    reference, stock = plain()
    for number in range(2):
        for net in (model, reference):
            loss_of(net).backward()
            net[0].weight.grad = torch.full((WIDTH, WIDTH), 0.5)
            net[1].bias.grad = net[1].bias.grad.detach()
            if number:
                loss_of(net, 1).backward()  # which adds to it
            clip_grad_norm_(net.parameters(), 0.3)
        step(optimizer, stock)
    assert_same(model, optimizer, reference)


def test_scaling_by_a_number_is_torchs() -> None:
    model, optimizer = prepared()
    reference, stock = plain()
    for net in (model, reference):
        loss_of(net).backward()
        for p in net.parameters():
            p.grad /= 4
            p.grad.data.mul_(torch.tensor(-0.5))
        net[0].weight.grad.mul_(3)
        torch._foreach_div_([p.grad for p in net[1].parameters()], 2)
    step(optimizer, stock)
    assert_same(model, optimizer, reference)


# What is refused


OPERATIONS: dict[str, tuple[Callable[[nn.Parameter], Any], str]] = {
    "clip_grad_value_": (lambda p: clip_grad_value_([p], 1.0), "clip_grad_value_ is not supported"),
    "SGD by hand": (lambda p: p.data.add_(p.grad, alpha=-0.1), "full_grad"),
    "adaptive clipping": (lambda p: p.grad.detach().norm(p=2, dim=0, keepdim=True), "some dimensions"),
    "another optimizer": (lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9).step(), "full_grad"),
    "torch.save": (lambda p: torch.save(p.grad, io.BytesIO()), "pickle"),
    "deepcopy": (lambda p: copy.deepcopy(p.grad), "deepcopy"),
    "clone": (lambda p: p.grad.clone(), "full_grad"),
    "add_": (lambda p: p.grad.add_(torch.ones_like(p)), "set_full_grad"),
    "a mask": (lambda p: p.grad.mul_(torch.ones_like(p)), "by other than a number"),
    "a factor": (lambda p: torch.ones_like(p).mul_(p.grad), "by other than a number"),
    "a divisor": (lambda p: torch._foreach_div_([torch.ones_like(p)], p.grad), "by other than a number"),
    "nothing left": (lambda p: p.grad.mul_(0), r"zero_grad\(\)"),
    "isfinite": (lambda p: torch.isfinite(p.grad).all(), "full_grad"),
    "mean": (lambda p: p.grad.abs().mean().item(), "full_grad"),
    "numpy": (lambda p: p.grad.cpu().numpy(), "numpy"),
    "tolist": (lambda p: p.grad.tolist(), "tolist"),
    "a vector of gradients": (lambda p: torch.cat([p.grad.view(-1), p.grad.view(-1)]), "full_grad"),
    "an address": (lambda p: p.grad.data_ptr(), "data_ptr"),
    "an element": (lambda p: p.grad[0], "full_grad"),
    "another's": (lambda p: torch.ones_like(p).copy_(p.grad), "full_grad"),
    "GradScaler": (lambda p: unscale(p), "GradScaler was given"),
}


def unscale(p: nn.Parameter) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD([p], lr=0.1))


def test_anything_else_is_refused_by_name() -> None:
    """The step that all refused operations leave possible comes in the end."""
    model, optimizer = prepared(inline)
    loss_of(model).backward()
    before = [optimizer.full_grad(p) for p in model.parameters()]
    for use, words in OPERATIONS.values():
        with pytest.raises(EngineError, match=r"'0\.weight'.*optimizer\.(set_)?full_grad") as caught:
            use(model[0].weight)
        assert caught.match(words)
    assert all(torch.equal(optimizer.full_grad(p), q) for p, q in zip(model.parameters(), before, strict=True))
    assert not optimizer.step().skipped


# The handle's own clip_grad_norm_


def test_torchs_word_for_the_greatest_is_read_too() -> None:
    model, optimizer = prepared()
    optimizer.backward(loss_of(model))
    expected = max(float(optimizer.full_grad(p).abs().max()) for p in model.parameters())
    assert float(optimizer.clip_grad_norm_(0.5, norm_type="inf")) == expected
    for wrong in ("largest", None, "-inf"):
        with pytest.raises(ConfigError, match=r"clip_grad_norm_\(norm_type="):
            optimizer.clip_grad_norm_(0.5, norm_type=wrong)


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
