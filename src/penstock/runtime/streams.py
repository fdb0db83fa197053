"""Work that runs beside compute, ordered by events: one interface, several back ends.

Compute is the work that the user's thread, or autograd's for it, issues on the device's current stream. Everything else
is submitted to one of the streams below, each of which runs its work in the order of submission. Work on the device
starts after all compute that was issued before it was submitted, and after the events in `after`; compute and the host
see its result after they wait for its event. Nothing else orders work: a missing wait is a bug, and the simulated back
end turns it into a wrong number on any machine (`runtime/simulated.py`). The test that leaves out one wait after the
other knows each by the comment `# site NAME` beside it.

Collectives are issued before `submit` returns, by its caller, which first waits for work on the host that they follow:
a read of a file, an update. A thread would issue them at a time of its own on each rank, before or after collectives of
the user that come later in the program; communicators of a device may block each other then (ordering rule 4).

Worker threads have no compute: their current stream is not the user's. Work that they submit follows the events in
`after`; to follow compute, it names an event (`now`) that was taken on the user's thread.

Memory that work uses must outlive its event: the caching allocator hands freed memory out at once, so the owner waits
for the event before it drops the memory, or keeps it alive until then with `keep_alive` (ordering rule 1).
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

#: Names of other modules that users of streams import from here.
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
        """True while a trace is taken, which tells units apart."""

    def submitted(
        self, stream: str, work: Work, after: Sequence[Event], nbytes: int, label: Label
    ) -> tuple[Work, Sequence[Event], Callable[[Event], Event]]:
        """Note submitted work. Return what to run, the events that it follows, and what wraps its event."""

    def turn_to(self, label: Label) -> None:
        """Note that compute turns to other work; to none in particular if the label is empty."""

    def step_made(self, *told: Any) -> None:
        """Note that a step of the optimizer has returned: the engine, its result and the param groups."""


def _nothing() -> None: ...


class Streams(ABC):
    """Side streams of one device.

    Attributes:
        observer: while a trace is taken or steps are recorded.
        saved_bytes: bytes of checkpoints that were written to files, the markers aside. One save at a time adds to it.
    """

    #: compute reads and writes the cpu tier directly: nothing has to be copied to be used
    aliases_host: bool
    #: compute reads parameters in their storage, where it reaches them; else they are gathered and released
    reads_in_place = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.observer: StreamObserver | None = None
        self.saved_bytes = 0
        self._kept_alive: deque[tuple[Event, Sequence[Tensor]]] = deque()
        self._keeping_alive = threading.RLock()  # freeing a tensor may call `keep_alive` for others

    @property
    def computes_on_host(self) -> bool:
        """True if compute is the calling thread, and not a device that it enqueues work for."""
        return self.device.type == "cpu"

    @property
    def reach(self) -> Reach:
        """The state that compute reads and writes in its storage, as a value."""
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
                must outlive its event; tensors that it makes are of its own stream, and may be dropped when it returns.
            after: events that the work waits for, beside compute; from a worker thread, all that it waits for.
            writes: tensors that the work overwrites whole; undefined until the event.
            nbytes: bytes moved, for bandwidth models and traces.
            label: its purpose, in traces.
        """
        self._let_go()  # here, as nothing else is called as often
        if self.observer is None:
            return self._submit(stream, work, after, writes)
        work, after, watch = self.observer.submitted(stream, work, after, nbytes, label)
        return watch(self._submit(stream, work, after, writes))

    @abstractmethod
    def _submit(self, stream: str, work: Work, after: Sequence[Event], writes: Sequence[Tensor]) -> Event:
        """Do what `submit` does, on this back end."""

    def drain(self, streams: Iterable[str]) -> None:
        """Wait on the host until all work of some streams has run, also work whose event is lost."""
        for stream in streams:
            self._submit(stream, _nothing, (), ()).synchronize()

    def now(self) -> Event:
        """Return an event of all compute issued until now, for work that is submitted later or by a worker thread."""
        return DONE

    def follow_current_stream(self) -> None:  # noqa: B027 - where streams are the host's, there is nothing to do
        """Order the calling thread's current stream after all earlier compute, on any stream."""

    def keep_alive(self, tensors: Sequence[Tensor], *, until: Event) -> None:
        """Keep tensors that submitted work may still use alive until an event is over (ordering rule 1)."""
        self._let_go()
        if tensors and not until.done():
            with self._keeping_alive:
                self._kept_alive.append((until, tensors))

    def _let_go(self) -> None:
        """Drop the tensors of `keep_alive` whose event is over."""
        if not self._kept_alive:
            return
        gone: list[Sequence[Tensor]] = []
        with self._keeping_alive:
            while self._kept_alive and self._kept_alive[0][0].done():
                gone.append(self._kept_alive.popleft()[1])  # dropped after the lock: freeing a tensor may free others

    def compute(self, work: Callable[[], None], *, label: Label, nbytes: int = 0) -> None:
        """Run work of compute itself, now, in the caller's thread.

        Arguments:
            work: the arithmetic.
            label: its purpose, in traces.
            nbytes: bytes that it reads and writes, for simulations.
        """
        del nbytes
        self.follow_current_stream()
        if self.observer is not None:
            self.observer.turn_to(label)
        work()
        if self.observer is not None:
            self.observer.turn_to(NO_LABEL)

    def device_clock(self) -> Clock:
        """Make a clock of compute and of the device's streams. Waits for the device."""
        return Clock()

    def allocate(self, buffer: Tensor) -> None:
        """Allocate a buffer's memory. Contents are undefined.

        The buffer keeps one storage object all its life: autograd saves views of a weight, and they must see the
        bytes of the next gather.
        """
        nbytes = int(buffer.storage_offset() + buffer.numel()) * buffer.dtype.itemsize
        if buffer.untyped_storage().nbytes() != nbytes:
            self._resize(buffer, nbytes)

    def _resize(self, buffer: Tensor, nbytes: int) -> None:
        buffer.untyped_storage().resize_(nbytes)

    def make_buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Make a flat buffer, with memory, for `allocate` and `deallocate`."""
        return torch.empty(numel, dtype=dtype, device=self.device)

    def deallocate(self, buffer: Tensor) -> None:
        """Free a buffer's memory. Precondition: all work on it was waited for (ordering rule 1)."""
        if not self.reads_in_place:
            poison(buffer)  # debugging: memory that is not freed at once must not look as if it had values
        self._resize(buffer, 0)

    def transfer_to_compute(self, buffer: Tensor) -> None:  # noqa: B027 - where streams are the host's, there is nothing to do
        """Transfer a buffer's memory to compute and to the user, who may drop it at any time."""

    def poison(self, buffer: Tensor) -> None:
        """Overwrite a buffer with NaN and keep its memory. Precondition: all work on it was waited for."""
        poison(buffer)

    def return_free_memory(self) -> None:
        """Return freed memory to the system."""
        return_free_memory()

    @abstractmethod
    def close(self) -> None:
        """Finish submitted work and end the threads."""


