"""What people and autograd keep of a unit that is released: nothing of it faults, and nothing is silently wrong."""

import copy
import gc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.engine.unit.unit import UnitState
from tests.lib.engines import ON_CPU, adamw, assert_same_state, loss_of, prepared, state, train
from tests.lib.models import Blocks
from tests.lib.ranks import run_ranks
from tests.lib.streams import STREAMS, is_released

WIDTH = 16


def block() -> nn.Module:
    """A matrix, a weight that autograd saves as it is, and what is not linear."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())


def stack() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[block() for _ in range(3)], nn.Linear(WIDTH, 1))


def ready(model: nn.Module, streams: str = "separate", **how: Any) -> penstock.Optimizer:
    """On the cpu, unless it is told where."""
    _, optimizer = prepared(model, STREAMS[streams], stock=lambda p: torch.optim.SGD(p, lr=0.1), **{**ON_CPU, **how})
    return optimizer


def assert_gradients(optimizer: penstock.Optimizer, model: nn.Module, plain: nn.Module) -> None:
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        expected = torch.zeros_like(other) if other.grad is None else other.grad
        assert torch.equal(optimizer.full_grad(parameter), expected), name


def assert_released(optimizer: penstock.Optimizer) -> None:
    engine = optimizer._engine
    assert engine.gatherer.live_bytes == 0
    assert {unit.holding.unit_state for unit in engine.context.units if not unit.resident} <= {UnitState.RELEASED}


# Backwards of backwards

Backward = Callable[[Tensor], None]


def gradient_penalty(model: nn.Module, backward: Backward) -> None:
    """An ordinary loop of WGAN-GP: forwards run between the recorded backward and its own."""
    x = torch.randn(4, WIDTH).requires_grad_()
    (of_input,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    penalty = ((of_input.norm(dim=1) - 1) ** 2).mean()
    real, fake = model(torch.randn(4, WIDTH)).mean(), model(torch.randn(4, WIDTH)).mean()
    backward(fake - real + 10 * penalty)


def recorded_twice(model: nn.Module, backward: Backward) -> None:
    """Two recorded graphs that live at once, each with forwards after it."""
    penalties = []
    for _ in range(2):
        x = torch.randn(4, WIDTH).requires_grad_()
        (of_input,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        penalties.append(of_input.square().sum())
        model(torch.randn(2, WIDTH))
    backward(penalties[0])
    model(torch.randn(2, WIDTH))
    backward(penalties[1])


def _on_two_ranks(rank: int) -> None:
    for work in (gradient_penalty, recorded_twice):
        model = stack()
        plain = copy.deepcopy(model)
        optimizer = ready(model, "late")
        torch.manual_seed(0)  # the same data: the mean over ranks is the gradient of each
        work(plain, lambda loss: loss.backward())
        torch.manual_seed(0)
        work(model, optimizer.backward)
        if rank == 0:
            gc.collect()
        for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(optimizer.full_grad(parameter), other.grad, rtol=1e-6, atol=1e-6)
        assert not optimizer.step().skipped
        optimizer.close()


def test_a_backward_of_a_backward_on_two_ranks() -> None:
    run_ranks(_on_two_ranks, 2)


def test_what_a_recorded_graph_needs_goes_with_the_graph() -> None:
    model = stack()
    optimizer = ready(model)
    x = torch.randn(4, WIDTH).requires_grad_()
    (of_input,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    first, *_ = optimizer._engine.context.units
    with torch.no_grad():
        model(x)
    assert all(unit.recorded.shown is not None for unit in optimizer._engine.context.units)
    del of_input
    with torch.no_grad():
        model(x)
    assert all(unit.recorded.shown is None for unit in optimizer._engine.context.units)
    assert is_released(next(model.parameters()))
    assert first.holding.unit_state is UnitState.RELEASED


def penalty_of(model: nn.Module) -> Tensor:
    """A recorded graph, with respect to the parameters; its forward's own graph goes."""
    torch.manual_seed(1)
    gradients = torch.autograd.grad(model(torch.randn(4, WIDTH)).sum(), list(model.parameters()), create_graph=True)
    return sum((g.square().sum() for g in gradients), torch.zeros(()))


ON_DEVICE = dict.fromkeys(ON_CPU, "device")


