"""The observer of streams: when submitted work ran, what it followed, and the waits for it.

Streams call it for each piece of work that is submitted (`Streams.observer`). It has two outputs. `TraceNotes` are for
a trace: every piece of work and every wait, with its times. `WaitSums` are for a record of steps: how long compute
stands still, added up by the stream that it waits for, cheap enough for every step. While a trace is taken, a record
notes no waits. The host does not wait for the device before the end of a trace.

Where compute is the host's thread, a wait takes the time that it blocks. On a device it is the time between two of the
device's own events, one before each wait of compute and one behind it, which are read once the device has passed them.
"""

import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.ext.observe.timeline import Recording, TraceSpan, Wait
from penstock.runtime.hardware import Clock
from penstock.runtime.streams import DONE, ON_DEVICE, Event, Pending, Streams, Work, on_worker
from penstock.trace import Label

#: Of spans, of waits, of turns of compute, and of sizes. A span takes about half a KiB.
LIMIT = 1 << 18


@dataclass(slots=True, eq=False)
class SubmittedWork:
    """A piece of submitted work.

    Attributes:
        observer: notes the waits for it.
        stream, label, nbytes: as it was submitted.
        before: the jobs that it follows, for a trace.
        event: its own, as it was before it was watched; `DONE` once nothing about it changes any more, `None` until it
            is submitted.
        clock: times it, for a trace; `None` without one.
        started, ended: marks of `clock`; `None` until then.
        pending: the transfer that it has started.
        inline: it ran in the thread of its caller, on the host.
    """

    observer: "Observer"
    stream: str
    label: Label
    nbytes: int
    before: Sequence["SubmittedWork"] = ()
    event: Event | None = None
    clock: Clock | None = None
    started: Any = None
    ended: Any = None
    pending: Pending | None = None
    inline: bool = False

    def run(self, work: Work) -> Pending | None:
        """Run the work and note its times. Runs on the thread of its stream."""
        clock = self.clock
        assert clock is not None
        self.inline = clock.on_host and not on_worker()
        self.started = clock.mark()
        try:
            self.pending = work()
        finally:
            if self.pending is None:
                self.ended = clock.mark()
        return self.pending

    def watch(self, event: Event) -> Event:
        """Wrap the work's event, so that every wait for it is noted."""
        self.event = event
        return event if event is DONE else _Watched(event, self)

    def is_over(self) -> bool:
        """Return True if it ran, or will not because what it follows failed."""
        return self.event is not None and self.event.done()

    def condense(self) -> None:
        """Keep only the times, once the work is done."""
        if self.pending is not None:
            self.ended, self.pending = self.pending.ended, None
        if self.started is not None:  # else what it follows failed
            assert self.clock is not None
            self.started, self.ended = self.clock.seconds(self.started), self.clock.seconds(self.ended)
            self.clock = Clock()
        self.event = DONE


