"""Every option of every class, as this version of torch has them: honoured with torch's result, or refused by name."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.optim import Lion
from penstock.rules import StateFormat, UpdateSlice, rule_for
from penstock.rules.fused import FusedRule
from penstock.rules.generic import GenericRule
from penstock.rules.select import ELEMENTWISE, FUSED, UNFIT, WHOLE
from tests.unit.rules import test_against_torch, test_generic

ADAMW, ADAM, SGD, ADAGRAD = torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad
CLASSES = [ADAMW, ADAM, SGD, ADAGRAD, Lion]
STEPS = 5

#: For each honoured option a value that is not the default's, and the options without which it would change nothing.
ADAM_OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "lr": (0.02, {}),
    "betas": ((0.8, 0.95), {}),
    "eps": (1e-2, {}),
    "weight_decay": (0.3, {}),
    "amsgrad": (True, {"betas": (0.9, 0.5)}),
    "maximize": (True, {}),
    "decoupled_weight_decay": (True, {"weight_decay": 0.3}),
}
HONOURED: dict[Any, dict[str, tuple[Any, dict[str, Any]]]] = {
    ADAMW: {**ADAM_OPTIONS, "decoupled_weight_decay": (False, {"weight_decay": 0.3})},
    ADAM: ADAM_OPTIONS,
    SGD: {
        "lr": (0.02, {}),
        "momentum": (0.7, {}),
        "dampening": (0.4, {"momentum": 0.7}),
        "weight_decay": (0.3, {}),
        "nesterov": (True, {"momentum": 0.7}),
        "maximize": (True, {}),
    },
    ADAGRAD: {
        "lr": (0.02, {}),
        "lr_decay": (0.5, {}),
        "weight_decay": (0.3, {}),
        "initial_accumulator_value": (0.5, {}),
        "eps": (1e-2, {}),
        "maximize": (True, {}),
    },
    Lion: {
        "lr": (0.02, {}),
        "betas": ((0.2, 0.6), {}),
        "weight_decay": (0.3, {}),
        "maximize": (True, {}),
    },
}
WITHOUT_EFFECT = {"foreach", "fused"}
REFUSED = {"capturable", "differentiable"}


def options_of(cls: Any) -> set[str]:
    """What the constructor takes and what it puts into every group."""
    taken = set(inspect.signature(cls).parameters) - {"params"}
    return taken | set(cls([torch.zeros(1)], lr=0.1).defaults)


def stock_classes() -> list[Any]:
    found = [c for c in vars(torch.optim).values() if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer)]
    return [c for c in found if c is not torch.optim.Optimizer]


def name_of(cls: Any) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def values(index: int) -> Tensor:
    """Numbers of sizes that matter for eps, and that change from step to step."""
    generator = torch.Generator().manual_seed(index)
    return torch.randn(512, generator=generator) * 10 ** torch.empty(512).uniform_(-3, 0, generator=generator)


def of_torch(cls: Any, shared: dict[str, Any], group: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The class itself: a parameter with the shared options, and one with those of its group besides."""
    plain, special = nn.Parameter(values(100)), nn.Parameter(values(100))
    optimizer = cls([{"params": [plain]}, {"params": [special], **group}], **{"lr": 0.01, **shared})
    for step in range(STEPS):
        plain.grad, special.grad = values(step), values(step)
        optimizer.step()
    return plain.detach(), special.detach()


