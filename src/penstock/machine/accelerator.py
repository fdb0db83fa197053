"""The streams of an accelerator."""

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.machine.clocks import Clock, DeviceClock
from penstock.machine.hardware import Hardware
from penstock.machine.lifetime import Ending, Phase, at_end, exiting
from penstock.machine.simulated import SimulatedStreams
from penstock.machine.streams import (
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

_LATE_SECONDS = 0.002  # of simulated streams, at most


class AcceleratorStreams(Streams):
    """A stream of the accelerator for each kind of movement, and a thread for each kind of work on the host.

    The device's work is enqueued where it is submitted. Where it follows work on the host that is not over, such as the
    read of a file, a thread waits for that and enqueues it then, and what follows on the same stream too. Collectives
    never are: the caller waits for the host's work instead.
    """

    aliases_host = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._hardware = Hardware(device)
        self._sides = {name: self._hardware.make_stream() for name in ON_DEVICE}
        self._workers = {name: HostWorker(name) for name in STREAMS}
        endings = [worker.ending for worker in self._workers.values()]
        self._end = at_end(self, _finish, self._hardware, endings, phase=Phase.THREADS)

    def _submit(self, stream: str, work: Work, after: Sequence[Event], writes: Sequence[Tensor]) -> Event:
        """Enqueue `work` on the device's stream, or on a host thread."""
        del writes
        worker = self._workers[stream]
        events = [part.unwatched() for event in after for part in event.parts()]
        if stream not in self._sides:
            return worker.submit(partial(after_all, events, work))
        if not on_worker():
            events.insert(0, self.now())
        enqueue = partial(self._enqueue, stream, work, events)
        at_once = worker.idle() and not any(map(_waits_for_host, events))
        if at_once or stream == COLLECTIVE:  # then the caller waits for what the host does first
            return enqueue()
        deferred = _DeferredEvent()
        worker.submit(lambda: deferred.enqueued(enqueue()), deferred)
        return deferred

    def _enqueue(self, stream: str, work: Work, events: Sequence[Event]) -> "_DeviceEvent":
        side = self._sides[stream]
        with self._hardware.on(side):
            for event in events:
                _follow(side, event)
            work()
        return _DeviceEvent(self._hardware, self._hardware.recorded(side))

    def now(self) -> Event:
        """An event of the calling thread's current stream."""
        assert not on_worker(), "a thread of ours has no compute"
        return _DeviceEvent(self._hardware, self._hardware.recorded(self._hardware.compute()))

    def here(self) -> None:
        """The calling thread's current stream follows the one that compute was on."""
        self._hardware.compute()

    def _resize(self, buffer: Tensor, nbytes: int) -> None:
        """Of the memory that torch keeps for the stream of uploads, which activations do not split.

        What is released goes back there, for whatever is allocated on that stream next. So that stream follows compute,
        which has read the buffer and has waited for all that filled it; and whoever fills one was submitted after its
        lease, on whichever stream.
        """
        uploads = self._sides[UPLOAD]
        if nbytes == 0:
            self._hardware.recorded(self._hardware.compute()).wait(uploads)
        with self._hardware.on(uploads):
            super()._resize(buffer, nbytes)

    def hand_over(self, buffer: Tensor) -> None:
        """Have torch keep the memory, when it is let go of, until compute's stream of now is past that."""
        buffer.record_stream(self._hardware.compute())

    def make_buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Of the same memory."""
        with self._hardware.on(self._sides[UPLOAD]):
            return super().make_buffer(numel, dtype)

    def device_clock(self) -> Clock:
        """The device's own."""
        return DeviceClock(self._hardware)

    def return_free_memory(self) -> None:
        """Empty the cache of the device's allocator as well."""
        super().return_free_memory()
        self._hardware.empty_cache()

    def close(self) -> None:
        """Finish host work and device work."""
        close_workers(self._workers)
        self._hardware.synchronize()
        self._end.cancel()
        self._let_go()


class _DeviceEvent(Event):
    def __init__(self, hardware: Hardware, event: Any) -> None:
        self._hardware, self._event = hardware, event

    def wait(self) -> None:
        assert not on_worker(), "a thread of ours has no compute that could wait"
        self.hold_up(self._hardware.compute())

    def hold_up(self, stream: Any) -> None:
        """What a stream is given from here on runs after the work."""
        self._event.wait(stream)

    def synchronize(self) -> None:
        self._event.synchronize()

    def done(self) -> bool:
        return bool(self._event.query())

    def check(self) -> None:
        """A device that failed says so at the next call."""


class _DeferredEvent(HostEvent):
    """Device work that a host thread enqueues."""

    def __init__(self) -> None:
        super().__init__()
        self._enqueued: _DeviceEvent | None = None

    def enqueued(self, event: _DeviceEvent) -> None:
        self._enqueued = event

    def in_queue(self) -> _DeviceEvent:
        """The device's event, once it has one: blocks until then."""
        super().synchronize()
        assert self._enqueued is not None
        return self._enqueued

    def wait(self) -> None:
        self.in_queue().wait()

    def synchronize(self) -> None:
        self.in_queue().synchronize()

    def done(self) -> bool:
        return super().done() and (self._enqueued is None or self._enqueued.done())


def _finish(hardware: Hardware, threads: Sequence[Ending]) -> None:
    """What nobody closed was dropped: memory goes, and work of the device may still use it."""
    for end in threads:  # which enqueue
        end()
    if not exiting():  # then the process ends, and what waits for a rank that is gone would never be over
        hardware.synchronize()


def _waits_for_host(event: Event) -> bool:
    """Whether a stream of the device cannot follow an event yet: what the host does first is not over."""
    if isinstance(event, _DeferredEvent):
        return not event.ran()
    return not (isinstance(event, _DeviceEvent) or event.done())


def _follow(side: Any, event: Event) -> None:
    """Have a stream follow an event; block until the host's part of it is over."""
    if isinstance(event, _DeferredEvent):
        event = event.in_queue()
    if isinstance(event, _DeviceEvent):
        event.hold_up(side)
    else:
        event.synchronize()


def streams_for(device: torch.device, *, debug_release: bool = False) -> Streams:
    """The back end of a device: inline for a cpu, the accelerator's own streams otherwise.

    Arguments:
        device: of compute.
        debug_release: what compute could read in place is released too; on a cpu everything runs late.
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
