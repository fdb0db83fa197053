"""Hard and mixed inputs over many steps: the native update is the reference, torch's where torch is exact."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock import _native
from penstock.rules import StateFormat, UpdateSlice, join_master, rule_for
from penstock.rules.device import update_reference
from tests.support import sampled
from tests.unit.rules.segments import FORMATS, GRADS, RULES, STORAGES, copy_of, make, parts, rule_and_hyper
from tests.unit.rules.test_against_torch import EXACT, stock

Check = Callable[[Tensor, Tensor], None]
NUMEL = 300

#: What makes numbers hard: their bits, to be mixed within one vector.
NUMBERS = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-1, 1, width=32),
    st.floats(0, 2.0**-126, width=32, allow_subnormal=True),
    st.floats(2.0**100, 2.0**127, width=32),
    st.sampled_from([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, -1e-45, 3.4028234663852886e38]),
)
VECTORS = st.lists(NUMBERS, min_size=1, max_size=40)


def hard(seed: int, numel: int = NUMEL) -> Tensor:
    """Ordinary values, and every fourth a hard one: denormal, huge, infinite, NaN, or a zero of either sign."""
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(numel, generator=generator) * 10 ** torch.empty(numel).uniform_(-8, 3, generator=generator)
    bad = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 1e38, -3e38, torch.inf, -torch.inf, torch.nan])
    chosen = bad[torch.randint(len(bad), (numel,), generator=generator)]
    return torch.where(torch.rand(numel, generator=generator) < 0.25, chosen, value)


def benign(seed: int, numel: int = NUMEL) -> Tensor:
    return torch.nan_to_num(hard(seed, numel), nan=1.0, posinf=1e10, neginf=-1e10).clamp(-1e10, 1e10)


@pytest.mark.parametrize(
    ("grad_dtype", "storage", "format_"),
    [
        (torch.float32, STORAGES[0], FORMATS[4]),
        (torch.bfloat16, STORAGES[2], FORMATS[0]),
        (torch.float16, STORAGES[1], FORMATS[3]),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", sampled(RULES, every=3))
def test_a_hundred_steps_of_hard_gradients(
    name: str, grad_dtype: torch.dtype, storage: Any, format_: StateFormat, assert_same_bits: Check
) -> None:
    """The reference and every instruction set stay together, before the first NaN and after it."""
    rule, _ = rule_and_hyper(name, format_)
    expected = make(rule, benign(1), benign(5), (benign(2), benign(3), benign(4)), storage, grad_dtype)
    actual = {isa: copy_of(expected) for isa in _native.isas()}
    try:
        for step in range(1, 101):
            step_scalars = rule_and_hyper(name, format_, step)[1]
            grad = (benign if step < 80 else hard)(10 + step).to(grad_dtype)
            update_reference(rule, replace(expected, grad=grad), step_scalars, 0.7)
            for isa, update_slice in actual.items():
                _native.set_isa(isa)
                rule.update(replace(update_slice, grad=grad), step_scalars, 0.7, None)
                if step in (1, 10, 79, 100):
                    for (_, found), (_, wanted) in zip(parts(update_slice), parts(expected), strict=True):
                        assert_same_bits(found, wanted)
    finally:
        _native.set_isa(_native.isas()[0])


@pytest.mark.parametrize("name", [name for name, (cls, _) in RULES.items() if cls in EXACT])
@pytest.mark.parametrize("grad_dtype", GRADS, ids=str)
def test_a_hundred_steps_are_torchs_where_torch_is_exact(
    name: str, grad_dtype: torch.dtype, isa: str, assert_same_bits: Check
) -> None:
    cls, options = RULES[name]
    numel = 512  # whole vectors: the tail of a short tensor is not fused in torch
    theirs = benign(1, numel).requires_grad_()
    optimizer = stock(cls, theirs, {**options, "lr": 1e-2})
    rule = rule_for(optimizer)
    states = tuple(torch.zeros(numel) for _ in rule.states)
    ours = UpdateSlice(theirs.detach().clone(), torch.zeros(numel, dtype=grad_dtype), None, states)
    for step in range(1, 101):
        grad = (benign if step < 80 else hard)(10 + step, numel).to(grad_dtype)
        theirs.grad = grad.float()
        optimizer.step()
        ours.grad.copy_(grad)
        rule.update(ours, rule.step_scalars(optimizer.param_groups[0], step), 1.0, None)
        if step in (1, 10, 79, 100):
            assert_same_bits(ours.param, theirs.detach())
            for spec, state in zip(rule.states, ours.states, strict=True):
                assert_same_bits(state, optimizer.state[theirs][spec.name])


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(list(RULES)),
    case=st.sampled_from([(s, f) for s in STORAGES for f in (FORMATS[0], FORMATS[3], FORMATS[4])]),
    grad_dtype=st.sampled_from(GRADS),
    value=VECTORS,
    grad=VECTORS,
    moment=VECTORS,
    steps=st.sampled_from([1, 10]),
)
def test_any_values_at_all(
    assert_same_bits: Check,
    name: str,
    case: Any,
    grad_dtype: torch.dtype,
    value: list[float],
    grad: list[float],
    moment: list[float],
    steps: int,
) -> None:
    storage, format_ = case
    numel = max(len(value), len(grad), len(moment))

    def filled(numbers: list[float]) -> Tensor:
        return torch.tensor((numbers * numel)[:numel])

    rule, _ = rule_and_hyper(name, format_)
    moments = (filled(moment), filled(moment).abs(), filled(moment).abs())
    expected = make(rule, filled(value), filled(grad), moments, storage, grad_dtype)
    actual = {isa: copy_of(expected) for isa in _native.isas()}
    try:
        for step in range(1, steps + 1):
            step_scalars = rule_and_hyper(name, format_, step)[1]
            update_reference(rule, expected, step_scalars, 0.7)
            for isa, update_slice in actual.items():
                _native.set_isa(isa)
                rule.update(update_slice, step_scalars, 0.7, None)
    finally:
        _native.set_isa(_native.isas()[0])
    for update_slice in actual.values():
        for (_, found), (_, wanted) in zip(parts(update_slice), parts(expected), strict=True):
            assert_same_bits(found, wanted)


@pytest.mark.parametrize("name", RULES)
def test_the_remainder_follows_fp32_exactly(name: str, isa: str, assert_same_bits: Check) -> None:
    """Value and states bit for bit; the bf16 parameter is the nearest, and on ties alone not the even one."""
    rule, _ = rule_and_hyper(name)
    moments = (benign(2), benign(3), benign(4))
    fp32 = make(rule, benign(1), benign(5), moments, (torch.float32, None), torch.bfloat16)
    split = make(rule, benign(1), benign(5), moments, (torch.bfloat16, torch.int16), torch.bfloat16)
    for step in range(1, 101):
        step_scalars = rule_and_hyper(name, step=step)[1]
        grad = benign(10 + step).bfloat16()
        update_reference(rule, replace(fp32, grad=grad), step_scalars, 0.7)
        rule.update(replace(split, grad=grad), step_scalars, 0.7, None)
        assert split.master is not None
        assert_same_bits(join_master(split.param, split.master), fp32.param)
        for found, wanted in zip(split.states, fp32.states, strict=True):
            assert_same_bits(found, wanted)
        tie = (fp32.param.view(torch.int32) & 0xFFFF) == 0x8000
        assert_same_bits(split.param[~tie], fp32.param.bfloat16()[~tie])


def test_nothing_to_update_changes_nothing(isa: str) -> None:
    for name in RULES:
        for storage in STORAGES:
            for format_ in FORMATS:
                rule, step_scalars = rule_and_hyper(name, format_)
                empty = torch.empty(0)
                update_slice = make(rule, empty, empty, (empty, empty, empty), storage, torch.bfloat16)
                rule.update(update_slice, step_scalars, 1.0, None)
                update_reference(rule, update_slice, step_scalars, 1.0)
                assert all(part.numel() == 0 for _, part in parts(update_slice))