@pytest.mark.parametrize(
    ("streams", "between", "where"),
    [
        ("inline", "step", ON_CPU),
        ("separate", "move", ON_DEVICE),
        ("late", "move", ON_CPU),
        ("released", "step", ON_CPU),
    ],
)
def test_a_recorded_graph_outlives_a_step_without_gradients_and_a_move(
    streams: str, between: str, where: dict[str, str], tmp_path: Path
) -> None:
    model = stack()
    plain = copy.deepcopy(model)
    optimizer = ready(model, streams, nvme_path=tmp_path, **where)
    penalties = penalty_of(model), penalty_of(plain)
    if between == "step":
        optimizer.step()
        with torch.no_grad():
            model(torch.randn(1, WIDTH))
    else:
        optimizer.offload_states(to="nvme")
    optimizer.backward(penalties[0])
    penalties[1].backward()
    assert_gradients(optimizer, model, plain)
    optimizer.reload_states()
    assert not optimizer.step().skipped


@pytest.mark.parametrize("streams", ["inline", "released"])
def test_a_recorded_graph_that_outlives_an_update_is_refused_and_the_loop_goes_on(streams: str) -> None:
    model = stack()
    optimizer = ready(model, streams)
    penalty = penalty_of(model)
    optimizer.backward(model(torch.randn(1, WIDTH)).sum())
    optimizer.step()
    assert torch.isfinite(model(torch.randn(1, WIDTH))).all()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        optimizer.backward(penalty)
    optimizer.zero_grad()
    optimizer.backward(model(torch.randn(1, WIDTH)).sum())
    assert not optimizer.step().skipped


# What people keep


@pytest.mark.parametrize("keep", [lambda p: p.detach().numpy(), lambda p: p.detach().view(-1), lambda p: p.data.t()])
@pytest.mark.parametrize("streams", STREAMS)
def test_what_is_kept_of_gathered_has_its_values(keep: Callable[[Tensor], Any], streams: str) -> None:
    model = stack()
    optimizer = ready(model, streams)
    weight = model[0][0].weight
    with optimizer.gathered():
        kept = keep(weight)
        values = torch.as_tensor(kept).clone()
    for _ in range(2):  # the engine goes on
        optimizer.backward(model(torch.randn(2, WIDTH)).sum())
        optimizer.zero_grad()
    assert torch.equal(torch.as_tensor(kept), values)
    optimizer.backward(model(torch.randn(2, WIDTH)).sum())
    assert not optimizer.step().skipped
    if streams != "inline":  # where parameters rest in place a view shows the update, as in plain torch
        assert torch.equal(torch.as_tensor(kept), values)
    optimizer.close()
    assert torch.isfinite(torch.as_tensor(kept)).all()


