"""The native update is the reference, bit for bit: rules, storages, instruction sets, threads, sizes, alignments."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import _native
from penstock.rules import Pool, StateFormat, UpdateSlice
from penstock.rules.device import update_reference
from tests.unit.rules.segments import (
    FORMATS,
    GRADS,
    RULES,
    STORAGES,
    copy_of,
    make,
    parts,
    random_inputs,
    rule_and_hyper,
)

Check = Callable[[Tensor, Tensor], None]


def check_all(actual: UpdateSlice, expected: UpdateSlice, check: Check, what: object) -> None:
    for (name, result), (_, reference) in zip(parts(actual), parts(expected), strict=True):
        try:
            check(result, reference)
        except AssertionError as error:
            raise AssertionError(f"{what}, {name}: {error}") from None


@pytest.mark.parametrize("format_", FORMATS, ids=lambda f: f"{f.dtype}-{f.rounding}")
@pytest.mark.parametrize("name", RULES)
def test_every_storage_and_gradient(name: str, format_: StateFormat, isa: str, assert_same_bits: Check) -> None:
    rule, step_scalars = rule_and_hyper(name, format_)
    for storage, grad_dtype in product(STORAGES, GRADS):
        expected = make(rule, *random_inputs(3 * 256 + 39), storage, grad_dtype)
        actual = copy_of(expected)
        update_reference(rule, expected, step_scalars, 0.7)
        rule.update(actual, step_scalars, 0.7, None)
        check_all(actual, expected, assert_same_bits, (storage, grad_dtype))


SIZES = [*range(71), 255, 256, 257, 511, 1023, 1024, 1025, 1300]


@pytest.mark.parametrize("format_", [FORMATS[0], FORMATS[3], FORMATS[4]], ids=lambda f: f.dtype)
@pytest.mark.parametrize("name", ["adamw", "sgd-nesterov"])
@pytest.mark.parametrize("storage", [(torch.bfloat16, torch.int16), (torch.bfloat16, None)], ids=str)
def test_every_small_size_at_any_alignment(
    name: str,
    storage: tuple[Any, Any],
    format_: StateFormat,
    isa: str,
    guarded: Callable[..., Any],
    assert_same_bits: Check,
) -> None:
    rule, step_scalars = rule_and_hyper(name, format_)
    for numel in SIZES:
        expected = make(rule, *random_inputs(numel), storage, torch.bfloat16)
        guards = [guarded(tensor, numel % 5 + i) for i, (_, tensor) in enumerate(parts(expected))]
        tensors = iter(guard.tensor for guard in guards)
        actual = replace(
            expected,
            param=next(tensors),
            master=None if expected.master is None else next(tensors),
            states=tuple(next(tensors) for _ in expected.states),
            scales=tuple(None if scale is None else next(tensors) for scale in expected.scales),
        )
        update_reference(rule, expected, step_scalars, 0.7)
        rule.update(actual, step_scalars, 0.7, None)
        check_all(actual, expected, assert_same_bits, numel)
        for guard in guards:
            guard.check()


@pytest.mark.parametrize("format_", [FORMATS[0], FORMATS[3], FORMATS[4]], ids=lambda f: f.dtype)
@pytest.mark.parametrize("name", ["adamw", "adagrad"])
def test_any_cut_on_blocks_and_any_number_of_threads(name: str, format_: StateFormat, assert_same_bits: Check) -> None:
    rule, step_scalars = rule_and_hyper(name, format_)
    whole = make(rule, *random_inputs(100_001), (torch.bfloat16, torch.int16), torch.bfloat16)
    expected = copy_of(whole)
    update_reference(rule, expected, step_scalars, 0.7)
    try:
        for isa, threads, cut in product(_native.isas(), (1, 3), (100_001, 256 * 77)):
            _native.set_isa(isa)
            pool = Pool(threads)
            actual = copy_of(whole)
            for start in range(0, 100_001, cut):
                part, blocks = slice(start, start + cut), slice(start // 256, -(-(start + cut) // 256))
                update_slice = UpdateSlice(
                    actual.param[part],
                    actual.grad[part],
                    actual.master[part],
                    tuple(state[part] for state in actual.states),
                    tuple(None if scale is None else scale[blocks] for scale in actual.scales),
                    actual.first + start,
                )
                rule.update(update_slice, step_scalars, 0.7, pool)
            pool.close()
            check_all(actual, expected, assert_same_bits, (isa, threads, cut))
    finally:
        _native.set_isa(_native.isas()[0])


@pytest.mark.parametrize("format_", [FORMATS[0], FORMATS[3], FORMATS[4]], ids=lambda f: f.dtype)
@pytest.mark.parametrize("name", RULES)
def test_hard_values(name: str, format_: StateFormat, isa: str, hard_fp32: Tensor, assert_same_bits: Check) -> None:
    """Denormals, infinities, NaNs and ties, in parameter, gradient and states."""
    rule, step_scalars = rule_and_hyper(name, format_)
    generator = torch.Generator().manual_seed(1)
    shuffled = hard_fp32[torch.randperm(hard_fp32.numel(), generator=generator)]
    one = torch.ones_like(shuffled)
    for storage, (value, grad, moment) in product(
        STORAGES, [(hard_fp32, shuffled, one), (shuffled, one, hard_fp32), (one, one, shuffled)]
    ):
        expected = make(rule, value, grad, (moment, moment.abs(), shuffled.abs()), storage, torch.float32)
        actual = copy_of(expected)
        update_reference(rule, expected, step_scalars, 1.0)
        rule.update(actual, step_scalars, 1.0, None)
        check_all(actual, expected, assert_same_bits, storage)


@pytest.mark.parametrize("name", RULES)
def test_an_update_that_flushes_no_denormal(name: str, isa: str) -> None:
    rule, step_scalars = rule_and_hyper(name)
    tiny = 1e-40
    states = tuple(torch.full((50,), tiny) for _ in rule.states)
    update_slice = UpdateSlice(torch.full((50,), tiny), torch.zeros(50), None, states)
    expected = copy_of(update_slice)
    update_reference(rule, expected, step_scalars, 1.0)
    torch.set_flush_denormal(True)
    try:
        rule.update(update_slice, step_scalars, 1.0, None)
    finally:
        torch.set_flush_denormal(False)
    for (_, actual), (_, reference) in zip(parts(update_slice), parts(expected), strict=True):
        assert torch.equal(actual.view(torch.int32), reference.view(torch.int32))


def test_dtypes_without_a_kernel_are_refused() -> None:
    n = 4
    rule, step_scalars = rule_and_hyper("adamw")
    moments = (torch.zeros(n), torch.zeros(n))
    for param, grad, master, states, message in (
        (torch.zeros(n, dtype=torch.float64), torch.zeros(n), None, moments, "param is torch.float64"),
        (torch.zeros(n), torch.zeros(n, dtype=torch.int32), None, moments, "grad is torch.int32"),
        (torch.zeros(n), torch.zeros(n), torch.zeros(n, dtype=torch.int64), moments, "master is torch.int64"),
        (torch.zeros(n), torch.zeros(n), None, (moments[0].bfloat16(), moments[1]), "exp_avg is torch.bfloat16"),
    ):
        with pytest.raises(TypeError, match=message):
            rule.update(UpdateSlice(param, grad, master, states), step_scalars, 1.0, None)
    half_alone = UpdateSlice(torch.zeros(n, dtype=torch.float16), torch.zeros(n), None, moments)
    with pytest.raises(ValueError, match="no kernel for this dtype of the parameter"):
        rule.update(half_alone, step_scalars, 1.0, None)


def test_a_segment_begins_on_a_block() -> None:
    with pytest.raises(ValueError, match="begins on a block of 256 elements, not at element 64"):
        UpdateSlice(torch.zeros(4), torch.zeros(4), None, (), first=64)
