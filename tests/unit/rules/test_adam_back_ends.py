"""The native update is the reference, bit for bit: every storage, instruction set, thread count, size and alignment."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import _native
from penstock.rules import Pool, Segment, rule_for
from penstock.rules.adam import Adam, update_reference
from tests.unit.rules.segments import GRADS, STORAGES, hypers, make, parts, random_inputs

Check = Callable[[Tensor, Tensor], None]


@pytest.mark.parametrize("grad_dtype", GRADS, ids=str)
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_every_small_size_at_any_alignment(
    storage: tuple[Any, Any], grad_dtype: Any, isa: str, guarded: Callable[..., Any], assert_same_bits: Check
) -> None:
    for numel, hyper in product(range(71), hypers()):
        expected = make(*random_inputs(numel), storage, grad_dtype)
        offset = numel % 5
        homes = [guarded(tensor, offset + i) for i, tensor in enumerate(parts(expected))]
        param, exp_avg, exp_avg_sq, *master = (home.tensor for home in homes)
        actual = Segment(param, expected.grad, master[0] if master else None, (exp_avg, exp_avg_sq))
        update_reference(expected, hyper, 0.7)
        Adam("adam").update(actual, hyper, 0.7, None)
        for result, reference in zip(parts(actual), parts(expected), strict=True):
            assert_same_bits(result, reference)
        for home in homes:
            home.check()


@pytest.mark.parametrize("storage", [(torch.bfloat16, torch.int16), (torch.float32, None)], ids=str)
@pytest.mark.parametrize("numel", [32_768, 100_001])
def test_large_sizes_on_several_threads(numel: int, storage: tuple[Any, Any], assert_same_bits: Check) -> None:
    hyper = next(hypers())
    inputs = random_inputs(numel)
    expected = make(*inputs, storage, torch.bfloat16)
    update_reference(expected, hyper, 0.7)
    try:
        for isa, threads in product(_native.isas(), (1, 2, 3)):
            _native.set_isa(isa)
            pool = Pool(threads)
            actual = make(*inputs, storage, torch.bfloat16)
            Adam("adam").update(actual, hyper, 0.7, pool)
            pool.close()
            for result, reference in zip(parts(actual), parts(expected), strict=True):
                assert_same_bits(result, reference)
    finally:
        _native.set_isa(_native.isas()[0])


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_hard_values_in_parameter_and_gradient(
    storage: tuple[Any, Any], isa: str, hard_fp32: Tensor, assert_same_bits: Check
) -> None:
    generator = torch.Generator().manual_seed(1)
    shuffled = hard_fp32[torch.randperm(hard_fp32.numel(), generator=generator)]
    for hyper, (value, grad, moment) in product(
        hypers(), [(hard_fp32, shuffled, torch.ones_like(shuffled)), (shuffled, torch.ones_like(shuffled), hard_fp32)]
    ):
        moments = (moment, moment.abs())
        expected = make(value, grad, moments, storage, torch.float32)
        actual = make(value, grad, moments, storage, torch.float32)
        update_reference(expected, hyper, 1.0)
        Adam("adam").update(actual, hyper, 1.0, None)
        for result, reference in zip(parts(actual), parts(expected), strict=True):
            assert_same_bits(result, reference)


def test_an_update_that_flushes_no_denormal(isa: str) -> None:
    tiny = 1e-40
    segment = Segment(torch.full((50,), tiny), torch.zeros(50), None, (torch.full((50,), tiny), torch.zeros(50)))
    optimizer = torch.optim.Adam([torch.zeros(1)], lr=0.0)
    hyper = rule_for(optimizer).hyper(optimizer.param_groups[0], 1)
    torch.set_flush_denormal(True)
    try:
        Adam("adam").update(segment, hyper, 1.0, None)
    finally:
        torch.set_flush_denormal(False)
    assert (segment.param == tiny).all()
    assert (segment.states[0] > 0).all()


def test_dtypes_without_a_kernel_are_refused() -> None:
    n = 4
    hyper = next(hypers())
    moments = (torch.zeros(n), torch.zeros(n))
    for param, grad, master, states, message in (
        (torch.zeros(n, dtype=torch.float64), torch.zeros(n), None, moments, "param is torch.float64"),
        (torch.zeros(n), torch.zeros(n, dtype=torch.int32), None, moments, "grad is torch.int32"),
        (torch.zeros(n), torch.zeros(n), torch.zeros(n, dtype=torch.int64), moments, "master is torch.int64"),
        (torch.zeros(n), torch.zeros(n), None, (moments[0].bfloat16(), moments[1]), "must be float32"),
    ):
        with pytest.raises(TypeError, match=message):
            Adam("adam").update(Segment(param, grad, master, states), hyper, 1.0, None)
    with pytest.raises(ValueError, match="no Adam kernel"):
        Adam("adam").update(Segment(torch.zeros(n), torch.zeros(n), torch.zeros(n), moments), hyper, 1.0, None)


def test_a_segment_whose_tensors_do_not_match_is_refused() -> None:
    n = torch.zeros(4)
    with pytest.raises(ValueError, match="contiguous tensors that are alike"):
        Segment(n, torch.zeros(3), None, (n, n))
    with pytest.raises(ValueError, match="contiguous tensors that are alike"):
        Segment(n, torch.zeros(8)[::2], None, (n, n))
    with pytest.raises(ValueError, match="contiguous tensors that are alike"):
        Segment(n, n, None, (n, torch.zeros(4, device="meta")))
