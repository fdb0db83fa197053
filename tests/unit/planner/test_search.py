"""Which placements are tried: what need not move is not moved, what is said by name is kept."""

from typing import Any

from penstock.config import Options, Placement
from penstock.planner.candidates import CandidatePlacement, Choice
from penstock.planner.machine import Machine
from penstock.planner.search import _choices, _fixed, find_best, given
from penstock.planner.trials import Trials
from tests.planning import ON_HOST, Tellable, asked


def choices(**changes: Any) -> list[Choice]:
    return _choices(asked(**changes))


def tellable() -> Tellable:
    return Tellable()


class TestChoices:
    def test_what_costs_nothing_comes_first(self) -> None:
        assert choices() == [Choice(), Choice("cpu")]

    def test_what_can_be_told_may_compute_again(self) -> None:
        assert choices(model=tellable) == [Choice(), Choice(None, True), Choice("cpu"), Choice("cpu", True)]

    def test_a_share_of_updates_that_is_said_is_that_of_every_choice(self) -> None:
        found = choices(model=tellable, arguments={"options": Options(streamed_updates=0.25)})
        assert {choice.streamed for choice in found} == {0.25}

    def test_auto_leaves_it_to_the_planner(self) -> None:
        found = choices(arguments={"options": Options(streamed_updates="auto")})
        assert found == [Choice(), Choice(streamed=1.0), Choice("cpu")]

    def test_a_cpu_streams_nothing_and_has_no_choice_twice(self) -> None:
        machine = Machine.read("cpu-laptop")
        found = choices(machine=machine, arguments={"options": Options(streamed_updates=0.5)})
        assert {choice.streamed for choice in found} == {0.0}
        assert len(found) == len(set(found))


def test_a_share_that_is_said_is_what_is_rehearsed_whatever_the_bound_likes() -> None:
    candidate = CandidatePlacement(Choice(streamed=0.25), {}, 0.1, 1.0)
    said = asked(arguments={"options": Options(streamed_updates=0.25)})
    assert _fixed(candidate, said).streamed == 0.25
    assert _fixed(candidate, asked(arguments={"options": Options(streamed_updates="auto")})).streamed == 0.1


def test_where_all_fits_on_the_device_one_rehearsal_does() -> None:
    request = asked()
    trials = Trials(request)
    best = find_best(request, trials)
    assert best.trial.placement == Placement()
    assert len(trials) == 1
    assert best.lower_bound_s <= best.trial.timing.step_s


def test_what_is_given_is_looked_at_alone() -> None:
    request = asked(device_bytes=100_000)
    best = given(request, Trials(request), ON_HOST)
    assert best.trial.placement == ON_HOST
    assert best.lacking is not None
    excess = request.limits.excess(best.trial.peak_bytes)
    assert best.lacking.missing == excess
    assert excess["device"] > 0
