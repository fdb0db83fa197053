"""Work that runs beside compute, ordered by events: one interface, several back ends.

Compute is whatever the caller's own thread and the device's current stream do. Everything else is submitted to one of
the streams below, each of which runs its work in the order of submission. Work starts after all compute that
was issued before it was submitted, and after the events in `after`; compute and the host see its result after they wait
for its event. Nothing else orders anything: a missing wait is a bug, and the simulated back end turns it into
a wrong number on any machine (`machine/simulated.py`).
"""

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

UPLOAD = "upload"  # host to device
DOWNLOAD = "download"  # device to host
COLLECTIVE = "collective"  # between ranks: one stream, so that every rank issues them in the same order
UPDATE = "update"  # arithmetic on the host

Work = Callable[[], None]


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


class Streams(ABC):
    """Side streams of one device."""

    #: compute reads and writes the cpu tier directly: nothing has to be copied to be used
    aliases_host: bool

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def submit(
        self, stream: str, work: Work, *, after: Sequence[Event] = (), writes: Sequence[Tensor] = (), nbytes: int = 0
    ) -> Event:
        """Run `work` on a stream.

        Arguments:
            stream: `UPLOAD`, `DOWNLOAD`, `COLLECTIVE` or `UPDATE`.
            work: issues the copies, collectives or arithmetic. Buffers it touches must outlive its event.
            after: events that the work waits for.
            writes: tensors that the work overwrites whole; undefined until the event.
            nbytes: bytes moved, for bandwidth models and traces.
        """

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
        buffer.untyped_storage().resize_(0)

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


DONE: Event = _Done()


class InlineStreams(Streams):
    """Nothing is asynchronous: work runs where it is submitted. The back end of a cpu as the device."""

    aliases_host = True

    def submit(
        self, stream: str, work: Work, *, after: Sequence[Event] = (), writes: Sequence[Tensor] = (), nbytes: int = 0
    ) -> Event:
        """Run `work` now."""
        del stream, after, writes, nbytes
        work()
        return DONE

    def close(self) -> None:
        """Nothing is pending."""


class HostEvent(Event):
    """Completion of work on a `HostWorker`."""

    def __init__(self) -> None:
        self._finished = threading.Event()
        self._error: BaseException | None = None

    def run(self, work: Work) -> None:
        """Run the work and keep its error for whoever waits."""
        try:
            work()
        except BaseException as error:
            self._error = error
        self._finished.set()

    def wait(self) -> None:
        """Block until done: compute on the host is the calling thread."""
        self.synchronize()

    def synchronize(self) -> None:
        """Block until done."""
        self._finished.wait()
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Whether the work ran."""
        return self._finished.is_set()


class HostWorker:
    """One persistent thread that runs submitted work in order."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[HostEvent, Work] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=f"penstock-{name}", daemon=True)
        self._thread.start()

    def submit(self, work: Work, event: HostEvent | None = None) -> HostEvent:
        """Queue the work; returns its event (the one given, if any)."""
        event = event or HostEvent()
        self._queue.put((event, work))
        return event

    def close(self) -> None:
        """Run what is queued, then end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _loop(self) -> None:
        while (item := self._queue.get()) is not None:
            event, work = item
            event.run(work)
            del item, event, work  # a waiting worker must not keep the last buffers alive


class AcceleratorStreams(Streams):
    """A stream of the accelerator for each kind of movement, and one thread for arithmetic on the host."""

    aliases_host = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._module: Any = torch.get_device_module(device)
        with self._module.device(device):
            self._sides = {name: self._module.Stream() for name in (UPLOAD, DOWNLOAD, COLLECTIVE)}
        self._update = HostWorker(UPDATE)

    def submit(
        self, stream: str, work: Work, *, after: Sequence[Event] = (), writes: Sequence[Tensor] = (), nbytes: int = 0
    ) -> Event:
        """Enqueue `work` on the device's stream; `UPDATE` work goes to the host thread."""
        del writes, nbytes
        if stream == UPDATE:
            pending = tuple(after)

            def on_host() -> None:
                for event in pending:
                    event.synchronize()
                work()

            return self._update.submit(on_host)
        side = self._sides[stream]
        side.wait_stream(self._module.current_stream(self.device))
        with self._module.stream(side):
            for event in after:
                event.wait()
            work()
            recorded = self._module.Event()
            recorded.record(side)
        return _DeviceEvent(self._module, self.device, recorded)

    def close(self) -> None:
        """Finish host work and device work."""
        self._update.close()
        self._module.synchronize(self.device)


class _DeviceEvent(Event):
    def __init__(self, module: Any, device: torch.device, event: Any) -> None:
        self._module, self._device, self._event = module, device, event

    def wait(self) -> None:
        self._module.current_stream(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()

    def done(self) -> bool:
        return bool(self._event.query())


def copy(target: Tensor, source: Tensor) -> None:
    """Work: copy a tensor, without waiting for it where the host memory is pinned."""
    target.copy_(source, non_blocking=True)


def streams_for(device: torch.device) -> Streams:
    """The back end of a device: inline for a cpu, the accelerator's own streams otherwise."""
    return InlineStreams(device) if device.type == "cpu" else AcceleratorStreams(device)
