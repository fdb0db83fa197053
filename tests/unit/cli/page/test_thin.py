"""Points that are left out are none that stand out."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.reporting.charts import kept_points

VALUES = st.floats(-10, 10)


@given(st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=300), st.integers(4, 60))
def test_least_and_greatest_of_each_curve_stay_and_there_are_few(rows: list[tuple[float, float]], most: int) -> None:
    columns = list(zip(*rows, strict=True))
    kept = kept_points(columns, most)
    assert kept == sorted(set(kept))
    assert len(kept) <= most + 2
    assert {0, len(rows) - 1} <= set(kept)
    for column in columns:
        assert {min(column), max(column)} <= {column[index] for index in kept}
    if len(rows) <= most:
        assert len(kept) == len(rows)
