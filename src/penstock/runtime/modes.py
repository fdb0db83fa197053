"""Engine mode and user mode: torch's thread-local state has fixed values while code of the engine runs.

    engine mode   gradients, inference mode, autocast, functorch levels, dispatch and function modes (a default device
                  is one) are off, whatever they are for the user
    user mode     inside engine mode: all of these are as the user has set them, for code that runs on the user's behalf

Every call by torch or by the user enters engine mode: public methods, hooks, threads. The state is the thread's own, so
other threads are not affected. The default dtype belongs to the process and cannot be fixed: in engine mode every
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


# Read once: every hook of every parameter passes here, and a look into torch's modules takes as long as the call.
_grad_is_on, _set_grad = torch.is_grad_enabled, torch._C._set_grad_enabled
_inference_is_on, _autocast_is_on = torch.is_inference_mode_enabled, torch._C._is_any_autocast_enabled
_functorch, _dispatch_modes = torch._C._functorch.peek_interpreter_stack, torch._C._len_torch_dispatch_stack
_DisableTorchFunction = torch._C.DisableTorchFunction
_autograd: Any = torch._C._autograd
_saved_hooks = _autograd._top_saved_tensors_default_hooks


class _ThreadModes(threading.local):
    """The innermost engine mode of the calling thread; `None` in user mode."""

    stay: "engine_mode | None" = None


_thread = _ThreadModes()


class engine_mode:  # noqa: N801 - used as torch's own context managers are
    """Engine mode for the time of a `with` block. Blocks may be nested.

    Attributes:
        records: True if autograd records operations in user mode.
    """

    __slots__ = ("_functions", "_grad", "_guards", "_modes", "_outer", "records")

    records: bool

    def __enter__(self) -> "engine_mode":
        self._outer, self._grad = _thread.stay, _grad_is_on()
        self.records = self._grad if self._outer is None else self._outer.records
        self._modes: list[TorchDispatchMode] = []
        self._guards: list[Any] = []
        self._functions = _DisableTorchFunction()
        try:
            _thread.stay = self  # first: `engine_entry` undoes all changes after this on an interrupt
            self._functions.__enter__()
            if _inference_is_on():
                self._guard(torch._C._InferenceMode(False))
            if _autocast_is_on():
                self._guard(torch._C._DisableAutocast())
            if _functorch() is not None:
                self._guard(torch._C._DisableFuncTorch())
            if _dispatch_modes():
                self._take_modes()
            _set_grad(False)  # last: leaving inference mode turns gradients on
            return self
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        """Restore the state in reverse order. After an interrupt a second call restores the rest."""
        while self._modes:
            torch._C._push_on_torch_dispatch_stack(self._modes.pop())
        while self._guards:
            self._guards[-1].__exit__(None, None, None)
            del self._guards[-1]
        _set_grad(self._grad)
        self._functions.__exit__(None, None, None)  # last: a function mode would see the change of the grad mode
        _thread.stay = self._outer

    def _guard(self, guard: Any) -> None:
        """Enter one of torch's guards. It is recorded first, so that `__exit__` leaves it also after an interrupt."""
        self._guards.append(guard)
        guard.__enter__()

    def _take_modes(self) -> None:
        """Pop the dispatch modes from the stack, down to torch's own ones: fake tensors stay fake.

        A mode with the attribute `stays` is left too, with all modes below it: a simulation sees the operations of the
        engine as it sees the user's.
        """
        while count := torch._C._len_torch_dispatch_stack():
            mode = torch._C._get_dispatch_stack_at(count - 1)
            if getattr(mode, "_mode_key", None) is not None or getattr(mode, "stays", False):
                return
            self._modes.append(mode)
            torch._C._pop_torch_dispatch_stack(None)


class user_mode:  # noqa: N801
    """User mode inside engine mode, for the time of a `with` block: for the user's code and recorded operations."""

    def __enter__(self) -> None:
        self._stays: list[engine_mode] = []
        while _thread.stay is not None:
            self._stays.append(_thread.stay)
            _thread.stay.__exit__()

    def __exit__(self, *_: object) -> None:
        while self._stays:
            self._stays.pop().__enter__()


class without_saved_hooks:  # noqa: N801
    """No hooks of saved tensors on the calling thread, for the time of a `with` block, in which collectives are issued.

    A thread of gloo takes over the state of the thread that issued its collective, and takes the interpreter's lock for
    each hook in it, up to some time after the collective is over. Where the program ends meanwhile, the process aborts.
    """

    __slots__ = ("_hooks",)

    def __enter__(self) -> None:
        self._hooks: list[tuple[Any, Any]] = []
        try:
            while (hooks := _saved_hooks(True)) is not None:
                self._hooks.append(hooks)
                _autograd._pop_saved_tensors_default_hooks()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        while self._hooks:
            _autograd._push_saved_tensors_default_hooks(*self._hooks[-1])
            del self._hooks[-1]


def user_records() -> bool:
    """Return True if autograd records operations in user mode."""
    stay = _thread.stay
    return _grad_is_on() if stay is None else stay.records


def engine_entry(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function run in engine mode: a public method, or a function that torch calls."""

    @wraps(function)
    def crossed(*args: P.args, **kwargs: P.kwargs) -> R:
        before = _thread.stay
        try:
            with engine_mode():
                return function(*args, **kwargs)
        except BaseException:
            # An interrupt may come between entering the block and its first line, or before its `__exit__` has begun.
            # The thread would stay in engine mode, and autograd would record nothing in the user's next forward.
            while _thread.stay is not before and _thread.stay is not None:
                _thread.stay.__exit__()
            raise

    return crossed


class EngineBlock(AbstractContextManager[T]):
    """A context manager of the engine whose block runs in user mode.

    Arguments:
        inside: the context manager, which is entered and left in engine mode.
        turn: makes a context for each of these two steps.
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
