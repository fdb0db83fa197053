"""Notes for a trace: when submitted work ran, what it followed, and who stood waiting for it.

Streams ask for a job for each piece of work that is submitted (`Streams.recorder`). Nothing waits for the device before
`finish`. Memory is bounded: after `LIMIT` notes of a kind there are no more, and the trace ends there.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.machine.clocks import Clock, HostClock
from penstock.machine.streams import DONE, ON_DEVICE, Event, Pending, Streams, Work, on_worker
from penstock.trace import Label, Recording, Span, Wait

#: Of spans, of waits, of turns of compute, and of sizes. A span takes about half a KiB.
LIMIT = 1 << 18


class Job:
    """A piece of submitted work.

    Attributes:
        after: the events that it waits for, as they were before they were watched.
        event: its own, the same way; `DONE` once nothing about it changes any more, `None` until it is submitted.
        started, ended: marks of `clock`; `None` until then.
        inline: it ran in the thread of its caller, on the host.
    """

    __slots__ = (
        "_recorder",
        "_work",
        "after",
        "before",
        "clock",
        "ended",
        "event",
        "inline",
        "label",
        "nbytes",
        "pending",
        "started",
        "stream",
    )

    def __init__(
        self, recorder: "Recorder", stream: str, work: Work, after: Sequence[Event], nbytes: int, label: Label
    ) -> None:
        self.stream, self.nbytes, self.label = stream, nbytes, label
        self.clock = recorder.clock(stream)
        parts = [part for event in after for part in event.parts()]
        self.before = [part.job for part in parts if isinstance(part, _Watched)]
        self.after: Sequence[Event] = [part.unwatched() for part in parts]  # work that waits is no wait of compute's
        self.event: Event | None = None
        self.started: Any = None
        self.ended: Any = None
        self.pending: Pending | None = None
        self.inline = False
        self._recorder = recorder
        self._work: Work | None = work

    def run(self) -> Pending | None:
        """Run the work and note when. The work, and the buffers that it knows, are let go of."""
        work, self._work = self._work, None
        assert work is not None
        self.inline = isinstance(self.clock, HostClock) and not on_worker()
        self.started = self.clock.mark()
        try:
            self.pending = work()
        finally:
            if self.pending is None:
                self.ended = self.clock.mark()
        return self.pending

    def watch(self, event: Event) -> Event:
        """Wrap the work's event, so that every wait for it is noted."""
        self.event = event
        return event if event is DONE else _Watched(event, self, self._recorder)

    def is_over(self) -> bool:
        """Whether it ran, or will not because what it follows failed."""
        return self.event is not None and self.event.done()

    def condense(self) -> None:
        """Keep no more than what the trace says, once the work is done."""
        if self.pending is not None:
            self.ended, self.pending = self.pending.ended, None
        if self.started is not None:  # else what it follows failed
            self.started, self.ended = self.clock.seconds(self.started), self.clock.seconds(self.ended)
            self.clock = HostClock()
        self.event = DONE
        self.after = ()


