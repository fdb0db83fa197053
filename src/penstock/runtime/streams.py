"""Work that runs beside compute, ordered by events: one interface, several back ends.

Compute is whatever the user's thread, or autograd's for it, gives to the device's current stream. Everything else is
submitted to one of the streams below, each of which runs its work in the order of submission. Work on the device starts
after all compute that was issued before it was submitted, and after the events in `after`; compute and the host see its
result after they wait for its event. Nothing else orders anything: a missing wait is a bug, and the simulated back end
turns it into a wrong number on any machine (`runtime/simulated.py`). The test that leaves out one wait after the other
knows each by the comment `# site NAME` beside it.

Collectives are issued before `submit` returns, by its caller, who waits for what they follow on the host: a read of a
file, an update. A thread that issued them once that is over would do so at a time of its own on each rank, before or
after collectives of the user that lie behind them in the program; communicators of a device may block each other then.

Threads of ours have no compute: their current stream is not the user's. What they submit follows the events that it
names, and where it is to follow compute, a moment of it (`now`) that was taken on the user's thread.

Memory that work uses outlives its event: an allocator hands what was freed to the next one who asks, at once, and torch
keeps nothing for us. So its owner waits for the event before he lets go of it, or gives it up (`give_up`).
"""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.runtime.events import DONE, Event, FailedEvent, HostEvent, Pending, PendingEvent, Work, after_all, all_of
from penstock.runtime.hardware import Clock
from penstock.runtime.host_memory import return_free_memory
from penstock.runtime.topology import Reach
from penstock.runtime.workers import HostWorker, WorkerThread, on_worker
from penstock.trace import NO_LABEL, Label

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

#: Of other modules, for those who use streams.
__all__ = [
    "DONE",
    "Event",
    "FailedEvent",
    "HostEvent",
    "HostWorker",
    "Pending",
    "PendingEvent",
    "Work",
    "WorkerThread",
    "after_all",
    "all_of",
    "on_worker",
]


class StreamObserver(Protocol):
    """Listens on streams, for a trace or a record of steps (`ext/observe`)."""

    @property
    def is_traced(self) -> bool:
        """Whether a trace is taken, which tells units apart."""

    def submitted(
        self, stream: str, work: Work, after: Sequence[Event], nbytes: int, label: Label
    ) -> tuple[Work, Sequence[Event], Callable[[Event], Event]]:
        """Note that work is submitted; return what to run, what that waits for, and what wraps its event."""

    def turn_to(self, label: Label) -> None:
        """Note that compute turns to something; to nothing in particular where the label is empty."""

    def step_made(self, *told: Any) -> None:
        """Note that a step of the optimizer has returned: the engine, its result and the param groups."""


def _nothing() -> None: ...


