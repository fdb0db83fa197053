"""Candidates and the search, with simulations that are arithmetic: the bound, and what the bound does not know."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

import pytest

from penstock.config import Placement, TierName
from penstock.planner.candidates import GRID, CandidatePlacement, Candidates, Choice, candidates, cut
from penstock.planner.solve import Evaluation, Found, Infeasible, infeasible, search
from penstock.planner.workload import KINDS, TIERS, Fractions, Limits, Load
from tests.property.pipelines import Machine

GIB = 1 << 30
MACHINE = Machine(
    h2d=20e9,
    d2h=20e9,
    duplex=30e9,
    host_bandwidth=60e9,
    update=30e9,
    device_update=800e9,
    disk_read=6e9,
    disk_write=4e9,
    disk_mixed=5e9,
    folders=1,
)
LIMITS = Limits({"device": 24 * GIB, "cpu": 64 * GIB, "nvme": 500 * GIB})
LOAD = Load(
    params_bytes=8 * GIB,
    own_params_bytes=8 * GIB,
    grads_bytes=8 * GIB,
    optimizer_bytes=40 * GIB,
    update_bytes=104 * GIB,
    reduced_bytes=8 * GIB,
    forward_s=0.5,
    backward_s=1.0,
    forward_gathered_bytes=8 * GIB,
    backward_gathered_bytes=8 * GIB,
    ahead_bytes=GIB,
    kept_bytes=GIB // 4,
    fixed_bytes={"device": GIB},
    activation_peak_bytes={"device": 12 * GIB},
)
LOADS: Mapping[Choice, Load] = {
    Choice(): LOAD,
    Choice(recompute=True): replace(LOAD, backward_s=1.5, activation_peak_bytes={"device": 3 * GIB}),
    Choice("cpu"): replace(
        LOAD, activations="cpu", activations_bytes=11 * GIB, activation_peak_bytes={"device": GIB, "cpu": 11 * GIB}
    ),
}


@pytest.fixture(scope="module")
def of() -> Candidates:
    """Candidates for all choices: values, which nobody changes."""
    return among()


def among(loads: Mapping[Choice, Load] = LOADS, limits: Limits = LIMITS) -> Candidates:
    return candidates(loads, MACHINE, limits, back_end="accelerator", overlap="forward")


def simulation(
    of: Candidates, *, hidden: Mapping[TierName, int] | None = None, seen: list[CandidatePlacement] | None = None
) -> Callable[[CandidatePlacement], Evaluation]:
    """A step between the bound and all work in turn; buffers that no bound knows of."""

    def evaluate(candidate: CandidatePlacement) -> Evaluation:
        if seen is not None:
            seen.append(candidate)
        at_rest = of.at_rest(candidate.choice, candidate.fractions)
        peak = {tier: int(at_rest[tier]) + (hidden or {}).get(tier, 0) for tier in TIERS}
        step_s = 0.8 * candidate.bound_s + 0.2 * candidate.work_s
        return Evaluation(max(candidate.bound_s, step_s), peak, not of.limits.excess(peak))

    return evaluate


def found_by(of: Candidates, evaluate: Callable[[CandidatePlacement], Evaluation], simulations: int = 9) -> Found:
    found = search(of, evaluate, simulations=simulations)
    assert isinstance(found, Found), found
    return found


def test_candidates_come_in_order_of_their_bound_but_for_a_hundredth(of: Candidates) -> None:
    bounds = [candidate.bound_s for candidate in of.in_order]
    assert len(bounds) > 8
    assert all(later >= earlier * 0.99 for earlier, later in pairwise(bounds))
    assert of.lower_bound_s <= bounds[0]


def test_every_candidate_is_a_placement(of: Candidates) -> None:
    """Fractions sum to 1 and are what `Placement` takes; none is there twice."""
    there = of.in_order
    for candidate in there:
        placement = Placement(**{kind: dict(candidate.fractions[kind]) for kind in KINDS}, nvme_path="there")
        for kind in KINDS:
            assert sum(placement.home(kind).values()) == pytest.approx(1, abs=1e-9)
    assert len({candidate.key for candidate in there}) == len(there)


def test_cuts_are_on_the_grid_where_that_fits(of: Candidates) -> None:
    on_grid = [
        candidate
        for candidate in of.in_order
        if all(share * GRID % 1 == 0 for kind in KINDS for share in candidate.fractions[kind].values())
    ]
    assert len(on_grid) >= len(of.in_order) / 2


def test_all_on_one_tier_is_among_them() -> None:
    roomy = among({Choice(): LOAD}, Limits(dict.fromkeys(TIERS, 1 << 40)))
    whole: Fractions = {kind: {"device": 1.0} for kind in KINDS}
    assert whole in [candidate.fractions for candidate in roomy.in_order]


def test_a_cut_moves_to_the_slower_tier_and_equal_cuts_stay_equal() -> None:
    shares: Mapping[TierName, float] = {"device": 0.3, "cpu": 0.5, "nvme": 0.2}
    found = cut(dict.fromkeys(KINDS, shares), TIERS, 1e-6)
    assert found == {kind: {"device": 19 / 64, "cpu": 32 / 64, "nvme": 13 / 64} for kind in KINDS}
    nearly: Mapping[TierName, float] = {"device": 0.9999, "cpu": 0.0001}
    assert cut(dict.fromkeys(KINDS, nearly), ("device", "cpu"), 0.25) == {kind: {"device": 1.0} for kind in KINDS}
    assert cut(dict.fromkeys(KINDS, nearly), ("device", "cpu"), None)["params"]["cpu"] == pytest.approx(0.0001)


def test_proposals_leave_room_for_buffers_that_come_and_go() -> None:
    load = replace(LOAD, passing_bytes={"device": 2 * GIB, "cpu": 3 * GIB})
    there = among({Choice(): load})
    proposed = [c for c in there.in_order if any(0 < s < 1 for kind in KINDS for s in c.fractions[kind].values())]
    assert proposed
    for candidate in proposed:
        for tier, room in (("device", 22 * GIB - load.there("device")), ("cpu", 61 * GIB)):
            state = sum(nbytes * candidate.fractions[kind].get(tier, 0.0) for kind, nbytes in load.kind_bytes.items())
            assert state <= room + 1
    assert there.lower_bound_s == among({Choice(): LOAD}).lower_bound_s  # the bound does not count them


def test_a_search_stops_once_no_bound_is_below_the_best() -> None:
    of, seen = among(limits=Limits(dict.fromkeys(TIERS, 1 << 40))), list[CandidatePlacement]()

    def exact(candidate: CandidatePlacement) -> Evaluation:
        seen.append(candidate)
        return Evaluation(candidate.bound_s, {}, fits=True)

    found = found_by(of, exact)
    assert len(seen) < 6
    assert found.evaluation.step_s <= min(candidate.bound_s for candidate in of.in_order)
    assert found.gap == pytest.approx(found.evaluation.step_s / of.lower_bound_s - 1)


@pytest.mark.parametrize("simulations", [1, 2, 5, 12])
def test_the_best_that_was_tried_is_found_in_as_many_rehearsals_as_may_be(of: Candidates, simulations: int) -> None:
    seen: list[CandidatePlacement] = []
    found = found_by(of, simulation(of, seen=seen), simulations)
    assert len(seen) == len(found.tried) <= simulations
    assert found.evaluation.step_s == min(evaluation.step_s for _, evaluation in found.tried)
    assert len({candidate.key for candidate in seen}) == len(seen)


def test_what_a_peak_exceeds_is_moved_off_that_tier(of: Candidates) -> None:
    hidden: Mapping[TierName, int] = {"device": 3 * GIB, "cpu": 2 * GIB}
    found = found_by(of, simulation(of, hidden=hidden))
    assert found.evaluation.fits
    assert not of.limits.excess(found.evaluation.peak_bytes)
    fit = [evaluation.fits for _, evaluation in found.tried]
    assert sum(not each for each in fit) <= 2  # what the first ones have shown holds for the others


def test_the_least_used_goes_first() -> None:
    """Only the state is moved, and by what is missing: half a GiB of 40, in parts of 1/256."""
    limits = Limits({"device": 100 * GIB, "cpu": 100 * GIB})
    of = among({Choice(): replace(LOAD, activation_peak_bytes={}, passing_bytes={})}, limits)
    tried: list[CandidatePlacement] = []

    def evaluate(candidate: CandidatePlacement) -> Evaluation:
        tried.append(candidate)
        over = len(tried) == 1
        peak: Mapping[TierName, int] = {"device": 100 * GIB + (GIB // 2 if over else 0)}
        return Evaluation(1e9, peak, fits=not over)

    search(of, evaluate, simulations=2)
    first, second = tried
    assert first.fractions == {kind: {"device": 1.0} for kind in KINDS}
    assert second.fractions["params"] == {"device": 1.0}
    assert second.fractions["optimizer"]["cpu"] >= 0.5 / 40


def test_shifting_cuts_finds_what_no_bound_knows() -> None:
    """The engine is quickest where a quarter of the state is on the device: a valley beside all candidates."""
    limits = Limits(dict.fromkeys(("device", "cpu"), 1 << 40))
    of = among({Choice(): LOAD}, limits)

    def evaluate(candidate: CandidatePlacement) -> Evaluation:
        share = candidate.fractions["optimizer"].get("device", 0.0)
        return Evaluation(10 + abs(share - 0.75), {}, fits=True)

    found = found_by(of, evaluate, 24)
    assert found.best.fractions["optimizer"].get("device", 0.0) == pytest.approx(0.75, abs=0.13)


def test_the_same_search_has_the_same_end(of: Candidates) -> None:
    ends = [found_by(of, simulation(of, hidden={"device": GIB})) for _ in range(2)]
    assert ends[0] == ends[1]


def test_streamed_shares_are_those_that_a_choice_allows() -> None:
    choice = Choice(streamed=0.5)
    of = among({choice: replace(LOAD, streamed=0.5)})
    assert all(0 <= candidate.streamed <= 0.5 for candidate in of.in_order)
    assert any(candidate.streamed > 0 for candidate in of.in_order)
    found = found_by(of, simulation(of), 8)
    assert all(0 <= candidate.streamed <= 0.5 for candidate, _ in found.tried)


def test_where_no_rehearsal_fits_it_says_what_is_missing(of: Candidates) -> None:
    found = search(of, simulation(of, hidden={"device": 30 * GIB}), simulations=4)
    assert isinstance(found, Infeasible)
    assert found.missing == {"device": 8 * GIB}  # 30 and 2, activations being on the cpu, of 24


def test_nothing_fits() -> None:
    limits = Limits({"device": 8 * GIB, "cpu": 200 * GIB})
    assert among({Choice(): LOAD}, limits).in_order == []
    assert infeasible({Choice(): LOAD}, limits).missing == {"device": 5 * GIB}


def test_the_choice_that_comes_nearest_says_what_is_missing() -> None:
    found = infeasible(LOADS, Limits({"device": GIB, "cpu": 200 * GIB}))
    assert found.missing == {"device": GIB}  # with activations on the cpu


def test_on_a_cpu_there_is_one_memory() -> None:
    limits = Limits({"cpu": 50 * GIB, "nvme": 500 * GIB}, shared=True)
    load = replace(LOAD, activation_peak_bytes={"device": GIB})
    machine = Machine(update=30e9, disk_read=6e9, disk_write=4e9)
    of = candidates({Choice(): load}, machine, limits, back_end="inline", overlap="forward")
    for candidate in of.in_order:
        assert all(tier != "cpu" for kind in KINDS for tier in candidate.fractions[kind])
    found = found_by(of, simulation(of, hidden={"cpu": 4 * GIB}))
    assert found.evaluation.fits
    assert found.evaluation.peak_bytes["device"] <= 46 * GIB
