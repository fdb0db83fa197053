"""Turns, deadlines and quartiles."""

from collections.abc import Callable

import pytest
import torch

from penstock.planner.rates import Rate
from penstock.probe import sampling
from penstock.probe.sampling import Case, Deadline, seconds_each, take_turns


def counted(calls: list[str], name: str) -> Case:
    def run() -> float:
        calls.append(name)
        return float(len(calls))

    return run, f"a run of {name}"


def test_cases_take_turns_and_the_warm_up_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MOST_ROUNDS", 3)
    calls: list[str] = []
    figures = take_turns({name: counted(calls, name) for name in "ab"}, Deadline(5))
    assert calls == ["a", "b"] * 4
    assert figures["a"] == Rate(5.0, 4.0, 6.0, "a run of a; median of 3 runs")
    assert figures["b"] == Rate(6.0, 5.0, 7.0, "a run of b; median of 3 runs")


def test_no_round_begins_that_would_be_over_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(sampling.time, "perf_counter", lambda: now)

    def one() -> float:
        nonlocal now
        now += 0.05
        return now

    figures = take_turns({"a": (one, "one")}, Deadline(0.33))
    # After the warm-up and these there are 30 ms left, for 50.
    assert figures["a"].how == "one; median of 5 runs, then the time was up"


def test_without_time_there_are_three_runs_after_the_warm_up() -> None:
    """The first run of a GPU loads its kernels: 9 GB/s of 3,000, written as measured."""
    runs = iter([9e9, 3e12, 2e12, 4e12])
    figures = take_turns({"a": (lambda: next(runs), "a thing")}, Deadline(0))
    assert figures["a"] == Rate(3e12, 2.5e12, 3.5e12, "a thing; median of 3 runs, then the time was up")


def test_a_figure_is_a_median_with_its_quartiles() -> None:
    assert Rate.of([5.0, 1.0, 2.0, 4.0, 3.0], "x") == Rate(3.0, 2.0, 4.0, "x")
    assert Rate.of([2.0], "x").scaled(3, ", thrice") == Rate(6.0, 6.0, 6.0, "x, thrice")


def test_in_less_time_a_run_goes_over_less() -> None:
    assert Deadline(100).nbytes(1 << 20, 64 << 20) == 64 << 20
    assert 32 << 20 < Deadline(1).nbytes(1 << 20, 1 << 30) <= 64 << 20
    assert Deadline(-1).nbytes(1 << 20, 1 << 30) == 1 << 20


def test_short_work_is_run_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now, runs = 0.0, 0
    monkeypatch.setattr(sampling.time, "perf_counter", lambda: now)

    def working(seconds: float) -> Callable[[], None]:
        def work() -> None:
            nonlocal now, runs
            now, runs = now + seconds, runs + 1

        return work

    assert seconds_each(working(2e-3), torch.device("cpu")) == pytest.approx(2e-3)
    assert runs == 1 + 5
    assert seconds_each(working(0.5), torch.device("cpu")) == 0.5
    assert runs == 7
