"""The streams of an accelerator, written against what every device's module of torch has."""

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.machine.clocks import Clock, DeviceClock
from penstock.machine.simulated import SimulatedStreams
from penstock.machine.streams import (
    COLLECTIVE,
    DONE,
    ON_DEVICE,
    STREAMS,
    Event,
    HostEvent,
    HostWorker,
    InlineStreams,
    Streams,
    Work,
    after_all,
    close_workers,
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
        self._module: Any = torch.get_device_module(device)
        with self._module.device(device):
            self._sides = {name: self._module.Stream() for name in ON_DEVICE}
        self._workers = {name: HostWorker(name) for name in STREAMS}

    def _submit(self, stream: str, work: Work, after: Sequence[Event], writes: Sequence[Tensor]) -> Event:
        """Enqueue `work` on the device's stream, or on a host thread."""
        del writes
        worker = self._workers[stream]
        if stream not in self._sides:
            return worker.submit(partial(after_all, tuple(after), work))
        compute = self._module.Event()
        compute.record(self._module.current_stream(self.device))
        enqueue = partial(self._enqueue, stream, work, tuple(after), compute)
        at_once = worker.idle() and all(event.done() or isinstance(event, _DeviceEvent) for event in after)
        if at_once or stream == COLLECTIVE:  # then each wait for an event blocks until that is enqueued, at most
            return enqueue()
        deferred = _DeferredEvent()
        worker.submit(lambda: deferred.enqueued(enqueue()), deferred)
        return deferred

    def _enqueue(self, stream: str, work: Work, after: tuple[Event, ...], compute: Any) -> "_DeviceEvent":
        side = self._sides[stream]
        with self._module.device(self.device), self._module.stream(side):
            side.wait_event(compute)
            for event in after:
                event.wait()
            work()
            recorded = self._module.Event()
            recorded.record(side)
        return _DeviceEvent(self._module, self.device, recorded)

    def device_clock(self) -> Clock:
        """The device's own."""
        return DeviceClock(self._module, self.device)

    def return_free_memory(self) -> None:
        """Empty the cache of the device's allocator as well."""
        super().return_free_memory()
        with self._module.device(self.device):
            self._module.empty_cache()

    def close(self) -> None:
        """Finish host work and device work."""
        close_workers(self._workers)
        self._module.synchronize(self.device)


class _DeferredEvent(HostEvent):
    """Device work that a host thread enqueues."""

    def __init__(self) -> None:
        super().__init__()
        self._enqueued: Event = DONE

    def enqueued(self, event: Event) -> None:
        self._enqueued = event

    def wait(self) -> None:
        super().synchronize()
        self._enqueued.wait()

    def synchronize(self) -> None:
        super().synchronize()
        self._enqueued.synchronize()

    def done(self) -> bool:
        return super().done() and self._enqueued.done()


class _DeviceEvent(Event):
    def __init__(self, module: Any, device: torch.device, event: Any) -> None:
        self._module, self._device, self._event = module, device, event

    def wait(self) -> None:
        self._module.current_stream(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()

    def done(self) -> bool:
        return bool(self._event.query())

    def check(self) -> None:
        """A device that failed says so at the next call."""


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
