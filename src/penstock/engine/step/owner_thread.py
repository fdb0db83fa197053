"""What is under way, and in whose thread: one forward, backward or method call of an optimizer at a time.

A forward gathers what it needs and releases it again, so two at once would take it from each other: while one thread is
inside, a call from another one is an error. Threads of autograd's, which run backward on a device, act for the thread
that is inside. What ended without a word, by an interrupt or a backward that failed, holds nobody up.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from penstock.errors import EngineError

_RUNS = {"forward": "torch.nn.modules.module", "backward": "torch.autograd.graph"}  # modules of torch


def in_backward() -> bool:
    """Whether the calling thread runs inside autograd's backward: a checkpointed forward does."""
    return torch._C._current_graph_task_id() != -1


class UnderWay:
    """The thread that is inside, and what it is inside of.

    Arguments:
        lost: is called when what was under way has ended without a word.
    """

    def __init__(self, lost: Callable[[], None]) -> None:
        self._lost = lost
        self._lock = threading.RLock()
        self._what = ""  # forward, backward, or a method; nothing
        self._owner = threading.current_thread()
        self._frame: FrameType | None = None  # that runs as long as it; of a backward on a device's thread, not known

    def goes_on_here(self) -> bool:
        """Whether the calling thread is inside of what is under way."""
        return self._owner.ident == threading.get_ident() and not self.is_over()

    def enter(self, what: str) -> bool:
        """Enter a forward, a backward or a method: inside of what is under way in this thread, or as a new one.

        Returns:
            Whether it is a new one, which `leave` ends.

        Raises:
            EngineError: another thread is inside.
        """
        is_autograds = in_backward() and _is_autograds()
        with self._lock:
            if not self.is_over():
                if is_autograds or self._owner.ident == threading.get_ident():
                    return False
                raise EngineError(
                    f"Thread '{threading.current_thread().name}' called {what} while thread '{self._owner.name}' is "
                    f"inside {self._what} of the same model. One thread runs a model at a time: hold a lock around "
                    "forward, backward and step in both threads, or prepare a model for each."
                )
            self.end_lost()
            if not is_autograds:  # else the thread that ran the last forward waits for this one
                self._owner = threading.current_thread()
            self._what, self._frame = what, _runs_as_long(_RUNS.get(what))
        return True

    def leave(self, what: str) -> None:
        """End what is under way, if it is this."""
        if self._what == what:
            self._what, self._frame = "", None

    def end_lost(self) -> bool:
        """Let go of what has ended without a word; return True if there was anything."""
        if not self._what or not self.is_over():
            return False
        self.leave(self._what)
        self._lost()
        return True

    @contextmanager
    def turn(self, method: str) -> Iterator[None]:
        """Run a method of the optimizer inside."""
        is_new = self.enter(f"{method}()")
        try:
            yield
        except BaseException as error:
            if is_new and not isinstance(error, Exception):
                self._lost()  # an interrupt: the forward or backward inside that it ended has let go of nothing
            raise
        finally:
            if is_new:
                self.leave(f"{method}()")

    def is_over(self) -> bool:
        """Whether what is under way, or was, does not run any more."""
        frame = self._frame  # which another thread may take away
        if not self._what or not self._owner.is_alive():
            return True
        if frame is None:  # a method, which tells its end; or a backward: who waits for it calls nothing meanwhile
            return self._what == "backward" and self._owner.ident == threading.get_ident() and not in_backward()
        try:
            frame.clear()  # refused while it runs, in whatever thread
        except RuntimeError:
            return False
        return True


def _is_autograds() -> bool:
    """Whether the calling thread is one that Python did not start."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def _runs_as_long(module: str | None) -> FrameType | None:
    """Find the outermost frame of a module that waits for the caller: it ends with what it runs, also by an error."""
    frame: FrameType | None = sys._getframe(1)
    found = None
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            found = frame
        frame = frame.f_back
    return found
