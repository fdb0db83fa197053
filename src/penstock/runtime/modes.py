"""The border between people's code and ours. What torch keeps for each thread has one fixed state on our side.

    ours       gradients, inference mode, autocast, functorch levels, dispatch and function modes (a default device is
               one) are off, whatever they are on the user's side
    theirs     inside of `engine_mode`: all of these are as on the user's side, for what is run on behalf of the user

Whatever torch or the user calls crosses the border: public methods, hooks, threads. The state is the thread's own, so
other threads do not notice. The default dtype is the process's, and cannot be changed for one side: on our side every
allocation names its dtype.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class _ThreadModes(threading.local):
    """What is known of the calling thread: its innermost stay on our side; `None` on the user's."""

    stay: "engine_mode | None" = None


_thread = _ThreadModes()


class engine_mode:  # noqa: N801 - used as torch's own context managers are
    """A stay on our side, as long as a `with` block. Stays may lie inside one another.

    Attributes:
        records: whether operations are recorded for backward on the user's side.
    """

    records: bool

    def __enter__(self) -> "engine_mode":
        self._outer, self._grad = _thread.stay, torch.is_grad_enabled()
        self.records = self._grad if self._outer is None else self._outer.records
        self._modes: list[TorchDispatchMode] = []
        self._guards: list[Any] = []
        self._functions = torch._C.DisableTorchFunction()
        try:
            _thread.stay = self  # before anything is changed: an interrupt from here on is undone by `engine_entry`
            self._functions.__enter__()
            if torch.is_inference_mode_enabled():
                self._guard(torch._C._InferenceMode(False))
            if torch._C._is_any_autocast_enabled():
                self._guard(torch._C._DisableAutocast())
            if torch._C._functorch.peek_interpreter_stack() is not None:
                self._guard(torch._C._DisableFuncTorch())
            if torch._C._len_torch_dispatch_stack():
                self._take_modes()
            torch._C._set_grad_enabled(False)  # last: leaving inference mode turns gradients on
            return self
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        """Put everything back as it was, in the reverse order. After an interrupt a second call does the rest."""
        while self._modes:
            torch._C._push_on_torch_dispatch_stack(self._modes.pop())
        while self._guards:
            self._guards[-1].__exit__(None, None, None)
            del self._guards[-1]
        torch._C._set_grad_enabled(self._grad)
        self._functions.__exit__(None, None, None)  # after the grad mode: function modes would see that change
        _thread.stay = self._outer

    def _guard(self, guard: Any) -> None:
        """Enter one of torch's guards, and note it first, so that an interrupt in between leaves it to `__exit__`."""
        self._guards.append(guard)
        guard.__enter__()

    def _take_modes(self) -> None:
        """Take all dispatch modes off the stack but torch's own, which are below the others: fake tensors stay fake.

        A mode that says `stays` is left too, with what is below it: a rehearsal sees our operations as the user's.
        """
        while count := torch._C._len_torch_dispatch_stack():
            mode = torch._C._get_dispatch_stack_at(count - 1)
            if getattr(mode, "_mode_key", None) is not None or getattr(mode, "stays", False):
                return
            self._modes.append(mode)
            torch._C._pop_torch_dispatch_stack(None)


class user_mode:  # noqa: N801
    """The user's side again, inside of `engine_mode`: for the user's own code, and what is recorded for backward."""

    def __enter__(self) -> None:
        self._stays: list[engine_mode] = []
        while _thread.stay is not None:
            self._stays.append(_thread.stay)
            _thread.stay.__exit__()

    def __exit__(self, *_: object) -> None:
        while self._stays:
            self._stays.pop().__enter__()


def user_records() -> bool:
    """Whether operations are recorded for backward on the user's side."""
    stay = _thread.stay
    return torch.is_grad_enabled() if stay is None else stay.records


def engine_entry(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function run on our side: a public method, or one that torch calls."""

    @wraps(function)
    def crossed(*args: P.args, **kwargs: P.kwargs) -> R:
        before = _thread.stay
        try:
            with engine_mode():
                return function(*args, **kwargs)
        except BaseException:
            # An interrupt may come between entering the block and its first line, or before its `__exit__` has begun:
            # then the thread would stay on our side, and the user's next forward would record nothing for backward.
            while _thread.stay is not before and _thread.stay is not None:
                _thread.stay.__exit__()
            raise

    return crossed


class EngineBlock(AbstractContextManager[T]):
    """A context manager of ours whose block is the user's.

    Arguments:
        inside: the context manager, which is entered and left on our side.
        turn: makes what is entered around each of these two steps.
    """

    def __init__(self, inside: AbstractContextManager[T], turn: Callable[[], AbstractContextManager[None]]) -> None:
        self._inside = inside
        self._turn = turn

    @engine_entry
    def __enter__(self) -> T:
        with self._turn():
            return self._inside.__enter__()

    @engine_entry
    def __exit__(self, *raised: Any) -> bool | None:
        with self._turn():
            return self._inside.__exit__(*raised)
