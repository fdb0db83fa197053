"""The generic rule runs the user's class: the same numbers as the class itself, in every partition the same bits."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import ConfigError
from penstock.rules import Pool, StateFormat, UpdateSlice, rule_for
from penstock.rules.generic import GenericRule, GenericScalars
from tests.unit.rules.classes import Base, parameters

NUMEL = 20_000
CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.RMSprop, {"lr": 1e-3}),
    (torch.optim.RMSprop, {"lr": 1e-3, "centered": True, "momentum": 0.9, "weight_decay": 0.1, "maximize": True}),
    (torch.optim.Adadelta, {"lr": 0.5}),
    (torch.optim.Adamax, {"lr": 1e-3}),
    (torch.optim.NAdam, {"lr": 1e-3, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    (torch.optim.RAdam, {"lr": 1e-3}),
    (torch.optim.ASGD, {"lr": 1e-2, "t0": 2, "lambd": 0.1}),
    (torch.optim.Rprop, {"lr": 1e-3}),
]


@penstock.elementwise
class SignMomentum(Base):
    """Keeps a count as a Python number."""

    def one(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["count"] = state.get("count", 0) + 1
        average = state.setdefault("average", torch.zeros_like(p)).mul_(0.9).add_(grad)
        p.sub_(average.sign(), alpha=group["lr"] / state["count"])


def gradients(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(NUMEL, generator=generator) for _ in range(steps)]


def run(optimizer: Any, value: Tensor, format_: StateFormat, *, cut: int, steps: int) -> tuple[Tensor, Any, Any]:
    """Several steps of the rule on a parameter cut into segments. Returns value, states and scalars."""
    rule = rule_for(optimizer, format_)
    assert isinstance(rule, GenericRule)
    param = value.clone()
    states = tuple(torch.zeros(NUMEL, dtype=spec.dtype) for spec in rule.states)
    scalars: Any = {}
    for step, grad in enumerate(gradients(steps), start=1):
        step_scalars = rule.step_scalars(optimizer.param_groups[0], step, scalars)
        for start in range(0, NUMEL, cut):
            part = slice(start, start + cut)
            update_slice = UpdateSlice(param[part], grad[part], None, tuple(s[part] for s in states), first=start)
            rule.update(update_slice, step_scalars, 1.0, None)
        scalars = rule.advance(step_scalars)
    return param, dict(zip((spec.name for spec in rule.states), states, strict=True)), scalars


@pytest.mark.parametrize(("cls", "options"), [*CLASSES, (SignMomentum, {})])
def test_as_the_class_itself_and_in_every_partition(cls: Any, options: dict[str, Any]) -> None:
    value = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))
    theirs = nn.Parameter(value.clone())
    stock = cls([theirs], **options)
    for grad in gradients(5):
        theirs.grad = grad.clone()
        stock.step()
    param, states, scalars = run(cls(parameters(), **options), value, StateFormat(), cut=NUMEL, steps=5)
    torch.testing.assert_close(param, theirs.detach(), rtol=2e-6, atol=1e-8)
    for name, kept in stock.state[theirs].items():
        if name in states:
            torch.testing.assert_close(states[name], kept, rtol=1e-5, atol=1e-8)
        elif kept is not None:
            assert scalars[name] == (kept.item() if isinstance(kept, Tensor) else kept), name
    for cut in (256 * 5, 256 * 50):
        again, others, _ = run(cls(parameters(), **options), value, StateFormat(), cut=cut, steps=5)
        assert torch.equal(again, param)
        assert all(torch.equal(others[name], states[name]) for name in states)


@pytest.mark.parametrize(("cls", "options"), [CLASSES[1], CLASSES[4], (SignMomentum, {})])
def test_threads_change_no_bit(cls: Any, options: dict[str, Any]) -> None:
    numel = 3 * (1 << 16) + 12_345
    generator = torch.Generator().manual_seed(3)
    value, grad = torch.randn(numel, generator=generator), torch.randn(numel, generator=generator)
    optimizer = cls(parameters(), **options)
    rule = rule_for(optimizer)
    states = [0.5 + 0.2 * torch.rand(numel, generator=generator) for _ in rule.states]
    scalars = rule.advance(rule.step_scalars(optimizer.param_groups[0], 1))
    step_scalars = rule.step_scalars(optimizer.param_groups[0], 2, scalars)

    def updated(threads: int, pool: Pool | None) -> list[Tensor]:
        update_slice = UpdateSlice(value.clone(), grad, None, tuple(state.clone() for state in states))
        torch.set_num_threads(threads)
        rule.update(update_slice, step_scalars, 1.0, pool)
        return [update_slice.param, *update_slice.states]

    before, pool = torch.get_num_threads(), Pool(2)
    try:
        alone = updated(1, None)
        for threads, given in ((3, None), (1, pool), (2, pool), (3, pool)):
            assert all(map(torch.equal, updated(threads, given), alone)), threads
    finally:
        torch.set_num_threads(before)
        pool.close()


def test_what_the_rule_cannot_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"state_dtype='int8'\) is not for rmsprop"):
        rule_for(torch.optim.RMSprop(parameters()), StateFormat("int8"))
    with pytest.raises(
        ConfigError,
        match=r"Subclass is not supported\. Use exactly one of torch.*penstock\.elementwise",
    ):
        rule_for(type("Subclass", (SignMomentum,), {})(parameters()))
    with pytest.raises(ConfigError, match="give a class of torch"):
        penstock.elementwise(int)  # type: ignore[type-var]


def test_what_begins_after_prepare_is_refused() -> None:
    """A state of a parameter, and what is written into its group."""
    optimizer = torch.optim.RMSprop(parameters())
    rule = rule_for(optimizer)
    step_scalars = rule.step_scalars(optimizer.param_groups[0], 1)
    assert isinstance(step_scalars, GenericScalars)
    assert not step_scalars.keeps_zeros
    optimizer.param_groups[0]["momentum"] = 0.9
    update_slice = UpdateSlice(torch.zeros(4), torch.ones(4), None, (torch.zeros(4),))
    with pytest.raises(ConfigError, match="began to keep 'momentum_buffer' after prepare"):
        rule.update(update_slice, rule.step_scalars(optimizer.param_groups[0], 1), 1.0, None)

    @penstock.elementwise
    class Late(Base):
        def begin(self, group: dict[str, Any]) -> None:
            if group["lr"] > 1:
                group["late"] = True

    late = Late(parameters())
    rule = rule_for(late)
    late.param_groups[0]["lr"] = 2.0
    with pytest.raises(ConfigError, match="Late began to write 'late' into its parameter group after prepare"):
        rule.advance_group(late.param_groups[0])


def test_groups_with_other_options_are_not_merged() -> None:
    """Neighbours with equal scalars are updated as one. Those of two groups were, with the options of the last."""
    states = []
    for is_ours in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(16, 16)
        groups = [{"params": [model.weight], "weight_decay": 10.0}, {"params": [model.bias], "weight_decay": 0.0}]
        optimizer: Any = torch.optim.RMSprop(groups)
        if is_ours:
            optimizer = penstock.prepare(model, optimizer, precision="fp32")
        model(torch.ones(1, 16)).sum().backward()
        optimizer.step()
        read = optimizer.full_state if is_ours else lambda p, name, o=optimizer: o.state[p][name]
        states.append([read(parameter, "square_avg") for parameter in model.parameters()])
    for plain, ours in zip(*states, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=0)


@penstock.elementwise
class Counting(Base):
    """Counts its steps in the group, where the first one makes the entry."""

    def begin(self, group: dict[str, Any]) -> None:
        group["step"] = group.get("step", 0) + 1

    def one(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        mean = state.setdefault("mean", torch.zeros_like(p)).lerp_(grad, 0.1)
        p.sub_(mean, alpha=group["lr"] / (1 - 0.9 ** group["step"]))


@penstock.elementwise
class Averaging(Base):
    """Weighs each iterate by the largest learning rate so far, all of it kept in the group."""

    def __init__(self, params: Any, lr: float = 1e-1) -> None:
        super().__init__(params, lr, k=0, weight_sum=0.0, lr_max=-1.0, train_mode=True, phase=None)

    def begin(self, group: dict[str, Any]) -> None:
        group["lr_max"] = max(group["lr_max"], group["lr"])
        group["weight_sum"] += group["lr_max"] ** 2 * (group["k"] + 1)
        group["k"] += 1
        group["phase"] = "first" if group["k"] == 1 else "later"

    def one(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        z = state.setdefault("z", p.clone())
        p.lerp_(z, group["lr_max"] ** 2 * group["k"] / group["weight_sum"])
        p.sub_(grad, alpha=group["lr"] * 0.9)
        z.sub_(grad, alpha=group["lr"])


class Pair(nn.Module):
    """Two layers in two groups; the second is left out where asked, and gets no gradient then."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.second(self.first(x)) if both else self.first(x)


