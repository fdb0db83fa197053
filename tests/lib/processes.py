"""Processes that a test has started, and those below them."""

import os
import signal
from collections.abc import Callable
from pathlib import Path


def lives(process: int) -> bool:
    """Whether a process runs. A zombie does not: it is over, and nobody has asked how."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children(process: int) -> list[int]:
    """What a process has started and not waited for."""
    listed = Path(f"/proc/{process}/task/{process}/children")
    return [int(number) for number in listed.read_text().split()] if listed.exists() else []


def kill_once_it_says_so(work: Callable[[Callable[[], None]], object]) -> None:
    """Run work in a child of this process; kill it when it calls what it is given, and wait for its end."""
    told, tells = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work(lambda: os.write(tells, b"x") and None)
        finally:
            os._exit(1)
    os.close(tells)
    with os.fdopen(told, "rb") as said:
        assert said.read(1), "the child ended before it said so"
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
