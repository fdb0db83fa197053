"""Work that runs beside compute, ordered by events: one interface, several back ends.

Compute is whatever the caller's own thread and the device's current stream do. Everything else is submitted to one of
the streams below, each of which runs its work in the order of submission. Work starts after all compute that
was issued before it was submitted, and after the events in `after`; compute and the host see its result after they wait
for its event. Nothing else orders anything: a missing wait is a bug, and the simulated back end turns it into
a wrong number on any machine (`machine/simulated.py`).

Collectives are issued before `submit` returns, by its caller, who waits for what they follow on the host: a read of a
file, an update. A thread that issued them once that is over would do so at a time of its own on each rank, before or
after collectives of the user that lie behind them in the program; communicators of a device may block each other then.
"""

import logging
import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from penstock.errors import EngineError
from penstock.machine.arena import return_free_memory
from penstock.machine.border import ours
from penstock.machine.clocks import Clock, HostClock
from penstock.machine.lifetime import Phase, at_end, exiting

UPLOAD = "upload"  # host to device
DOWNLOAD = "download"  # device to host
COLLECTIVE = "collective"  # between ranks: one stream, so that every rank issues them in the same order
UPDATE = "update"  # arithmetic on the host
DEVICE_UPDATE = "device update"  # arithmetic on the device, beside compute
READ = "read"  # file to host, for gathers and gradients
FETCH = "fetch"  # file to host, for updates: these wait for each other, and gathers do not wait for them
WRITE = "write"  # host to file
SAVE = "save"  # device to host, for checkpoints: submitted from their own thread, and nothing else waits behind it

CASTS = "a copy between the host and a device casts nothing"

STREAMS = (UPLOAD, DOWNLOAD, COLLECTIVE, UPDATE, DEVICE_UPDATE, READ, FETCH, WRITE, SAVE)
ON_DEVICE = (UPLOAD, DOWNLOAD, COLLECTIVE, DEVICE_UPDATE, SAVE)  # streams of the device itself, where it has some


class Pending(Protocol):
    """A transfer that goes on after the work that started it has returned."""

    def wait(self) -> None:
        """Block until it is over; raise its error."""

    def done(self) -> bool:
        """Whether it is over."""

    @property
    def ended(self) -> float:
        """When it was over, in seconds of `time.monotonic`, once done."""


Work = Callable[[], Pending | None]

# That a thread nobody closed is waited for, at most: it may wait for a rank that is gone, or for what collection holds.
DROP_SECONDS = 10.0

_logger = logging.getLogger("penstock")


class Event(ABC):
    """The completion of a piece of submitted work. Work that failed raises its error at every wait."""

    @abstractmethod
    def wait(self) -> None:
        """Everything that compute is given from here on runs after the work. Never blocks the host on a device."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the calling thread until the work is done."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the work is done, without blocking."""

    @abstractmethod
    def check(self) -> None:
        """Raise the error of work that has failed by now, without blocking."""

    def parts(self) -> Sequence["Event"]:
        """The events that this one stands for."""
        return (self,)


class Job(Protocol):
    """Submitted work that is being recorded.

    Attributes:
        after: the events that it waits for, as they were before they were watched.
    """

    after: Sequence[Event]

    def run(self) -> Pending | None:
        """Run the work and note when."""

    def watch(self, event: Event) -> Event:
        """The work's event, with a note of every wait for it."""


class Recorder(Protocol):
    """Takes notes for a trace (`machine/recorder.py`)."""

    def submitted(self, stream: str, work: Work, after: Sequence[Event], nbytes: int, what: str) -> Job:
        """Work is submitted."""

    def turn_to(self, what: str) -> None:
        """Compute turns to something; empty: to nothing in particular."""


