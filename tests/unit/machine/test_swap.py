"""Swap folders: where they may be, what they remove, what they leave alone."""

import contextlib
import errno
import fcntl
import gc
import json
import logging
import os
import signal
import socket
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from penstock.errors import NvmeError
from penstock.runtime.swap import IDENTITY, LOCK, UNFINISHED_SECONDS, Identity, SwapFolder
from penstock.runtime.system import BOOT_ID

DEAD = replace(Identity.own(), pid=4242, started="2024-05-06T07:08:09+00:00")


def leftover(parent: Path, identity: Identity | None = DEAD, name: str = "penstock-node-4242-0a1b2c3d") -> Path:
    """What a killed run leaves, with 64 KiB of data."""
    folder = parent / name
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "tiles").write_bytes(b"x" * 32768)
    (folder / "tiles").write_bytes(b"x" * 32768)
    (folder / LOCK).touch()
    if identity:
        (folder / IDENTITY).write_text(json.dumps(asdict(identity)))
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def descriptors() -> set[int]:
    """Those that are open once they have been listed."""
    listed = [int(name) for name in os.listdir("/dev/fd")]
    return {number for number in listed if os.path.exists(f"/dev/fd/{number}")}


def test_a_folder_says_whose_it_is_and_holds_its_lock(tmp_path: Path) -> None:
    folder = SwapFolder(tmp_path, 0)
    assert folder.path.parent == tmp_path
    assert folder.path.name.startswith(f"penstock-{os.uname().nodename}-{os.getpid()}-")
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert names(folder.path) == [IDENTITY, LOCK]
    identity = Identity.read(folder.path)
    assert identity is not None
    assert (identity.pid, identity.host) == (os.getpid(), os.uname().nodename)
    assert identity.boot == (BOOT_ID.read_text().strip() if BOOT_ID.exists() else "")
    with (folder.path / LOCK).open("r+") as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder.close()
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert names(tmp_path) == []


def test_descriptors_are_back_after_close_and_are_not_inherited(tmp_path: Path) -> None:
    before = descriptors()
    folder = SwapFolder(tmp_path, 0)
    (lock,) = descriptors() - before
    assert not os.get_inheritable(lock)
    folder.close()
    assert descriptors() == before


def test_close_removes_everything_and_may_come_twice(tmp_path: Path) -> None:
    folder = SwapFolder(tmp_path, 0)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    (folder.path / "inner").mkdir()
    (folder.path / "inner" / "tiles").touch()
    (folder.path / "link").symlink_to(elsewhere)
    folder.close()
    folder.close()
    assert names(tmp_path) == ["elsewhere"]
    assert names(elsewhere) == ["kept"]


@pytest.mark.parametrize("gone", ["", LOCK, IDENTITY, "tiles"])
def test_close_does_not_mind_what_is_gone(tmp_path: Path, gone: str) -> None:
    folder = SwapFolder(tmp_path, 0)
    (folder.path / "tiles").touch()
    if gone:
        (folder.path / gone).unlink()
    else:
        folder.path.rename(tmp_path / "moved")
    folder.close()
    assert names(tmp_path) == ([] if gone else ["moved"])


def test_what_cannot_be_removed_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = SwapFolder(tmp_path, 0)

    def refuse(*_: object) -> Path:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "rename", refuse)
    folder.close()
    assert f"{folder.path} cannot be removed" in caplog.text
    monkeypatch.undo()
    SwapFolder(tmp_path, 0).close()  # its lock is free: a leftover
    assert names(tmp_path) == []


def test_a_folder_goes_with_its_object(tmp_path: Path) -> None:
    folder = SwapFolder(tmp_path, 0)
    assert folder.path.exists()
    del folder
    gc.collect()
    assert names(tmp_path) == []


def test_the_parent_is_found_through_links_and_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    monkeypatch.chdir(tmp_path)
    folder = SwapFolder("link", 0)
    monkeypatch.chdir("/")
    assert folder.path.parent == tmp_path / "disk"
    folder.close()
    assert names(tmp_path / "disk") == []


