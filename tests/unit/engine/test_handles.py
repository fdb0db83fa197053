"""What stands in `.grad` after backward: torch's own functions clip by it, and nothing is done to it in silence."""

import copy
import gc
import io
import math
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

import penstock
from penstock.engine.gradients.proxy import GradientProxy
from penstock.errors import EngineError
from tests.lib.engines import prepare_on
from tests.lib.streams import inline, separate
from tests.support import sampled_rows

WIDTH = 24
EVERYWHERE = {
    "read in place": (inline, penstock.Placement()),
    "gathered": (separate, penstock.Placement(params="cpu")),
    "split": (separate, penstock.Placement(params="cpu", grads={"device": 0.5, "cpu": 0.5}, optimizer="cpu")),
}


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    return model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))).float().square().sum()


def prepared(
    streams: Any = separate, precision: str = "fp32", model: nn.Module | None = None, **rest: Any
) -> tuple[nn.Module, penstock.Optimizer]:
    model = model or stack()
    given = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1, momentum=0.9)
    options = penstock.Options(tile_bytes=4096)
    return model, prepare_on(streams(), model, given, precision=precision, options=options, **rest)


def plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = stack()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1, momentum=0.9)


def assert_same(ours: nn.Module, optimizer: penstock.Optimizer, theirs: nn.Module) -> None:
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(optimizer.full_param(p), q.detach(), rtol=1e-6, atol=1e-7)


# Clipping as torch does it


@pytest.mark.parametrize(
    ("norm_type", "foreach", "where"),
    sampled_rows(product([2.0, math.inf, 1.0, 3.0], [None, True, False], EVERYWHERE), every=4),
)
def test_torchs_clip_grad_norm_clips_as_on_the_plain_model(where: str, foreach: bool | None, norm_type: float) -> None:
    streams, placement = EVERYWHERE[where]
    model, optimizer = prepared(streams, placement=placement)
    reference, stock = plain()
    for seed in range(3):
        for loss in (loss_of(model, seed), loss_of(model, seed + 10)):
            loss.backward()
        for loss in (loss_of(reference, seed), loss_of(reference, seed + 10)):
            loss.backward()
        found = clip_grad_norm_(model.parameters(), 0.5, norm_type, error_if_nonfinite=True, foreach=foreach)
        expected = clip_grad_norm_(reference.parameters(), 0.5, norm_type, error_if_nonfinite=True, foreach=foreach)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(optimizer.full_grad(p), q.grad, rtol=1e-5, atol=1e-7)
        optimizer.step()
        stock.step()
        optimizer.zero_grad()
        stock.zero_grad()
    assert_same(model, optimizer, reference)
    optimizer.close()