class Observer:
    """Listens on `streams` from here on, for a trace, a record or both. `observe` makes one.

    Attributes:
        notes: of the trace that is taken; `None` without one.
        waits: of the record; `None` without one.
        on_step: the record's function that is called after every step; `None` without one.
    """

    def __init__(self, streams: Streams) -> None:
        self.notes: TraceNotes | None = None
        self.waits: WaitSums | None = None
        self.on_step: Callable[..., None] | None = None
        self._streams = streams

    @property
    def is_traced(self) -> bool:
        """True while a trace is taken, which tells units apart."""
        return self.notes is not None

    def submitted(
        self, stream: str, work: Work, after: Sequence[Event], nbytes: int, label: Label
    ) -> tuple[Work, Sequence[Event], Callable[[Event], Event]]:
        """Note submitted work.

        Returns:
            The work that the stream runs, the events that it waits for (without their wrappers: a wait of work is no
            wait of compute), and a function that wraps its event, so that every wait for it is noted.
        """
        parts = [part for event in after for part in event.parts()]
        job, notes = SubmittedWork(self, stream, label, nbytes), self.notes
        if notes is not None and notes.add(job):
            job.before = [part.job for part in parts if isinstance(part, _Watched)]
        run = work if job.clock is None else partial(job.run, work)
        return run, [part.unwatched() for part in parts], job.watch

    def turn_to(self, label: Label) -> None:
        """Note that compute turns to other work; to none in particular if the label is empty."""
        if self.notes is not None:
            self.notes.turn_to(label)

    def step_made(self, *told: Any) -> None:
        """Note that a step of the optimizer has returned. Collective if a record begins to trace.

        Arguments:
            told: as `Record.step_made` says.
        """
        if self.notes is not None:
            self.notes.step_made()
        if self.on_step is not None:
            self.on_step(*told)

    def waiting(self, job: SubmittedWork, event: Event, block: Callable[[], None], *, by_host: bool) -> None:
        """Wait for an event; note the wait if it takes time, and the caller is no worker thread."""
        output = None if event.done() or on_worker() else self.notes or self.waits
        over = None if output is None else output.wait_begins(job, by_host=by_host)
        try:
            block()
        finally:
            if over is not None:
                over()

    def begin_trace(self, limit: int = LIMIT, *, sizes: Callable[[], Mapping[str, int]] | None = None) -> None:
        """Take notes for a trace from here on. Waits for the device.

        Arguments:
            limit: the most notes of a kind. The trace ends there.
            sizes: returns the bytes on each tier; called whenever compute turns to other work.
        """
        self.notes = TraceNotes(self._streams, limit, sizes)

    def end_trace(self, *, wait: bool) -> Recording:
        """Return the recording since the trace began. Events that were watched go on without notes.

        Arguments:
            wait: wait until all submitted work is done; else only work that is done by now is in it.
        """
        notes = self.notes
        assert notes is not None
        try:
            if wait:
                for job in list(notes.open):
                    event = job.event or DONE
                    with contextlib.suppress(Exception):  # raised by other waits for the work
                        self.waiting(job, event, event.synchronize, by_host=True)
                notes.device.synchronize()
            return notes.finish()
        finally:
            self.notes = None
            self.leave()

    def leave(self) -> None:
        """Stop listening if there is no output left."""
        if self.notes is None and self.waits is None and self.on_step is None:
            self._streams.observer = None


def observe(streams: Streams) -> Observer:
    """Return the observer of streams; make one if there is none."""
    if not isinstance(streams.observer, Observer):
        streams.observer = Observer(streams)
    return streams.observer


class WaitSums:
    """Adds up how long compute waits from here on, by stream.

    A wait counts for the stream that is waited for, whatever that waits for in turn.

    Arguments:
        streams: the constructor waits for their device.
    """

    def __init__(self, streams: Streams) -> None:
        self._clock = streams.device_clock()
        self._waits: deque[tuple[str, Any, Any]] = deque()

    def wait_begins(self, job: SubmittedWork, *, by_host: bool) -> Callable[[], None] | None:
        """Note the begin of a wait of compute. Return the function that notes its end."""
        if by_host and not self._clock.on_host:
            return None  # mostly the device computes while the host waits for it
        begun = self._clock.mark()
        return lambda: self._waits.append((job.stream, begun, self._clock.mark()))

    def take(self) -> dict[str, float]:
        """Return the seconds by stream of all waits that are over by now, and reset them. Never blocks."""
        seconds: defaultdict[str, float] = defaultdict(float)
        while self._waits:
            stream, *marks = self._waits[0]
            begun, ended = map(self._clock.seconds, marks)
            if begun is None or ended is None:
                break
            self._waits.popleft()
            seconds[stream] += ended - begun
        return dict(seconds)


