"""The rules against torch's classes: every option of every class has torch's effect, or is refused by name."""

import inspect
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.optim import Lion
from penstock.rules import StateFormat, UpdateSlice, rule_for
from penstock.rules.fused import FusedRule, FusedScalars
from penstock.rules.generic import GenericRule
from penstock.rules.select import ELEMENTWISE, FUSED, UNFIT, WHOLE
from tests.unit.rules import test_generic
from tests.unit.rules.segments import GRADS, assert_same_bits, mixed

NUMEL = 2048  # whole vectors: the tail of a short tensor is not fused in torch
LR = 1e-3
ADAMW, ADAM, SGD, ADAGRAD = torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad

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
#: None, and several at once.
TOGETHER: list[tuple[Any, dict[str, Any]]] = [
    *((cls, {}) for cls in HONOURED),
    (ADAMW, {"weight_decay": 0.0}),
    (ADAMW, {"betas": (0.4, 0.95), "eps": 1e-6}),
    (ADAMW, {"betas": (0.0, 0.9), "maximize": True, "weight_decay": 0.3}),
    (ADAMW, {"lr": torch.tensor(LR)}),
    (ADAM, {"weight_decay": 0.1, "maximize": True, "amsgrad": True}),
    (SGD, {"weight_decay": 0.1, "maximize": True}),
    (SGD, {"lr": torch.tensor(LR), "momentum": 0.9}),
    (SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    (SGD, {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1, "maximize": True}),
    (ADAGRAD, {"lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-6}),
    (ADAGRAD, {"initial_accumulator_value": 0.5, "maximize": True}),
    (Lion, {"betas": (0.8, 0.95), "maximize": True, "lr": torch.tensor(LR)}),
]
WITHOUT_EFFECT = {"foreach", "fused"}
REFUSED = {"capturable", "differentiable"}
#: No square root, so nothing in which torch's kernels are not exact.
EXACT = {SGD, Lion}

options = pytest.mark.parametrize(("cls", "option"), [(cls, option) for cls in HONOURED for option in HONOURED[cls]])
classes = pytest.mark.parametrize("cls", HONOURED, ids=lambda cls: cls.__name__)


def options_of(cls: Any) -> set[str]:
    """What the constructor takes and what it puts into every group."""
    taken = set(inspect.signature(cls).parameters) - {"params"}
    return taken | set(cls([torch.zeros(1)], lr=0.1).defaults)


def constructed() -> list[tuple[Any, dict[str, Any]]]:
    """Each option that a constructor takes, by itself; then several."""
    alone = [
        (cls, {option: value, **others})
        for cls, table in HONOURED.items()
        for option, (value, others) in table.items()
        if option in inspect.signature(cls).parameters
    ]
    return alone + TOGETHER


def stock(cls: Any, parameters: Any, options: dict[str, Any]) -> torch.optim.Optimizer:
    one_by_one = {} if cls is Lion else {"foreach": False}
    optimizer: torch.optim.Optimizer = cls(parameters, **{"lr": LR, **one_by_one, **options})
    return optimizer


def start(optimizer: torch.optim.Optimizer, parameter: Tensor, grad_dtype: torch.dtype = torch.float32) -> UpdateSlice:
    """What `prepare` begins with: the optimizer's own state where it has some."""
    state = optimizer.state[parameter]
    states = [state[s.name].clone() if s.name in state else torch.zeros(NUMEL) for s in rule_for(optimizer).states]
    return UpdateSlice(parameter.detach().clone(), torch.empty(NUMEL, dtype=grad_dtype), None, tuple(states))


def normal(seed: int, least: float = -6, most: float = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = 10 ** torch.empty(NUMEL).uniform_(least, most, generator=generator)
    return torch.randn(NUMEL, generator=generator) * scale


@pytest.mark.parametrize(("cls", "options"), constructed(), ids=str)
def test_states_and_values_are_torchs(cls: Any, options: dict[str, Any]) -> None:
    """Bit for bit where torch is exact, also of gradients in 16 bits and of hard ones; else to the last bits."""
    for grad_dtype in GRADS if cls in EXACT else GRADS[:1]:
        theirs = mixed(1, NUMEL, hard=False).requires_grad_() if cls in EXACT else normal(1, 0, 0).requires_grad_()
        optimizer = stock(cls, [theirs], options)
        rule, ours = rule_for(optimizer), start(optimizer, theirs, grad_dtype)
        for step in range(1, 41):
            grad = mixed(10 + step, NUMEL, hard=step >= 30) if cls in EXACT else normal(step)
            ours.grad.copy_(grad)
            theirs.grad = ours.grad.float()
            optimizer.step()
            rule.update(ours, rule.step_scalars(optimizer.param_groups[0], step), 1.0, None)
            if step in (1, 10, 29, 40):
                compare(cls, options, rule, ours, theirs, optimizer)


#: Where torch's kernels fuse what ours do.
FUSES = torch.backends.cpu.get_cpu_capability() in {"AVX2", "AVX512"}


def compare(
    cls: Any, options: dict[str, Any], rule: Any, ours: UpdateSlice, theirs: Tensor, optimizer: torch.optim.Optimizer
) -> None:
    kept = [optimizer.state[theirs][spec.name] for spec in rule.states]
    # Weight decay that is added to the gradient feeds a last bit of the parameter back into the states.
    l2 = 0 if options.get("decoupled_weight_decay") or cls is ADAMW else options.get("weight_decay", 0)
    if cls in EXACT:
        assert_same_bits(ours.param, theirs.detach())
    else:
        # A parameter near zero is what remains of updates of about lr: there a millionth of one update is the measure.
        lr = float(options.get("lr", LR))
        torch.testing.assert_close(ours.param, theirs.detach(), rtol=1e-6, atol=2e-6 * lr)
    for state, wanted in zip(ours.states, kept, strict=True):
        if cls in EXACT or (FUSES and not l2):
            assert_same_bits(state, wanted)
        else:
            torch.testing.assert_close(state, wanted, rtol=1e-6, atol=1e-6 * LR * l2 if l2 else 1e-14)


# Options of a group, and what is refused


def one() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2))]


@options
def test_an_honoured_option_of_a_group_reaches_the_rule(cls: Any, option: str) -> None:
    """What it does there is torch's: see above."""
    value, companions = HONOURED[cls][option]
    optimizer = cls([{"params": one()}, {"params": one(), option: value}], **{"lr": 0.01, **companions})
    rule = rule_for(optimizer)
    plain, ours = (rule.step_scalars(group, 3) for group in optimizer.param_groups)
    assert (ours == plain) is (option == "initial_accumulator_value"), "torch reads that one when it is constructed"


@classes
def test_every_option_is_honoured_or_refused_by_name(cls: Any) -> None:
    """A new version's new option fails here: give it a value in HONOURED, or refuse it."""
    found = options_of(cls)
    assert found <= set(HONOURED[cls]) | WITHOUT_EFFECT | REFUSED, f"{cls.__name__} has options nobody decided about"
    rule = rule_for(cls([torch.zeros(1)], lr=0.1))
    assert isinstance(rule, FusedRule)
    assert set(HONOURED[cls]) == set(rule.honoured)
    assert rule.unknown == {}
    for option in found & WITHOUT_EFFECT:
        groups = [cls(one(), lr=0.1, **{option: value}).param_groups[0] for value in (None, True, False)]
        assert len({rule.step_scalars(group, 3) for group in groups}) == 1, f"{option} chooses a back end of torch"


@options
def test_tensors_are_refused_by_name_except_the_learning_rate(cls: Any, option: str) -> None:
    optimizer = cls([torch.zeros(2)], lr=0.1)
    value = HONOURED[cls][option][0]
    as_tensor = (value[0], torch.tensor(value[1])) if isinstance(value, tuple) else torch.tensor(value)
    optimizer.param_groups[0][option] = as_tensor
    if option == "lr":
        rule_for(optimizer)
        return
    with pytest.raises(ConfigError, match=rf"Parameter group 0: {option}(\[1\])? is a tensor"):
        rule_for(optimizer)


@classes
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


def stock_classes() -> list[Any]:
    found = [c for c in vars(torch.optim).values() if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer)]
    return [c for c in found if c is not torch.optim.Optimizer]


