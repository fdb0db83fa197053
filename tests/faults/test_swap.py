"""Swap folders of processes that end in every way."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.runtime.swap import SwapFolder

SETUP = """
import logging, os, signal, sys, threading, time
from penstock.runtime.swap import SwapFolder

def make():
    folder = SwapFolder(sys.argv[1], 0)
    (folder.path / "tiles").write_bytes(b"x" * 65536)
    (folder.path / "inner").mkdir()
    (folder.path / "inner" / "tiles").touch()
    return folder

def say(word):
    print(word, flush=True)
"""
WAIT = "\nsay('ready'); time.sleep(60)"


@contextmanager
def running(code: str, parent: Path, before: str = "") -> Iterator["subprocess.Popen[str]"]:
    """A process that made its folders, up to the `ready` it says."""
    process = subprocess.Popen(
        [sys.executable, "-c", before + SETUP + code, str(parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(code: str, parent: Path, sent: signal.Signals | None = None, before: str = "") -> tuple[int, str, str]:
    """How a process ended: its exit status, and what it said."""
    with running(code, parent, before) as process:
        if sent is not None:
            process.send_signal(sent)
        said, complained = process.communicate(timeout=60)
        return process.returncode, said, complained


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("raise ValueError('unhandled')", 1),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", -signal.SIGINT),
        ("threading.Thread(target=make).start()", 0),
    ],
)
def test_an_exit_removes_the_folders(tmp_path: Path, end: str, status: int) -> None:
    code = f"a = make(); b = make(); assert a.path.exists() and b.path.exists(); say('ready'); {end}"
    assert ended(code, tmp_path)[0] == status
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "code",
    [
        "a = make(); b = make()" + WAIT,
        "a = make(); b = make(); a.close()" + WAIT,
        "a = make(); a.close(); b = make()" + WAIT,
        # the main thread holds one, others theirs, and it waits for them
        """
a = make()
others = []
threads = [threading.Thread(target=lambda: (others.append(make()), time.sleep(60))) for _ in range(4)]
[thread.start() for thread in threads]
while len(others) < 4: time.sleep(0.01)
say('ready')
[thread.join() for thread in threads]
""",
    ],
)
def test_sigterm_removes_the_folders_and_ends_as_ever(tmp_path: Path, code: str) -> None:
    status, _, complained = ended(code, tmp_path, signal.SIGTERM)
    assert status == -signal.SIGTERM
    assert complained == ""
    assert names(tmp_path) == []


def test_sigterm_in_the_middle_of_close(tmp_path: Path) -> None:
    code = """
import penstock.runtime.swap as swap
remove = swap._remove
def slow(path):
    swap._remove = remove
    say('ready')
    time.sleep(60)
swap._remove = slow
make().close()
"""
    assert ended(code, tmp_path, signal.SIGTERM)[0] == -signal.SIGTERM
    assert names(tmp_path) == []


def test_after_the_last_close_sigterm_is_as_it_was(tmp_path: Path) -> None:
    code = "make().close(); assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL" + WAIT
    assert ended(code, tmp_path, signal.SIGTERM)[0] == -signal.SIGTERM


def test_the_handler_of_the_program_runs_alone(tmp_path: Path) -> None:
    code = """
def own(*_):
    say(f'own {len(os.listdir(sys.argv[1]))}')
    sys.exit(5)
