"""When work runs, for traces: on the host, or on a device, which gets to it later than the host that enqueues it."""

import time
from abc import ABC, abstractmethod
from typing import Any

from penstock.machine.hardware import Hardware


class Clock(ABC):
    """Marks points in the order of work, and tells when they were reached."""

    @abstractmethod
    def mark(self) -> Any:
        """Mark the point where all that the calling thread has issued so far is over. Never blocks."""

    @abstractmethod
    def seconds(self, mark: Any) -> float | None:
        """Return when a mark was reached, in seconds of `time.monotonic`; `None` where it was not yet."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until every mark is reached."""


class HostClock(Clock):
    """The clock of work that is over when its call returns: a mark is the time."""

    def mark(self) -> float:
        """Return the time of now."""
        return time.monotonic()

    def seconds(self, mark: float) -> float:
        """Return the mark itself."""
        return mark

    def synchronize(self) -> None:
        """Do nothing: every mark is reached."""


class DeviceClock(Clock):
    """The clock of a device's streams: a mark is an event, timed against one that the host has waited for.

    Arguments:
        hardware: the device. The constructor waits until it is idle.
    """

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        hardware.synchronize()
        self._origin = self.mark()
        # The device is idle, so it comes to this event at once and the host returns with it: both times are of one
        # moment. With work before it, what the host reads afterwards would be late by as much as it takes to wake up.
        self._origin.synchronize()
        self._origin_seconds = time.monotonic()

    def mark(self) -> Any:
        """Record an event on the calling thread's current stream."""
        event = self._hardware.make_event(timing=True)
        event.record(self._hardware.current())
        return event

    def seconds(self, mark: Any) -> float | None:
        """Return when the device came to a mark, by its own timing; `None` where it has not."""
        if not mark.query():
            return None
        return self._origin_seconds + float(self._origin.elapsed_time(mark)) / 1e3

    def synchronize(self) -> None:
        """Block until all that the device was given is over."""
        self._hardware.synchronize()
