"""Free memory is given back when a process has grown, and not each time."""

import pytest

from penstock.runtime.system import SETTLING_LOOKS, Growth
from tests.lib.engines import prepared, train


class Process:
    """One that holds what it is told to."""

    def __init__(self, resident: int) -> None:
        self.resident = resident
        self.given_back: list[int] = []
        self.growth = Growth(lambda: self.given_back.append(self.resident), lambda: self.resident)

    def look(self, *resident: int) -> None:
        for self.resident in resident:
            self.growth.look()


def test_nothing_is_given_back_while_a_process_settles() -> None:
    process = Process(100)
    process.look(*range(100, 100 + 50 * SETTLING_LOOKS, 50))
    assert process.given_back == []


def test_what_grows_all_the_same_is_asked_for_again_only_when_it_has_grown_as_much() -> None:
    process = Process(800)
    process.look(*[800] * SETTLING_LOOKS, 901, *[900] * SETTLING_LOOKS, 1000, 1012, 1013)
    assert process.given_back == [901, 1013]


def test_a_step_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Growth] = []
    monkeypatch.setattr(Growth, "look", lambda self: looks.append(self))
    train(*prepared(), 2)
    assert len(looks) == 2
