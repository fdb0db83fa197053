"""How long compute stands still, added up by the stream that it waits for: cheap enough for every step.

A trace knows what each wait was for; this knows how long they were together. Where compute is the host's thread, that
is the time that its waits block. On a device it is the time between two of the device's own events, one before each
wait of compute and one behind it, which are read once the device has passed them: nothing waits for it.

A wait is put down to one stream. Of the host's thread that is the one whose work is under way when the wait begins: of
what is waited for, or of what that follows. On a device it is the one that is waited for, because the host, which runs
ahead, does not know what the device will find done.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from penstock.machine.clocks import HostClock
from penstock.machine.events import DONE, Event
from penstock.machine.streams import Streams
from penstock.machine.workers import on_worker

#: Events whose predecessors are known, at most: one that is never over would keep all that come after it.
_MOST_OPEN = 4096


class WaitMeter:
    """Adds up the waits of compute for what `streams` do from here on.

    Arguments:
        streams: its device, where there is one, is waited for, once.
    """

    def __init__(self, streams: Streams) -> None:
        self._clock = streams.device_clock()
        self._of_host = isinstance(self._clock, HostClock)
        self._lock = threading.Lock()  # autograd's thread waits too
        self._waits: deque[tuple[str, Any, Any]] = deque()
        self._open: deque[_Metered] = deque()

    def watch(self, stream: str, event: Event, after: Sequence[Event]) -> Event:
        """Wrap the event of submitted work, so that waits for it are counted.

        Arguments:
            stream: what does the work.
            event: its own.
            after: the events that it follows.
        """
        if event is DONE:
            return event
        metered = _Metered(event, stream, self)
        if self._of_host:
            parts = (part for each in after for part in each.left())
            metered.before = [part for part in parts if isinstance(part, _Metered) and not part.done()]
            with self._lock:
                self._open.append(metered)
                while self._open and (self._open[0].done() or len(self._open) > _MOST_OPEN):
                    self._open.popleft().before = []
        return metered

    def waited(self, metered: "_Metered", event: Event, block: Callable[[], None], *, by_host: bool) -> None:
        """Wait for an event, and count that where compute is what stands still."""
        # A host that waits for its device says nothing of what the device waits for: mostly it computes meanwhile.
        if on_worker() or (by_host and not self._of_host) or event.done():
            block()
            return
        stream = metered.cause()
        begun = self._clock.mark()
        try:
            block()
        finally:
            ended = self._clock.mark()
            with self._lock:
                self._waits.append((stream, begun, ended))

    def take(self) -> dict[str, float]:
        """Give the seconds by stream of all waits that are over by now, and begin anew. Never blocks."""
        seconds: defaultdict[str, float] = defaultdict(float)
        with self._lock:
            while self._waits:
                stream, *marks = self._waits[0]
                begun, ended = map(self._clock.seconds, marks)
                if begun is None or ended is None:
                    break
                self._waits.popleft()
                seconds[stream] += ended - begun
        return dict(seconds)


class _Metered(Event):
    """An event of work whose waits are counted."""

    __slots__ = ("_event", "_meter", "before", "stream")

    def __init__(self, event: Event, stream: str, meter: WaitMeter) -> None:
        self._event, self.stream, self._meter = event, stream, meter
        self.before: list[_Metered] = []

    def cause(self) -> str:
        """Name the stream that is at work now: down the chain of what is not done."""
        first = self
        while True:
            below = next((other for other in first.before if not other.done()), None)
            if below is None:
                return first.stream
            first = below

    def wait(self) -> None:
        self._meter.waited(self, self._event, self._event.wait, by_host=False)

    def synchronize(self) -> None:
        self._meter.waited(self, self._event, self._event.synchronize, by_host=True)

    def done(self) -> bool:
        return self._event.done()

    def check(self) -> None:
        self._event.check()

    def unwatched(self) -> Event:
        return self._event