class Keeps(nn.Module):
    """Keeps a view of its weight beyond its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.linear.weight.detach().view(-1)
        return self.linear(x)


@pytest.mark.parametrize("streams", ["separate", "late", "released"])
def test_a_view_that_is_kept_beyond_a_forward_reads_nan(streams: str) -> None:
    model = nn.Sequential(Keeps(), Keeps())
    optimizer = ready(model, streams)
    loss = model(torch.randn(2, WIDTH)).sum()
    assert model[0].kept.isnan().all()
    optimizer.backward(loss)
    assert model[0].kept.isnan().all()
    assert not optimizer.step().skipped
    assert model[0].kept.isnan().all()
    for module in model:
        del module.kept
    optimizer.zero_grad()
    optimizer.backward(model(torch.randn(2, WIDTH)).sum())


def test_a_users_saved_tensor_hook_that_uses_numpy() -> None:
    model = stack()
    plain = copy.deepcopy(model)
    optimizer = ready(model)
    for _ in range(2):
        x = torch.randn(2, WIDTH)
        for each, backward in ((plain, lambda loss: loss.backward()), (model, optimizer.backward)):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy(), torch.from_numpy):
                loss = each(x).square().sum()
            backward(loss)
        assert_gradients(optimizer, model, plain)
        plain.zero_grad()
        optimizer.zero_grad()


def test_close_inside_gathered() -> None:
    model = stack()
    values = copy.deepcopy(model.state_dict())
    optimizer = ready(model)
    with optimizer.gathered():
        optimizer.close()
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())

    optimizer = ready(model)
    with optimizer.gathered(modify=True):
        with torch.no_grad():
            model[0][0].weight.fill_(1)
        with pytest.raises(penstock.EngineError, match=r"gathered\(modify=True\)"):
            optimizer.close()
    optimizer.close()
    assert (model[0][0].weight == 1).all()


# Transforms


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_functorch_is_refused_by_name_where_units_are_released(transform: Callable[..., Any]) -> None:
    model = stack()
    optimizer = ready(model)
    x = torch.randn(1, WIDTH)
    with pytest.raises(penstock.EngineError, match=r"torch\.func.*unit '0'"):
        transform(lambda x: model(x).sum())(x)
    optimizer.backward(model(x).sum())
    assert not optimizer.step().skipped


def test_functorch_works_where_parameters_are_read_in_place() -> None:
    model = stack()
    optimizer = ready(model, "inline")
    x = torch.randn(1, WIDTH)
    expected = torch.func.grad(lambda x: copy.deepcopy(stack())(x).sum())(x)
    assert torch.equal(torch.func.grad(lambda x: model(x).sum())(x), expected)
    optimizer.backward(model(x).sum())
    assert not optimizer.step().skipped


# Reads outside of the module's own forward


class Bias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self) -> Tensor:
        return self.bias


class Method(nn.Linear):
    def run(self, x: Tensor) -> Tensor:
        return (x @ self.weight).tanh()


class Reads(nn.Module):
    """Reads its children's weights, before and after they run, and one that a child returns; calls no `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.returns = Bias()
        self.method = Method(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        before = x @ self.linear.weight
        x = self.norm(self.linear(x)) + before * self.norm.weight
        bias = self.returns()
        return self.method.run((x * bias).square() + bias)


class CallsForward(nn.Module):
    """Blocks that run by their `forward` method alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Reads() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for each in self.blocks:
            x = each.forward(x)
        return x


READS = {Reads: (nn.Linear, nn.LayerNorm, Bias), CallsForward: None}


@pytest.mark.parametrize(
    "hooks", [nullcontext, lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)]
)
@pytest.mark.parametrize("streams", ["separate", "released"])
@pytest.mark.parametrize("make", READS)
def test_parameters_that_are_read_outside_of_their_modules_forward(
    make: type[nn.Module], streams: str, hooks: Callable[[], Any]
) -> None:
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    optimizer = ready(model, streams, units=READS[make])
    x = torch.randn(3, 4, WIDTH)
    for _ in range(2):
        with hooks():
            loss = model(x).square().sum()
        expected = plain(x).square().sum()
        with torch.no_grad():
            assert torch.equal(model(x).square().sum(), expected)
        assert torch.equal(loss, expected)
        optimizer.backward(loss)
        expected.backward()
        assert_gradients(optimizer, model, plain)
        plain.zero_grad()
        optimizer.zero_grad()
    del loss
    assert_released(optimizer)
    optimizer.close()
    assert all(type(module._parameters) is dict for module in model.modules())


def test_a_unit_that_was_never_announced_is_named() -> None:
    model = Blocks()
    model.order = [0]
    optimizer = ready(model)
    # `vmap` reads the parameter past its class; all else is refused when it is read (`test_reads.py`).
    read = torch.vmap(lambda row: row.square().sum())(model.blocks[1].up.weight)
    with pytest.raises(
        penstock.EngineError, match=r"'blocks\.1\.up.weight' got a gradient.*unit 'blocks\.1'.*gathered"
    ):
        optimizer.backward(loss_of(model) + read.sum())
    optimizer.zero_grad()
    optimizer.backward(loss_of(model))
    assert not optimizer.step().skipped


# The option


@pytest.mark.parametrize(("where", "ask"), [({}, "option"), (ON_CPU, "environment")])
def test_debug_release_releases_everything_and_changes_nothing(
    where: dict[str, str], ask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for debug in (False, True):
        if debug and ask == "environment":
            monkeypatch.setenv("PENSTOCK_DEBUG_RELEASE", "1")
        model = stack()
        optimizer = penstock.prepare(
            model,
            adamw(model.parameters()),
            placement=penstock.Placement(**where),
            max_grad_norm=1.0,
            options=penstock.Options(debug_release=debug and ask == "option"),
        )
        train(model, optimizer, 3)
        assert is_released(next(model.parameters())) == debug
        results.append(state(model, optimizer))
        optimizer.close()
    assert_same_state(*results)
