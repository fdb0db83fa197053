"""When work runs, for traces: on the host, or on a device, which gets to it later than the host that enqueues it."""

import time
from abc import ABC, abstractmethod
from typing import Any, Protocol


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


class Timing(Protocol):
    """What a clock asks of a device (`machine/hardware.py`)."""

    def current(self) -> Any:
        """The stream that the calling thread is on."""

    def make_event(self, *, timing: bool = False) -> Any:
        """A new event."""

    def synchronize(self) -> None:
        """Wait for the device."""


class DeviceClock(Clock):
    """A mark is an event of the current stream, timed against one that the host has waited for.

    Arguments:
        hardware: the device. It is waited for, once.
    """

    def __init__(self, hardware: Timing) -> None:
        self._hardware = hardware
        hardware.synchronize()
        self._origin = self.mark()
        self._origin.synchronize()
        self._origin_seconds = time.monotonic()

    def mark(self) -> Any:
        """An event on the current stream."""
        event = self._hardware.make_event(timing=True)
        event.record(self._hardware.current())
        return event

    def seconds(self, mark: Any) -> float | None:
        """By the device's own timing."""
        if not mark.query():
            return None
        return self._origin_seconds + float(self._origin.elapsed_time(mark)) / 1e3

    def synchronize(self) -> None:
        """Wait for the device."""
        self._hardware.synchronize()
