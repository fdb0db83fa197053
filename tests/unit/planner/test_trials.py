"""Placements that are tried: simulated once, timed for any machine, written for Perfetto."""

import json
from pathlib import Path

import pytest

from penstock.config import Placement
from penstock.errors import ConfigError
from penstock.planner.simulation import operation_times
from penstock.planner.trials import Trials
from penstock.planner.workload import Choice
from tests.lib.planning import ON_HOST, asked


def test_a_placement_is_rehearsed_once() -> None:
    trials = Trials(asked())
    one, other = trials.run(Placement(), Choice()), trials.run(ON_HOST, Choice())
    assert trials.run(Placement(), Choice()) is one
    assert len(trials) == 2
    assert one.peak_bytes["device"] > other.peak_bytes["device"]
    assert "cpu" not in one.peak_bytes
    assert one.timing.step_s < other.timing.step_s


def test_a_trace_is_json_with_a_span_for_each_job(tmp_path: Path) -> None:
    trials = Trials(asked())
    trials.write_trace(trials.run(ON_HOST, Choice()), tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    threads = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"upload", "download", "update"} <= threads
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
    with pytest.raises(ConfigError, match=r"^The trace cannot be written: "):
        trials.write_trace(trials.run(ON_HOST, Choice()), tmp_path)


def test_measuring_times_each_kind_of_operation_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation_times, "_LEAST_SECONDS", 1e-5)
    measured: dict = {}
    trial = Trials(asked(), measures=True, measured=measured).run(Placement(), Choice())
    assert measured.keys() == trial.simulation.recipes.keys()
    assert all(seconds >= 0 for seconds in measured.values())
    assert trial.timing.step_s > 0
