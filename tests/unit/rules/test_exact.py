"""The emulated operations against exact rational arithmetic."""

from fractions import Fraction

import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.rules.rule import fma, fp32, sqrt

FP32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def nearest_fp32(value: Fraction) -> float:
    """Round to nearest even without an intermediate rounding, by trying the neighbours of a first guess."""
    guess = torch.tensor(float(value), dtype=torch.float64).float()
    around = [torch.nextafter(guess, torch.tensor(-torch.inf)), guess, torch.nextafter(guess, torch.tensor(torch.inf))]
    finite = [x for x in around if torch.isfinite(x)]
    return min(finite, key=lambda x: (abs(Fraction(x.item()) - value), int(x.view(torch.int32)) & 1)).item()


@given(FP32, FP32, FP32)
def test_fma_rounds_the_exact_sum_once(a: float, b: float, c: float) -> None:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if abs(exact) >= Fraction(torch.finfo(torch.float32).max):
        return
    assert fma(torch.tensor(a), torch.tensor(b), torch.tensor(c)).item() == nearest_fp32(exact)


def test_fma_where_rounding_twice_fails() -> None:
    # c is odd in its last place, 2^-23, and the product is 2^-54 less than half of that place. In fp64 the sum becomes
    # a tie, which would then go up to even.
    a, b, c = torch.tensor(1 + 2.0**-15), torch.tensor(2.0**-24 * (1 - 2.0**-15)), torch.tensor(1 + 2.0**-23)
    assert (a.double() * b.double() + c.double()).float() == 1 + 2.0**-22
    assert fma(a, b, c) == c


def test_fma_keeps_special_values() -> None:
    inf, nan = torch.tensor(torch.inf), torch.tensor(torch.nan)
    one, zero = torch.tensor(1.0), torch.tensor(0.0)
    assert fma(inf, one, one) == torch.inf
    assert fma(one, one, -inf) == -torch.inf
    assert fma(inf, zero, one).isnan()
    assert fma(inf, one, -inf).isnan()
    assert fma(one, nan, one).isnan()
    assert fma(torch.tensor(3e38), torch.tensor(2.0), one) == torch.inf


@given(st.floats(width=32, min_value=0, allow_infinity=False))
def test_sqrt_is_the_nearest_value(value: float) -> None:
    root = sqrt(torch.tensor(value))
    below, above = torch.nextafter(root, torch.tensor(-1.0)), torch.nextafter(root, torch.tensor(torch.inf))
    # The exact root lies between the middles towards both neighbours.
    low = (Fraction(root.item()) + Fraction(max(below.item(), 0.0))) / 2
    high = (Fraction(root.item()) + Fraction(above.item())) / 2
    assert low**2 <= Fraction(value) <= high**2


def test_fp32_rounds_and_overflows_to_infinity() -> None:
    assert fp32(0.1) == torch.tensor(0.1).item()
    assert fp32(1e300) == torch.inf
    assert fp32(torch.tensor(0.25)) == 0.25