def of_rule(cls: Any, shared: dict[str, Any], group: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The same by the rule, which reads the groups as they are."""
    parameters = [nn.Parameter(values(100)), nn.Parameter(values(100))]
    groups = [{"params": [parameters[0]]}, {"params": [parameters[1]], **group}]
    optimizer = cls(groups, **{"lr": 0.01, **shared})
    rule = rule_for(optimizer)
    found = []
    for parameter, options in zip(parameters, optimizer.param_groups, strict=True):
        state = optimizer.state[parameter]
        states = tuple(state.get(s.name, torch.zeros(512)).clone() for s in rule.states)
        update_slice = UpdateSlice(parameter.detach().clone(), torch.empty(512), None, states)
        for step in range(STEPS):
            update_slice.grad.copy_(values(step))
            rule.update(update_slice, rule.step_scalars(options, step + 1), 1.0, None)
        found.append(update_slice.param)
    return found[0], found[1]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_every_option_is_honoured_or_refused_by_name(cls: Any) -> None:
    """A new version's new option fails here: give it a value in HONOURED, or refuse it."""
    known = set(HONOURED[cls]) | WITHOUT_EFFECT | REFUSED
    assert options_of(cls) <= known, f"{cls.__name__} has options that nobody decided about"
    rule = rule_for(cls([torch.zeros(1)], lr=0.1))
    assert isinstance(rule, FusedRule)
    assert set(HONOURED[cls]) == set(rule.honoured)
    assert rule.unknown == {}


@pytest.mark.parametrize(("cls", "option"), [(cls, option) for cls, table in HONOURED.items() for option in table])
@pytest.mark.parametrize("where", ["constructor", "group"])
def test_an_honoured_option_has_torchs_effect(cls: Any, option: str, where: str) -> None:
    value, companions = HONOURED[cls][option]
    shared, group = dict(companions), {}
    if where == "group" or option not in inspect.signature(cls).parameters:
        group = {option: value}
    else:
        shared[option] = value
    expected, found = of_torch(cls, shared, group), of_rule(cls, shared, group)
    for theirs, ours in zip(expected, found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    if where == "group" and option == "initial_accumulator_value":
        return  # the constructor's alone reaches torch's state
    without = of_rule(cls, companions, {})
    assert (found[1] - without[1]).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("cls", "option"),
    [(cls, option) for cls in CLASSES for option in sorted(options_of(cls) & WITHOUT_EFFECT)],
)
def test_options_that_choose_a_back_end_change_nothing(cls: Any, option: str) -> None:
    for value in (True, False):
        assert all(map(torch.equal, of_rule(cls, {option: value}, {}), of_rule(cls, {}, {})))


@pytest.mark.parametrize(
    ("cls", "option"),
    [
        (cls, option)
        for cls in [*CLASSES, *(c for c in stock_classes() if name_of(c) in ELEMENTWISE)]
        for option in sorted(options_of(cls) & REFUSED)
    ],
)
def test_options_that_change_the_machinery_are_refused_by_name(cls: Any, option: str) -> None:
    optimizer = cls([{"params": [torch.zeros(2)]}, {"params": [torch.zeros(2)], option: True}])
    with pytest.raises(
        ConfigError, match=rf"^(Parameter group 1: )?{option}=True is not supported.*Set {option}=False"
    ):
        rule_for(optimizer)


@pytest.mark.parametrize(("cls", "option"), [(cls, option) for cls, table in HONOURED.items() for option in table])
def test_tensors_are_refused_by_name_except_the_learning_rate(cls: Any, option: str) -> None:
    optimizer = cls([torch.zeros(2)], lr=0.1)
    value = HONOURED[cls][option][0]
    as_tensor = tuple(map(torch.tensor, value)) if isinstance(value, tuple) else torch.tensor(value)
    optimizer.param_groups[0][option] = as_tensor
    if option == "lr":
        rule_for(optimizer)
        return
    with pytest.raises(ConfigError, match=rf"Parameter group 0: {option}(\[0\])? is a tensor"):
        rule_for(optimizer)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_an_option_of_a_newer_version_is_refused_unless_it_asks_for_nothing(
    cls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = cls.__init__

    def newer(self: Any, params: Any, *args: Any, cautious: float = 1.0, **options: Any) -> None:
        original(self, params, *args, **options)
        self.defaults["cautious"] = cautious
        for group in self.param_groups:
            group.setdefault("cautious", cautious)

    monkeypatch.setattr(cls, "__init__", newer)
    rule = rule_for(cls([torch.zeros(2)], lr=0.1))
    refusal = r"cautious=0\.5 is an option of this version of the class that .* not know\. Set cautious=1\.0"
    with pytest.raises(ConfigError, match=f"Parameter group 0: {refusal}"):
        rule_for(cls([torch.zeros(2)], lr=0.1, cautious=0.5))
    later = cls([torch.zeros(2)], lr=0.1).param_groups[0]
    rule.step_scalars(later, 1)
    later["cautious"] = 0.5
    with pytest.raises(ConfigError, match=refusal):
        rule.step_scalars(later, 2)


def test_every_class_of_torch_is_run_like_torch_or_refused_with_the_reason() -> None:
    """A new version's new class fails here: give it a rule, or a reason."""
    compared = {parameters.values[0] for parameters in test_against_torch.OPTIMIZERS}
    compared_generic = {cls for cls, _ in test_generic.CLASSES}
    for cls in stock_classes():
        name = name_of(cls)
        matrix = nn.Parameter(torch.zeros(2, 2))
        if name in UNFIT:
            with pytest.raises(ConfigError, match=rf"{cls.__name__} is not supported: \w+"):
                rule_for(cls([matrix]))
        elif name in FUSED:
            assert cls in compared, name
        elif name in WHOLE:  # test_whole.py compares them
            assert rule_for(cls([matrix])).whole
        else:
            assert name in ELEMENTWISE, f"{name} is neither run nor refused with a reason"
            assert cls in compared_generic, name
            assert isinstance(rule_for(cls([matrix]), StateFormat()), GenericRule)
