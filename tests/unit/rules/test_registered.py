"""Rules that are registered for classes: believed once tried out."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import ConfigError
from penstock.optim import register
from penstock.rules import rule_for
from tests.unit.rules.classes import Base, parameters


class Descent(Base):
    """A class, and below three rules for it."""

    def one(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        mean = state.setdefault("mean", torch.zeros_like(p)).lerp_(grad, 0.5)
        p.sub_(mean / mean.norm(), alpha=group["lr"])


class DescentRule:
    def states(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        return {"mean": shape}

    def update(self, matrix: Tensor, grad: Tensor, states: Any, group: Any, step: int) -> None:
        mean = states["mean"].lerp_(grad, 0.5)
        matrix.sub_(mean / mean.norm(), alpha=group["lr"])


def fresh() -> type[Descent]:
    return type("Fresh", (Descent,), {})


def wrong(after: Callable[..., Any], share: float = 1.0) -> DescentRule:
    """A rule that does something after its update, which may take another learning rate than its group's."""

    class Wrong(DescentRule):
        def update(self, matrix: Tensor, grad: Tensor, states: Any, group: Mapping[str, Any], step: int) -> None:
            super().update(matrix, grad, states, {**group, "lr": share * group["lr"]}, step)
            after(matrix, grad, states, group)

    return Wrong()


def nothing(*_: Any) -> None: ...


DIFFERS = "the parameter differs by up to"
REFUSED: dict[str, tuple[DescentRule, float, str]] = {
    "another value": (
        wrong(lambda m, *_: m.add_(1e-3)),
        0.1,
        rf"something else than the class: after 3 updates .* \(6, 4\), {DIFFERS} 0\.003",
    ),
    "another state": (wrong(lambda m, g, s, _: s["mean"].add_(1.0)), 0.1, rf"'mean' differs by up to|{DIFFERS}"),
    "another gradient": (wrong(lambda m, g, *_: g.mul_(2)), 0.1, "changes the gradient"),
    "a failure": (
        wrong(lambda m, g, s, _: s["other"]),
        0.1,
        r"failed beside it on a parameter of shape \(6, 4\): .*other",
    ),
    "another group": (
        wrong(lambda m, g, s, group: group.update(count=1)),
        0.1,
        "The rule that was registered for Fresh changes the group",
    ),
    "a rate of 0": (wrong(nothing, 1.01), 0.0, DIFFERS),
    "a small rate": (wrong(nothing, 1.01), 1e-6, DIFFERS),
}


@pytest.mark.parametrize(("rule", "lr", "message"), REFUSED.values(), ids=REFUSED)
def test_a_registered_rule_that_differs_is_refused(rule: DescentRule, lr: float, message: str) -> None:
    cls = fresh()
    register(cls, rule)
    with pytest.raises(ConfigError, match=message):
        rule_for(cls(parameters((6, 4)), lr=lr))


def test_a_registered_rule_is_tried_on_every_number_of_dimensions() -> None:
    cls = fresh()
    register(cls, wrong(lambda m, *_: m.add_(1e-3) if m.dim() == 4 else m))
    rule_for(cls(parameters((6, 4), (4,))))
    with pytest.raises(ConfigError, match=r"of shape \(6, 4, 3, 2\), the parameter differs by"):
        rule_for(cls(parameters((6, 4), (4,), (2, 2, 2, 2))))


class Optional(Base):
    """Keeps a momentum where its group asks for one, and counts its steps in the group."""

    def begin(self, group: dict[str, Any]) -> None:
        group["k"] = group.get("k", 0) + 1

    def one(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if group["momentum"]:
            grad = state.setdefault("mean", torch.zeros_like(p)).mul_(group["momentum"]).add_(grad)
        p.sub_(grad / grad.norm(), alpha=group["lr"] / group["k"])


class OptionalRule:
    def states(self, shape: tuple[int, ...], group: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
        return {"mean": shape} if group["momentum"] else {}

    def update(self, matrix: Tensor, grad: Tensor, states: Any, group: Any, step: int) -> None:
        mean = states["mean"].mul_(group["momentum"]).add_(grad) if group["momentum"] else grad
        matrix.sub_(mean / mean.norm(), alpha=group["lr"] / step)


def test_states_are_those_of_the_group() -> None:
    """A rule saw the shape alone: it kept a momentum for every group, or for none."""
    cls = type("OfGroups", (Optional,), {})
    register(cls, OptionalRule)
    ends = []
    for is_ours in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        momenta = (0.9, 0.0, 0.5)
        groups = [{"params": [*layer.parameters()], "momentum": m} for layer, m in zip(model, momenta, strict=True)]
        optimizer: Any = cls(groups, momentum=0.0)
        if is_ours:
            optimizer = penstock.prepare(model, optimizer, precision="fp32")
            assert {row.unit for row in optimizer.locations().rows if row.kind == "mean"}
        for _ in range(3):
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        read = optimizer.full_param if is_ours else Tensor.detach
        ends.append([read(p) for p in model.parameters()])
        assert [group["k"] for group in optimizer.param_groups] == [3, 3, 3]
        if is_ours:
            with pytest.raises(ConfigError, match="'mean'"):
                optimizer.full_state(model[1].weight, "mean")
            optimizer.param_groups[1]["momentum"] = 0.9
            model(torch.ones(2, 8)).square().mean().backward()
            with pytest.raises(ConfigError, match="names other states for a parameter of shape"):
                optimizer.step()
            optimizer.close()
    for plain, ours in zip(*ends, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-7)


def test_a_class_that_looks_at_several_parameters_is_found_out_beside_its_rule() -> None:
    class Together(Base):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            held = self.param_groups[0]["params"]
            norm = torch.stack([p.grad.norm() for p in held]).norm()
            for p in held:
                p.sub_(p.grad / norm, alpha=self.param_groups[0]["lr"])

    class Alone(DescentRule):
        def update(self, matrix: Tensor, grad: Tensor, states: Any, group: Any, step: int) -> None:
            matrix.sub_(grad / grad.norm(), alpha=group["lr"])

    register(Together, Alone())
    with pytest.raises(ConfigError, match="computes something else than the class"):
        rule_for(Together(parameters((6, 4))))
