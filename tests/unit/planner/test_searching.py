"""Which placements are tried: what need not move is not moved, what is said by name is kept."""

from typing import Any

from penstock.config import Options, Placement
from penstock.forecast.candidates import Candidate, Choice
from penstock.forecast.machine import Machine
from penstock.planner.searching import _fixed, _in_turn, find_best, given
from penstock.planner.trials import Trials
from tests.planning import ON_HOST, Tellable, asked


def choices(**changes: Any) -> list[list[Choice]]:
    return _in_turn(asked(**changes))


def tellable() -> Tellable:
    return Tellable()


class TestInTurn:
    def test_what_costs_nothing_comes_first_and_slices_last(self) -> None:
        turns = choices()
        assert turns[0] == [Choice(), Choice("cpu")]
        assert [[choice.unit_micro_batches for choice in turn] for turn in turns[1:]] == [[2, 2], [4, 4], [8, 8]]

    def test_what_can_be_told_may_compute_again(self) -> None:
        assert choices(model=tellable)[0] == [Choice(), Choice(None, True), Choice("cpu"), Choice("cpu", True)]

    def test_slices_that_are_said_stay(self) -> None:
        turns = choices(arguments={"unit_micro_batches": 4})
        assert {choice.unit_micro_batches for turn in turns for choice in turn} == {4}

    def test_a_share_of_updates_that_is_said_is_that_of_every_choice(self) -> None:
        turns = choices(model=tellable, arguments={"options": Options(streamed_updates=0.25)})
        assert {choice.streamed for turn in turns for choice in turn} == {0.25}

    def test_auto_leaves_it_to_the_planner(self) -> None:
        turns = choices(arguments={"options": Options(streamed_updates="auto")})
        assert turns[0] == [Choice(), Choice(streamed=1.0), Choice("cpu")]

    def test_a_cpu_streams_nothing_and_has_no_choice_twice(self) -> None:
        machine = Machine.read("cpu-laptop")
        turns = choices(machine=machine, arguments={"options": Options(streamed_updates=0.5)})
        assert {choice.streamed for turn in turns for choice in turn} == {0.0}
        assert all(len(turn) == len(set(turn)) for turn in turns)


def test_a_share_that_is_said_is_what_is_rehearsed_whatever_the_bound_likes() -> None:
    candidate = Candidate(Choice(streamed=0.25), {}, 0.1, 1.0)
    said = asked(arguments={"options": Options(streamed_updates=0.25)})
    assert _fixed(candidate, said).streamed == 0.25
    assert _fixed(candidate, asked(arguments={"options": Options(streamed_updates="auto")})).streamed == 0.1


def test_where_all_fits_on_the_device_one_rehearsal_does() -> None:
    question = asked()
    trials = Trials(question)
    best = find_best(question, trials)
    assert best.trial.placement == Placement()
    assert len(trials) == 1
    assert best.lower_bound_s <= best.trial.timing.step_s


def test_what_is_given_is_looked_at_alone() -> None:
    question = asked(device_bytes=100_000)
    best = given(question, Trials(question), ON_HOST)
    assert best.trial.placement == ON_HOST
    assert best.lacking is not None
    excess = question.limits.excess(best.trial.peak_bytes)
    assert best.lacking.missing == excess
    assert excess["device"] > 0
