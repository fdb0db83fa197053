"""The owner thread of a model: one forward, backward or method of the optimizer runs at a time.

A forward gathers units and releases them, and two at once would release each other's. While one thread runs a model, a
call from another thread is an error. Autograd's threads, which run backward on a device, act for the owner thread. A
forward that an interrupt ended, or a backward that failed, does not block the model.
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
    """Return True if the calling thread runs inside autograd's backward, as a checkpointed forward does."""
    return torch._C._current_graph_task_id() != -1


class OwnerThread:
    """The thread that runs a model, and the forward, backward or method that it runs.

    Arguments:
        lost: called when a forward or backward has ended without `leave`.
    """

    def __init__(self, lost: Callable[[], None]) -> None:
        self._lost = lost
        self._lock = threading.RLock()
        self._what = ""  # "forward", "backward", the name of a method, or "" for nothing
        self._owner = threading.current_thread()
        self._frame: FrameType | None = None  # it runs as long as that; `None` if it is not known

    def goes_on_here(self) -> bool:
        """Return True if the calling thread is the owner, and the pass under way has not ended."""
        return self._owner.ident == threading.get_ident() and not self.is_over()

    def enter(self, what: str) -> bool:
        """Enter a forward, a backward or a method, inside of the one that this thread runs, or as a new one.

        Returns:
            True if it is a new one, which `leave` ends.

        Raises:
            EngineError: another thread runs the model.
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
            if not is_autograds:  # autograd's thread acts for the owner, which waits for it
                self._owner = threading.current_thread()
            self._what, self._frame = what, _runs_as_long(_RUNS.get(what))
        return True

    def leave(self, what: str) -> None:
        """End a forward, backward or method, if it is the one under way."""
        if self._what == what:
            self._what, self._frame = "", None

    def end_lost(self) -> bool:
        """Drop a forward or backward that has ended without `leave`; return True if there was one."""
        if not self._what or not self.is_over():
            return False
        self.leave(self._what)
        self._lost()
        return True

    @contextmanager
    def turn(self, method: str) -> Iterator[None]:
        """Make a block for a method of the optimizer."""
        is_new = self.enter(f"{method}()")
        try:
            yield
        except BaseException as error:
            if is_new and not isinstance(error, Exception):
                self._lost()  # an interrupt may have ended a forward or backward inside
            raise
        finally:
            if is_new:
                self.leave(f"{method}()")

    def is_over(self) -> bool:
        """Return True if nothing is under way, or if it has ended without `leave`."""
        frame = self._frame  # read once: another thread may change it
        if not self._what or not self._owner.is_alive():
            return True
        if frame is None:  # a method calls `leave`. The thread that waits for a backward cannot call this meanwhile
            return self._what == "backward" and self._owner.ident == threading.get_ident() and not in_backward()
        try:
            frame.clear()  # raises an error while the frame runs, in any thread
        except RuntimeError:
            return False
        return True


def _is_autograds() -> bool:
    """Return True if the calling thread is one of autograd's, which Python did not start."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def _runs_as_long(module: str | None) -> FrameType | None:
    """Find the outermost frame of a torch module around the caller: it ends with the pass, also by an error."""
    frame: FrameType | None = sys._getframe(1)
    found = None
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            found = frame
        frame = frame.f_back
    return found
