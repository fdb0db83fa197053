"""Events: completion of submitted work, and of transfers that go on after the work that started them."""

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Protocol

from penstock.errors import EngineError


class Pending(Protocol):
    """A transfer that goes on after the work that started it has returned."""

    def wait(self) -> None:
        """Block until the transfer is over; raise its error."""

    def done(self) -> bool:
        """Return True if the transfer is over."""

    @property
    def ended(self) -> float:
        """Time of the end, in seconds of `time.monotonic`, once done."""


Work = Callable[[], Pending | None]


class Event(ABC):
    """The completion of a piece of submitted work. Work that failed raises its error at every wait."""

    @abstractmethod
    def wait(self) -> None:
        """Order all later compute after the work (ordering rule 2). Never blocks the host on a device."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the calling thread until the work is done."""

    @abstractmethod
    def done(self) -> bool:
        """Return True if the work is done, without blocking."""

    @abstractmethod
    def check(self) -> None:
        """Raise the error of work that has failed by now, without blocking."""

    def parts(self) -> Sequence["Event"]:
        """List the single events behind this one that have to be followed: those not known to have gone well."""
        return (self,)

    def members(self) -> Sequence["Event"]:
        """List the events that this one was made of, which may stand for several themselves."""
        return (self,)

    def unwatched(self) -> "Event":
        """Return the event itself, without the wrapper that notes its waits."""
        return self


class _AllOf(Event):
    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events
        # Every tile of a unit follows every tile of its last update: without the flags, queries grow with their square.
        self._done = False
        self._went_well = False

    def wait(self) -> None:
        if not self._went_well:
            for event in self._events:
                event.wait()

    def synchronize(self) -> None:
        if not self._went_well:
            for event in self._events:
                event.synchronize()
            self._went_well = self.done()  # False after a wait that a test has left out

    def done(self) -> bool:
        if not self._done:
            for event in self._events:
                if not event.done():
                    return False
            self._done = True
        return True

    def check(self) -> None:
        for event in self._events:
            event.check()

    def parts(self) -> Sequence[Event]:
        if not self._went_well and self.done():
            with contextlib.suppress(Exception):  # every wait raises the error of work that failed
                self.check()
                self._went_well = True
        return () if self._went_well else [part for event in self._events for part in event.parts()]

    def members(self) -> Sequence[Event]:
        return self._events


#: The event of work that is over.
DONE: Event = _AllOf(())


def all_of(events: Iterable[Event]) -> Event:
    """Make one event of several. An error of any of them is raised at every wait."""
    left = [event for event in events if event is not DONE]
    return _AllOf(left) if len(left) > 1 else left[0] if left else DONE


class HostEvent(Event):
    """Completion of work on a `HostWorker`."""

    def __init__(self) -> None:
        self._finished = threading.Event()
        self._pending: Pending | None = None
        self._error: BaseException | None = None

    def run(self, work: Work) -> None:
        """Run the work and keep its error, which every wait raises."""
        self.run_from([work])

    def run_from(self, box: list[Work]) -> None:
        """Run work that is taken out of a box, and keep its error.

        Once the event is done, nothing here refers to the work: the reference count of a buffer that it touched is
        right.
        """
        work = box.pop()
        try:
            self._pending = work()
        except BaseException as error:
            self._error = error
        del work  # before the event: the thread that waits may count the references to a buffer at once
        self._finished.set()

    def settle(self) -> None:
        """Release the threads that wait, also if the work never runs. Changes nothing once it ran."""
        self._finished.set()

    def wait(self) -> None:
        """Block until done: compute on the host is the calling thread."""
        self.synchronize()

    def synchronize(self) -> None:
        """Block until done."""
        if not self._finished.is_set():  # `wait` takes a lock, also of an event that is set
            self._finished.wait()
        if self._error is not None:
            raise _again(self._error)
        if self._pending is not None:
            self._pending.wait()  # the work has only started it

    def ran(self) -> bool:
        """Return True if the work ran; a transfer that it started may go on."""
        return self._finished.is_set()

    def done(self) -> bool:
        """Return True if the work ran, and the transfer that it started is over."""
        return self._finished.is_set() and (self._pending is None or self._pending.done())

    def check(self) -> None:
        """Raise the error of work that is over. Never blocks."""
        # Of this class alone: to synchronize with a device's part, which a subclass has, is a wait of the host.
        if HostEvent.done(self):
            HostEvent.synchronize(self)


class PendingEvent(HostEvent):
    """Completion of a transfer that was started already."""

    def __init__(self, pending: Pending) -> None:
        super().__init__()
        self._pending = pending
        self.settle()


class FailedEvent(HostEvent):
    """Work that failed before it had an event of its own."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error
        self.settle()


def _again(error: BaseException) -> BaseException:
    """Copy an error, for a wait to raise.

    An exception keeps every frame that it passes. Frames of a forward refer to the autograd graph, which keeps the
    unit, its event and so the error: a cycle that Python's garbage collector does not see.
    """
    if isinstance(error, MemoryError):
        again: BaseException = EngineError(
            "Host memory ran out in an update or a movement of state: its values are not whole. Close the optimizer "
            "with keep_params=False, and go on from a checkpoint with less on the cpu tier."
        )
        again.__cause__ = error.with_traceback(None)
        return again
    try:
        again = copy(error)
    except Exception:  # its constructor does not take its arguments
        return error
    if isinstance(again, OSError) and isinstance(error, OSError) and again.errno != error.errno:
        again.errno = error.errno  # no argument of our own errors
    if type(again) is not type(error) or str(again) != str(error):
        return error
    again.__cause__, again.__suppress_context__ = error.__cause__, error.__suppress_context__
    return again.with_traceback(error.__traceback__)


def after_all(events: Sequence[Event], work: Work) -> Pending | None:
    """Wait for the events on the host, then run the work."""
    for event in events:
        event.synchronize()
    return work()