def trained(cls: Any, steps: range, optimizer: Any = None, model: Any = None, **prepared: Any) -> tuple[Any, Any]:
    """A model after some steps: by the class itself, or prepared where options are given."""
    if model is None:
        torch.manual_seed(0)
        model = Pair()
        optimizer = cls([{"params": [*model.first.parameters()]}, {"params": [*model.second.parameters()], "lr": 0.05}])
        if prepared:
            optimizer = penstock.prepare(model, optimizer, precision="fp32", **prepared)
    for step in steps:
        optimizer.param_groups[0]["lr"] = 0.01 * (step + 1)  # as a scheduler does
        model(torch.full((2, 16), 1.0 + step), both=step not in (0, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def options(optimizer: Any) -> list[dict[str, Any]]:
    return [{name: v for name, v in group.items() if name != "params"} for group in optimizer.param_groups]


@pytest.mark.parametrize("cls", [Counting, Averaging])
@pytest.mark.parametrize("overlap", ["none", "backward"])
def test_what_a_class_writes_into_its_group_is_kept_saved_and_loaded(cls: Any, overlap: Any, tmp_path: Path) -> None:
    """It went with the copy of the group that the class had run on: a count stayed at 1, and the loss was another."""
    theirs, stock = trained(cls, range(6))
    storage = penstock.Placement(params="cpu", grads="cpu", optimizer="cpu")
    ours, optimizer = trained(cls, range(3), placement=storage, overlap=overlap)
    optimizer.save(tmp_path / "three")
    optimizer.close()
    ours, optimizer = trained(cls, range(0), placement=storage, overlap=overlap)
    optimizer.load(tmp_path / "three")
    trained(cls, range(3, 6), optimizer, ours)
    assert options(optimizer) == options(stock)
    for mine, plain in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(optimizer.full_param(mine), plain.detach(), rtol=1e-6, atol=1e-8)
        for name, kept in stock.state[plain].items():
            torch.testing.assert_close(optimizer.full_state(mine, name), kept, rtol=1e-6, atol=1e-8)
    optimizer.close()


def test_a_step_that_is_skipped_writes_nothing_into_groups() -> None:
    model, optimizer = trained(Counting, range(2), placement=penstock.Placement())
    model(torch.full((2, 16), torch.nan), both=True).sum().backward()
    assert optimizer.step().skipped
    assert [group["step"] for group in optimizer.param_groups] == [2, 2]
    optimizer.close()


class InAList(Base):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.seen: list[int] = []

    def begin(self, group: dict[str, Any]) -> None:
        self.seen.append(1)


class LaterNormed(Base):
    """Another one than it seems from its third step on."""

    def one(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        p.sub_(grad / grad.norm() if state["step"] == 3 else grad, alpha=group["lr"])


def begins(name: str, begin: Callable[[Any, dict[str, Any]], Any], **options: Any) -> Callable[[Any], Any]:
    """Make an optimizer of a class that does something with each group before its parameters."""
    return lambda params: penstock.elementwise(type(name, (Base,), {"begin": begin}))(params, **options)


def looks(name: str, look: Callable[..., Any], **options: Any) -> Callable[[Any], Any]:
    """The same of a class that does something with each parameter, its gradient, its state and its group."""

    def one(self: Any, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        look(p, grad, state, group)
        Base.one(self, p, grad, state, group)

    return lambda params: penstock.elementwise(type(name, (Base,), {"one": one}))(params, **options)


WRITES = "into its parameter group, "
PARTS = "is not element-wise: on a part of a parameter it computes something"
REFUSED: list[tuple[Callable[[Any], Any], str]] = [
    (
        looks("Estimating", lambda p, grad, state, group: group.update(d=max(group["d"], grad.norm().item())), d=1e-6),
        f"Estimating writes 'd' {WRITES}.* depends on more than the number of the step",
    ),
    (
        looks("PerParameter", lambda p, grad, state, group: group.update(calls=group.get("calls", 0) + 1)),
        f"PerParameter writes 'calls' {WRITES}.* depends on more than the number",
    ),
    (
        begins("Buffering", lambda self, group: group["buffer"].insert(0, 1), buffer=[None, None]),
        f"Buffering writes 'buffer' {WRITES}a list: Penstock can carry numbers",
    ),
    (
        begins("Tensors", lambda self, group: group["count"].add_(1), count=torch.zeros(())),
        f"Tensors writes 'count' {WRITES}a Tensor: Penstock can carry numbers",
    ),
    (
        begins("OnItself", lambda self, group: setattr(self, "count", getattr(self, "count", 0) + 1)),
        "OnItself keeps 'count' on the optimizer itself",
    ),
    (penstock.elementwise(InAList), "InAList keeps 'seen' on the optimizer itself"),
    (
        begins("Shared", lambda self, group: self.state.update(shared={"count": 1})),
        "Shared keeps 'shared' in its state, which is of no parameter",
    ),
    (
        looks("DecaysMatrices", lambda p, *_: p.mul_(1 - 1e-5) if p.dim() > 1 else p),
        f"DecaysMatrices {PARTS}",
    ),
    (
        looks("CentresFilters", lambda p, grad, *_: grad.sub_(grad.mean((1, 2, 3), True)) if p.dim() == 4 else p),
        f"CentresFilters {PARTS}",
    ),
    (looks("Normed", lambda p, grad, *_: grad.div_(grad.norm())), f"Normed {PARTS}"),
    (penstock.elementwise(LaterNormed), f"LaterNormed {PARTS}"),
    (begins("Failing", lambda self, group: group["nope"]), "Failing failed on small parameters: .*nope"),
    (
        looks("Rows", lambda p, grad, state, group: state.update(rows=torch.zeros(p.shape[0]))),
        r"Rows keeps 'rows', a tensor of shape \(16,\), for a parameter of shape",
    ),
    (lambda params: torch.optim.RMSprop(params, capturable=True), "capturable=True is not supported"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message.split()[0] for _, message in REFUSED])
def test_what_pieces_cannot_do_is_refused_by_name(make: Callable[[Any], Any], message: str) -> None:
    optimizer = make(parameters())
    before = deepcopy(options(optimizer)[0])
    with pytest.raises(ConfigError, match=message):
        rule_for(optimizer)
    assert options(optimizer)[0] == before


def test_methods_of_the_class_that_work_on_whole_parameters_are_missed_by_name() -> None:
    """`train` and `eval` of such a class exchange two sets of parameters, which are elsewhere once prepared."""

    @penstock.elementwise
    class Exchanging(Averaging):
        def eval(self) -> None: ...

    _, optimizer = trained(Exchanging, range(1), placement=penstock.Placement())
    assert not hasattr(optimizer, "eval")
    with pytest.raises(AttributeError, match=r"Exchanging\.eval is not there once the optimizer is prepared"):
        optimizer.eval()
    with pytest.raises(AttributeError, match="'Optimizer' object has no attribute 'nothing'"):
        optimizer.nothing  # noqa: B018
    optimizer.close()


@pytest.mark.parametrize("lr", [0.0, 1e-6, 0.1])
@pytest.mark.parametrize("dims", [1, 2, 4])
def test_a_class_that_looks_at_the_shape_is_found_out_at_any_learning_rate(dims: int, lr: float) -> None:
    """A warm-up begins at a rate of 0, where a trial of the parameters alone would see nothing."""

    @penstock.elementwise
    class Looking(Base):
        def one(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            p.sub_(grad, alpha=group["lr"] * (2 if p.dim() == dims else 1))

    with pytest.raises(ConfigError, match="Looking is not element-wise"):
        rule_for(Looking([nn.Parameter(torch.zeros(4, 4))], lr=lr))
