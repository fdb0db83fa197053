"""The end of a launcher: what it started ends too, with what a run saves when it is asked to end.

A torchrun that is killed leaves its processes. They would go on, out of anybody's sight, and hold their devices when
the job is started again. Nothing tells them: a process learns of its parent's end by having another one.
"""

import os
import signal
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress

_LOOK_S = 0.2


class LauncherWatch(AbstractContextManager["LauncherWatch"]):
    """Sends this process SIGTERM when the torchrun that started it has ended. A context around a run.

    Without torchrun nobody is watched: what a person starts may outlive the shell that it was started in.

    Arguments:
        environ: what a launcher has set.
        look_s: how often to look, in seconds.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ, *, look_s: float = _LOOK_S) -> None:
        self._is_launched = "TORCHELASTIC_RUN_ID" in environ
        self._rank = environ.get("RANK", "0")
        self._look_s = look_s
        self._parent = os.getppid()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="penstock-launcher", daemon=True)

    def __enter__(self) -> "LauncherWatch":
        if self._is_launched:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._is_launched:
            self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self._look_s):
            if os.getppid() != self._parent:
                line = f"penstock [rank {self._rank}]: its launcher, process {self._parent}, has ended: ends too\n"
                with suppress(OSError):
                    os.write(2, line.encode())
                os.kill(os.getpid(), signal.SIGTERM)
                return
