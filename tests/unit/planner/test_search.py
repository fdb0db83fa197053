"""Which placements are tried: what need not move is not moved, what is said by name is kept; busy times by hand."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.config import Options, Placement, TierName
from penstock.planner import search as searching
from penstock.planner.machine import Machine
from penstock.planner.search import Placements, Search, _choices, find_best, fractions_of
from penstock.planner.trials import Trials, placement_of
from penstock.planner.workload import KINDS, TIERS, Choice, Flow, Fractions, Limits, StepWorkload
from tests.lib.planning import Tellable, asked

GIB = 1 << 30


def choices(**changes: Any) -> list[Choice]:
    return _choices(asked(**changes))


def tellable() -> Tellable:
    return Tellable()


def test_what_costs_nothing_comes_first_and_what_can_be_told_may_compute_again() -> None:
    assert choices() == [Choice(), Choice("cpu")]
    assert choices(model=tellable) == [Choice(), Choice(None, True), Choice("cpu"), Choice("cpu", True)]
    within_one_memory = replace(asked().machine, unified_memory=True)
    assert choices(machine=within_one_memory) == [Choice(), Choice("nvme")]


def test_a_share_of_updates_that_is_said_is_that_of_every_choice_and_a_cpu_streams_nothing() -> None:
    found = choices(model=tellable, arguments={"options": Options(streamed_updates=0.25)})
    assert {choice.streamed for choice in found} == {0.25}
    found = choices(machine=Machine.read("cpu-laptop"), arguments={"options": Options(streamed_updates=0.5)})
    assert {choice.streamed for choice in found} == {0.0}
    assert len(found) == len(set(found)), "no choice twice"


# A step of 20 bytes a second over the link, ...

RATES: Mapping[Flow, float] = {"upload": 10, "download": 10, "read": 4, "write": 2, "update": 20, "device update": 1000}
SMALL = StepWorkload(
    params_bytes=20,
    own_params_bytes=20,
    grads_bytes=20,
    optimizer_bytes=100,
    update_bytes=260,
    reduced_bytes=20,
    forward_gathered_bytes=20,
    backward_gathered_bytes=20,
    busy={"forward": {"compute": 1.0}, "backward": {"compute": 2.0}},
    rates={flow: {f"{flow} 0": 1 / rate} for flow, rate in RATES.items()}
    | {"in place": {"compute": 1 / 1000}, "update first": {"update 0": 1 / 20, "compute": 1 / 20}},
)
ROOMY = Limits(dict.fromkeys(TIERS, 1 << 40))


def on(params: TierName, grads: TierName, optimizer: TierName) -> torch.Tensor:
    cuts = {"device": (1.0, 1.0), "cpu": (0.0, 1.0), "nvme": (0.0, 0.0)}
    return torch.tensor([[*cuts[params], *cuts[grads], *cuts[optimizer], 0.0]], dtype=torch.float64)


def busy_s(point: torch.Tensor, workload: StepWorkload = SMALL, limits: Limits = ROOMY) -> float:
    return float(Placements(workload, limits).seconds(point)[0])


# Each placement, and what binds it: forward window + backward window.
BY_HAND: dict[str, tuple[torch.Tensor, float, float]] = {
    "all on the device: compute and its updates": (on("device", "device", "device"), 1 + 0.26, 2.0),
    "all on the cpu: updates, then compute": (on("cpu", "cpu", "cpu"), 260 / 20, 2.0),
    "state on the cpu: updates": (on("device", "device", "cpu"), 260 / 20, 2.0),
    "state in files: reads, then writes go on until the next": (on("device", "device", "nvme"), 100 / 4, 50 - 25),
    "gradients on the cpu: one link": (on("device", "cpu", "device"), 2.0, 2.0),
    "gradients in files: writes of all, reads in forward": (on("device", "nvme", "device"), 5.0, 5.0),
    "parameters on the cpu: up twice, down once": (on("cpu", "device", "device"), 0.26 + 2.0, 2.0),
    "parameters in files: read by update and backward": (on("nvme", "device", "device"), 5.0, 5.0),
}


def test_parameters_off_the_device_have_only_the_compute_of_their_own_to_hide_behind() -> None:
    """All of them take 2 s to bring, of 1 s of compute: a half of the model waits for a half of the difference."""
    workload = replace(SMALL, update_bytes=0, grads_bytes=0, reduced_bytes=0, optimizer_bytes=0, own_params_bytes=0)
    point = on("device", "device", "device")
    assert busy_s(point, workload) == pytest.approx(1 + 2)
    point[:, 0] = 0.5
    assert busy_s(point, workload) == pytest.approx(1 + 0.5 + 2)


ON_CPU, STATE_ON_CPU, ALL = on("cpu", "cpu", "cpu"), on("device", "cpu", "cpu"), on("device", "device", "device")
ONE_MEMORY = Limits({"cpu": 1000, "nvme": 1000}, shared=True)
#: Other steps, at a placement within limits, and their seconds.
OTHERS: dict[str, tuple[dict[str, Any], torch.Tensor, Limits, float]] = {
    # Uploads are after the first forward.
    "micro-batches gather anew and send again": ({"micro_batches": 3, "reductions": 3}, ON_CPU, ROOMY, 260 / 20 + 10),
    "what rings keep is not read again": (
        {"kept_bytes": 40, "busy": {"backward": {"compute": 100.0}}},
        on("device", "device", "nvme"),
        ROOMY,
        15 + 100,
    ),
    "updates hide behind nothing": ({"overlap": "none"}, STATE_ON_CPU, ROOMY, 1 + 13 + 2),
    "updates hide behind forward": ({"overlap": "forward"}, STATE_ON_CPU, ROOMY, 13 + 2),
    "updates hide behind both": ({"overlap": "backward"}, STATE_ON_CPU, ROOMY, 13),
    "in one memory nothing is copied": ({"one_memory": True}, ALL, ONE_MEMORY, 1.26 + 2),
    "and files are read": ({"one_memory": True}, on("nvme", "device", "device"), ONE_MEMORY, 5 + 5),
}


OTHERS |= {name: ({}, point, ROOMY, sum(windows)) for name, (point, *windows) in BY_HAND.items()}


@pytest.mark.parametrize(("changes", "point", "limits", "seconds"), OTHERS.values(), ids=OTHERS)
def test_busy_times_by_hand(changes: dict[str, Any], point: torch.Tensor, limits: Limits, seconds: float) -> None:
    assert busy_s(point, replace(SMALL, **changes), limits) == pytest.approx(seconds)


def test_bytes_of_every_way_of_a_streamed_tile() -> None:
    """State and shadow come up and go down, and the shadow is published: nothing of it is the host's."""
    point = on("device", "cpu", "cpu")
    point[:, -1] = 1.0
    busy, work = Placements(SMALL, ROOMY, (0.0, 1.0)).seconds(point)
    assert float(busy) == pytest.approx((100 + 20 + 20 + 20) / 10 + 2)
    assert float(work) == 0.0  # no rate says what all work is


