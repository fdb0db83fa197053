"""The remainder form: exact in both directions, nearest for the reader, and a NaN stays one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.rules import join_master, split_master
from penstock.rules.formats import write_given, write_master
from tests.unit.rules.segments import hard_values


def from_bits(bits: int) -> Tensor:
    return torch.tensor([bits - (1 << 32) if bits >= 1 << 31 else bits], dtype=torch.int32).view(torch.float32)


@given(st.integers(0, 2**32 - 1))
def test_any_pattern_survives_split_and_join(bits: int) -> None:
    value = from_bits(bits)
    back = join_master(*split_master(value))
    assert back.isnan() if value.isnan() else torch.equal(back.view(torch.int32), value.view(torch.int32))


def test_param_is_nearest_and_differs_from_nearest_even_on_ties_alone() -> None:
    number = hard_values()[~hard_values().isnan()]
    param, remainder = split_master(number)
    tie = (number.view(torch.int32) & 0xFFFF) == 0x8000
    nearest_even = number.bfloat16()
    assert torch.equal(param[~tie].view(torch.int16), nearest_even[~tie].view(torch.int16))
    # Ties go away from zero: the next pattern above the truncated one.
    away = ((number[tie].view(torch.int32) >> 16) + 1).to(torch.int16)
    assert torch.equal(param[tie].view(torch.int16), away)
    assert (remainder[tie] == -0x8000).all()


def test_largest_finite_value_reads_as_infinity_and_is_kept() -> None:
    param, remainder = split_master(from_bits(0x7F7FFFFF))
    assert param.item() == torch.inf
    assert remainder.item() == -1
    assert join_master(param, remainder).item() == torch.finfo(torch.float32).max


def test_nan_that_rounding_would_carry_into_minus_zero() -> None:
    for bits in (0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001):
        param, remainder = split_master(from_bits(bits))
        assert param.isnan().all()
        assert join_master(param, remainder).isnan().all()


@pytest.mark.parametrize("has", ["numbers", "infinite ones", "NaN"])
@pytest.mark.parametrize("form", ["remainder", "copy", "alone"])
def test_every_bf16_pattern_is_written_as_the_same_value_in_fp32(form: str, has: str) -> None:
    value = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    value = value[value.isfinite()] if has == "numbers" else value if has == "NaN" else value[~value.isnan()]
    masters = {"remainder": torch.int16, "copy": torch.float32}
    found, wanted = (
        (
            torch.full_like(value, 7),
            torch.zeros_like(value, dtype=masters[form]) if form in masters else None,
        )
        for _ in range(2)
    )
    write_given(*found, value)
    write_master(*wanted, value.float())
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert torch.equal(ours.isnan(), theirs.isnan())  # which NaN it is may differ
            assert torch.equal(ours[~ours.isnan()].view(torch.int16), theirs[~ours.isnan()].view(torch.int16))
