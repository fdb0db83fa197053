"""The strict process, seen from the one that pytest was started in."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from tests.device.building import REPOSITORY

START_SECONDS = 300.0  # imports and collection, on a busy machine
DUMP_SECONDS = 5.0  # to write the stacks of all threads
END_SECONDS = 30.0  # the last fixtures, and what libraries do at exit
SHOWN_LINES = 150


class ProcessError(Exception):
    """The process is no more: how it ended, and what it wrote last."""


class StrictProcess:
    """One process: started, asked for one item after the other, and ended."""

    def __init__(self, library: Path | None, backend: str, folder: Path, arguments: list[str]) -> None:
        self.output = tempfile.TemporaryFile()  # noqa: SIM115  # as long as this object is there
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._marks = (0, 0)
        self.connection, theirs = multiprocessing.Pipe()
        # Not in the terminal's process group: an interrupt is this process's to handle, and a kill is of all that the
        # tests there have started.
        self.popen = subprocess.Popen(
            [sys.executable, "-u", "-m", "tests.device.worker", str(theirs.fileno())],
            cwd=REPOSITORY,
            env={name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"},
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=self.errors,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        with contextlib.suppress(BrokenPipeError):
            self.connection.send((library, backend, folder, arguments))
        deadline = time.monotonic() + START_SECONDS
        while self._answer(START_SECONDS, deadline)[0] != "ready":
            pass  # a warning of the collection, which the other collection has given as well

    def run(self, nodeid: str, following: str | None, seconds: float | None) -> Iterator[tuple[str, Any]]:
        """What comes about while an item runs, to the end of it.

        Raises:
            ProcessError: the process ended, or did not get to the end in this time and was ended.
        """
        self._marks = (_size(self.output), _size(self.errors))
        with contextlib.suppress(BrokenPipeError):
            self.connection.send((nodeid, following))
        deadline = None if seconds is None else time.monotonic() + seconds
        while (answer := self._answer(seconds, deadline))[0] != "done":
            yield answer
            if answer[0] == "unknown":
                return

    def printed(self) -> str:
        """What the item that runs has written to its standard output."""
        return _text(self.output, self._marks[0])

    def close(self) -> None:
        """No more requests: the process tears down what is still set up, and exits.

        Raises:
            ProcessError: it ended in another way.
        """
        self._marks = (_size(self.output), _size(self.errors))
        self.connection.close()
        try:
            self.popen.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._stop_late(END_SECONDS)
        if self.popen.returncode:
            raise self._ended()
        self.kill()

    def kill(self) -> None:
        """The process, and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def _answer(self, seconds: float | None, deadline: float | None) -> tuple[str, Any]:
        # The end of the process is asked for as well: its children may hold the other end of the pipe open.
        while not self.connection.poll(0.2 if deadline is None else min(0.2, max(0.0, deadline - time.monotonic()))):
            if self.popen.poll() is not None and not self.connection.poll():
                raise self._ended()
            if deadline is not None and time.monotonic() >= deadline:
                self._stop_late(seconds)
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(DUMP_SECONDS)
            raise self._ended() from None

    def _stop_late(self, seconds: float | None) -> None:
        self.popen.send_signal(signal.SIGABRT)  # on which faulthandler writes where every thread is
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(DUMP_SECONDS)
        self.kill()
        raise ProcessError(f"the strict process was stopped after {seconds:g} s\n{self._tail()}")

    def _ended(self) -> ProcessError:
        self.kill()
        code = self.popen.returncode
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return ProcessError(f"the strict process {how}\n{self._tail()}")

    def _tail(self) -> str:
        return "\n".join(_text(self.errors, self._marks[1]).splitlines()[-SHOWN_LINES:])


def _size(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size


def _text(file: IO[bytes], start: int) -> str:
    # Not by seeking: the process writes at the offset that both share.
    return os.pread(file.fileno(), _size(file) - start, start).decode(errors="replace")
