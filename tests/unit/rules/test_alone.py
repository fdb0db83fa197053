"""Classes that update each parameter by itself, and rules that are registered for classes: believed once tried out."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, EngineError
from penstock.optim import per_parameter, register
from penstock.rules import Segment, StateFormat, rule_for
from tests.unit.rules.test_whole import by_class, normal, numel_of, run, state


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape)) for shape in shapes or ((6, 4), (5,))]


class Base(torch.optim.Optimizer):
    """A step that calls `one` for each parameter."""

    def __init__(self, params: Any, lr: float = 0.1, **more: Any) -> None:
        super().__init__(params, {"lr": lr, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.one(p, self.state[p], group)

    def one(self, p: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        raise NotImplementedError


@per_parameter
class Normalised(Base):
    """Row norms, a count, and the running length of all gradients, in a constant number of bins."""

    def one(self, p: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        assert p.grad is not None
        if not state:
            state |= {"count": 0, "rows": p.new_zeros(p.shape[:1]), "bins": p.new_zeros(3), "mean": torch.zeros_like(p)}
            state["length"] = p.new_zeros(())
        state["count"] += 1
        state["rows"] = state["rows"] * 0.9 + p.grad.flatten(1).norm(dim=1) if p.dim() > 1 else state["rows"] + 1
        state["bins"][state["count"] % 3] += p.grad.norm()
        state["mean"].lerp_(p.grad, 0.1)
        state["length"] += p.grad.norm()
        p.grad.div_(p.grad.norm())
        p.sub_(p.grad + state["mean"] / state["length"] / state["count"], alpha=group["lr"])


@pytest.mark.parametrize("shape", [(12, 40), (9,)])
def test_a_declared_class_runs_on_whole_parameters(shape: Any) -> None:
    value, grads = normal(*shape), [normal(*shape, seed=s) for s in (1, 2, 3)]
    rule, segment = run(Normalised([nn.Parameter(value.clone())]), value, grads)
    theirs, kept = by_class(Normalised, value, grads)
    assert rule.scalar_names == ("count",)
    assert {s.name: numel_of(rule, s.name, shape) for s in rule.states} == {
        "rows": shape[0],
        "bins": 3,
        "mean": value.numel(),
        "length": 1,
    }
    assert torch.equal(segment.param.view(shape), theirs)
    for spec in rule.states:
        assert torch.equal(state(rule, segment, spec.name, kept[spec.name].numel()), kept[spec.name].flatten()), (
            spec.name
        )
    # The gradient, which the class has changed, is the engine's.
    assert torch.equal(segment.grad.view(shape), grads[-1])


def test_states_may_change_places() -> None:
    @per_parameter
    class Swapping(Base):
        def one(self, p: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
            assert p.grad is not None
            last = state.setdefault("last", torch.zeros_like(p))
            state["last"], state["before"] = p.grad.clone(), last
            if group["lr"] > 1:
                state["last"], state["before"] = state["before"], state["last"]
            p.sub_(state["before"], alpha=0.1)

    value, grads = normal(6, 8), [normal(6, 8, seed=s) for s in (1, 2, 3)]
    for lr in (0.1, 2.0):

        def make(params: Any, lr: float = lr) -> torch.optim.Optimizer:
            return Swapping(params, lr=lr)

        rule, segment = run(make([nn.Parameter(value.clone())]), value, grads)
        theirs, kept = by_class(make, value, grads)
        assert torch.equal(segment.param.view(6, 8), theirs)
        for name in ("last", "before"):
            assert torch.equal(state(rule, segment, name, 48).view(6, 8), kept[name]), name


def test_only_what_has_the_parameters_shape_is_stored_in_bf16() -> None:
    rule = rule_for(Normalised(parameters()), StateFormat("bf16"))
    assert {spec.name: spec.dtype for spec in rule.states} == {
        "rows": torch.float32,
        "bins": torch.float32,
        "mean": torch.bfloat16,
        "length": torch.float32,
    }
    with pytest.raises(ConfigError, match=r"state_dtype='int8'\) is not for normalised"):
        rule_for(Normalised(parameters()), StateFormat("int8"))


def test_a_subclass_is_another_class() -> None:
    class Sub(Normalised):
        pass

    with pytest.raises(ConfigError, match=r"Sub is not supported.*per_parameter"):
        rule_for(Sub(parameters()))


def test_what_looks_at_several_parameters_is_found_out() -> None:
    @per_parameter
    class Global(Base):
        def step(self, closure: Any = None) -> Any:
            group = self.param_groups[0]
            norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
            with torch.no_grad():
                for p in group["params"]:
                    p.sub_(p.grad / norm)

    with pytest.raises(ConfigError, match="Global does not update each parameter by itself"):
        rule_for(Global(parameters()))


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (
            lambda p: p.new_zeros(p.numel() + 1),
            r"keeps 'kept' of shape \(36,\) for a parameter of shape \(5, 7\), and \(25,\)",
        ),
        (lambda p: p.new_zeros(p.numel()), r"keeps 'kept' of shape \(35,\)"),
        (lambda p: p.norm().item(), "keeps 'kept', a float of the data"),
        (lambda p: torch.ones_like(p).long(), r"keeps 'kept', a tensor of torch\.int64"),
        (lambda p: ["a list"], "keeps 'kept', a list"),
    ],
)
def test_state_of_another_form_is_refused_by_name(keep: Any, message: str) -> None:
    @per_parameter
    class Keeping(Base):
        def one(self, p: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
            state["kept"] = keep(p)

    with pytest.raises(ConfigError, match=message):
        rule_for(Keeping(parameters((6, 4))))


def test_a_class_that_fails_is_named_with_the_shape() -> None:
    @per_parameter
    class Failing(Base):
        def one(self, p: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
            raise KeyError("nope")

    with pytest.raises(ConfigError, match=r"Failing failed on a small parameter of shape \(5, 7\): .*nope"):
        rule_for(Failing(parameters((6, 4))))
    with pytest.raises(ConfigError, match="on a parameter of 0 dimensions"):
        rule_for(Normalised(parameters(())))


def test_forms_that_sizes_decide_end_at_the_first_update_of_a_large_one() -> None:
    @per_parameter
    class Factored(Base):
        def one(self, p: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
            state.setdefault("kept", torch.zeros_like(p) if p.shape[0] < 16 else p.new_zeros(p.shape[:1]))

    optimizer = Factored(parameters((20, 4)))
    rule = rule_for(optimizer)
    segment = Segment(torch.zeros(80), torch.ones(80), None, (torch.zeros(80),), (), 0, (20, 4))
    with pytest.raises(ConfigError, match=r"keeps 'kept' of shape \(20,\) for a parameter of shape \(20, 4\)"):
        rule.update(segment, rule.hyper(optimizer.param_groups[0], 1), 1.0, None)


def test_a_state_that_begins_after_prepare_is_refused() -> None:
    @per_parameter
    class Late(Base):
        def one(self, p: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
            if group["momentum"]:
                state["mean"] = torch.zeros_like(p)

    optimizer = Late(parameters((6, 4)), momentum=0.0)
    rule = rule_for(optimizer)
    optimizer.param_groups[0]["momentum"] = 0.9
    segment = Segment(torch.zeros(24), torch.ones(24), None, (), (), 0, (6, 4))
    with pytest.raises(ConfigError, match=r"began to keep 'mean' of a parameter of shape \(6, 4\) after prepare"):
        rule.update(segment, rule.hyper(optimizer.param_groups[0], 1), 1.0, None)


class Descent(Base):
    """A class, and below three rules for it."""

    def one(self, p: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        assert p.grad is not None
        mean = state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.5)
        p.sub_(mean / mean.norm(), alpha=group["lr"])


class DescentRule:
    def states(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        return {"mean": shape}

    def update(
        self, matrix: Tensor, grad: Tensor, states: Mapping[str, Tensor], group: Mapping[str, Any], step: int
    ) -> None:
        mean = states["mean"].lerp_(grad, 0.5)
        matrix.sub_(mean / mean.norm(), alpha=group["lr"])


def test_the_example_of_the_page() -> None:
    page = (Path(__file__).parents[3] / "docs" / "rules.md").read_text()
    (block,) = [text for text in re.findall(r"```python\n(.*?)```", page, re.S) if "register(" in text]
    names: dict[str, Any] = {}
    exec(block, names)
    cls, value, grads = names["RowNormalised"], normal(6, 9), [normal(6, 9, seed=s) for s in (1, 2)]
    rule, segment = run(cls([nn.Parameter(value.clone())]), value, grads)
    theirs, _ = by_class(cls, value, grads)
    assert [spec.name for spec in rule.states] == ["mean"]
    assert torch.equal(segment.param.view(6, 9), theirs)


def fresh() -> type[Descent]:
    return type("Fresh", (Descent,), {})


def test_a_registered_rule_is_believed() -> None:
    cls = fresh()
    assert register(cls)(DescentRule) is DescentRule
    value, grads = normal(12, 40), [normal(12, 40, seed=s) for s in (1, 2)]
    rule, segment = run(cls([nn.Parameter(value.clone())]), value, grads)
    theirs, kept = by_class(cls, value, grads)
    assert torch.equal(segment.param.view(12, 40), theirs)
    assert torch.equal(state(rule, segment, "mean", 480).view(12, 40), kept["mean"])
    unstated: Any = rule
    assert unstated.working_bytes((1024, 1024)) >= 6 * 4 * 1024**2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m, g, s: m.add_(1e-3),
            r"something else than the class: after 2 updates .* \(6, 4\), the parameter differs by up to 0\.002",
        ),
        (lambda m, g, s: s["mean"].add_(1.0), r"'mean' differs by up to|the parameter differs"),
        (lambda m, g, s: g.mul_(2), "changes the gradient"),
        (lambda m, g, s: s["other"], r"failed beside it on a parameter of shape \(6, 4\): .*other"),
    ],
)
def test_a_registered_rule_that_differs_is_refused(change: Any, message: str) -> None:
    class Wrong(DescentRule):
        def update(
            self, matrix: Tensor, grad: Tensor, states: Mapping[str, Tensor], group: Mapping[str, Any], step: int
        ) -> None:
            super().update(matrix, grad, states, group, step)
            change(matrix, grad, states)

    cls = fresh()
    register(cls, Wrong())
    with pytest.raises(ConfigError, match=message):
        rule_for(cls(parameters((6, 4))))


def test_what_fails_in_an_update_names_class_and_shape() -> None:
    class Minds(DescentRule):
        def update(
            self, matrix: Tensor, grad: Tensor, states: Mapping[str, Tensor], group: Mapping[str, Any], step: int
        ) -> None:
            if matrix.shape[0] == 8:
                raise RuntimeError("eight\nrows")
            super().update(matrix, grad, states, group, step)

    cls = fresh()
    register(cls, Minds)
    value = normal(8, 4)
    with pytest.raises(EngineError, match=r"Fresh failed on a parameter of shape \(8, 4\): eight rows"):
        run(cls([nn.Parameter(value)]), value, [value])


def test_a_rule_that_names_no_shapes_is_refused() -> None:
    class Nameless(DescentRule):
        def states(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
            return {"mean": shape} if shape == (6, 4) else {"mean": "x"}  # type: ignore[dict-item]

    cls = fresh()
    register(cls, Nameless)
    with pytest.raises(ConfigError, match=r"The rule of Fresh fails to name the states of \(5, 4\)"):
        rule_for(cls(parameters((5, 4))))


def test_what_is_no_class_or_no_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"per_parameter.*give a class of torch.optim.Optimizer"):
        per_parameter(int)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match=r"register.*give a class of torch.optim.Optimizer"):
        register(int, DescentRule)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="give a rule with the methods `states` and `update`"):
        register(fresh(), object())


def test_states_that_are_square_by_chance_are_told_from_states_of_the_parameters_shape() -> None:
    class Square(DescentRule):
        def states(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
            return {"mean": shape, "left": (shape[0], shape[0])}

    cls = fresh()
    register(cls, Square())
    rule = rule_for(cls(parameters((4, 4))), StateFormat("int8"))
    assert {spec.name: spec.dtype for spec in rule.states} == {"mean": torch.uint8, "left": torch.float32}
