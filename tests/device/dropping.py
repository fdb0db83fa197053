"""An accelerator's streams that can leave out one of the engine's waits."""

from collections.abc import Sequence
from typing import Any

import torch

from penstock.runtime.accelerator import AcceleratorStreams
from penstock.runtime.simulated import _place
from penstock.runtime.streams import Event, Work


class DroppingStreams(AcceleratorStreams):
    """Streams whose waits are known by their place, as those of `SimulatedStreams` are.

    Arguments:
        dropped: `file:line` of the wait that is left out, with `#index` for an entry of `after`.

    Attributes:
        seen: the places that waited.
    """

    def __init__(self, device: torch.device, dropped: str | None = None) -> None:
        super().__init__(device)
        self._dropped = dropped
        self.seen: set[str] = set()

    def keeps(self, place: str) -> bool:
        """Note a wait; whether it is to be done."""
        self.seen.add(place)
        return place != self._dropped

    def submit(self, stream: str, work: Work, *, after: Sequence[Event] = (), **rest: Any) -> Event:
        place = _place(2)
        kept = [event for index, event in enumerate(after) if self.keeps(f"{place}#{index}")]
        return _Heard(super().submit(stream, work, after=kept, **rest), self)


class _Heard(Event):
    """An event whose waits are heard of."""

    def __init__(self, event: Event, streams: DroppingStreams) -> None:
        self._event, self._streams = event, streams

    def wait(self) -> None:
        if self._streams.keeps(_place(2)):
            self._event.wait()

    def synchronize(self) -> None:
        if self._streams.keeps(_place(2)):
            self._event.synchronize()

    def done(self) -> bool:
        return self._event.done()

    def check(self) -> None:
        self._event.check()

    def unwatched(self) -> Event:
        return self._event
