"""The range of a step: what past predictions missed by."""

from statistics import fmean

import pytest

from penstock.planner.make_plan import Residual, step_range, stored


def rows(*ratios: float, device: str = "cpu", on_files: bool = False, probed: bool = True) -> list[Residual]:
    return [Residual("", device, on_files, probed, 1.0, ratio) for ratio in ratios]


CLASS = {"device": "cpu", "on_files": False, "probed": True}


def test_nine_in_ten_of_the_stored_rows_lie_in_the_range_of_the_others() -> None:
    inside = []
    for row in stored():
        others = [each for each in stored() if each is not row]
        low, high = step_range(
            row.predicted_s, device=row.device, on_files=row.on_files, probed=row.probed, rows=others
        )
        inside.append(low <= row.measured_s <= high)
    assert fmean(inside) >= 0.9


def test_it_holds_the_prediction() -> None:
    low, high = step_range(1.0, rows=rows(1.5, 1.5, 1.5), **CLASS)
    assert (low, high) == (1.0, pytest.approx(1.5))


def test_few_rows_give_a_wide_range() -> None:
    few, many = (step_range(1.0, rows=rows(*[1.0, 1.1, 1.2] * times), **CLASS) for times in (1, 5))
    assert few[0] < many[0] < many[1] < few[1]


def test_a_class_without_rows_takes_the_nearest() -> None:
    on_files, other = rows(1.4, 1.4, 1.4, on_files=True), rows(2.0, 2.0, 2.0, device="accelerator")
    assert step_range(1.0, rows=[*on_files, *other], **CLASS)[1] == pytest.approx(1.4)
    assert step_range(1.0, rows=other, **CLASS)[1] == pytest.approx(2.0)
    sheet = rows(3.0, 3.0, 3.0, device="accelerator", probed=False)
    assert step_range(1.0, rows=[*on_files, *sheet], **{**CLASS, "probed": False})[1] == pytest.approx(3.0)