def name_of(cls: Any) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def test_every_class_of_torch_is_run_like_torch_or_refused_with_the_reason() -> None:
    """A new version's new class fails here: give it a rule, or a reason."""
    compared_generic = {cls for cls, _ in test_generic.CLASSES}
    for cls in stock_classes():
        name = name_of(cls)
        matrix = nn.Parameter(torch.zeros(2, 2))
        if name in UNFIT:
            with pytest.raises(ConfigError, match=rf"{cls.__name__} is not supported: \w+"):
                rule_for(cls([matrix]))
        elif name in FUSED:
            assert cls in HONOURED, name
        elif name in WHOLE:  # test_whole.py compares them
            assert rule_for(cls([matrix])).whole
        else:
            assert name in ELEMENTWISE, f"{name} is neither run nor refused with a reason"
            assert cls in compared_generic, name
            assert isinstance(rule_for(cls([matrix]), StateFormat()), GenericRule)
        for option in REFUSED & options_of(cls) if cls in HONOURED or name in ELEMENTWISE else ():
            optimizer = cls([{"params": [torch.zeros(2)]}, {"params": [torch.zeros(2)], option: True}])
            said = rf"^(Parameter group 1: )?{option}=True is not supported.*Set {option}=False"
            with pytest.raises(ConfigError, match=said):
                rule_for(optimizer)