def test_it_is_the_same_step_as_the_optimizers_own_clip() -> None:
    def run(clip: Callable[[nn.Module, penstock.Optimizer], Tensor]) -> list[Tensor]:
        model, optimizer = prepared(precision="bf16")
        for seed in range(3):
            loss_of(model, seed).backward()
            clip(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        found = [optimizer.full_param(p) for p in model.parameters()]
        optimizer.close()
        return found

    ours = run(lambda model, optimizer: optimizer.clip_grad_norm_(0.5))
    for p, q in zip(run(lambda model, optimizer: clip_grad_norm_(model.parameters(), 0.5)), ours, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


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
    optimizer.close()


def test_error_if_nonfinite_raises_and_without_it_the_step_is_skipped() -> None:
    model, optimizer = prepared()
    before = [optimizer.full_param(p) for p in model.parameters()]
    for bad in (math.nan, math.inf):
        optimizer.set_full_grad(model[0][0].bias, torch.full((WIDTH,), bad))
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        assert not clip_grad_norm_(model.parameters(), 1.0).isfinite()
        with pytest.warns(UserWarning, match=r"0\.0\.bias") if math.isnan(bad) else nullcontext():
            assert optimizer.step().skipped
        optimizer.zero_grad()
    assert all(torch.equal(optimizer.full_param(p), q) for p, q in zip(model.parameters(), before, strict=True))
    optimizer.close()


@pytest.mark.parametrize("foreach", [None, True])
def test_groups_are_clipped_each_for_itself(foreach: bool | None) -> None:
    model, optimizer = prepared()
    reference, stock = plain()
    for seed in range(2):
        for net in (model, reference):
            loss_of(net, seed).backward()
            for part, limit in ((net[0], 0.1), (net[1], 0.2)):  # and the last is not clipped
                clip_grad_norm_(part.parameters(), limit, foreach=foreach)
        optimizer.step()
        stock.step()
        optimizer.zero_grad()
        stock.zero_grad()
    assert_same(model, optimizer, reference)
    optimizer.close()


@pytest.mark.parametrize("foreach", [None, True])
def test_gradients_of_ours_and_of_another_module_are_clipped_together(foreach: bool | None) -> None:
    model, optimizer = prepared()
    reference, stock = plain()
    norms = []
    for net in (model, reference):
        torch.manual_seed(1)
        other = nn.Linear(WIDTH, 3)
        other(net(torch.ones(2, WIDTH))).square().sum().backward()
        parameters = [*other.parameters(), *net.parameters()]
        norms.append(clip_grad_norm_(parameters, 0.3, foreach=foreach))
        norms.append(other.weight.grad)
    torch.testing.assert_close(norms[0], norms[2], rtol=1e-6, atol=0)
    torch.testing.assert_close(norms[1], norms[3], rtol=1e-6, atol=1e-9)
    optimizer.step()
    stock.step()
    assert_same(model, optimizer, reference)
    optimizer.close()


@pytest.mark.parametrize("foreach", [None, True])
def test_gradients_of_two_engines_are_clipped_together(foreach: bool | None) -> None:
    pairs = [prepared(), prepared()]
    references = [plain(), plain()]
    for (first, one), (second, two) in (pairs, references):
        second(first(torch.ones(4, WIDTH))).sum().backward()
        clip_grad_norm_([*first.parameters(), *second.parameters()], 0.3, foreach=foreach)
        one.step()
        two.step()
    for (model, optimizer), (reference, _) in zip(pairs, references, strict=True):
        assert_same(model, optimizer, reference)
        optimizer.close()


def test_a_tensor_that_was_set_is_clipped_beside_handles() -> None:
    model, optimizer = prepared()
    reference, stock = plain()
    for net in (model, reference):
        loss_of(net).backward()
        net[1][0].weight.grad = torch.ones(WIDTH, WIDTH)
        clip_grad_norm_(net.parameters(), 0.3)
    optimizer.step()
    stock.step()
    assert_same(model, optimizer, reference)
    optimizer.close()


def test_fp16_shows_unscaled_norms() -> None:
    model, optimizer = prepared(precision="fp16")
    optimizer.backward(loss_of(model) / 1000)
    expected = math.sqrt(sum(float(optimizer.full_grad(p).square().sum()) for p in model.parameters()))
    assert float(clip_grad_norm_(model.parameters(), expected / 2)) == pytest.approx(expected, rel=1e-5)
    assert optimizer.step().grad_norm == pytest.approx(expected / 2, rel=1e-4)
    optimizer.close()


def test_norms_are_taken_once_until_a_gradient_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = prepared()
    stepper = optimizer._engine.stepper
    taken = []
    measure = stepper.measure
    monkeypatch.setattr(stepper, "measure", lambda: taken.append(1) or measure())

    def norm() -> float:
        return float(get_total_norm([p.grad for p in model.parameters()]))

    loss_of(model).backward()
    first = norm()
    assert norm() == first
    clip_grad_norm_(model.parameters(), 1e9)
    assert len(taken) == 1
    loss_of(model).backward()
    assert norm() == pytest.approx(2 * first, rel=1e-5)
    optimizer.set_full_grad(model[0][0].weight, torch.zeros(WIDTH, WIDTH))
    assert norm() < 2 * first
    assert len(taken) == 3
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    optimizer.close()


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
    optimizer.close()


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
    model[1][0].weight.requires_grad_(False)
    model[2](model[0](torch.ones(1, WIDTH))).sum().backward()
    assert [p.grad is not None for p in model.parameters()] == [True, True, False, False, True, True]
    optimizer.zero_grad()
    model(torch.ones(1, WIDTH)).sum().backward()
    assert [p.grad is not None for p in model.parameters()] == [True, True, False, True, True, True]
    optimizer.close()


def test_forwards_and_autograd_grad_leave_them() -> None:
    model, optimizer = prepared()
    loss_of(model).backward()
    norm = get_total_norm([p.grad for p in model.parameters()])
    with torch.no_grad():
        loss_of(model)
    loss = loss_of(model)
    x = torch.ones(1, WIDTH, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x)
    del loss
    assert torch.equal(get_total_norm([p.grad for p in model.parameters()]), norm)
    optimizer.close()


class Penalised(nn.Module):
    """The loss reads a parameter that no forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.alone = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_parameter_that_the_loss_reads_gets_each_gradient_once(create_graph: bool) -> None:
    model, optimizer = prepared(inline, model=Penalised())
    model(torch.ones(1, WIDTH)).sum().backward()
    for count in range(1, 4):
        (model.alone * torch.arange(WIDTH)).sum().backward(create_graph=create_graph)
        assert torch.equal(optimizer.full_grad(model.alone), count * torch.arange(WIDTH).float())
        assert type(model.alone.grad) is GradientProxy
    optimizer.close()


def test_checkpointing_accumulation_and_retained_graphs() -> None:
    model, optimizer = prepared(separate)
    reference, _ = plain()
    for net in (model, reference):
        hidden = torch.utils.checkpoint.checkpoint(net[0], torch.ones(2, WIDTH), use_reentrant=False)
        loss = net[2](torch.utils.checkpoint.checkpoint(net[1], hidden, use_reentrant=True)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        clip_grad_norm_(net.parameters(), 0.7)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(optimizer.full_grad(p), q.grad, rtol=1e-5, atol=1e-8)
    optimizer.close()


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
    optimizer.close()


def test_where_updates_begin_in_backward_there_is_nothing_to_clip() -> None:
    model, optimizer = prepared(placement=penstock.Placement(optimizer="cpu"), overlap="backward")
    optimizer.backward(loss_of(model))
    for use in (lambda: clip_grad_norm_(model.parameters(), 1.0), lambda: model[0][0].weight.grad.mul_(0.5)):
        with pytest.raises(EngineError, match=r"updates have begun in that backward.*overlap='forward'"):
            use()
    optimizer.step()
    optimizer.close()


def test_dropped_engines_are_collected_with_their_handles() -> None:
    model, optimizer = prepared()
    loss_of(model).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    engine = weakref.ref(optimizer._engine)
    grad = model[0][0].weight.grad
    del model, optimizer
    gc.collect()
    assert engine() is None
    with pytest.raises(EngineError, match="closed"):
        grad.norm()


# What people put into `.grad`


def test_none_counts_as_zeroed() -> None:
    model, optimizer = prepared()
    reference, stock = plain()
    for net in (model, reference):
        loss_of(net).backward()
        net[0][0].weight.grad = None
        del net[1][0].bias.grad
    optimizer.step()
    stock.step()
    assert_same(model, optimizer, reference)
    assert torch.equal(optimizer.full_grad(model[0][0].weight), torch.zeros(WIDTH, WIDTH))
    for net in (model, reference):  # the next is added to those that are left
        loss_of(net, 1).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(optimizer.full_grad(p), q.grad, rtol=1e-5, atol=1e-8)
    optimizer.close()


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
    optimizer.close()


def test_a_tensor_sets_the_gradient() -> None:
    model, optimizer = prepared()
    reference, stock = plain()
    for step in range(2):
        for net in (model, reference):
            loss_of(net).backward()
            net[0][0].weight.grad = torch.full((WIDTH, WIDTH), 0.5)
            net[1][0].bias.grad = net[1][0].bias.grad.detach()
            if step:
                loss_of(net, 1).backward()  # which adds to it
        optimizer.step()
        stock.step()
        optimizer.zero_grad()
        stock.zero_grad()
    assert_same(model, optimizer, reference)
    optimizer.close()


def test_scaling_by_a_number_is_torchs() -> None:
    model, optimizer = prepared()
    reference, stock = plain()
    for net in (model, reference):
        loss_of(net).backward()
        for p in net.parameters():
            p.grad /= 4
            p.grad.data.mul_(torch.tensor(-0.5))
        net[0][0].weight.grad.mul_(3)
        torch._foreach_div_([p.grad for p in net[1].parameters()], 2)
    optimizer.step()
    stock.step()
    assert_same(model, optimizer, reference)
    optimizer.close()


# What is refused


OPERATIONS: dict[str, tuple[Callable[[nn.Parameter], Any], str]] = {
    "clip_grad_value_": (lambda p: clip_grad_value_([p], 1.0), "clip_grad_value_ is not supported"),
    "clip_grad_value_(foreach)": (lambda p: clip_grad_value_([p], 1.0, foreach=True), "clip_grad_value_"),
    "another optimizer": (lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9).step(), "full_grad"),
    "another AdamW": (lambda p: torch.optim.AdamW([p], lr=0.1).step(), "Another optimizer was given"),
    "torch.save": (lambda p: torch.save(p.grad, io.BytesIO()), "pickle"),
    "deepcopy": (lambda p: copy.deepcopy(p.grad), "deepcopy"),
    "clone": (lambda p: p.grad.clone(), "full_grad"),
    "add_": (lambda p: p.grad.add_(torch.ones_like(p)), "set_full_grad"),
    "noise": (lambda p: p.grad.add_(torch.randn(p.shape)), "set_full_grad"),
    "weight decay by hand": (lambda p: p.grad.add_(p.detach(), alpha=0.1), "set_full_grad"),
    "copy_": (lambda p: p.grad.copy_(torch.ones_like(p)), "set_full_grad"),
    "a mask": (lambda p: p.grad.mul_(torch.ones_like(p)), "by other than a number"),
    "a factor": (lambda p: torch.ones_like(p).mul_(p.grad), "by other than a number"),
    "a divisor": (lambda p: torch._foreach_div_([torch.ones_like(p)], p.grad), "by other than a number"),
    "nothing left": (lambda p: p.grad.mul_(0), r"zero_grad\(\)"),
    "isfinite": (lambda p: torch.isfinite(p.grad).all(), "full_grad"),
    "isnan": (lambda p: p.grad.isnan().any(), "full_grad"),
    "mean": (lambda p: p.grad.abs().mean().item(), "full_grad"),
    "numpy": (lambda p: p.grad.cpu().numpy(), "numpy"),
    "tolist": (lambda p: p.grad.tolist(), "tolist"),
    "a histogram": (lambda p: torch.histc(p.grad), "full_grad"),
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


@pytest.mark.parametrize("name", OPERATIONS)
def test_anything_else_is_refused_by_name(name: str) -> None:
    use, words = OPERATIONS[name]
    model, optimizer = prepared(inline)
    loss_of(model).backward()
    before = [optimizer.full_grad(p) for p in model.parameters()]
    with pytest.raises(EngineError, match=r"'0\.0\.weight'.*optimizer\.(set_)?full_grad") as caught:
        use(model[0][0].weight)
    assert caught.match(words)
    assert all(torch.equal(optimizer.full_grad(p), q) for p, q in zip(model.parameters(), before, strict=True))
    assert not optimizer.step().skipped
    optimizer.close()


def test_gradients_that_are_not_reduced_are_not_clipped(tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, optimizer = prepared(inline)
        loss_of(model).backward()
        with pytest.raises(EngineError, match=r"c10d.*reduced over ranks already"):
            torch.distributed.all_reduce(model[0][0].weight.grad)
        optimizer.close()
    finally:
        torch.distributed.destroy_process_group()


def test_compiled_blocks_take_no_notice() -> None:
    model, optimizer = prepared(separate)
    loss_of(model).backward()
    model[0].compile(backend="aot_eager")
    loss_of(model).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    assert not optimizer.step().skipped
    optimizer.close()