@pytest.mark.parametrize(
    ("name", "says", "number"),
    [
        ("missing", "cannot be found (No such file or directory). Create it, or choose another", errno.ENOENT),
        ("file", "is no folder. Remove that file and create a folder, or choose another", errno.ENOTDIR),
        ("file/below", "cannot be found (Not a directory). Create it, or choose another", errno.ENOTDIR),
        ("circle", "cannot be found (Too many levels of symbolic links). Create it, or choose", errno.ELOOP),
    ],
)
def test_a_parent_that_is_no_folder(tmp_path: Path, name: str, says: str, number: int) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(NvmeError) as caught:
        SwapFolder(tmp_path / name, 0)
    assert f"The nvme path '{tmp_path / name}' {says}" in str(caught.value)
    assert "Placement(nvme_path=...)" in str(caught.value)
    assert caught.value.errno == number
    assert names(tmp_path) == ["circle", "file"]


def test_a_parent_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    if os.access(tmp_path, os.W_OK):
        pytest.skip("this user may write everywhere")
    with pytest.raises(
        NvmeError, match=r"No swap folder can be made .* Permission denied.* user can write.*nvme_path="
    ):
        SwapFolder(tmp_path, 0)


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    before = descriptors()
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(NvmeError, match=r"Function not implemented.*with locks \(flock\), or choose another") as caught:
        SwapFolder(tmp_path, 0)
    assert caught.value.errno == errno.ENOSYS
    assert str(tmp_path) in str(caught.value)
    assert names(tmp_path) == []
    assert descriptors() == before


@pytest.mark.parametrize("below", [".", "inner"])
def test_a_parent_in_the_swap_folder_of_a_live_run(tmp_path: Path, below: str) -> None:
    live = SwapFolder(tmp_path, 0)
    parent = live.path / below
    parent.mkdir(exist_ok=True)
    says = rf"lies in the swap folder of the run with pid {os.getpid()} on .*, started 20.*\. Choose another"
    with pytest.raises(NvmeError, match=says):
        SwapFolder(parent, 0)
    assert names(live.path) == sorted({IDENTITY, LOCK} | ({below} - {"."}))
    live.close()


def test_a_parent_in_the_swap_folder_of_a_dead_run(tmp_path: Path) -> None:
    with pytest.raises(NvmeError, match="lies in the swap folder of the run with pid 4242"):
        SwapFolder(leftover(tmp_path) / "inner", 0)


def test_too_little_space_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = os.statvfs(tmp_path)
    fields = list(system)
    fields[1], fields[3], fields[4] = 512, 9, 4  # fragments of 512 bytes: 9 free, 4 of them for users
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    SwapFolder(tmp_path, 2048).close()
    with pytest.raises(
        NvmeError, match=r"needs 2,049 bytes, and .* has 2,048 bytes free\. Free 1 bytes, keep"
    ) as caught:
        SwapFolder(tmp_path, 2049)
    assert caught.value.errno == errno.ENOSPC
    assert str(tmp_path) in str(caught.value)
    assert names(tmp_path) == []


def test_space_is_counted_after_leftovers_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = leftover(tmp_path)
    system = os.statvfs(tmp_path)
    empty = os.statvfs_result([*system[:4], 0, *system[5:]])
    monkeypatch.setattr(os, "statvfs", lambda path: empty if dead.exists() else system)
    SwapFolder(tmp_path, 1).close()


def test_leftovers_go_with_a_line_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    leftover(tmp_path)
    leftover(tmp_path, replace(DEAD, pid=4343), "penstock-node-4343-00000000")
    with caplog.at_level(logging.INFO, "penstock"):
        SwapFolder(tmp_path, 0).close()
    assert names(tmp_path) == []
    lines = sorted(caplog.messages)
    assert len(lines) == 2
    for line, pid in zip(lines, (4242, 4343), strict=True):
        assert line.startswith(f"Removed {tmp_path}/penstock-node-{pid}-")
        assert f"left by the run with pid {pid} on {DEAD.host}, started 2024-05-06T07:08:09+00:00" in line
        assert int(line.split(": ")[1].split(" ")[0].replace(",", "")) >= 65536


