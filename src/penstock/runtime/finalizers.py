"""How threads, files and folders end that nobody closed: when they are dropped, at the interpreter's exit, in a fork.

    at_end      registers what is called once: when its owner is collected, or before the interpreter ends, while
                threads can still be joined
    in_child    registers what is called in the child of a fork, which has a copy of its parent's objects and none of
                its threads

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
    """The order in which things end at the exit of the interpreter; in one phase the youngest ends first.

    PROMISED: work that somebody counts on, such as a checkpoint that is being written. It is finished.
    THREADS: threads that run Python. One that still does when the interpreter is gone is unwound by force, through
        native code that allows no unwinding: the process would abort.
    REST: what those threads used.
    """

    PROMISED = 0
    THREADS = 1
    REST = 2


class Finalizer:
    """What is to be done once, at the end of an object. Call it to have it done now.

    It is no `weakref.finalize`: once the turn of those at the exit is over, which may come first, they do nothing more.

    Arguments:
        owner: the object. Nothing here keeps it alive.
        phase: when its turn is at the exit.
        end: what to call; it must not refer to the owner.
        args: the arguments of the call; neither must they.
    """

    def __init__(self, owner: object, phase: Phase, end: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.phase = phase
        self._end, self._args = end, args
        self._process = os.getpid()
        self._number = next(_alive.numbers)

        def collected(_: object, is_late: Callable[[], bool] = sys.is_finalizing) -> None:
            # On whichever thread. Not while modules are taken apart, when nothing here is what it was: what a thread
            # has made after the exit's turn is left to the system then.
            if not is_late():
                self()

        self._owner = weakref.ref(owner, collected)
        _alive.endings[self._number] = self

    def __call__(self) -> None:
        """Do it now, if it was not done."""
        if self.cancel() and os.getpid() == self._process:  # in the child of a fork it is the parent's to end
            self._end(*self._args)

    def cancel(self) -> bool:
        """Take it off the list. Return whether it was still to be done."""
        # One step that threads cannot come between: of two that get here at once, one alone ends the object.
        return _alive.endings.pop(self._number, None) is not None


class _Alive:
    """What has not ended yet. The one state of the module: a process has one exit, and forks with all it has.

    Attributes:
        numbers: gives each thing a number, in the order of their making.
        endings: what is to be done at the end, by number.
        in_children: what is to be done in the child of a fork, and for whom, by number.
        phase: the phase that the exit has come to; `None` before it.
    """

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.endings: dict[int, Finalizer] = {}
        self.in_children: dict[int, tuple[weakref.ref[Any], Callable[[Any], object]]] = {}
        self.phase: Phase | None = None


_alive = _Alive()


def at_end(owner: object, end: Callable[..., object], *args: Any, phase: Phase = Phase.REST) -> Finalizer:
    """Call `end(*args)` when `owner` is collected or the interpreter exits. They must not refer to the owner."""
    return Finalizer(owner, phase, end, args)


def in_child(owner: Owner, do: Callable[[Owner], object]) -> None:
    """Call `do(owner)` in the child of every fork, as long as there is an owner. `do` must not refer to it."""
    number = next(_alive.numbers)
    children = _alive.in_children  # it is there as long as this callback, which modules taken apart may not be
    children[number] = weakref.ref(owner, lambda _: children.pop(number, None)), do


def exiting(phase: Phase = Phase.THREADS) -> bool:
    """Whether the interpreter exits, and a phase has come: from `THREADS` on no thread begins, nothing queued runs."""
    return _alive.phase is not None and _alive.phase >= phase


def _at_exit() -> None:
    """End everything that is left, phase by phase."""
    for phase in Phase:
        # Before anything of the phase ends: from here on nothing that it would have to wait for begins.
        _alive.phase = phase
        # A list of its own: other threads register and end things meanwhile.
        endings = [ending for ending in list(_alive.endings.values()) if ending.phase is phase]
        for ending in endings[::-1]:
            try:
                ending()
            except KeyboardInterrupt:
                continue  # whoever waits for this end wants it now; the others are still to be ended
            except Exception:
                _logger.exception("Something was not given back at the exit.")


def _after_fork_in_child() -> None:
    """Call what was registered for the child of a fork; an error in one must not keep the others from it."""
    for reference, do in list(_alive.in_children.values()):
        owner = reference()
        if owner is not None:
            try:
                do(owner)
            except Exception:
                _logger.exception("Something of the parent's was not taken from its child.")


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)
