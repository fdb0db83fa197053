"""A run that is asked to end: by a scheduler of preemptible machines, by a launcher, or by Ctrl-C.

1. Until the run has something to keep, a signal ends the command: `Ended` is raised where the main thread is.
2. From `defer` on the first signal is only noted, and the run ends when it has saved.
3. A SIGINT that comes `AGAIN_SECONDS` or more after another ends the process at once, also one that waits in a
   collective: a thread sees to it, because Python's handlers run between two lines of the main thread alone.

Torch is not imported here: signals are taken before it is.
"""

import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self

#: The exit status of a run that was asked to end and can be resumed: `EX_TEMPFAIL` of sysexits(3), "try again".
EXIT_INTERRUPTED = 75
#: What asks a run to end: a person, a scheduler of preemptible machines, a launcher, or a terminal that is closed.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
#: Those that whoever starts the command may have had ignored.
IGNORABLE = (signal.SIGINT, signal.SIGHUP)
#: A launcher that gets Ctrl-C hands it on, so that its processes get it twice, or with a SIGTERM: within this time the
#: same Ctrl-C is meant.
AGAIN_SECONDS = 1.0
_LAST = b"\0"  # no signal has this number
_SHOW_CURSOR = b"\x1b[?25h"


class Ended(BaseException):
    """Asked to end before there was anything to keep. No `Exception`: what other libraries catch does not hold it up.

    Arguments:
        number: the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def status(self) -> int:
        """The exit status of a process that a signal has ended, as shells tell it."""
        return 128 + self.number

    def __str__(self) -> str:
        return (
            f"ended by {signal.Signals(self.number).name} before the first step. Nothing of an earlier run was changed"
        )


class Interruption:
    """Takes the signals that ask to end, as a context; what took them before takes them again afterwards.

    In a thread that is not the main one it takes none. A SIGINT that is ignored, as of a command that a script has put
    into the background, stays ignored, and so does a SIGHUP (nohup).

    Arguments:
        speaks: whether this process says that it was asked to end; of several, the first rank does.

    Attributes:
        asked: whether this process was asked to end. Other ranks may not be: see `Ranks.any`.
    """

    def __init__(self, *, speaks: bool = True) -> None:
        self.asked = False
        self._speaks = speaks
        self._deferred = False
        self._said = False
        self._first_seconds: float | None = None
        self._number = 0
        self._process = os.getpid()
        self._before: dict[int, Any] = {}
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        taken = [number for number in SIGNALS if number not in IGNORABLE or not _is_ignored(number)]
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)  # a handler of signals may not wait
        self._wakeup_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._watch = threading.Thread(target=self._watch_signals, name="penstock-signals", daemon=True)
        self._watch.start()
        self._before = {number: signal.signal(number, self._take) for number in taken}
        return self

    def __exit__(self, *error: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._wakeup_before)
        # Not by closing it: a process that was forked may have it open, and the thread would wait for that one.
        os.write(self._writing, _LAST)
        self._watch.join()
        os.close(self._writing)
        os.close(self._reading)

    def defer(self) -> None:
        """Note signals from now on, in place of ending the command by them.

        Raises:
            Ended: one came before, and somebody has caught what it raised.
        """
        if self.asked:
            raise Ended(self._number)
        self._deferred = True

    def _take(self, number: int, frame: FrameType | None) -> None:
        """Take a signal, in the main thread."""
        del frame
        if os.getpid() != self._process:  # a fork has this handler too, and is to end as if it had not
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if number == signal.SIGHUP:  # here too: the next print may come before the turn of the thread that watches
            self._leave_terminal()
        is_first, self.asked = not self.asked, True
        if is_first and not self._deferred:
            self._number = number
            raise Ended(number)

    def _watch_signals(self) -> None:
        """Answer signals at once, whatever the main thread waits for."""
        while _LAST not in (numbers := os.read(self._reading, 64)):
            for number in numbers:
                if number == signal.SIGINT and self._is_again():
                    self._end_at_once()
                if number == signal.SIGHUP:
                    self._leave_terminal()
                if number in SIGNALS and self._deferred and not self._said:
                    self._said = True
                    self._say(signal.Signals(number).name)

    def _is_again(self) -> bool:
        """Tell whether there was a SIGINT before this one, other than this one's own echo."""
        now = time.monotonic()
        if self._first_seconds is None:
            self._first_seconds = now
        return now - self._first_seconds >= AGAIN_SECONDS

    def _say(self, name: str) -> None:
        """Tell that the run will end. Past Python's files, which the main thread may be writing to."""
        if self._speaks:
            line = f"penstock: {name}: ends when what is being made is saved. Another Ctrl-C ends at once, unsaved.\n"
            with suppress(OSError):
                os.write(2, line.encode())

    def _leave_terminal(self) -> None:
        """Let what is printed go nowhere once the terminal is gone: its error would end the run before it has saved."""
        for descriptor in self._terminals:
            if not os.isatty(descriptor):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)

    def _end_at_once(self) -> None:
        """End the process without a word to anybody: threads, files and other ranks may be what it waits for.

        No half of a checkpoint counts, because its marker is written last; swap files have no names.
        """
        with suppress(OSError):
            if os.isatty(1):
                os.write(1, _SHOW_CURSOR)
            if self._speaks:
                os.write(2, b"penstock: interrupted twice: ended at once\n")
        os._exit(128 + signal.SIGINT)


def _is_ignored(number: int) -> bool:
    return signal.getsignal(number) == signal.SIG_IGN


def command_to_go_on(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> str:
    """Write the command that goes on from the newest checkpoint, as one would type it.

    Arguments:
        arguments: `sys.argv` of the command that ends.
        environ: what its launcher has set.

    Example:
        >>> command_to_go_on(["/usr/bin/penstock", "train", "--resume", "old", "--out", "my runs"], {})
        "penstock train --out 'my runs' --resume auto"
    """
    kept: list[str] = []
    rest = iter(arguments[1:])
    for argument in rest:
        if argument == "--resume":
            next(rest, None)
        elif not argument.startswith("--resume="):
            kept.append(argument)
    return command_of([arguments[0], *kept, "--resume", "auto"], environ)


def command_of(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> str:
    """Write a command with its launcher, as one would type it."""
    name = Path(arguments[0]).name
    command = ["python", "-m", "penstock"] if name == "__main__.py" else [name]
    world_size, of_host = environ.get("WORLD_SIZE", "1"), environ.get("LOCAL_WORLD_SIZE")
    if world_size != "1":
        # Of several hosts each has a command of its own, which is known there alone.
        count = ["--nproc-per-node", of_host] if of_host == world_size else ["..."]
        command = ["torchrun", *count, "-m", "penstock"]
    return shlex.join([*command, *arguments[1:]])


def asked_to_end(*, step: int) -> str:
    """Say how a run goes on that was asked to end after a step."""
    if step == 0:
        return f"asked to end before the first step; start again with: {command_of(sys.argv)}"
    return f"asked to end: saved step {step}; go on with: {command_to_go_on(sys.argv)}"
