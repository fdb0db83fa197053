"""Disks that are full, files that others change, processes that end: what a user's run can meet."""

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from penstock.errors import NvmeError
from penstock.runtime.aio import File, Queue
from penstock.runtime.host_memory import PAGE_BYTES
from tests.faults.failing_files import mounted
from tests.faults.preload import run_preloaded
from tests.lib.memory import memory

MIB = 1 << 20
CHUNK_BYTES = MIB


@pytest.fixture
def queue() -> Iterator[Queue]:
    with Queue(2, chunk_bytes=CHUNK_BYTES) as queue:
        yield queue


def test_calls_that_fail_move_less_or_are_held_up(tmp_path: Path) -> None:
    """The tests of injected_aio.py."""
    run_preloaded("syscalls.c", "injected_aio.py", tmp_path)


def test_a_file_truncated_under_us_ends(tmp_path: Path, queue: Queue) -> None:
    with File(queue, tmp_path / "file", 4 * CHUNK_BYTES) as file:
        file.write(0, memory(4 * CHUNK_BYTES, seed=1)).wait()
        for size in (2 * CHUNK_BYTES, CHUNK_BYTES + 100):
            os.truncate(file.path, size)
            end = size // PAGE_BYTES * PAGE_BYTES
            with pytest.raises(NvmeError) as caught:
                file.read(end - PAGE_BYTES, memory(4 * PAGE_BYTES)).wait()
            assert str(caught.value) == (
                f"Reading 16,384 bytes at offset {end - PAGE_BYTES:,} of {file.path} failed at offset {end:,}: the "
                "file ends there. Another program truncated the file: nothing else may write to nvme_path."
            )
            assert (caught.value.offset, caught.value.errno) == (end, None)
        into = memory(CHUNK_BYTES)
        file.read(0, into).wait()
        assert torch.equal(into, memory(4 * CHUNK_BYTES, seed=1)[:CHUNK_BYTES])


def test_a_file_removed_under_us_works_on(tmp_path: Path, queue: Queue) -> None:
    source, into = memory(MIB, seed=1), memory(MIB)
    with File(queue, tmp_path / "file", MIB) as file:
        os.unlink(file.path)
        write = file.write(0, source)
        write.wait()
        file.read(0, into, checksum=write.checksum).wait()
        assert torch.equal(source, into)


@pytest.mark.parametrize("place", [0, CHUNK_BYTES + 17, 3 * CHUNK_BYTES - 1])
def test_one_changed_bit_fails_the_checksum(tmp_path: Path, queue: Queue, place: int) -> None:
    source = memory(3 * CHUNK_BYTES, seed=1)
    with File(queue, tmp_path / "file", 4 * CHUNK_BYTES) as file:
        write = file.write(PAGE_BYTES, source)
        write.wait()
        changed = bytes([int(source[place]) ^ 1])
        with open(file.path, "r+b", buffering=0) as outside:
            outside.seek(PAGE_BYTES + place)
            outside.write(changed)
            os.fsync(outside)
        into = memory(3 * CHUNK_BYTES)
        file.read(PAGE_BYTES, into).wait()  # nothing was asked
        transfer = file.read(PAGE_BYTES, into, checksum=write.checksum, what="master of unit 'head', tile 0")
        with pytest.raises(NvmeError) as caught:
            transfer.wait()
        assert str(caught.value) == (
            f"Reading master of unit 'head', tile 0, 3,145,728 bytes at offset 4,096 of {file.path} failed at offset "
            f"4,096: the checksum is {transfer.checksum:#010x}, not {write.checksum:#010x}. Another program wrote to "
            "the file, or the disk does not keep what it is given: give another nvme_path."
        )
        assert (caught.value.file, caught.value.offset, caught.value.errno) == (file.path, 4096, errno.EBADMSG)
        file.read(PAGE_BYTES, into, checksum=write.checksum)  # nobody waits
        with pytest.raises(NvmeError, match="the checksum is"):
            file.close()


def test_folders_that_do_not_work(tmp_path: Path, queue: Queue) -> None:
    missing = tmp_path / "missing" / "file"
    with pytest.raises(NvmeError) as caught:
        File(queue, missing, 2 * MIB)
    assert str(caught.value) == (
        f"Cannot make a file of 2,097,152 bytes at {missing}: No such file or directory. Create the folder, or give "
        "another nvme_path."
    )
    assert (caught.value.file, caught.value.offset, caught.value.errno) == (str(missing), None, errno.ENOENT)
    (tmp_path / "plain").write_text("x")
    with pytest.raises(NvmeError, match=r"Not a directory\. Give an nvme_path that is a folder\."):
        File(queue, tmp_path / "plain" / "file", MIB)
    with pytest.raises(NvmeError, match=r"File exists\. Give another nvme_path; remove the file"):
        File(queue, tmp_path / "plain", MIB)
    assert (tmp_path / "plain").read_text() == "x"