class Streams(ABC):
    """Side streams of one device.

    Attributes:
        recorder: while a trace is taken.
    """

    #: compute reads and writes the cpu tier directly: nothing has to be copied to be used
    aliases_host: bool
    #: compute reads parameters where they rest, where it reaches them; else they are gathered and released all the same
    reads_in_place = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.recorder: Recorder | None = None

    def submit(
        self,
        stream: str,
        work: Work,
        *,
        after: Sequence[Event] = (),
        writes: Sequence[Tensor] = (),
        nbytes: int = 0,
        what: str = "",
    ) -> Event:
        """Run `work` on a stream.

        Arguments:
            stream: one of the names above.
            work: issues the copies, collectives or arithmetic, or starts a transfer and returns it. Buffers it touches
                must outlive its event.
            after: events that the work waits for.
            writes: tensors that the work overwrites whole; undefined until the event.
            nbytes: bytes moved, for bandwidth models and traces.
            what: `verb unit [kind] [tile n]`, for traces.
        """
        if self.recorder is None:
            return self._submit(stream, work, after, writes)
        job = self.recorder.submitted(stream, work, after, nbytes, what)
        return job.watch(self._submit(stream, job.run, job.after, writes))

    @abstractmethod
    def _submit(self, stream: str, work: Work, after: Sequence[Event], writes: Sequence[Tensor]) -> Event:
        """`submit`, as the back end does it."""

    def compute(self, work: Callable[[], None], *, what: str) -> None:
        """Run what compute itself does: now, in the caller's thread."""
        if self.recorder is not None:
            self.recorder.turn_to(what)
        work()
        if self.recorder is not None:
            self.recorder.turn_to("")

    def device_clock(self) -> Clock:
        """A clock of compute and of the device's streams. Waits for the device."""
        return HostClock()

    def lease(self, buffer: Tensor) -> None:
        """Give a buffer its memory. Contents are undefined.

        The buffer keeps one storage object all its life: autograd saves views of a weight, and they must see the
        bytes of the next gather.
        """
        storage = buffer.untyped_storage()
        nbytes = int(buffer.storage_offset() + buffer.numel()) * buffer.dtype.itemsize
        if storage.nbytes() != nbytes:
            storage.resize_(nbytes)

    def retire(self, buffer: Tensor) -> None:
        """Take a buffer's memory back. All work on it has been waited for."""
        if not self.reads_in_place:
            poison(buffer)  # debugging: memory that is not given back yet must not look as if it had values
        buffer.untyped_storage().resize_(0)

    def spoil(self, buffer: Tensor) -> None:
        """Overwrite a buffer with NaN and leave it its memory. All work on it has been waited for."""
        poison(buffer)

    def return_free_memory(self) -> None:
        """Give memory that was freed back to the system, for others than torch to use."""
        return_free_memory()

    @abstractmethod
    def close(self) -> None:
        """Finish what is submitted and end the threads."""