def test_tiles_of_mixed_cuts_are_where_the_cuts_put_them() -> None:
    """A quarter of all tiles has its parameters on the device and its state on the host: only there are shadows."""
    point = torch.tensor([[0.5, 1.0, 0.5, 1.0, 0.25, 1.0, 0.0]], dtype=torch.float64)
    peak = Placements(SMALL, ROOMY).peak(point, torch.zeros(3))[0].tolist()
    assert peak == [10 + 10 + 25, 10 + 10 + 75 + 5, 0]


# The search, with simulations that are arithmetic: what the formula does not know is some bytes, and a longer step.

LARGE = replace(
    SMALL,
    params_bytes=8 * GIB,
    own_params_bytes=8 * GIB,
    grads_bytes=8 * GIB,
    optimizer_bytes=40 * GIB,
    update_bytes=104 * GIB,
    reduced_bytes=8 * GIB,
    forward_gathered_bytes=8 * GIB,
    backward_gathered_bytes=8 * GIB,
    there_bytes={"device": GIB},
    activation_peak_bytes={"device": 12 * GIB},
    busy={"forward": {"compute": 0.5}, "backward": {"compute": 1.0}},
    rates={flow: {row: seconds * 1e-9 for row, seconds in busy.items()} for flow, busy in SMALL.rates.items()},
)
LIMITS = Limits({"device": 24 * GIB, "cpu": 64 * GIB, "nvme": 500 * GIB})
WORKLOADS = {
    Choice(): LARGE,
    Choice(recompute=True): replace(
        LARGE,
        activation_peak_bytes={"device": 3 * GIB},
        busy={"forward": {"compute": 0.5}, "backward": {"compute": 1.5}},
    ),
}


def search_of(
    workloads: Mapping[Choice, StepWorkload] = WORKLOADS,
    limits: Limits = LIMITS,
    *,
    hidden: Mapping[TierName, int] | None = None,
    longer: Callable[[Choice], float] = lambda choice: 1.1,
    streamed: tuple[float, float] = (0.0, 0.0),
) -> Search:
    """Search to the end. Each "trial" has its choice, its fractions, its step and its peaks."""
    by_name = {choice[:2]: Placements(workload, limits, streamed) for choice, workload in workloads.items()}

    def simulate(choice: Choice, fractions: Fractions) -> Any:
        point = point_of(fractions, choice.streamed)
        there = by_name[choice[:2]].peak(point, torch.zeros(3))[0].tolist()
        peak = {tier: int(nbytes) + (hidden or {}).get(tier, 0) for tier, nbytes in zip(TIERS, there, strict=True)}
        timing = SimpleNamespace(step_s=float(by_name[choice[:2]].seconds(point)[0]) * longer(choice))
        return SimpleNamespace(choice=choice, fractions=fractions, timing=timing, peak_bytes=peak)

    search = Search(limits, streamed, workloads.get, simulate)
    search.run([*workloads])
    return search


def excess(search: Search) -> list[bool]:
    return [bool(LIMITS.excess(trial.peak_bytes)) for trial in search.tried]


