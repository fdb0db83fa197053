"""The generic rule runs the user's class: the same numbers as the class itself, in every partition the same bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import ConfigError
from penstock.rules import Pool, Segment, StateFormat, rule_for
from penstock.rules.generic import Generic, GenericHyper

NUMEL = 40_000
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
class SignMomentum(torch.optim.Optimizer):
    """Keeps a count as a Python number."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["count"], state["average"] = 0, torch.zeros_like(p)
                state["count"] += 1
                state["average"].mul_(0.9).add_(p.grad)
                p.sub_(state["average"].sign(), alpha=group["lr"] / state["count"])


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(4))]


def gradients(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(NUMEL, generator=generator) for _ in range(steps)]


def run(optimizer: Any, value: Tensor, format_: StateFormat, *, cut: int, steps: int) -> tuple[Tensor, Any, Any]:
    """Several steps of the rule on a parameter cut into segments. Returns value, states and scalars."""
    rule = rule_for(optimizer, format_)
    assert isinstance(rule, Generic)
    param = value.clone()
    states = tuple(torch.zeros(NUMEL, dtype=spec.dtype) for spec in rule.states)
    scalars: Any = {}
    for step, grad in enumerate(gradients(steps), start=1):
        hyper = rule.hyper(optimizer.param_groups[0], step, scalars)
        for start in range(0, NUMEL, cut):
            part = slice(start, start + cut)
            segment = Segment(param[part], grad[part], None, tuple(s[part] for s in states), first=start)
            rule.update(segment, hyper, 1.0, None)
        scalars = rule.advance(hyper)
    return param, dict(zip((spec.name for spec in rule.states), states, strict=True)), scalars


@pytest.mark.parametrize(("cls", "options"), [*CLASSES, (SignMomentum, {})])
def test_as_the_class_itself_and_in_every_partition(cls: Any, options: dict[str, Any]) -> None:
    value = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))
    theirs = nn.Parameter(value.clone())
    stock = cls([theirs], **options)
    for grad in gradients(10):
        theirs.grad = grad.clone()
        stock.step()
    param, states, scalars = run(cls(parameters(), **options), value, StateFormat(), cut=NUMEL, steps=10)
    torch.testing.assert_close(param, theirs.detach(), rtol=2e-6, atol=1e-8)
    for name, kept in stock.state[theirs].items():
        if name in states:
            torch.testing.assert_close(states[name], kept, rtol=1e-5, atol=1e-8)
        elif kept is not None:
            assert scalars[name] == (kept.item() if isinstance(kept, Tensor) else kept), name
    for cut in (256 * 5, 256 * 70):
        again, others, _ = run(cls(parameters(), **options), value, StateFormat(), cut=cut, steps=10)
        assert torch.equal(again, param)
        assert all(torch.equal(others[name], states[name]) for name in states)


@pytest.mark.parametrize(("cls", "options"), [*CLASSES, (SignMomentum, {})])
def test_threads_change_no_bit(cls: Any, options: dict[str, Any]) -> None:
    numel = 3 * (1 << 16) + 12_345
    generator = torch.Generator().manual_seed(3)
    value, grad = torch.randn(numel, generator=generator), torch.randn(numel, generator=generator)
    optimizer = cls(parameters(), **options)
    rule = rule_for(optimizer)
    states = [0.5 + 0.2 * torch.rand(numel, generator=generator) for _ in rule.states]
    scalars = rule.advance(rule.hyper(optimizer.param_groups[0], 1))
    hyper = rule.hyper(optimizer.param_groups[0], 2, scalars)

    def updated(threads: int, pool: Pool | None) -> list[Tensor]:
        segment = Segment(value.clone(), grad, None, tuple(state.clone() for state in states))
        torch.set_num_threads(threads)
        rule.update(segment, hyper, 1.0, pool)
        return [segment.param, *segment.states]

    before, pool = torch.get_num_threads(), Pool(2)
    try:
        alone = updated(1, None)
        for threads, given in ((3, None), (1, pool), (2, pool), (3, pool)):
            assert all(map(torch.equal, updated(threads, given), alone)), threads
    finally:
        torch.set_num_threads(before)
        pool.close()


def test_states_in_bf16() -> None:
    value = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))
    exact = run(torch.optim.RMSprop(parameters(), lr=1e-3), value, StateFormat(), cut=NUMEL, steps=10)
    format_ = StateFormat("bf16", "stochastic", seed=3)
    found = [
        run(torch.optim.RMSprop(parameters(), lr=1e-3), value, format_, cut=cut, steps=10) for cut in (NUMEL, 256 * 5)
    ]
    assert found[0][1]["square_avg"].dtype == torch.bfloat16
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1]["square_avg"].float(), exact[1]["square_avg"], rtol=0.05, atol=1e-6)


def test_eight_bits_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"state_dtype='int8'\) is not for rmsprop"):
        rule_for(torch.optim.RMSprop(parameters()), StateFormat("int8"))


def test_a_class_that_is_not_element_wise_is_found_out() -> None:
    @penstock.elementwise
    class Normed(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad /= p.grad.norm()
            return super().step(closure)

    with pytest.raises(ConfigError, match="Normed is not element-wise: on a part of a parameter it computes something"):
        rule_for(Normed(parameters()))


def test_state_of_another_form_is_refused_by_name() -> None:
    @penstock.elementwise
    class Rows(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                self.state[p]["rows"] = torch.zeros(p.shape[0])
            return super().step(closure)

    with pytest.raises(ConfigError, match=r"Rows keeps 'rows', a tensor of shape \(8,\), for a parameter of shape"):
        rule_for(Rows(parameters()))


def test_only_the_declared_class_is_believed() -> None:
    class Subclass(SignMomentum):
        pass

    with pytest.raises(ConfigError, match=r"Subclass is not supported.*penstock\.elementwise"):
        rule_for(Subclass(parameters()))
    with pytest.raises(ConfigError, match="give a class of torch"):
        penstock.elementwise(int)  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (torch.optim.LBFGS, "LBFGS is not supported: it looks at all parameters at once"),
        (torch.optim.SparseAdam, "SparseAdam is not supported: it takes sparse gradients"),
    ],
)
def test_classes_across_elements_are_refused_with_the_reason(make: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rule_for(make(parameters()))


def test_a_state_that_begins_after_prepare_is_refused() -> None:
    optimizer = torch.optim.RMSprop(parameters())
    rule = rule_for(optimizer)
    optimizer.param_groups[0]["momentum"] = 0.9
    segment = Segment(torch.zeros(4), torch.ones(4), None, (torch.zeros(4),))
    with pytest.raises(ConfigError, match="began to keep 'momentum_buffer' after prepare"):
        rule.update(segment, rule.hyper(optimizer.param_groups[0], 1), 1.0, None)


def test_options_that_change_the_machinery_are_refused() -> None:
    with pytest.raises(ConfigError, match="capturable=True is not supported"):
        rule_for(torch.optim.RMSprop(parameters(), capturable=True))


def test_equal_groups_are_not_compared() -> None:
    rule = rule_for(torch.optim.RMSprop(parameters()))
    hyper = rule.hyper(torch.optim.RMSprop(parameters()).param_groups[0], 1)
    assert isinstance(hyper, GenericHyper)
    assert not hyper.keeps_zeros


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