class _Done(Event):
    def wait(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def done(self) -> bool:
        return True

    def check(self) -> None:
        pass


DONE: Event = _Done()


class _AllOf(Event):
    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events

    def wait(self) -> None:
        for event in self._events:
            event.wait()

    def synchronize(self) -> None:
        for event in self._events:
            event.synchronize()

    def done(self) -> bool:
        return all(event.done() for event in self._events)

    def check(self) -> None:
        for event in self._events:
            event.check()

    def parts(self) -> Sequence[Event]:
        return [part for event in self._events for part in event.parts()]


def all_of(events: Iterable[Event]) -> Event:
    """One event for several. An error of any of them is raised at every wait."""
    left = [event for event in events if event is not DONE]
    return _AllOf(left) if len(left) > 1 else left[0] if left else DONE


class PendingEvent(Event):
    """Completion of a transfer."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def wait(self) -> None:
        """Block until done: compute on the host is the calling thread."""
        self._pending.wait()

    def synchronize(self) -> None:
        """Block until done."""
        self._pending.wait()

    def done(self) -> bool:
        """Whether it is over."""
        return self._pending.done()

    def check(self) -> None:
        """Raise its error if it is over."""
        if self.done():
            self._pending.wait()


class FailedEvent(Event):
    """Work that failed before it had an event of its own."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def wait(self) -> None:
        """Raise the error."""
        raise self._error

    def synchronize(self) -> None:
        """Raise the error."""
        raise self._error

    def done(self) -> bool:
        """It is over."""
        return True

    def check(self) -> None:
        """Raise the error."""
        raise self._error


class HostEvent(Event):
    """Completion of work on a `HostWorker`."""

    def __init__(self) -> None:
        self._finished = threading.Event()
        self._pending: Pending | None = None
        self._error: BaseException | None = None

    def run(self, work: Work) -> None:
        """Run the work and keep its error for whoever waits."""
        self.run_from([work])

    def run_from(self, box: list[Work]) -> None:
        """The same of work that is taken out of a box.

        When the event is done nothing here refers to it any more: who counts the references to a buffer that it
        touched counts right.
        """
        work = box.pop()
        try:
            self._pending = work()
        except BaseException as error:
            self._error = error
        del work
        self._finished.set()

    def wait(self) -> None:
        """Block until done: compute on the host is the calling thread."""
        self.synchronize()

    def synchronize(self) -> None:
        """Block until done."""
        self._finished.wait()
        if self._error is not None:
            raise self._error
        if self._pending is not None:
            self._pending.wait()

    def ran(self) -> bool:
        """Whether the work ran; what it started may go on."""
        return self._finished.is_set()

    def done(self) -> bool:
        """Whether the work ran, and what it started is over."""
        return self._finished.is_set() and (self._pending is None or self._pending.done())

    def check(self) -> None:
        """Raise the error of work that is over."""
        if HostEvent.done(self):
            HostEvent.synchronize(self)


class WorkerThread(threading.Thread):
    """The thread of a `HostWorker`: neither compute nor the caller's."""


class _Inbox:
    """What a worker's thread knows of it: the thread must not keep the worker alive.

    Attributes:
        queue: work, and `None` after the last of it.
        dropped: nobody wants what is queued.
        promised: what its work is, where that is finished at the end; else it is given up.
        last: the event of the last of it. Of no other work: an error that failed it holds all that it was about.
    """

    def __init__(self, promised: str) -> None:
        self.queue: queue.SimpleQueue[tuple[HostEvent, list[Work]] | None] = queue.SimpleQueue()
        self.dropped = False
        self.promised = promised
        self.last: HostEvent | None = None

    def serve(self) -> None:
        """Run what comes, in order."""
        with ours():
            while (item := self.queue.get()) is not None:
                event, box = item
                if self.dropped or exiting():
                    box[:] = [_given_up]
                event.run_from(box)
                del item, event, box  # a waiting worker must not keep the last event alive

    def finish(self, thread: threading.Thread, seconds: float | None = None) -> None:
        """End the thread after the work that is queued.

        A thread of this kind does not wait for it: it may be what that work waits for, and collection runs on any.
        """
        self.queue.put(None)
        if not isinstance(threading.current_thread(), WorkerThread):
            thread.join(seconds)

    def drop(self, thread: threading.Thread) -> None:
        """End the thread after the work that it is in."""
        self.dropped = True
        self.finish(thread, DROP_SECONDS)

    def keep(self, thread: threading.Thread) -> None:
        """Finish the work, which nobody asked for the end of, and say if it failed."""
        self.finish(thread, None if exiting(Phase.PROMISED) else DROP_SECONDS)
        if self.last is not None:
            try:
                self.last.check()
            except Exception as error:
                _logger.error("%s failed: %s", self.promised, error)


class HostWorker:
    """One persistent thread that runs submitted work in order.

    It ends with `close`, when the worker is collected, and when the interpreter exits.

    Arguments:
        name: of the thread.
        promised: what its work is, where that is finished also if nobody closes the worker; else what is queued then is
            given up.

    Raises:
        EngineError: the interpreter exits.
    """

    def __init__(self, name: str, *, promised: str = "") -> None:
        if exiting():
            raise EngineError("The interpreter exits: work that needs a thread cannot be started any more.")
        self._inbox = _Inbox(promised)
        self._process = os.getpid()
        self._closed = False
        self._last: HostEvent | None = None
        self._thread = WorkerThread(target=self._inbox.serve, name=f"penstock-{name}", daemon=True)
        self._thread.start()
        end, phase = (self._inbox.keep, Phase.PROMISED) if promised else (self._inbox.drop, Phase.THREADS)
        self._end = at_end(self, end, self._thread, phase=phase)

    def submit(self, work: Work, event: HostEvent | None = None) -> HostEvent:
        """Queue the work; returns its event (the one given, if any).

        Raises:
            EngineError: the thread has ended, or is one of the process that this one was forked from.
        """
        if os.getpid() != self._process:
            raise EngineError(
                f"The threads of this engine are in another process ({self._process}), which forked this one."
            )
        if self._closed or exiting():
            raise EngineError("The threads of this engine have ended: it is closed, or the interpreter exits.")
        event = event or HostEvent()
        self._last = event
        self._inbox.last = event if self._inbox.promised else None
        self._inbox.queue.put((event, [work]))
        return event

    def idle(self) -> bool:
        """Whether everything submitted has run; what it started may go on."""
        return self._last is None or self._last.ran()

    def close(self) -> None:
        """Run what is queued, then end the thread."""
        if not self._closed and os.getpid() == self._process:
            self._closed = True
            self._end.cancel()
            self._inbox.finish(self._thread)


def _given_up() -> None:
    raise EngineError("This work was given up: nobody waits for it any more, or the interpreter exits.")


def close_workers(workers: Mapping[str, HostWorker]) -> None:
    """End the threads of streams by name, updates first: their work submits copies, and waits for them."""
    for name in sorted(workers, key=lambda name: name != UPDATE):
        workers[name].close()


class InlineStreams(Streams):
    """The back end of a cpu as the device: work runs where it is submitted.

    Work that cannot start yet, because a file is still being read or written, runs on a thread of its stream, and so
    does what follows it there: the caller computes meanwhile. Collectives never do.
    """

    aliases_host = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._workers: dict[str, HostWorker] = {}

    def _submit(self, stream: str, work: Work, after: Sequence[Event], writes: Sequence[Tensor]) -> Event:
        """Run `work` now if everything before it is done or waited for here, else queue it."""
        del writes
        worker = self._workers.get(stream)
        if stream == COLLECTIVE or ((worker is None or worker.idle()) and all(event.done() for event in after)):
            for event in after:
                event.synchronize()  # also raises the error of work that failed
            pending = work()
            return DONE if pending is None else PendingEvent(pending)
        if worker is None:
            worker = self._workers[stream] = HostWorker(stream)
        return worker.submit(partial(after_all, tuple(after), work))

    def close(self) -> None:
        """Run what is queued and end the threads."""
        close_workers(self._workers)
        self._workers.clear()


def after_all(events: Sequence[Event], work: Work) -> Pending | None:
    """Wait for the events on the host, then run the work."""
    for event in events:
        event.synchronize()
    return work()


def copy(target: Tensor, source: Tensor) -> None:
    """Work: copy a tensor, without waiting for it where the host memory is pinned."""
    assert target.device == source.device or target.dtype == source.dtype, CASTS
    target.copy_(source, non_blocking=True)


def across(target: Tensor, source: Tensor) -> Work:
    """The work of a copy between the memory of a device and of the host, pinned or not: of equal dtypes.

    Else torch casts where the values come from. On a device that takes a temporary there, and what is wider then goes
    over the bus; on the host it is pageable memory, which a device reads only while the host waits. So values are cast
    where they arrive, by work of its own.
    """
    assert target.dtype == source.dtype, CASTS
    return partial(copy, target, source)


def poison(tensor: Tensor) -> None:
    """Fill with the bytes 0xFF: NaN in every floating dtype, -1 in the integer ones."""
    if tensor.numel() and tensor.untyped_storage().nbytes():
        tensor.view(torch.uint8).fill_(0xFF)