def test_a_folder_that_may_not_be_written(tmp_path: Path, queue: Queue) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    (tmp_path / "folder").mkdir(mode=0o500)
    with pytest.raises(NvmeError, match=r"Permission denied\. Make the folder writable, or give another nvme_path\."):
        File(queue, tmp_path / "folder" / "file", MIB)


def test_more_than_the_disk_holds_leaves_nothing(tmp_path: Path, queue: Queue) -> None:
    free = os.statvfs(tmp_path)
    size = (free.f_bfree * free.f_frsize // PAGE_BYTES + 1_000_000) * PAGE_BYTES
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(NvmeError, match=r"Cannot make a file of [\d,]+ bytes at .*(No space|too large)") as caught:
        File(queue, tmp_path / "file", size)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert not (tmp_path / "file").exists()
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    yield from mounted(tmp_path / "mounted", "8m")


def test_a_disk_that_gets_full(small_disk: Path, queue: Queue) -> None:
    with pytest.raises(NvmeError, match=r"No space left on device\. Free space there, or give another nvme_path\."):
        File(queue, small_disk / "large", 16 * MIB)
    assert not list(small_disk.iterdir())
    with File(queue, small_disk / "file", 4 * MIB) as file:
        os.truncate(file.path, 0)  # gives the blocks back, and somebody else takes them
        (small_disk / "other").write_bytes(bytes(6 * MIB))
        with pytest.raises(NvmeError, match=r"Writing .*: No space left on device\. Free space there") as caught:
            file.write(0, memory(4 * MIB)).wait()
        assert caught.value.errno == errno.ENOSPC
        (small_disk / "other").unlink()
        file.write(0, memory(4 * MIB, seed=1)).wait()
    assert (small_disk / "file").read_bytes() == memory(4 * MIB, seed=1).numpy().tobytes()


# Imports once; then a child for each program goes through the whole exit of an interpreter.
PROGRAMS = """
import errno, json, os, resource, sys
from pathlib import Path
import torch
from penstock.errors import NvmeError
from penstock.runtime.aio import File, Queue
from penstock.runtime.host_memory import Arena

def filled(nbytes):
    return Arena(nbytes, torch.device("cpu")).allocate(nbytes, torch.uint8).fill_(7)

for path, program in json.loads(sys.argv[1]).items():
    child = os.fork()
    if child == 0:
        os.dup2(os.open(path + " said", os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(1, 2)
        break
    with open(path + " said", "a") as said:
        said.write(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
else:
    os._exit(0)
exec(program)
"""

LIMITED = """
CHUNK = 1 << 20
with Queue(1) as queue:
    file = File(queue, path, 4 * CHUNK)
    resource.setrlimit(resource.RLIMIT_FSIZE, (CHUNK + CHUNK // 2, resource.RLIM_INFINITY))
    try:
        file.write(0, filled(4 * CHUNK)).wait()
    except NvmeError as error:
        assert error.errno == errno.EFBIG, error
        assert error.offset == CHUNK + CHUNK // 2, error
        assert file._native.bytes_written == CHUNK + CHUNK // 2, file._native.bytes_written
        assert "File too large. Raise the limit of file sizes (ulimit -f)" in str(error), error
        print("limited")
    try:
        File(queue, path + " of another", 4 * CHUNK)
    except NvmeError as error:
        assert error.errno == errno.EFBIG, error
        assert not Path(path + " of another").exists()
        print("refused")
    file.close()
"""

LEFT_OPEN = """
queue = Queue(2)
file = File(queue, path, 64 << 20)
transfer = file.write(0, filled(64 << 20))
"""
ENDINGS = {"none": "", "fork": "os.fork()", "dropped": "del queue, file, transfer"}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs' files, and of what each said, with its status. All run at once."""
    folder = tmp_path_factory.mktemp("ended")
    programs = {name: LEFT_OPEN + ending for name, ending in ENDINGS.items()} | {"limited": LIMITED}
    given = json.dumps({str(folder / name): program for name, program in programs.items()})
    subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAMS, given], check=True)
    return folder


def test_the_limit_of_file_sizes(ended: Path) -> None:
    """The kernel writes what the limit allows and refuses the rest: a real short write, then a real error."""
    if resource.getrlimit(resource.RLIMIT_FSIZE)[1] != resource.RLIM_INFINITY:
        pytest.skip("file sizes are limited here already")
    assert (ended / "limited said").read_text().split() == ["limited", "refused", "0"]


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_that_ends_without_closing_finishes_its_writes(ended: Path, ending: str) -> None:
    assert (ended / f"{ending} said").read_text() == "0"
    assert (ended / ending).read_bytes() == b"\x07" * (64 << 20)
