"""The streams of an accelerator, and the choice of a device's streams."""

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.finalizers import Finalizer, Phase, at_end, exiting
from penstock.runtime.hardware import Clock, DeviceClock, Hardware
from penstock.runtime.simulated import SimulatedStreams
from penstock.runtime.streams import (
    COLLECTIVE,
    ON_DEVICE,
    STREAMS,
    UPLOAD,
    Event,
    HostEvent,
    HostWorker,
    InlineStreams,
    Streams,
    Work,
    after_all,
    close_workers,
    on_worker,
)
from penstock.runtime.topology import Reach

_LATE_SECONDS = 0.002  # that simulated streams wait before a piece of work, at most


class AcceleratorStreams(Streams):
    """A stream of the accelerator for each kind of transfer, and a thread for each kind of work on the host.

    Work of the device is enqueued by the caller of `submit`. If it follows work on the host that is not over yet, such
    as the read of a file, the thread of its stream waits for that and enqueues it then; later work of the same stream
    queues up behind it. A collective is always enqueued by its caller, which waits for the host's work: threads would
    enqueue collectives in another order on each rank (ordering rule 4).
    """

    aliases_host = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._hardware = Hardware(device)
        self._sides = {name: self._hardware.make_stream() for name in ON_DEVICE}
        self._workers = {name: HostWorker(name) for name in STREAMS}
        # The workers' endings, not the workers: what is called at the end must not keep them, or this object, alive.
        endings = [worker.ending for worker in self._workers.values()]
        self._end = at_end(self, _finish, self._hardware, endings, phase=Phase.THREADS)

    def _submit(self, stream: str, work: Work, after: Sequence[Event], writes: Sequence[Tensor]) -> Event:
        """Enqueue work on the device's stream, or queue it for a thread of the host."""
        del writes
        worker = self._workers[stream]
        events = [part.unwatched() for event in after for part in event.parts()]
        if stream not in self._sides:
            return worker.submit(partial(after_all, events, work))
        if not on_worker():
            # The work may read what compute has written, and overwrite what compute has read (ordering rule 3).
            events.insert(0, self.now())
        enqueue = partial(self._enqueue, stream, work, events)
        # Only where the thread has nothing of this stream left to enqueue: else this work would overtake it.
        at_once = worker.idle() and not any(map(_waits_for_host, events))
        if at_once or stream == COLLECTIVE:
            return enqueue()
        # The caller goes on. A wait for the event waits for the thread first, then for the device.
        deferred = _DeferredEvent()
        worker.submit(lambda: deferred.enqueued(enqueue()), deferred)
        return deferred

    def _enqueue(self, stream: str, work: Work, events: Sequence[Event]) -> "_DeviceEvent":
        """Enqueue waits, work and an event on a stream of the device; block for events of the host."""
        side = self._sides[stream]
        with self._hardware.on(side):
            for event in events:  # a wait of the stream, not of the host, if the event is the device's
                _follow(side, event)
            work()
        return _DeviceEvent(self._hardware, self._hardware.recorded(side))

    def now(self) -> Event:
        """Return an event that is over once all compute that was issued until now is over."""
        assert not on_worker(), "a thread of ours has no compute"
        return _DeviceEvent(self._hardware, self._hardware.recorded(self._hardware.compute()))

    def follow_current_stream(self) -> None:
        """Order the calling thread's current stream after the one that compute was on."""
        self._hardware.compute()

    def _resize(self, buffer: Tensor, nbytes: int) -> None:
        """Allocate or free memory of the pool that torch keeps for the stream of uploads, apart from activations."""
        uploads = self._sides[UPLOAD]
        if nbytes == 0:
            # The caching allocator hands the memory to the next allocation of that stream at once. Compute may not have
            # read the buffer yet: without this wait the next upload would overwrite it. The work that filled the buffer
            # is over then too, since compute has waited for it (ordering rule 1).
            self._hardware.recorded(self._hardware.compute()).wait(uploads)
        with self._hardware.on(uploads):
            super()._resize(buffer, nbytes)

    def transfer_to_compute(self, buffer: Tensor) -> None:
        """Keep a dropped buffer's memory until compute's stream has reached that point (`record_stream`)."""
        buffer.record_stream(self._hardware.compute())

    def make_buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Make a flat buffer in the pool that torch keeps for the stream of uploads."""
        with self._hardware.on(self._sides[UPLOAD]):
            return super().make_buffer(numel, dtype)

    def device_clock(self) -> Clock:
        """Make a clock of the device's own events. Waits for the device."""
        return DeviceClock(self._hardware)

    def return_free_memory(self) -> None:
        """Return freed host memory to the system, and cached device memory to the device."""
        super().return_free_memory()
        self._hardware.empty_cache()

    def close(self) -> None:
        """Finish the work of the host and of the device, and end the threads."""
        close_workers(self._workers)  # first: the threads enqueue work on the device
        self._hardware.synchronize()  # before anything is let go of: work of the device may still use it
        self._end.cancel()
        self._let_go()


