"""The reference and the native update against torch.optim, element by element."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.optim import Lion
from penstock.rules import Pool, Rule, StateFormat, UpdateSlice, rule_for, split_master
from penstock.rules.device import update_reference
from penstock.rules.formats import read_master
from penstock.rules.fused import FusedRule, FusedScalars
from tests.unit.rules.segments import FORMATS, make, rule_and_hyper

NUMEL = 2000
LR = 1e-3
ADAMW, ADAM, SGD, ADAGRAD = torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad

OPTIMIZERS = [
    pytest.param(ADAMW, {}, id="adamw"),
    pytest.param(ADAMW, {"weight_decay": 0.0}, id="adamw-no-decay"),
    pytest.param(ADAMW, {"betas": (0.4, 0.95), "eps": 1e-6}, id="adamw-small-beta1"),
    pytest.param(ADAMW, {"betas": (0.0, 0.9), "maximize": True, "weight_decay": 0.3}, id="adamw-maximize"),
    pytest.param(ADAMW, {"lr": torch.tensor(LR)}, id="adamw-lr-tensor"),
    pytest.param(ADAMW, {"amsgrad": True}, id="adamw-amsgrad"),
    pytest.param(ADAM, {}, id="adam"),
    pytest.param(ADAM, {"weight_decay": 0.1}, id="adam-l2"),
    pytest.param(ADAM, {"weight_decay": 0.1, "maximize": True, "amsgrad": True}, id="adam-l2-maximize-amsgrad"),
    pytest.param(ADAM, {"weight_decay": 0.1, "decoupled_weight_decay": True}, id="adam-decoupled"),
    pytest.param(SGD, {}, id="sgd"),
    pytest.param(SGD, {"weight_decay": 0.1, "maximize": True}, id="sgd-l2-maximize"),
    pytest.param(SGD, {"lr": torch.tensor(LR), "momentum": 0.9}, id="sgd-momentum-lr-tensor"),
    pytest.param(SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}, id="sgd-dampening"),
    pytest.param(SGD, {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1, "maximize": True}, id="sgd-nesterov"),
    pytest.param(ADAGRAD, {}, id="adagrad"),
    pytest.param(ADAGRAD, {"lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-6}, id="adagrad-decays"),
    pytest.param(ADAGRAD, {"initial_accumulator_value": 0.5, "maximize": True}, id="adagrad-initial-maximize"),
    pytest.param(Lion, {"weight_decay": 0.1}, id="lion"),
    pytest.param(Lion, {"betas": (0.8, 0.95), "maximize": True, "lr": torch.tensor(LR)}, id="lion-maximize-lr-tensor"),
]
#: No square root, so nothing in which torch's kernels are not exact.
EXACT = {torch.optim.SGD, Lion}


def gradients(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    scale = 10 ** torch.empty(NUMEL).uniform_(-6, 2, generator=generator)
    return [torch.randn(NUMEL, generator=generator) * scale for _ in range(steps)]


def stock(cls: Any, parameter: Tensor, options: dict[str, Any]) -> torch.optim.Optimizer:
    one_by_one = {} if cls is Lion else {"foreach": False}
    optimizer: torch.optim.Optimizer = cls([parameter], **{"lr": LR, **one_by_one, **options})
    return optimizer


def start(optimizer: torch.optim.Optimizer, rule: Rule, parameter: Tensor) -> UpdateSlice:
    """What `prepare` begins with: the optimizer's own state where it has some."""
    state = optimizer.state[parameter]
    states = tuple(state[s.name].clone() if s.name in state else torch.zeros_like(parameter) for s in rule.states)
    return UpdateSlice(parameter.detach().clone(), torch.empty_like(parameter), None, states)


def apply(rule: Rule, update_slice: UpdateSlice, group: dict[str, Any], step: int, back_end: str) -> None:
    assert isinstance(rule, FusedRule)
    step_scalars = rule.step_scalars(group, step)
    if back_end == "native":
        rule.update(update_slice, step_scalars, 1.0, None)
    else:
        update_reference(rule, update_slice, step_scalars, 1.0)


