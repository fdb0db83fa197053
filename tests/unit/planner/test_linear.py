from fractions import Fraction

import highspy
import pytest

from penstock.planner.linear import Linear

GIB = 1 << 30


def two_tiers(room: float) -> Linear:
    """All of 80 GB is on one of two tiers, the first of which has so much room."""
    linear = Linear()
    linear.equals("all", {"near": 1.0, "far": 1.0}, 1.0)
    linear.at_most("room", {"near": 80e9}, room)
    return linear


def test_the_least_sum_its_values_and_what_a_byte_is_worth() -> None:
    found = two_tiers(33e9).least({"far": 4.0, "": 1.0})
    assert found is not None
    assert found.value == pytest.approx(1 + 4 * (1 - 33 / 80))
    assert found.values == pytest.approx({"near": 33 / 80, "far": 47 / 80})
    assert found.prices["room"] == pytest.approx(-4 / 80e9)
    assert found.of({"near": 80e9, "": 5.0}) == pytest.approx(33e9 + 5)


def test_a_limit_that_does_not_bind_has_no_price() -> None:
    found = two_tiers(100e9).least({"far": 4.0})
    assert found is not None
    assert found.value == 0
    assert found.prices["room"] == 0


def test_what_cannot_be_has_no_solution() -> None:
    linear = two_tiers(33e9)
    linear.at_most("far", {"far": 80e9}, 46e9)
    assert linear.least({"far": 1.0}) is None
    assert linear.exactly({"far": 1.0}) is None


@pytest.mark.parametrize("room", [1, 3, 7, 33 * GIB + 1, 80_000_000_000 - 1000])
def test_exact_values_are_not_rounded(room: int) -> None:
    values = two_tiers(room).exactly({"far": 1.0})
    assert values == {"near": Fraction(room, 80_000_000_000), "far": 1 - Fraction(room, 80_000_000_000)}


def test_constants_in_rows_are_taken_off_their_limits() -> None:
    linear = Linear()
    linear.at_most("at least five", {"x": -1.0, "": 5.0})
    found = linear.least({"x": 2.0})
    assert found is not None
    assert found.value == pytest.approx(10)


def test_a_row_without_variables_holds_or_does_not() -> None:
    linear = Linear()
    linear.at_most("holds", {"": 5.0}, 5.0)
    assert linear.least({"x": 1.0}) is not None
    linear.at_most("does not", {"": 6.0}, 5.0)
    assert linear.least({"x": 1.0}) is None


def test_nothing_is_printed_from_the_first_call_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """HiGHS 1.16 prints a banner in its constructor, and `penstock plan --json` was no JSON."""
    flags = []
    first = highspy.Highs.enableCallbacks
    monkeypatch.setattr(
        highspy.Highs, "enableCallbacks", lambda self: (flags.append(self.getOptionValue("output_flag")), first(self))
    )
    assert two_tiers(33e9).least({"far": 4.0}) is not None
    assert [value for _, value in flags] == [False]
