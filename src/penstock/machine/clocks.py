"""When work runs, for traces: on the host, or on a device, which gets to it later than the host that enqueues it."""

import time
from abc import ABC, abstractmethod
from typing import Any

import torch


class Clock(ABC):
    """Marks points in the order of work, and tells when they were reached."""

    @abstractmethod
    def mark(self) -> Any:
        """The point where all that the calling thread has issued so far is over. Never blocks."""

    @abstractmethod
    def seconds(self, mark: Any) -> float | None:
        """When a mark was reached, as `time.monotonic` counts; `None` where it was not yet."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until every mark is reached."""


class HostClock(Clock):
    """What the host does is over when the call returns: a mark is the time."""

    def mark(self) -> float:
        """Now."""
        return time.monotonic()

    def seconds(self, mark: float) -> float:
        """The mark itself."""
        return mark

    def synchronize(self) -> None:
        """Every mark is reached."""


class DeviceClock(Clock):
    """A mark is an event of the current stream, timed against one that the host has waited for.

    Arguments:
        module: the device's module of torch. Its device is waited for, once.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module, self._device = module, device
        module.synchronize(device)
        self._origin = self.mark()
        self._origin.synchronize()
        self._origin_seconds = time.monotonic()

    def mark(self) -> Any:
        """An event on the current stream."""
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def seconds(self, mark: Any) -> float | None:
        """By the device's own timing."""
        if not mark.query():
            return None
        return self._origin_seconds + float(self._origin.elapsed_time(mark)) / 1e3

    def synchronize(self) -> None:
        """Wait for the device."""
        self._module.synchronize(self._device)
