"""Turns, deadlines and quartiles."""

import time

import pytest

from penstock.probe.sampling import Deadline, Turns, quartiles, take_turns


def counted(calls: list[str], name: str, seconds: float = 0.0) -> float:
    time.sleep(seconds)
    calls.append(name)
    return float(len(calls))


def test_cases_take_turns_and_the_warm_up_does_not_count() -> None:
    calls: list[str] = []
    turns = take_turns({"a": lambda: counted(calls, "a"), "b": lambda: counted(calls, "b")}, Deadline(5), most_rounds=3)
    assert calls == ["a", "b"] * 4
    assert turns.samples == {"a": [3.0, 5.0, 7.0], "b": [4.0, 6.0, 8.0]}
    assert not turns.cut_short


def test_no_round_begins_that_would_be_over_too_late() -> None:
    calls: list[str] = []
    start = time.perf_counter()
    turns = take_turns({"a": lambda: counted(calls, "a", 0.05)}, Deadline(0.12))
    assert time.perf_counter() - start < 0.2
    assert 1 <= len(turns.samples["a"]) <= 2
    assert turns.cut_short


def test_without_time_the_warm_up_is_the_sample_and_it_is_said() -> None:
    turns = take_turns({"a": lambda: 4.0}, Deadline(0))
    assert turns.samples == {"a": [4.0]}
    assert turns.measurement("a", "a thing") == (4.0, 4.0, 4.0, "a thing; 1 run, then the time was up")


def test_a_figure_is_a_median_with_its_quartiles() -> None:
    turns = Turns({"a": [5.0, 1.0, 2.0, 4.0, 3.0]}, cut_short=False)
    assert turns.measurement("a", "x") == (3.0, 2.0, 4.0, "x; median of 5 runs")


@pytest.mark.parametrize("samples", [[2.0], [2.0, 1.0], [3.0, 1.0, 2.0, 9.0]])
def test_quartiles_enclose_the_median(samples: list[float]) -> None:
    low, high = quartiles(samples)
    middle = Turns({"a": samples}, cut_short=False).median("a")
    assert min(samples) <= low <= middle <= high <= max(samples)


def test_a_share_is_of_what_is_left() -> None:
    deadline = Deadline(10)
    assert deadline.share(0.25).left() == pytest.approx(2.5, abs=0.1)
    assert Deadline(-1).share(0.5).left() <= 0
