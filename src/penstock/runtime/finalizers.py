"""Ends threads, files and folders that were not closed: when their owner is collected, at the exit, in a fork.

    at_end      registers a call that is made once: when its owner is collected, or before the interpreter ends, while
                threads can still be joined
    in_child    registers a call in the child of a fork, which has a copy of its parent's objects and none of its
                threads

In a child nothing is called that the parent registered with `at_end`: threads, files and folders are the parent's.
"""

import atexit
import itertools
import logging
import os
import sys
import weakref
from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeVar

_logger = logging.getLogger("penstock")

Owner = TypeVar("Owner")


class Phase(IntEnum):
    """Order of the finalizers at the exit of the interpreter; in one phase the youngest runs first.

    PROMISED: work that has to be finished, such as a checkpoint that is being written.
    THREADS: threads that run Python. One that still does when the interpreter is gone is unwound by force, through
        native code that allows no unwinding: the process would abort.
    REST: objects that those threads used.
    """

    PROMISED = 0
    THREADS = 1
    REST = 2


class Finalizer:
    """A call that is made once, at the end of an object. Call the finalizer to make it now.

    A `weakref.finalize` would not do: once those have run at the exit, which may come first, they do nothing more.

    Arguments:
        owner: the object. Nothing here keeps it alive.
        phase: its phase at the exit.
        end: the function; it must not refer to the owner.
        args: the arguments of the call; they must not refer to the owner.
    """

    def __init__(self, owner: object, phase: Phase, end: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.phase = phase
        self._end, self._args = end, args
        self._process = os.getpid()
        self._number = next(_alive.numbers)

        def collected(_: object, is_late: Callable[[], bool] = sys.is_finalizing) -> None:
            # On any thread. Not while modules are torn down: objects that a thread has made after the exit's phases are
            # left to the system.
            if not is_late():
                self()

        self._owner = weakref.ref(owner, collected)
        _alive.endings[self._number] = self

    def __call__(self) -> None:
        """Make the call now, if it was not made."""
        if self.cancel() and os.getpid() == self._process:  # in the child of a fork it is the parent's to end
            self._end(*self._args)

    def cancel(self) -> bool:
        """Remove the finalizer from the list. Return True if its call was not made."""
        # `dict.pop` is atomic: of two threads that get here at once, one alone ends the object.
        return _alive.endings.pop(self._number, None) is not None


class _Alive:
    """The only state of the module: finalizers that have not run.

    Attributes:
        numbers: numbers the finalizers in the order of their making.
        endings: the finalizers, by number.
        phase: the phase of the exit; `None` before it.
    """

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.endings: dict[int, Finalizer] = {}
        self.phase: Phase | None = None


_alive = _Alive()


def at_end(owner: object, end: Callable[..., object], *args: Any, phase: Phase = Phase.REST) -> Finalizer:
    """Call `end(*args)` when `owner` is collected or the interpreter exits. They must not refer to the owner."""
    return Finalizer(owner, phase, end, args)


def in_child(owner: Owner, do: Callable[[Owner], object]) -> None:
    """Call `do(owner)` in the child of every fork, as long as there is an owner. `do` must not refer to it."""
    reference = weakref.ref(owner)

    def after_fork() -> None:  # an error in one is printed, and keeps the others from nothing
        alive = reference()
        if alive is not None:
            do(alive)

    os.register_at_fork(after_in_child=after_fork)


def exiting(phase: Phase = Phase.THREADS) -> bool:
    """Return True if the exit has reached a phase: from `THREADS` on no thread starts, and queued work is dropped."""
    return _alive.phase is not None and _alive.phase >= phase


def _at_exit() -> None:
    """Run the finalizers that are left, phase by phase."""
    for phase in Phase:
        # First: from here on no work starts that the finalizers of the phase would have to wait for.
        _alive.phase = phase
        # A copy: other threads register and run finalizers meanwhile.
        endings = [ending for ending in list(_alive.endings.values()) if ending.phase is phase]
        for ending in endings[::-1]:
            try:
                ending()
            except KeyboardInterrupt:
                continue  # the user interrupts this wait; the other finalizers still have to run
            except Exception:
                _logger.exception("Something was not given back at the exit.")


atexit.register(_at_exit)