signal.signal(signal.SIGTERM, own)
a = make()
"""
    status, said, _ = ended(code + WAIT, tmp_path, signal.SIGTERM)
    assert (status, said) == (5, "own 1\n")
    assert names(tmp_path) == []


def test_a_program_that_ignores_sigterm_goes_on(tmp_path: Path) -> None:
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN); a = make()"
    code += "; say('ready'); sys.stdin.read(); say(a.path.exists())"
    with running(code, tmp_path) as process:
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=60)[0] == "True\n"
        assert process.returncode == 0
    assert names(tmp_path) == []


def test_the_next_run_removes_what_sigkill_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running("a = make()" + WAIT, tmp_path) as process:
        live = names(tmp_path)
        SwapFolder(tmp_path, 0).close()
        assert names(tmp_path) == live  # a live run's
        assert names(tmp_path / live[0]) == ["identity.json", "inner", "lock", "tiles"]
        assert caplog.messages == []
        process.kill()
        process.wait()
        assert names(tmp_path) == live
    SwapFolder(tmp_path, 0).close()
    assert names(tmp_path) == []
    (line,) = caplog.messages
    assert f"left by the run with pid {process.pid} on {os.uname().nodename}" in line
    assert int(re.search(r"([\d,]+) bytes freed", line)[1].replace(",", "")) >= 65536


@pytest.mark.parametrize("after", ["data", "name"])
def test_the_next_run_goes_on_where_a_removal_was_killed(tmp_path: Path, after: str) -> None:
    """Killed after a file, or after the folder lost its name: then what is left is small and unfinished."""
    killer = "os.kill(os.getpid(), signal.SIGKILL)"
    code = {
        "data": f"from pathlib import Path; Path.unlink = lambda *_, **__: {killer}",
        "name": f"from penstock.runtime import swap; swap._remove_own = lambda _: {killer}",
    }[after]
    assert ended(f"a = make()\n{code}\nsay('ready'); a.close()", tmp_path)[0] == -signal.SIGKILL
    (left,) = names(tmp_path)
    assert left.startswith({"data": "penstock-", "name": ".penstock-"}[after])
    if after == "name":
        assert names(tmp_path / left) == ["identity.json", "lock"]
        os.utime(tmp_path / left, (0, 0))
    SwapFolder(tmp_path, 0).close()
    assert names(tmp_path) == []


def test_processes_that_start_at_once_and_find_the_same_leftovers(tmp_path: Path) -> None:
    for _ in range(2):
        ended("a, b, c = make(), make(), make(); say('ready'); os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    left = names(tmp_path)
    assert len(left) == 3  # the second run removed those of the first
    code = "say('ready'); sys.stdin.readline(); a = make(); say(a.path.name); sys.stdin.read(); assert a.path.exists()"
    processes = []
    contexts = [running(code, tmp_path) for _ in range(6)]
    try:
        processes = [context.__enter__() for context in contexts]
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        made = [process.stdout.readline().strip() for process in processes]
        assert names(tmp_path) == sorted(made)  # leftovers gone, all six there
        complaints = [process.communicate(timeout=60)[1] for process in processes]
        assert [process.returncode for process in processes] == [0] * 6
    finally:
        for context in contexts[: len(processes)]:
            context.__exit__(None, None, None)
    removed = re.findall(r"^Removed \S*/(\S+), left by .*", "".join(complaints), re.M)
    assert sorted(removed) == left  # each by one of them
    assert "Traceback" not in "".join(complaints)
    assert names(tmp_path) == []


FORK = """
a = make()
child = os.fork()
if child == 0:
    {child}
    sys.exit(7)
_, status = os.waitpid(child, 0)
say('ready')
assert os.waitstatus_to_exitcode(status) == {expected}, status
assert sorted(path.name for path in a.path.iterdir()) == ['identity.json', 'inner', 'lock', 'tiles']
"""
TRY_LOCK = """
import fcntl
with open(a.path / 'lock', 'r+') as lock:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        raise SystemExit('the lock is free')
    except BlockingIOError:
        pass
"""


@pytest.mark.parametrize(
    ("child", "expected"),
    [
        ("pass", 7),
        ("a.close()", 7),
        ("del a; import gc; gc.collect()", 7),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", -15),
        ("assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL", 7),
        ("b = make(); b.close(); a.close()", 7),  # a folder of its own
        ("b = make(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", -15),
        ("os._exit(7)", 7),
        ("grandchild = os.fork(); grandchild and os.waitpid(grandchild, 0)", 7),
    ],
)
def test_a_forked_child_leaves_the_folder_and_its_lock(tmp_path: Path, child: str, expected: int) -> None:
    status, _, complained = ended(FORK.format(child=child, expected=expected) + TRY_LOCK, tmp_path)
    assert (status, complained) == (0, "")
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("early", "expected"), [("a.close()", 7), ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM)]
)
def test_a_child_that_does_not_know_yet_that_it_is_one(tmp_path: Path, early: str, expected: int) -> None:
    """What other modules registered before runs first."""
    before = f"import os, signal\nos.register_at_fork(after_in_child=lambda: {early})"
    code = FORK.format(child="pass", expected=expected) + TRY_LOCK
    status, _, complained = ended(code, tmp_path, before=before)
    assert (status, complained) == (0, "")
    assert names(tmp_path) == []


def test_sigterm_to_a_child_that_was_forked_just_now(tmp_path: Path) -> None:
    """Python's own handlers lose what comes before the child is set up; blocked signals wait."""
    code = """
a = make()
for _ in range(200):
    child = os.fork()
    if child == 0:
        time.sleep(60)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
"""
    status, _, complained = ended(code + "say('ready')", tmp_path)
    assert (status, complained) == (0, "")


def test_a_child_that_outlives_its_parent_does_not_keep_the_leftovers(tmp_path: Path) -> None:
    code = """
a = make()
if os.fork() == 0:
    say('ready')
    sys.stdin.read()  # until the test has looked
    sys.exit()
time.sleep(60)
"""
    with running(code, tmp_path) as process:
        process.kill()
        process.wait()
        assert len(names(tmp_path)) == 1
        SwapFolder(tmp_path, 0).close()
        assert names(tmp_path) == []


@pytest.mark.parametrize("end", ["", "os.kill(worker.pid, signal.SIGTERM)"])
def test_worker_processes_of_multiprocessing(tmp_path: Path, end: str) -> None:
    code = f"""
import multiprocessing as mp
a = make()
stop = mp.get_context('fork').Event()
worker = mp.get_context('fork').Process(target=stop.wait, args=(60,))
worker.start()
{end or "stop.set()"}
worker.join()
say('ready')
assert worker.exitcode == {-15 if end else 0}
assert (a.path / 'tiles').exists()
"""
    status, _, complained = ended(code, tmp_path)
    assert (status, complained) == (0, "")
    assert names(tmp_path) == []