# Which rule it is


def test_states_in_fewer_bits() -> None:
    optimizer = ADAMW(one())
    assert [spec.dtype for spec in rule_for(optimizer, StateFormat("bf16")).states] == [torch.bfloat16] * 2
    first, second = rule_for(optimizer, StateFormat("int8")).states
    assert (first.dtype, first.signed, first.scale_name) == (torch.uint8, True, "exp_avg_scale")
    assert (second.dtype, second.signed, second.scale_name) == (torch.uint8, False, "exp_avg_sq_scale")


def test_options_that_need_another_state_cannot_be_turned_on_later() -> None:
    for optimizer, name, value in ((ADAMW(one()), "amsgrad", True), (SGD(one(), lr=0.1), "momentum", 0.9)):
        rule = rule_for(optimizer)
        optimizer.param_groups[0][name] = value
        with pytest.raises(ConfigError, match=f"{name} was turned on after prepare"):
            rule.step_scalars(optimizer.param_groups[0], 1)


def test_keys_that_torch_ignores_are_ignored() -> None:
    groups = [{"params": one(), "name": "all", "initial_lr": 1.0, "max_lr": 2.0, "note": object()}]
    assert rule_for(ADAMW(groups)).name == "adamw"


def test_lion_of_lion_pytorch_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Theirs(torch.optim.Optimizer):
        decoupled_wd = False

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0})

    Theirs.__module__, Theirs.__qualname__ = "lion_pytorch.lion_pytorch", "Lion"
    monkeypatch.setitem(sys.modules, "lion_pytorch", ModuleType("lion_pytorch"))
    optimizer = Theirs(one())
    assert rule_for(optimizer).name == "lion"
    optimizer.decoupled_wd = True
    with pytest.raises(ConfigError, match="decoupled_weight_decay=True"):
        rule_for(optimizer)


def test_scalars_of_equal_groups_are_equal() -> None:
    optimizer = ADAMW([{"params": one()}, {"params": one()}, {"params": one(), "lr": 0.5}])
    first, second, third = (rule_for(optimizer).step_scalars(group, 4) for group in optimizer.param_groups)
    assert isinstance(first, FusedScalars)
    assert first == second != third
    assert hash(first) == hash(second)