class TraceNotes:
    """Notes of a trace, within a limit of memory.

    Attributes:
        device: the clock of compute and of the device's streams.
        open: work that was not over at the last query, in order.
    """

    def __init__(self, streams: Streams, limit: int, sizes: Callable[[], Mapping[str, int]] | None) -> None:
        self._limit = limit
        self._ask_sizes = sizes
        self._host: Clock = Clock()
        self.device = streams.device_clock()
        self.open: deque[SubmittedWork] = deque()
        self._lock = threading.Lock()  # autograd and the update's thread submit too
        self._jobs: list[SubmittedWork] = []
        self._waits: list[tuple[SubmittedWork, Clock, Any, Any]] = []
        self._turns: list[tuple[Any, Label]] = []
        self._sizes: list[tuple[float, Mapping[str, int]]] = []
        self._steps: list[float] = []
        self._began = time.monotonic()
        self._ended: float | None = None
        self._complete = True
        self._measure()

    def add(self, job: SubmittedWork) -> bool:
        """Note a job and have it timed; return False if there is no room for it."""
        with self._lock:
            if self._has_room(self._jobs):
                job.clock = self.device if job.stream in ON_DEVICE else self._host
                self._jobs.append(job)
                self.open.append(job)
            while self.open and self.open[0].is_over():
                self.open.popleft().condense()
        return job.clock is not None

    def turn_to(self, label: Label) -> None:
        """Note that compute turns to other work."""
        with self._lock:
            if self._has_room(self._turns):
                self._turns.append((self.device.mark(), label))
        self._measure()

    def step_made(self) -> None:
        """Note that a step of the optimizer has returned."""
        with self._lock:
            if self._ended is None:
                self._steps.append(time.monotonic())
        self._measure()

    def _measure(self) -> None:
        """Note the bytes on each tier, if they have changed."""
        if self._ask_sizes is None or self._ended is not None:
            return
        found = self._ask_sizes()
        with self._lock:
            if (not self._sizes or self._sizes[-1][1] != found) and self._has_room(self._sizes):
                self._sizes.append((time.monotonic(), found))

    def wait_begins(self, job: SubmittedWork, *, by_host: bool) -> Callable[[], None] | None:
        """Note the begin of a wait of compute or of the host. Return the function that notes its end."""
        if self._ended is not None:
            return None
        clock = self._host if by_host else self.device
        begun = clock.mark()

        def over() -> None:
            with self._lock:
                if self._has_room(self._waits):
                    self._waits.append((job, clock, begun, clock.mark()))

        return over

    def finish(self) -> Recording:
        """Return the recording, and drop the notes."""
        with self._lock:
            for job in filter(SubmittedWork.is_over, self.open):
                job.condense()
            stop = self._ended = self._ended or time.monotonic()
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
            for job in self._jobs:
                job.before = ()  # an event may outlive the trace
            for notes in (self.open, self._jobs, self._waits, self._turns, self._sizes, self._steps):
                notes.clear()
        return recording

    def _spans(self, stop: float) -> tuple[list[TraceSpan], dict[SubmittedWork, int]]:
        """List the spans of the work that is done, and the number of each job's span."""
        spans: list[TraceSpan] = []
        numbers: dict[SubmittedWork, int] = {}
        for job in self._jobs:
            if job.event is DONE and job.started is not None and job.started < stop:
                before = tuple(numbers[other] for other in job.before if other in numbers)
                numbers[job] = len(spans)
                ended = min(job.ended, stop)
                spans.append(TraceSpan(job.stream, job.label, job.started, ended, job.nbytes, job.inline, before))
        return spans, numbers

    def _waits_for(self, numbers: Mapping[SubmittedWork, int], stop: float) -> list[Wait]:
        waits = []
        for job, clock, *marks in self._waits:
            start, end = map(clock.seconds, marks)
            if job in numbers and start is not None and end is not None and start < stop:
                by_host = clock is not self.device and not self.device.on_host
                waits.append(Wait(numbers[job], start, min(end, stop), by_host))
        return waits

    def _compute(self, stop: float) -> list[tuple[float, Label]]:
        turns = [(self.device.seconds(mark), label) for mark, label in self._turns]
        return [(when, label) for when, label in turns if when is not None and when < stop]

    def _has_room(self, notes: Sequence[object]) -> bool:
        """Return True if there is room for another note; else end the trace."""
        if self._ended is None and len(notes) >= self._limit:
            self._ended, self._complete = time.monotonic(), False
        return self._ended is None


class _Watched(Event):
    """An event of observed work."""

    __slots__ = ("event", "job")

    def __init__(self, event: Event, job: SubmittedWork) -> None:
        self.event, self.job = event, job

    def wait(self) -> None:
        self.job.observer.waiting(self.job, self.event, self.event.wait, by_host=False)

    def synchronize(self) -> None:
        self.job.observer.waiting(self.job, self.event, self.event.synchronize, by_host=True)

    def done(self) -> bool:
        return self.event.done()

    def check(self) -> None:
        self.event.check()

    def unwatched(self) -> Event:
        return self.event
