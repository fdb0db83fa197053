"""What is under way, and in whose thread: one forward, backward or method call of an optimizer at a time.

A forward gathers what it needs and releases it again, so two at once would take it from each other. A thread waits
until the other one is done, whatever that does. What ended without a word, by an interrupt or a backward that failed,
is found by its frame, which does not run any more.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from torch import nn

from penstock.errors import EngineError

PATIENCE_SECONDS = 600.0
_POLL_SECONDS = 0.02  # what ends without a word wakes nobody up
_BETWEEN = ("penstock.", "torch._dynamo", "contextlib")  # modules whose frames are between hooks and who called them


def in_backward() -> bool:
    """Whether the calling thread runs inside autograd's backward: a checkpointed forward does."""
    return torch._C._current_graph_task_id() != -1


class UnderWay:
    """Whose turn it is.

    Arguments:
        lost: is called when what was under way has ended without a word.
    """

    def __init__(self, lost: Callable[[], None]) -> None:
        self._lost = lost
        self._changed = threading.Condition(threading.RLock())
        self._what = ""  # forward, backward, or a method; nothing
        self._thread = 0
        self._frame: FrameType | None = None  # that runs as long as it; none for a backward on a device's thread
        self._module: nn.Module | None = None  # of the forward

    def goes_on_here(self) -> bool:
        """Whether the calling thread is inside of what is under way."""
        return self._thread == threading.get_ident() and not self.is_over()

    def enter_forward(self, module: nn.Module) -> bool:
        """Enter a module's forward, outside of backward: in what is under way in this thread, or as a new one.

        Returns:
            Whether it is a new forward.

        Raises:
            EngineError: the module is a part of the one whose forward another thread runs; or that goes on for ever.
        """
        if self.goes_on_here():
            return False
        outer = self._module
        if outer is not None and outer is not module and not self.is_over() and module in set(outer.modules()):
            raise EngineError(
                f"A {type(module).__name__} was called in {_name(threading.get_ident())} while {_name(self._thread)} "
                f"runs the forward of a {type(outer).__name__} that it is a part of. Units are gathered for one thread "
                "at a time: call it there, or call the whole model, which waits for its turn."
            )
        self._take("forward", module)
        return True

    def leave_forward(self) -> None:
        """End the outermost forward, and let other threads go on."""
        if self._what == "forward" and self._thread == threading.get_ident():
            self._leave()

    def enter_backward(self) -> None:
        """Begin a backward, which has come to its first unit: wait until what other threads do is over."""
        if self.goes_on_here():
            return  # inside of a forward, or of a method
        if self._what and _caller() is None and _runs_a_backward(self._thread):
            return  # the same, on a device's thread
        self._take("backward", None)

    def join_backward(self) -> None:
        """Wait for the backward of another thread, before one in this thread goes on to another unit."""
        if self._what == "backward" and self._frame is not None and self._thread != threading.get_ident():
            with self._changed:
                self._wait("backward")

    def leave_backward(self) -> None:
        """End the backward that is over, or has failed, and let other threads go on."""
        if self._what == "backward":
            self._leave()

    @contextmanager
    def turn(self, method: str) -> Iterator[None]:
        """Run a method of the optimizer inside: within what is under way in this thread, or as a turn of its own."""
        if self._is_inside() and not self.is_over():
            yield
            return
        self._take(method, None)
        try:
            yield
        except Exception:
            raise
        except BaseException:  # an interrupt: the forward or backward inside that it ended has let go of nothing
            self._lost()
            raise
        finally:
            self._leave()

    def _is_inside(self) -> bool:
        if self._what == "backward" and self._frame is None:
            return in_backward()
        return self._thread == threading.get_ident()

    def _take(self, what: str, module: nn.Module | None) -> None:
        # Wait and take in one: between the two another thread would take its turn as well.
        with self._changed:
            self._wait(what)
            self._what, self._thread, self._module = what, threading.get_ident(), module
            self._frame = _caller()

    def _leave(self) -> None:
        with self._changed:
            self._what, self._thread, self._frame, self._module = "", 0, None, None
            self._changed.notify_all()  # threads that wait look now, and not only when they poll

    def _wait(self, what: str) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while self._what:
            if self.is_over():
                self._leave()
                self._lost()
            elif time.monotonic() > until:
                raise EngineError(
                    f"{what} in {_name(threading.get_ident())} waited {PATIENCE_SECONDS:.0f} seconds for the "
                    f"{self._what} of the same model in {_name(self._thread)}."
                )
            else:
                self._changed.wait(_POLL_SECONDS)

    def is_over(self) -> bool:
        """Whether what is under way, or was, does not run any more."""
        frame = self._frame  # which another thread may take away
        if frame is None:
            return self._what != "backward" or not _runs_a_backward()
        try:
            frame.clear()  # refused while it runs, in whatever thread
        except RuntimeError:
            return False
        return True


def _caller() -> FrameType | None:
    """Find the frame that called us; of a module the one that ends after its last hook, also where forward raises."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        frame.f_globals.get("__name__", "").startswith(_BETWEEN)
        or (frame.f_code.co_name == "inner" and frame.f_globals is vars(nn.modules.module))
    ):
        frame = frame.f_back
    return frame


def _runs_a_backward(thread: int | None = None) -> bool:
    """Whether a thread, or any, waits for a backward: hooks on a device's thread do not know which."""
    code = torch.autograd.graph._engine_run_backward.__code__
    for ident, top in sys._current_frames().items():
        frame: FrameType | None = top if thread in (None, ident) else None
        while frame is not None:
            if frame.f_code is code:
                return True
            frame = frame.f_back
    return False


def _name(ident: int) -> str:
    return next((f"thread '{t.name}'" for t in threading.enumerate() if t.ident == ident), "a thread that has ended")
