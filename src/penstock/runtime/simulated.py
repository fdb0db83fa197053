"""Simulated asynchronous streams on a cpu: every piece of submitted work runs late, and nothing hides a missing wait.

Each stream is a worker thread that sleeps before it works: a random time, or bytes / bandwidth. Buffers are filled with
NaN from lease to completion and after release, so that a read without a wait is a wrong number, not luck; a buffer that
changes hands while work writes it is an error. Waits can be dropped one by one, which is how the tests show that each
of them is needed. Collectives are late as well, and issued on the thread of their stream: in the order of submission,
on groups of their own, where nothing else is.
"""

import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.runtime.streams import (
    STREAMS,
    Event,
    HostEvent,
    HostWorker,
    Pending,
    Streams,
    Work,
    close_workers,
    poison,
)
from penstock.trace import NO_LABEL, Label

_EVENTS_FILE = HostEvent.run.__code__.co_filename  # where an event of several waits for each

Delay = Callable[[str, int], float]  # (stream, bytes) -> seconds


class SimulatedStreams(Streams):
    """Worker threads with delays in place of a device's streams.

    Arguments:
        delay: seconds that a piece of work on a stream waits before it runs, given its bytes.
        dropped_wait: a place of `waits_seen` whose wait is left out.

    Attributes:
        waits_seen: `file:line` of every place that waited for an event, with `#index` for an entry of `after`.
    """

    aliases_host = False

    def __init__(self, delay: Delay, dropped_wait: str | None = None) -> None:
        super().__init__(torch.device("cpu"))
        self._delay = delay
        self._dropped_wait = dropped_wait
        self.waits_seen: set[str] = set()
        self._writing: list[tuple[int, Event]] = []  # storages that submitted work overwrites
        self._workers = {name: HostWorker(name) for name in STREAMS}

    def submit(
        self,
        stream: str,
        work: Work,
        *,
        after: Sequence[Event] = (),
        writes: Sequence[Tensor] = (),
        nbytes: int = 0,
        label: Label = NO_LABEL,
    ) -> Event:
        """Queue `work` on the stream's thread; what it overwrites is NaN while it is delayed."""
        place = _place(2)
        kept = tuple(event for index, event in enumerate(after) if self.keeps(f"{place}#{index}"))
        seconds = self._delay(stream, nbytes)

        def late() -> Pending | None:
            for tensor in writes:  # not before: until here it may belong to work that this one follows
                poison(tensor)
            time.sleep(seconds)
            return work()

        return super().submit(stream, late, after=kept, writes=writes, nbytes=nbytes, label=label)

    def _submit(self, stream: str, work: Work, after: Sequence[Event], writes: Sequence[Tensor]) -> Event:
        def in_order() -> Pending | None:
            for event in after:  # by the base class: what the program waits for itself is noted, and may be left out
                HostEvent.synchronize(event) if isinstance(event, HostEvent) else event.synchronize()
            return work()

        event = _SimulatedEvent(self)
        try:
            self._writing = [(storage, other) for storage, other in self._writing if not other.done()]
            self._writing += [(tensor.untyped_storage().data_ptr(), event) for tensor in writes]
            self._workers[stream].submit(in_order, event)  # after the note: it may run at once
        except BaseException:
            self._note_behind(stream, event)
            raise
        return event

    def _note_behind(self, stream: str, event: Event) -> None:
        """Have memory count as written until what an interrupt has queued, or kept from the queue, must have run."""
        behind = _SimulatedEvent(self)
        self._writing = [(storage, behind if other is event else other) for storage, other in self._writing]
        self._workers[stream].submit(lambda: None, behind)

    def lease(self, buffer: Tensor) -> None:
        """Give the buffer its memory, full of NaN."""
        super().lease(buffer)
        self._check_quiet(buffer)
        poison(buffer)

    def retire(self, buffer: Tensor) -> None:
        """Fill the buffer with NaN and keep its memory: a late reader gets NaN, not a fault."""
        self.spoil(buffer)

    def spoil(self, buffer: Tensor) -> None:
        """Fill the buffer with NaN."""
        self._check_quiet(buffer)
        poison(buffer)

    def _check_quiet(self, buffer: Tensor) -> None:
        """Refuse memory that changes hands while work still writes it: its next user would find it damaged."""
        storage = buffer.untyped_storage().data_ptr()
        assert all(event.done() for other, event in self._writing if other == storage), "the buffer is being written"

    def keeps(self, place: str) -> bool:
        """Note a wait, and say whether it is to be done."""
        self.waits_seen.add(place)
        return place != self._dropped_wait

    def close(self) -> None:
        """Run what is queued and end the threads."""
        close_workers(self._workers)


class _SimulatedEvent(HostEvent):
    def __init__(self, streams: SimulatedStreams) -> None:
        super().__init__()
        self._streams = streams

    def wait(self) -> None:
        if self._streams.keeps(_place(2)):
            super().synchronize()

    def synchronize(self) -> None:
        if self._streams.keeps(_place(2)):
            super().synchronize()


def _place(depth: int) -> str:
    frame = sys._getframe(depth)
    while frame.f_back and frame.f_code.co_filename == _EVENTS_FILE:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