def close_workers(workers: Mapping[str, HostWorker]) -> None:
    """End the threads of streams by name, updates first: their work submits copies, and waits for them."""
    for name in sorted(workers, key=lambda name: name != UPDATE):
        workers[name].close()


class InlineStreams(Streams):
    """The back end of a cpu as the device: work runs in the call of `submit`.

    Work that cannot start yet, because a file is still being read or written, runs on a thread of its stream, and so
    does later work of that stream: the caller computes meanwhile. Collectives never do.
    """

    aliases_host = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._workers: dict[str, HostWorker] = {}

    def _submit(self, stream: str, work: Work, after: Sequence[Event], writes: Sequence[Tensor]) -> Event:
        """Run `work` now if everything before it is done or waited for here, else queue it."""
        del writes
        worker = self._workers.get(stream)
        # A collective is issued here, whatever it waits for: threads would issue it in another order on each rank
        # (ordering rule 4). Other work runs here only if no work of its stream is queued, which it would overtake.
        if stream == COLLECTIVE or ((worker is None or worker.idle()) and all(event.done() for event in after)):
            for event in after:
                event.synchronize()  # also raises the error of work that failed
            pending = work()
            return DONE if pending is None else PendingEvent(pending)
        if worker is None:
            # Updates may be products of matrices, which use all threads; other work only moves values.
            worker = self._workers[stream] = HostWorker(stream, alone=stream not in (UPDATE, DEVICE_UPDATE))
        return worker.submit(partial(after_all, tuple(after), work))

    def close(self) -> None:
        """Run queued work and end the threads."""
        close_workers(self._workers)
        self._workers.clear()


def copy(target: Tensor, source: Tensor) -> None:
    """Copy a tensor, as work of a stream: without waiting for it where the host memory is pinned."""
    assert target.device == source.device or target.dtype == source.dtype, CASTS
    target.copy_(source, non_blocking=True)


def across(target: Tensor, source: Tensor) -> Work:
    """Make the work of a copy between the memory of a device and of the host, pinned or not: of equal dtypes.

    Else torch casts at the source. On a device that takes a temporary there, and may send the wider dtype over the bus;
    on the host the temporary is pageable memory, which a device reads only while the host waits. So values are cast
    where they arrive, by work of its own.
    """
    assert target.dtype == source.dtype, CASTS
    return partial(copy, target, source)


def poison(tensor: Tensor) -> None:
    """Fill with the bytes 0xFF: NaN in every floating dtype, -1 in the integer ones."""
    if tensor.numel() and tensor.untyped_storage().nbytes():
        tensor.view(torch.uint8).fill_(0xFF)