class Recorder:
    """Takes notes of what `streams` do from here on.

    Arguments:
        streams: its device, where there is one, is waited for.
        sizes: says how many bytes are on each tier; asked whenever compute turns to something.
    """

    def __init__(
        self, streams: Streams, limit: int = LIMIT, *, sizes: Callable[[], Mapping[str, int]] | None = None
    ) -> None:
        self._limit = limit
        self._ask_sizes = sizes
        self._host: Clock = HostClock()
        self._device = streams.device_clock()
        self._lock = threading.Lock()  # autograd and the update's thread submit too
        self._jobs: list[Job] = []
        self._open: deque[Job] = deque()
        self._waits: list[tuple[Job, Clock, Any, Any]] = []
        self._turns: list[tuple[Any, Label]] = []
        self._sizes: list[tuple[float, Mapping[str, int]]] = []
        self._steps: list[float] = []
        self._began = time.monotonic()
        self._ended: float | None = None
        self._complete = True
        self._measure()

    def submitted(self, stream: str, work: Work, after: Sequence[Event], nbytes: int, label: Label) -> Job:
        """Note that work is submitted."""
        job = Job(self, stream, work, after, nbytes, label)
        with self._lock:
            if self._has_room(self._jobs):
                self._jobs.append(job)
                self._open.append(job)
            while self._open and self._open[0].is_over():
                self._open.popleft().condense()
        return job

    def turn_to(self, label: Label) -> None:
        """Note that compute turns to something; to nothing in particular where the label is empty."""
        with self._lock:
            if self._has_room(self._turns):
                self._turns.append((self._device.mark(), label))
        self._measure()

    def step_made(self) -> None:
        """Note that a step of the optimizer has returned."""
        with self._lock:
            if self._ended is None:
                self._steps.append(time.monotonic())
        self._measure()

    def _measure(self) -> None:
        """Note the bytes on each tier, where they are others than before."""
        if self._ask_sizes is None or self._ended is not None:
            return
        found = self._ask_sizes()
        with self._lock:
            if (not self._sizes or self._sizes[-1][1] != found) and self._has_room(self._sizes):
                self._sizes.append((time.monotonic(), found))

    def clock(self, stream: str) -> Clock:
        """Choose the clock of a stream."""
        return self._device if stream in ON_DEVICE else self._host

    def waiting(self, job: Job, event: Event, block: Callable[[], None], *, by_host: bool) -> None:
        """Wait for an event, and note it where that takes any time and nobody else's work waits."""
        if self._ended is not None or event.done() or on_worker():
            block()
            return
        clock = self._host if by_host else self._device
        begun = clock.mark()
        try:
            block()
        finally:
            with self._lock:
                if self._has_room(self._waits):
                    self._waits.append((job, clock, begun, clock.mark()))

    def finish(self, *, wait: bool) -> Recording:
        """Give all that was seen. Events that were watched go on without notes.

        Arguments:
            wait: until what was submitted is done; else only what is done by now is in it.
        """
        if wait:
            for job in list(self._open):
                event = job.event or DONE
                with contextlib.suppress(Exception):  # whoever needs the work gets its error
                    self.waiting(job, event, event.synchronize, by_host=True)
            self._device.synchronize()
        with self._lock:
            stop = self._ended = self._ended or time.monotonic()
            for job in self._open:
                if job.is_over():
                    job.condense()
            spans, numbers = self._spans(stop)
            recording = Recording(
                self._began,
                stop,
                spans,
                self._waits_for(numbers, stop),
                self._compute(stop),
                self._complete,
                sizes=[(when, sizes) for when, sizes in self._sizes if when <= stop],
                steps=[when for when in self._steps if when <= stop],
            )
            for job in self._jobs:  # an event may outlive the trace
                job.before = []
            for notes in (self._jobs, self._open, self._waits, self._turns, self._sizes, self._steps):
                notes.clear()
        return recording

    def _spans(self, stop: float) -> tuple[list[Span], dict[Job, int]]:
        """List the spans of the work that is done, and which of them is whose."""
        spans: list[Span] = []
        numbers: dict[Job, int] = {}
        for job in self._jobs:
            if job.event is DONE and job.started is not None and job.started < stop:
                before = tuple(numbers[other] for other in job.before if other in numbers)
                numbers[job] = len(spans)
                ended = min(job.ended, stop)
                spans.append(Span(job.stream, job.label, job.started, ended, job.nbytes, job.inline, before))
        return spans, numbers

    def _waits_for(self, numbers: Mapping[Job, int], stop: float) -> list[Wait]:
        waits = []
        for job, clock, *marks in self._waits:
            start, end = map(clock.seconds, marks)
            if job in numbers and start is not None and end is not None and start < stop:
                by_host = clock is not self._device and not isinstance(self._device, HostClock)
                waits.append(Wait(numbers[job], start, min(end, stop), by_host))
        return waits

    def _compute(self, stop: float) -> list[tuple[float, Label]]:
        turns = [(self._device.seconds(mark), label) for mark, label in self._turns]
        return [(when, label) for when, label in turns if when is not None and when < stop]

    def _has_room(self, notes: Sequence[object]) -> bool:
        """Say whether there may be another note; the first that may not ends the trace."""
        if self._ended is None and len(notes) >= self._limit:
            self._ended, self._complete = time.monotonic(), False
        return self._ended is None


class _Watched(Event):
    """An event of recorded work."""

    def __init__(self, event: Event, job: Job, recorder: Recorder) -> None:
        self.event, self.job, self._recorder = event, job, recorder

    def wait(self) -> None:
        self._recorder.waiting(self.job, self.event, self.event.wait, by_host=False)

    def synchronize(self) -> None:
        self._recorder.waiting(self.job, self.event, self.event.synchronize, by_host=True)

    def done(self) -> bool:
        return self.event.done()

    def check(self) -> None:
        self.event.check()

    def unwatched(self) -> Event:
        return self.event
