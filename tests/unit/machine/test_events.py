"""Events of several pieces of work."""

from collections.abc import Sequence

import pytest

from penstock.machine.events import Event, FailedEvent, HostEvent, all_of


class Counted(HostEvent):
    """An event that counts how often it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def synchronize(self) -> None:
        self.asked += 1
        super().synchronize()

    def done(self) -> bool:
        self.asked += 1
        return super().done()


def over(count: int) -> Sequence[Counted]:
    """Events whose work is over."""
    events = [Counted() for _ in range(count)]
    for event in events:
        event.run(lambda: None)
    return events


def test_what_went_well_together_is_not_asked_again() -> None:
    """Every tile of a unit follows all tiles of its last update: their number would count by its square."""
    events = over(3)
    together = all_of(events)
    together.synchronize()
    asked = [event.asked for event in events]
    for _ in range(10):
        together.synchronize()
        together.wait()
        assert together.done()
    assert [event.asked for event in events] == asked
    assert list(together.parts()) == events, "a trace asks what it was made of"


def test_what_is_done_is_not_asked_again() -> None:
    late, *rest = Counted(), *over(2)
    together = all_of([*rest, late])
    assert not together.done()
    late.run(lambda: None)
    assert together.done()
    asked = late.asked
    assert together.done()
    assert late.asked == asked


@pytest.mark.parametrize("first", ["done", "synchronize"])
def test_an_error_of_one_of_them_is_raised_at_every_wait(first: str) -> None:
    together: Event = all_of([*over(2), FailedEvent(ValueError("it failed"))])
    if first == "done":
        assert together.done()
    for ask in (together.synchronize, together.wait, together.check, together.synchronize):
        with pytest.raises(ValueError, match="it failed"):
            ask()
    assert together.done()