class Streams(ABC):
    """Side streams of one device.

    Attributes:
        observer: while a trace is taken or steps are recorded.
    """

    #: compute reads and writes the cpu tier directly: nothing has to be copied to be used
    aliases_host: bool
    #: compute reads parameters where they rest, where it reaches them; else they are gathered and released all the same
    reads_in_place = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.observer: StreamObserver | None = None
        self._given_up: deque[tuple[Event, Sequence[Tensor]]] = deque()
        self._giving_up = threading.RLock()  # a tensor that goes may take others with it, which are given up then

    @property
    def computes_on_host(self) -> bool:
        """Whether compute is the calling thread, and not a device that it enqueues work for."""
        return self.device.type == "cpu"

    @property
    def reach(self) -> Reach:
        """What compute reads and writes where it rests, as a value."""
        return Reach(self.aliases_host, self.reads_in_place)

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
        """Run `work` on a stream.

        Arguments:
            stream: one of the names above.
            work: issues the copies, collectives or arithmetic, or starts a transfer and returns it. Memory it touches
                must outlive its event; what it makes for itself is of its own stream, and may go when it returns.
            after: events that the work waits for, beside compute; of a thread of ours, all that it waits for.
            writes: tensors that the work overwrites whole; undefined until the event.
            nbytes: bytes moved, for bandwidth models and traces.
            label: what it is for, in traces.
        """
        self._let_go()  # nothing else comes by as often: memory that was given up would stay for long
        if self.observer is None:
            return self._submit(stream, work, after, writes)
        work, after, watch = self.observer.submitted(stream, work, after, nbytes, label)
        return watch(self._submit(stream, work, after, writes))

    @abstractmethod
    def _submit(self, stream: str, work: Work, after: Sequence[Event], writes: Sequence[Tensor]) -> Event:
        """Do what `submit` does, on this back end."""

    def drain(self, streams: Iterable[str]) -> None:
        """Wait on the host until all that was submitted to some streams has run: work whose event is lost, too."""
        for stream in streams:
            self._submit(stream, _nothing, (), ()).synchronize()

    def now(self) -> Event:
        """Mark everything that compute was given until now, for work that is submitted later or by a thread of ours."""
        return DONE

    def here(self) -> None:  # noqa: B027 - where streams are the host's, there is nothing to do
        """Let compute go on in the calling thread, after all that it was given before, on whichever stream it is."""

    def give_up(self, tensors: Sequence[Tensor], *, until: Event) -> None:
        """Let go of tensors that submitted work may still use: they go once an event is over."""
        self._let_go()
        if tensors and not until.done():
            with self._giving_up:
                self._given_up.append((until, tensors))

    def _let_go(self) -> None:
        """Drop what was given up and is not used any more."""
        if not self._given_up:
            return
        gone: list[Sequence[Tensor]] = []
        with self._giving_up:
            while self._given_up and self._given_up[0][0].done():
                gone.append(self._given_up.popleft()[1])  # dropped after the lock: a tensor may take others with it

    def compute(self, work: Callable[[], None], *, label: Label, nbytes: int = 0) -> None:
        """Run what compute itself does: now, in the caller's thread.

        Arguments:
            work: the arithmetic.
            label: what it is for, in traces.
            nbytes: bytes that it reads and writes, for whoever only imagines it.
        """
        del nbytes
        self.here()
        if self.observer is not None:
            self.observer.turn_to(label)
        work()
        if self.observer is not None:
            self.observer.turn_to(NO_LABEL)

    def device_clock(self) -> Clock:
        """Make a clock of compute and of the device's streams. Waits for the device."""
        return Clock()

    def lease(self, buffer: Tensor) -> None:
        """Give a buffer its memory. Contents are undefined.

        The buffer keeps one storage object all its life: autograd saves views of a weight, and they must see the
        bytes of the next gather.
        """
        nbytes = int(buffer.storage_offset() + buffer.numel()) * buffer.dtype.itemsize
        if buffer.untyped_storage().nbytes() != nbytes:
            self._resize(buffer, nbytes)

    def _resize(self, buffer: Tensor, nbytes: int) -> None:
        buffer.untyped_storage().resize_(nbytes)

    def make_buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Make a flat buffer for `lease` and `retire`, with memory."""
        return torch.empty(numel, dtype=dtype, device=self.device)

    def retire(self, buffer: Tensor) -> None:
        """Take a buffer's memory back. All work on it has been waited for."""
        if not self.reads_in_place:
            poison(buffer)  # debugging: memory that is not given back yet must not look as if it had values
        self._resize(buffer, 0)

    def hand_over(self, buffer: Tensor) -> None:  # noqa: B027 - where streams are the host's, there is nothing to do
        """Leave a buffer's memory to compute, and to people who let go of it when they like."""

    def spoil(self, buffer: Tensor) -> None:
        """Overwrite a buffer with NaN and leave it its memory. All work on it has been waited for."""
        poison(buffer)

    def return_free_memory(self) -> None:
        """Give memory that was freed back to the system, for others than torch to use."""
        return_free_memory()

    @abstractmethod
    def close(self) -> None:
        """Finish what is submitted and end the threads."""


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
        # A collective is issued here, whatever it waits for: threads would come to it in another order on each rank.
        # Other work runs here only where nothing of its stream is queued, which it would overtake.
        if stream == COLLECTIVE or ((worker is None or worker.idle()) and all(event.done() for event in after)):
            for event in after:
                event.synchronize()  # also raises the error of work that failed
            pending = work()
            return DONE if pending is None else PendingEvent(pending)
        if worker is None:
            # Updates may be products of matrices, which want all threads; what else runs there moves values.
            worker = self._workers[stream] = HostWorker(stream, alone=stream not in (UPDATE, DEVICE_UPDATE))
        return worker.submit(partial(after_all, tuple(after), work))

    def close(self) -> None:
        """Run what is queued and end the threads."""
        close_workers(self._workers)
        self._workers.clear()


def copy(target: Tensor, source: Tensor) -> None:
    """Copy a tensor, as work of a stream: without waiting for it where the host memory is pinned."""
    assert target.device == source.device or target.dtype == source.dtype, CASTS
    target.copy_(source, non_blocking=True)


def across(target: Tensor, source: Tensor) -> Work:
    """Make the work of a copy between the memory of a device and of the host, pinned or not: of equal dtypes.

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