class _DeviceEvent(Event):
    """The completion of work on a stream of the device."""

    def __init__(self, hardware: Hardware, event: Any) -> None:
        self._hardware, self._event = hardware, event

    def wait(self) -> None:
        assert not on_worker(), "a thread of ours has no compute that could wait"
        self.hold_up(self._hardware.compute())

    def hold_up(self, stream: Any) -> None:
        """Order all later work of a stream after this event. The host goes on (ordering rule 2)."""
        self._event.wait(stream)

    def synchronize(self) -> None:
        self._event.synchronize()

    def done(self) -> bool:
        return bool(self._event.query())

    def check(self) -> None:
        """Do nothing: a device that has failed says so at the next call."""


class _DeferredEvent(HostEvent):
    """The completion of work of the device that a thread of the host enqueues."""

    def __init__(self) -> None:
        super().__init__()
        self._enqueued: _DeviceEvent | None = None

    def enqueued(self, event: _DeviceEvent) -> None:
        """Take the device's event. Runs on the thread that has enqueued the work."""
        self._enqueued = event

    def in_queue(self) -> _DeviceEvent:
        """Block until the work is enqueued, and return the device's event."""
        super().synchronize()
        assert self._enqueued is not None
        return self._enqueued

    def wait(self) -> None:
        self.in_queue().wait()

    def synchronize(self) -> None:
        self.in_queue().synchronize()

    def done(self) -> bool:
        return super().done() and (self._enqueued is None or self._enqueued.done())


def _finish(hardware: Hardware, threads: Sequence[Finalizer]) -> None:
    """End the threads of streams that were not closed, and wait for the device: their memory is about to be freed."""
    for end in threads:  # first: they enqueue work on the device
        end()
    # At the exit the process ends anyway, and a collective that waits for a rank which is gone would never be over.
    if not exiting():
        hardware.synchronize()


def _waits_for_host(event: Event) -> bool:
    """Return True if a stream of the device cannot follow an event yet: work of the host comes first."""
    if isinstance(event, _DeferredEvent):
        return not event.ran()
    return not (isinstance(event, _DeviceEvent) or event.done())


def _follow(side: Any, event: Event) -> None:
    """Order a stream of the device after an event; block until the host's part of it is over."""
    if isinstance(event, _DeferredEvent):
        event = event.in_queue()
    if isinstance(event, _DeviceEvent):
        event.hold_up(side)
    else:
        event.synchronize()


def reach_for(device: torch.device, *, debug_release: bool = False) -> Reach:
    """Return what compute reaches on the streams that `streams_for` would make."""
    return Reach(aliases_host=device.type == "cpu" and not debug_release, reads_in_place=not debug_release)


def streams_for(device: torch.device, *, debug_release: bool = False) -> Streams:
    """Make the streams of a device: work runs inline on a cpu, and on an accelerator's own streams otherwise.

    Arguments:
        device: the device that compute runs on.
        debug_release: release also what compute could read in place, and on a cpu run all transfers late.
    """
    if device.type != "cpu":
        streams: Streams = AcceleratorStreams(device)
    elif debug_release:
        delays = random.Random(0)
        streams = SimulatedStreams(lambda stream, nbytes: delays.uniform(0, _LATE_SECONDS))
    else:
        streams = InlineStreams(device)
    streams.reads_in_place = not debug_release
    return streams
