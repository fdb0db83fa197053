"""Turns, deadlines and quartiles."""

import pytest

from penstock.probe import sampling
from penstock.probe.sampling import Deadline, Turns, quartiles, take_turns


def counted(calls: list[str], name: str) -> float:
    calls.append(name)
    return float(len(calls))


def test_cases_take_turns_and_the_warm_up_does_not_count() -> None:
    calls: list[str] = []
    turns = take_turns({"a": lambda: counted(calls, "a"), "b": lambda: counted(calls, "b")}, Deadline(5), most_rounds=3)
    assert calls == ["a", "b"] * 4
    assert turns.samples == {"a": [3.0, 5.0, 7.0], "b": [4.0, 6.0, 8.0]}
    assert not turns.cut_short


def test_no_round_begins_that_would_be_over_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(sampling.time, "perf_counter", lambda: now)

    def one() -> float:
        nonlocal now
        now += 0.05
        return now

    turns = take_turns({"a": one}, Deadline(0.33))
    assert len(turns.samples["a"]) == 5  # after the warm-up and these there are 30 ms left, for 50
    assert turns.cut_short


def test_without_time_there_are_three_runs_after_the_warm_up() -> None:
    """The first run of a GPU loads its kernels: 9 GB/s of 3,000, written as measured."""
    runs = iter([9e9, 3e12, 2e12, 4e12])
    turns = take_turns({"a": lambda: next(runs)}, Deadline(0))
    assert turns.samples == {"a": [3e12, 2e12, 4e12]}
    assert turns.measurement("a", "a thing").how == "a thing; median of 3 runs, then the time was up"


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
