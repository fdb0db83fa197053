"""Points that are left out are none that stand out."""

import random

from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.reporting.charts import kept_points

VALUES = st.lists(st.floats(-10, 10), min_size=1, max_size=300)


@given(VALUES, st.integers(4, 60))
def test_least_and_greatest_stay_and_there_are_few(column: list[float], most: int) -> None:
    kept = kept_points([column], most)
    assert kept == sorted(set(kept))
    assert len(kept) <= most + 2
    assert {0, len(column) - 1} <= set(kept)
    assert {min(column), max(column)} <= {column[index] for index in kept}
    if len(column) <= most:
        assert len(kept) == len(column)


def test_a_single_peak_of_many_steps_is_there_in_each_curve() -> None:
    draw = random.Random(0)
    columns = [[draw.random() for _ in range(50_000)] for _ in range(2)]
    columns[0][12_345], columns[1][43_210] = 50.0, -50.0
    kept = kept_points(columns)
    assert {12_345, 43_210} <= set(kept)
    assert len(kept) <= 2002