def test_a_held_folder_stays_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    held = leftover(tmp_path)
    with (held / LOCK).open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        SwapFolder(tmp_path, 0).close()
        assert names(held) == [IDENTITY, "inner", LOCK, "tiles"]
    assert caplog.messages == []
    SwapFolder(tmp_path, 0).close()
    assert not held.exists()


@pytest.mark.parametrize(
    "identity", ["", "{", "[]", "null", '{"pid": 1}', json.dumps(asdict(DEAD) | {"colour": "red"}), "\udcff"]
)
def test_folders_of_a_similar_name_stay(tmp_path: Path, identity: str) -> None:
    other = leftover(tmp_path, None)
    without = leftover(tmp_path, None, "penstock-checkpoints")
    (other / IDENTITY).write_bytes(identity.encode(errors="surrogateescape"))
    SwapFolder(tmp_path, 0).close()
    assert names(other) == [IDENTITY, "inner", LOCK, "tiles"]
    assert names(without) == ["inner", LOCK, "tiles"]


@pytest.mark.parametrize("kind", ["pipe", "link", "link to a pipe", "socket", "folder", "huge", "deep", "numbers"])
def test_an_identity_that_is_none_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    """Not even where the nvme path lies inside of it."""
    other = leftover(tmp_path, None)
    identity = other / IDENTITY
    if "pipe" in kind:
        os.mkfifo(identity if kind == "pipe" else tmp_path / "pipe")
    if "link" in kind:
        identity.symlink_to(tmp_path / "pipe" if kind == "link to a pipe" else leftover(tmp_path / "far") / IDENTITY)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(other):
            listener.bind(IDENTITY)
    elif kind == "folder":
        identity.mkdir()
    elif kind == "huge":
        with identity.open("wb") as file:
            file.write(json.dumps(asdict(DEAD)).encode())
            file.truncate(1 << 40)
    elif kind == "deep":
        identity.write_text("[" * 100_000)
    elif kind == "numbers":
        identity.write_text(json.dumps(dict.fromkeys(asdict(DEAD), 1)))
    SwapFolder(tmp_path, 0).close()
    SwapFolder(other, 0).close()
    assert names(other) == [IDENTITY, "inner", LOCK, "tiles"]


def test_links_and_files_of_a_similar_name_stay(tmp_path: Path) -> None:
    elsewhere = leftover(tmp_path, name="elsewhere")
    parent = tmp_path / "parent"
    parent.mkdir()
    (parent / "penstock-link").symlink_to(elsewhere)
    (parent / "penstock-file").touch()
    SwapFolder(parent, 0).close()
    assert names(parent) == ["penstock-file", "penstock-link"]
    assert names(elsewhere) == [IDENTITY, "inner", LOCK, "tiles"]


@pytest.mark.skipif(os.geteuid() != 0, reason="makes folders of another user")
def test_folders_of_another_user_stay(tmp_path: Path) -> None:
    other = leftover(tmp_path)
    os.chown(other, 65534, 65534)
    SwapFolder(tmp_path, 0).close()
    assert names(other) == [IDENTITY, "inner", LOCK, "tiles"]


@pytest.mark.parametrize(
    ("host", "boot", "goes"),
    [
        ("node-b", "another", False),  # its locks may not be seen here
        ("node-b", "", False),
        ("node-b", DEAD.boot, bool(DEAD.boot)),  # another container on this machine
        (DEAD.host, "another", True),  # this machine, started again
    ],
)
def test_folders_of_another_machine_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, host: str, boot: str, goes: bool
) -> None:
    other = leftover(tmp_path, replace(DEAD, host=host, boot=boot))
    SwapFolder(tmp_path, 0).close()
    assert other.exists() is not goes
    (line,) = caplog.messages
    assert ("Remove it if that run has ended" in line) is not goes


