"""Events of several pieces of work."""

from collections.abc import Sequence
from unittest.mock import MagicMock

import pytest
import torch

from penstock.runtime import accelerator
from penstock.runtime.events import Event, FailedEvent, HostEvent, all_of
from penstock.runtime.streams import UPLOAD


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
    assert list(together.members()) == events, "a simulation asks what it was made of"


def test_what_is_left_of_several_is_what_has_to_be_followed() -> None:
    gone, failed, late = over(2), FailedEvent(ValueError("it failed")), Counted()
    together = all_of([all_of(gone), all_of([gone[0], failed]), late])
    assert list(together.parts()) == [gone[0], failed, late], "of the second, one has failed: its error is to be raised"
    assert list(all_of(gone).parts()) == []
    late.run(lambda: None)
    assert len(together.parts()) == 3


def test_a_device_follows_no_tile_that_was_updated_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was given a wait for each tile of a unit before each tile of the unit."""
    followed: list[Event] = []
    monkeypatch.setattr(accelerator, "_follow", lambda side, event: followed.append(event))
    monkeypatch.setattr(accelerator, "Hardware", lambda device: MagicMock())
    streams = accelerator.AcceleratorStreams(torch.device("cpu"))
    complete = all_of([all_of(over(100)), all_of(over(100))])
    for _ in range(3):
        streams.submit(UPLOAD, lambda: None, after=(complete,))
    streams.close()
    assert len(followed) == 3, "what compute has done until then"


@pytest.mark.parametrize("first", ["done", "synchronize"])
def test_an_error_of_one_of_them_is_raised_at_every_wait(first: str) -> None:
    together: Event = all_of([*over(2), FailedEvent(ValueError("it failed"))])
    if first == "done":
        assert together.done()
    for ask in (together.synchronize, together.wait, together.check, together.synchronize):
        with pytest.raises(ValueError, match="it failed"):
            ask()
    assert together.done()