def point_of(fractions: Fractions, streamed: float = 0.0) -> torch.Tensor:
    cuts = [(f.get("device", 0.0), f.get("device", 0.0) + f.get("cpu", 0.0)) for f in (fractions[k] for k in KINDS)]
    return torch.tensor([[*(cut for pair in cuts for cut in pair), streamed]], dtype=torch.float64)


def test_every_placement_that_is_tried_is_one_and_none_is_tried_twice() -> None:
    tried: Any = search_of(longer=lambda choice: 2.0, hidden={"device": GIB}).tried
    keys = [(trial.choice, str(trial.fractions)) for trial in tried]
    assert len(set(keys)) == len(keys) <= searching.SIMULATIONS
    for trial in tried:
        placement = Placement(**{kind: dict(trial.fractions[kind]) for kind in KINDS}, nvme_path="there")
        for kind in KINDS:
            assert sum(placement.home(kind).values()) == pytest.approx(1, abs=1e-9)


def test_a_choice_whose_steps_are_longer_than_estimated_gives_way() -> None:
    """Each is simulated once or twice; which is best is told by steps, not by the formula."""
    for slow in WORKLOADS:
        found = search_of(longer=lambda choice, slow=slow: 2.0 if choice[:2] == slow[:2] else 1.05)
        assert found.fitting[0].choice[:2] != slow[:2]
        assert len(found.tried) <= 4


def test_what_a_peak_exceeds_is_expected_from_then_on() -> None:
    search = search_of(hidden={"device": 3 * GIB, "cpu": 2 * GIB})
    assert search.fitting
    assert sum(excess(search)) <= len(WORKLOADS)


def test_as_much_as_has_room_is_on_the_fastest_tiers() -> None:
    """No coarser than a 64th of a kind: the last steps of the search fill the device."""
    assert 23.3 * GIB < search_of().fitting[0].peak_bytes["device"] <= 24 * GIB


def test_where_no_simulation_fits_there_is_no_best() -> None:
    search = search_of(hidden={"device": 30 * GIB})
    assert search.fitting == []
    assert search.placements[Choice()].beside["device"] >= 30 * GIB


AWAY = {
    choice._replace(activations="cpu"): replace(workload, activation_peak_bytes={"device": GIB, "cpu": 11 * GIB})
    for choice, workload in WORKLOADS.items()
}


def counted(workloads: Mapping[Choice, StepWorkload]) -> set[Choice]:
    return {*search_of(workloads | AWAY).placements}


def test_activations_elsewhere_are_counted_only_where_that_may_be_better() -> None:
    """To bring them takes longer than to compute them again, which is then all that they are compared with."""
    assert counted(WORKLOADS) == {*WORKLOADS, Choice("cpu", True)}
    without = {choice: replace(workload, activation_peak_bytes={"device": 0}) for choice, workload in WORKLOADS.items()}
    assert counted(without) == {*WORKLOADS}
    rates = {**LARGE.rates, "upload": {"upload 0": 1e-12}, "download": {"download 0": 1e-12}}
    fast = {choice: replace(each, rates=rates) for choice, each in WORKLOADS.items()}
    assert Choice("cpu") in counted(fast), "then they need not be computed again"


def test_in_one_memory_nothing_is_on_the_host() -> None:
    limits = Limits({"cpu": 50 * GIB, "nvme": 500 * GIB}, shared=True)
    workload = replace(LARGE, activation_peak_bytes={"device": GIB}, one_memory=True)
    tried: Any = search_of({Choice(): workload}, limits, hidden={"cpu": 4 * GIB}).tried
    assert tried
    assert all("cpu" not in trial.fractions[kind] for trial in tried for kind in KINDS)


# The same with the engine.


def test_what_no_simulation_has_shown_to_fit_is_never_said_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that may simulate nothing: what is slowest fits, or says what it lacks."""
    monkeypatch.setattr(searching, "SIMULATIONS", 0)
    for device_bytes in (300_000, 200_000):
        request = asked(device_bytes=device_bytes)
        best = find_best(request, Trials(request))
        excess = request.limits.excess(best.trial.peak_bytes)
        assert (best.lacking is None) == (not excess)
        assert best.lacking is None or best.lacking.missing


def test_where_all_fits_on_the_device_one_simulation_does() -> None:
    request = asked()
    trials = Trials(request)
    assert find_best(request, trials).trial.placement == Placement()
    assert len(trials) == 1


def test_a_search_says_what_it_does_and_no_placement_of_the_quarter_grid_is_better() -> None:
    """Of the 125 placements of each choice every sixteenth is held against what was found."""
    request, said = asked(device_bytes=300_000), list[str]()
    trials = Trials(request)
    best = find_best(request, trials, said.append)
    assert said
    assert all(line.startswith("simulating placement ") for line in said)
    grid = [*product(_choices(request), Placements(SMALL, request.limits).grid(("device", "cpu")))]
    for choice, point in grid[::16]:
        trial = trials.run(placement_of(fractions_of(point), choice, request), choice)
        if not request.limits.excess(trial.peak_bytes):
            assert best.trial.timing.step_s <= 1.02 * trial.timing.step_s