@pytest.mark.parametrize("steps", [1, 10, 100])
@pytest.mark.parametrize("back_end", ["reference", "native"])
@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS)
def test_fp32_states_agree_with_torch(cls: Any, options: dict[str, Any], back_end: str, steps: int) -> None:
    generator = torch.Generator().manual_seed(3)
    theirs = torch.randn(NUMEL, generator=generator).requires_grad_()
    optimizer = stock(cls, theirs, options)
    rule = rule_for(optimizer)
    ours = start(optimizer, rule, theirs)
    for step, grad in enumerate(gradients(steps), start=1):
        theirs.grad = grad.clone()
        optimizer.step()
        ours.grad.copy_(grad)
        apply(rule, ours, optimizer.param_groups[0], step, back_end)
    if cls in EXACT:
        assert torch.equal(ours.param, theirs.detach())
        for spec, state in zip(rule.states, ours.states, strict=True):
            assert torch.equal(state, optimizer.state[theirs][spec.name])
        return
    # A parameter near zero is what remains of updates of about lr: there a millionth of one update is the measure.
    torch.testing.assert_close(ours.param, theirs.detach(), rtol=1e-6, atol=1e-6 * LR)
    # Weight decay that is added to the gradient feeds a last bit of such a parameter back into the states.
    l2 = 0 if options.get("decoupled_weight_decay") or cls is ADAMW else options.get("weight_decay", 0)
    for spec, state in zip(rule.states, ours.states, strict=True):
        atol = 1e-6 * LR * l2 if l2 else 1e-14
        torch.testing.assert_close(state, optimizer.state[theirs][spec.name], rtol=1e-6, atol=atol)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in {"AVX2", "AVX512"}, reason="torch's kernels do not fuse here"
)
@pytest.mark.parametrize(("cls", "options"), [(ADAMW, {}), (ADAMW, {"amsgrad": True}), (ADAGRAD, {"lr_decay": 0.1})])
def test_states_are_torchs_bit_for_bit(cls: Any, options: dict[str, Any]) -> None:
    theirs = torch.randn(NUMEL).requires_grad_()
    optimizer = stock(cls, theirs, options)
    rule = rule_for(optimizer)
    ours = start(optimizer, rule, theirs)
    for step, grad in enumerate(gradients(10), start=1):
        theirs.grad = grad.clone()
        optimizer.step()
        ours.grad.copy_(grad)
        apply(rule, ours, optimizer.param_groups[0], step, "native")
    for spec, state in zip(rule.states, ours.states, strict=True):
        assert torch.equal(state, optimizer.state[theirs][spec.name])


finite = st.floats(-(2.0**100), 2.0**100, width=32)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(ADAMW, {}), (ADAM, {"weight_decay": 0.5}), (SGD, {"momentum": 0.9}), (ADAGRAD, {}), (Lion, {})]),
    st.lists(st.tuples(finite, finite), min_size=1, max_size=20),
    st.floats(0, 1),
)
def test_any_finite_values_agree_with_torch(case: Any, values: list[tuple[float, float]], lr: float) -> None:
    cls, options = case
    theirs = torch.tensor([v for v, _ in values]).requires_grad_()
    optimizer = stock(cls, theirs, {"lr": lr, **options})
    rule = rule_for(optimizer)
    ours = start(optimizer, rule, theirs)
    grad = torch.tensor([g for _, g in values])
    theirs.grad = grad.clone()
    optimizer.step()
    ours.grad.copy_(grad)
    apply(rule, ours, optimizer.param_groups[0], 1, "native")
    scale = theirs.detach().abs().clamp(min=lr)  # the tail of a short tensor is not fused in torch
    both = torch.stack([ours.param, theirs.detach()])
    assert bool((both.isfinite().all(0) == both.isfinite().any(0)).all())
    difference = (ours.param - theirs.detach()).abs()
    assert bool((difference.nan_to_num(0) <= 1e-5 * scale.nan_to_num(0)).all()), (ours.param, theirs)


