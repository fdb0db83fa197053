"""Placements that are tried: simulated once, timed for any machine, written for Perfetto."""

import torch

from penstock.config import Placement
from penstock.planner.trials import Trials, placement_of
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


def test_other_states_and_twice_the_batch_are_other_trials() -> None:
    trials = Trials(asked())
    found = trials.run(Placement(), Choice())
    smaller, larger = trials.simulate_other(found, state_dtype="int8"), trials.simulate_other(found, twice=True)
    assert smaller is not None
    assert larger is not None
    assert smaller.peak_bytes["device"] < found.peak_bytes["device"] < larger.peak_bytes["device"]
    assert larger.simulation.program.tokens == 2 * found.simulation.program.tokens
    assert len(trials) == 1


def test_fractions_become_a_placement() -> None:
    request = asked(folders=["/a", "/b"])
    shares = {"params": {"device": 1.0, "cpu": 0.0}, "grads": {"cpu": 1.0}, "optimizer": {"cpu": 0.5, "nvme": 0.5}}
    made = placement_of(shares, Choice("cpu"), request)
    assert (made.params, made.grads, made.optimizer) == ("device", "cpu", {"cpu": 0.5, "nvme": 0.5})
    assert made.activations == "cpu"
    assert [str(folder) for folder in made.nvme_folders()] == ["/a", "/b"]
    in_memory = placement_of({**shares, "optimizer": {"cpu": 1.0}}, Choice(), request)
    assert in_memory.nvme_folders() == []
    assert torch.is_grad_enabled()
