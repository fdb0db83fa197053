"""Placements that are tried: simulated once, timed for any machine, written for Perfetto."""

from penstock.config import Placement
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