def test_the_form_of_the_master_never_changes_the_result() -> None:
    value = torch.randn(NUMEL)
    bf16, remainder = split_master(value)
    forms = {
        "fp32": (value.clone(), None),
        "remainder": (bf16, remainder),
        "bf16 and fp32": (value.bfloat16(), value.clone()),
        "fp16 and fp32": (value.half(), value.clone()),
    }
    optimizer = torch.optim.AdamW([torch.zeros(1)])
    rule = rule_for(optimizer)
    results: dict[str, list[Tensor]] = {}
    with_pool = Pool(2)
    for name, (param, master) in forms.items():
        update_slice = UpdateSlice(param, torch.empty(NUMEL), master, (torch.zeros(NUMEL), torch.zeros(NUMEL)))
        for step, grad in enumerate(gradients(10), start=1):
            update_slice.grad.copy_(grad)
            rule.update(update_slice, rule.step_scalars(optimizer.param_groups[0], step), 0.5, with_pool)
        results[name] = [read_master(param, master), *update_slice.states]
    with_pool.close()
    for name, tensors in results.items():
        for actual, expected in zip(tensors, results["fp32"], strict=True):
            assert torch.equal(actual, expected), name


def test_grad_scale_is_one_factor_on_the_gradient() -> None:
    grad = torch.randn(NUMEL)
    rule, step_scalars = rule_and_hyper("adamw")
    ones, zeros = torch.ones(NUMEL), torch.zeros(NUMEL)
    scaled = make(rule, ones, grad, (zeros, zeros), (torch.float32, None), torch.float32)
    plain = make(rule, ones, grad * torch.tensor(1 / 3), (zeros, zeros), (torch.float32, None), torch.float32)
    rule.update(scaled, step_scalars, 1 / 3, None)
    rule.update(plain, step_scalars, 1.0, None)
    assert torch.equal(scaled.param, plain.param)
    assert torch.equal(scaled.states[0], plain.states[0])


Make = Callable[[StateFormat], UpdateSlice]


@pytest.mark.parametrize("format_", FORMATS[2:], ids=lambda f: f"{f.dtype}-{f.rounding}")
def test_states_in_fewer_bits_train_as_well(format_: StateFormat) -> None:
    """A noisy quadratic: the loss comes down as with fp32 states, within a few percent of where it began."""

    def train(format_: StateFormat, *, master: bool) -> float:
        generator = torch.Generator().manual_seed(1)
        optimizer = torch.optim.AdamW([torch.zeros(1)], lr=3e-3, weight_decay=0.0)
        rule = rule_for(optimizer, format_)
        assert isinstance(rule, FusedRule)
        target = torch.randn(NUMEL, generator=generator)
        zeros = torch.zeros(NUMEL)
        storage = (torch.bfloat16, torch.int16 if master else None)
        update_slice = make(rule, zeros, zeros, (zeros, zeros), storage, torch.float32)
        curvature = 10 ** torch.empty(NUMEL).uniform_(-3, 1, generator=generator)
        for step in range(1, 801):
            value = read_master(update_slice.param, update_slice.master)
            noise = torch.randn(NUMEL, generator=generator) * 0.1
            update_slice.grad.copy_(curvature * (value - target + noise))
            rule.update(update_slice, rule.step_scalars(optimizer.param_groups[0], step), 1.0, None)
        return float((read_master(update_slice.param, update_slice.master) - target).square().mean())

    exact = train(StateFormat(), master=True)
    assert train(format_, master=True) < exact + 0.02
    if format_.stochastic:
        assert train(format_, master=False) < exact + 0.02


def test_equal_updates_compare_equal() -> None:
    first, second = (rule_and_hyper("adamw")[1] for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert isinstance(first, FusedScalars)
    assert dataclasses.replace(first, sign=-1.0) != first