def test_unfinished_folders_go_after_an_hour(tmp_path: Path) -> None:
    """Those with nothing but our own files: a name says nothing of what is inside."""
    young, old, empty, data = (tmp_path / f".penstock-node-1-0000000{number}" for number in range(1, 5))
    for folder in (young, old, empty, data):
        folder.mkdir()
    for folder in (young, old, data):
        (folder / LOCK).touch()
        (folder / IDENTITY).write_text("{")
    (data / "thesis.txt").touch()
    not_ours = leftover(tmp_path, DEAD, ".penstock-settings")
    for folder, seconds in ((young, 0.9), (old, 1.1), (empty, 1.1), (data, 9), (not_ours, 9)):
        then = time.time() - seconds * UNFINISHED_SECONDS
        os.utime(folder, (then, then))
    SwapFolder(tmp_path, 0).close()
    assert names(tmp_path) == [young.name, data.name, not_ours.name]
    assert names(data) == [IDENTITY, LOCK, "thesis.txt"]


def test_a_wrong_clock_removes_no_folder_that_another_rank_is_making(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    making = tmp_path / ".penstock-node-1-00000001"
    making.mkdir()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 86_400)
    SwapFolder(tmp_path, 0).close()
    assert names(tmp_path) == [making.name]


@pytest.mark.parametrize("by", ["link", "folder", "file"])
def test_what_has_the_name_of_a_folder_that_was_removed_stays(tmp_path: Path, by: str) -> None:
    folder = SwapFolder(tmp_path, 0)
    folder.check()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    folder.path.rename(tmp_path / "moved")
    if by == "link":
        folder.path.symlink_to(elsewhere)
    elif by == "folder":
        elsewhere.rename(folder.path)
        elsewhere = folder.path
    else:
        folder.path.touch()
    with pytest.raises(NvmeError, match=f"{folder.path}' was removed while its run goes on"):
        folder.check()
    folder.close()
    assert (elsewhere / "kept").exists()
    assert folder.path.exists()
    assert names(tmp_path / "moved") == [IDENTITY, LOCK]


def test_a_link_inside_of_leftovers_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    dead = leftover(tmp_path)
    (dead / "planted").symlink_to(elsewhere)
    (dead / "inner" / "planted").symlink_to(elsewhere)
    SwapFolder(tmp_path, 0).close()
    assert names(tmp_path) == ["elsewhere"]
    assert names(elsewhere) == ["kept"]


def test_many_threads_make_and_close_among_leftovers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(20):
        leftover(tmp_path, name=f"penstock-node-4242-{number:08x}")
    together = threading.Barrier(16)

    def work(number: int) -> Path:
        together.wait()
        for _ in range(5):
            folder = SwapFolder(tmp_path, 0)
            (folder.path / "tiles").write_text(str(number))
            assert (folder.path / "tiles").read_text() == str(number)
            folder.close()
        return folder.path

    before = descriptors()
    with ThreadPoolExecutor(16) as threads:
        paths = set(threads.map(work, range(16)))
    assert len(paths) == 16
    assert names(tmp_path) == []
    assert descriptors() == before
    assert len([line for line in caplog.messages if line.startswith("Removed")]) == 20  # each by one of them


def test_the_handler_is_there_while_folders_are(tmp_path: Path) -> None:
    gc.collect()  # folders that earlier tests forgot to close; on another thread nobody could set the signal back
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    first, second = SwapFolder(tmp_path, 0), SwapFolder(tmp_path, 0)
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    first.close()
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    second.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("when", ["before", "while"])
def test_the_handler_of_the_program_stays(tmp_path: Path, when: str) -> None:
    def own(*_: object) -> None:
        pass

    if when == "before":
        signal.signal(signal.SIGTERM, own)
    folder = SwapFolder(tmp_path, 0)
    if when == "while":
        signal.signal(signal.SIGTERM, own)
    try:
        assert signal.getsignal(signal.SIGTERM) is own
        folder.close()
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
