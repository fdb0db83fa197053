"""Signals that ask a run to end: what it has made is saved, and the same command goes on from there.

1. Before training, a signal ends the command: `Ended` is raised in the main thread.
2. From `defer` on, the first signal is noted, and the run ends after its step, with a checkpoint.
3. A signal that comes `AGAIN_SECONDS` or more after the first ends the process at once, also where the main thread
   waits in a collective: a thread of its own sees to it.

Nothing that takes long to import is imported here: signals are taken before it is.
"""

import ctypes
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, Self

#: The exit status of a run that was asked to end and can be resumed: `EX_TEMPFAIL` of sysexits(3).
EXIT_INTERRUPTED = 75
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
#: A launcher passes a Ctrl-C on, so that its processes get it twice: within this time the same one is meant.
AGAIN_SECONDS = 1.0
_LAST = b"\0"  # no signal has this number
_PR_SET_PDEATHSIG = 1


class Ended(BaseException):
    """Asked to end before training. No `Exception`, which other libraries would catch.

    Arguments:
        number: the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = 128 + number
        self._name = signal.Signals(number).name

    def __str__(self) -> str:
        return f"ended by {self._name} before the first step. Nothing of an earlier run was changed"


class Interruption:
    """Takes the signals that ask a run to end, in a `with` block. In a thread that is not the main one it takes none.

    A signal that is ignored, such as the SIGINT of a command in the background, or the SIGHUP of nohup, stays ignored.

    Attributes:
        number: the first signal that came; 0 where none did.
    """

    def __init__(self) -> None:
        self.number = 0
        self._speaks = os.environ.get("RANK", "0") == "0"
        self._is_deferred = False
        self._began = 0.0
        self._before: dict[int, Any] = {}
        self._is_main = threading.current_thread() is threading.main_thread()
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def __enter__(self) -> Self:
        if not self._is_main:
            return self
        taken = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        self._process = os.getpid()
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)  # a handler of signals may not wait
        self._wakeup_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="penstock-signals", daemon=True)
        self._thread.start()
        self._before = {number: signal.signal(number, self._take) for number in taken}
        return self

    def __exit__(self, *error: object) -> None:
        if not self._is_main:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.write(self._writing, _LAST)  # not closed yet: a forked process may have it open
        self._thread.join()
        os.close(self._writing)
        os.close(self._reading)

    def defer(self) -> None:
        """Note signals from now on, in place of ending the command by them.

        Raises:
            Ended: one came before, and another library has caught it.
        """
        if self.number:
            raise Ended(self.number)
        self._is_deferred = True

    def _take(self, number: int, frame: FrameType | None) -> None:
        """Take a signal, in the main thread."""
        del frame
        if os.getpid() != self._process:  # a fork ends as if it had no handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if number == signal.SIGHUP:
            self._leave_terminal()
        is_first = not self.number
        self.number = self.number or number
        if is_first and not self._is_deferred:
            raise Ended(number)

    def _watch(self) -> None:
        """Answer signals at once, whatever the main thread waits for. Runs on a thread of its own."""
        while _LAST not in (numbers := os.read(self._reading, 64)):
            for number in numbers:
                if number not in SIGNALS:
                    continue
                if number == signal.SIGHUP:  # here too: the main thread may be printing
                    self._leave_terminal()
                if self._began and time.monotonic() - self._began >= AGAIN_SECONDS:
                    self._say(f"{signal.Signals(number).name} again: ended at once")
                    os._exit(128 + number)
                if not self._began and self._is_deferred:
                    name = signal.Signals(number).name
                    self._say(f"{name}: ends after this step, with a checkpoint. Another one ends at once, unsaved")
                self._began = self._began or time.monotonic()

    def _leave_terminal(self) -> None:
        """Let what is printed go nowhere once the terminal is closed: an error would end the run before it is saved."""
        for descriptor in self._terminals:
            if not os.isatty(descriptor):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)

    def _say(self, text: str) -> None:
        """Print a line, past Python's files, which the main thread may be writing to."""
        if self._speaks:
            with suppress(OSError):
                os.write(2, f"penstock: {text}.\n".encode())


def end_with_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """Have the system send SIGTERM to this process when the torchrun that started it ends, as by a SIGKILL."""
    if "TORCHELASTIC_RUN_ID" in environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def command_to_go_on(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> str:
    """Write the command that goes on from the newest checkpoint, as it would be typed.

    Arguments:
        argv: the words behind `penstock train` of the command that ends.
        environ: what its launcher has set.

    Example:
        >>> command_to_go_on(["--out", "my runs", "--resume_from_checkpoint", "false"], {})
        "penstock train --out 'my runs'"
    """
    kept: list[str] = []
    rest = iter(argv)
    for word in rest:
        name, equals, _ = word.replace("-", "_").partition("=")
        if name != "__resume_from_checkpoint":
            kept.append(word)
        elif not equals:
            next(rest, None)
    world_size, of_host = environ.get("WORLD_SIZE", "1"), environ.get("LOCAL_WORLD_SIZE")
    command = ["penstock", "train"]
    if world_size != "1":  # of several hosts each has a command of its own
        count = ["--nproc-per-node", str(of_host)] if of_host == world_size else ["..."]
        command = ["torchrun", *count, "-m", *command]
    return shlex.join([*command, *kept])
