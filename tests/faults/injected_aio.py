"""Run by test_aio.py in a process of its own, with syscalls.c loaded before the C library."""

import ctypes
import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from penstock.errors import NvmeError
from penstock.runtime.aio import File, Queue, checksum
from penstock.runtime.host_memory import PAGE_BYTES
from tests.lib.memory import memory

CHUNK_BYTES = 1 << 20
NBYTES = 3 * CHUNK_BYTES
WHAT = "exp_avg of unit 'layers.3', tile 4"
ALWAYS = 10**9
shim = ctypes.CDLL(None)


def fault(
    kind: str, first: int = 1, last: int | None = None, *, error: int = 0, limit: int = -1, held: bool = False
) -> None:
    """Calls `first` to `last` (the same, unless given) of pread ("read") or pwrite ("write") go wrong.

    Those that are `held` go on when this is called again.
    """
    last = first if last is None else last
    shim.fault_set(kind == "write", *map(ctypes.c_long, (first, last)), error, ctypes.c_long(limit), held)


def calls(kind: str) -> int:
    return int(shim.fault_calls(kind == "write"))


@pytest.fixture
def file(tmp_path: Path) -> Iterator[File]:
    """Holds the bytes of `memory(NBYTES, seed=1)`; served by one thread, which takes chunks in order."""
    with Queue(1, chunk_bytes=CHUNK_BYTES) as queue, File(queue, tmp_path / "file", NBYTES + PAGE_BYTES) as file:
        file.write(0, memory(NBYTES, seed=1)).wait()
        yield file
        fault("read", ALWAYS)


def round_trip(file: File) -> None:
    """Write new bytes and read them back, while whatever was set goes wrong."""
    source, into = memory(NBYTES, seed=2), memory(NBYTES)
    written, read = file._native.bytes_written, file._native.bytes_read
    write = file.write(0, source)
    write.wait()
    assert write.checksum == checksum(source)
    file.read(0, into, checksum=write.checksum).wait()
    assert torch.equal(source, into)
    assert Path(file.path).read_bytes()[:NBYTES] == source.numpy().tobytes()
    assert (file._native.bytes_written - written, file._native.bytes_read - read) == (NBYTES, NBYTES)


@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("limit", [CHUNK_BYTES // 2, PAGE_BYTES, PAGE_BYTES + 100, CHUNK_BYTES - 1])
def test_short_transfers_go_on(file: File, kind: str, limit: int) -> None:
    fault(kind, 1, ALWAYS, limit=limit)
    round_trip(file)
    assert calls(kind) == 3 * (-(-CHUNK_BYTES // (limit // PAGE_BYTES * PAGE_BYTES)))


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_broken_page_is_moved_again(file: File, kind: str) -> None:
    fault(kind, 2, 4, limit=100)
    round_trip(file)
    assert calls(kind) == 3 + 3


@pytest.mark.parametrize("kind", ["read", "write"])
def test_interrupted_calls_are_made_again(file: File, kind: str) -> None:
    fault(kind, 2, 30, error=errno.EINTR)
    round_trip(file)
    assert calls(kind) == 3 + 29


@pytest.mark.parametrize(
    ("kind", "error", "advice"),
    [
        ("write", errno.ENOSPC, "Free space there, or give another nvme_path."),
        ("write", errno.EIO, "see the kernel's log (dmesg), and give an nvme_path on another disk."),
        ("read", errno.EIO, "see the kernel's log (dmesg), and give an nvme_path on another disk."),
    ],
)
@pytest.mark.parametrize("call", [1, 2, 3])
def test_an_error_names_what_failed_and_what_to_do(file: File, kind: str, error: int, advice: str, call: int) -> None:
    fault(kind, call, error=error)
    offset = (call - 1) * CHUNK_BYTES + PAGE_BYTES
    transfer = (file.read if kind == "read" else file.write)(PAGE_BYTES, memory(NBYTES), what=WHAT)
    for _ in range(2):
        with pytest.raises(NvmeError) as caught:
            transfer.wait()
        assert str(caught.value) == (
            f"{'Reading' if kind == 'read' else 'Writing'} {WHAT}, {NBYTES:,} bytes at offset 4,096 of {file.path} "
            f"failed at offset {offset:,}: {os.strerror(error)}. {ADVICE_START[error]}{advice}"
        )
        assert (caught.value.file, caught.value.offset, caught.value.errno) == (file.path, offset, error)
        assert isinstance(caught.value, OSError)
    assert transfer.done()
    assert calls(kind) == call  # the rest was not tried
    round_trip(file)  # and the queue works on


ADVICE_START = {errno.ENOSPC: "", errno.EIO: "The disk or its driver failed: "}


def test_a_device_that_takes_nothing_is_an_error_and_no_endless_loop(file: File) -> None:
    fault("write", 1, ALWAYS, limit=0)
    with pytest.raises(NvmeError, match=r"failed at offset 0: Input/output error"):
        file.write(0, memory(NBYTES)).wait()
    fault("write", 1, ALWAYS, limit=100)
    with pytest.raises(NvmeError, match=r"failed at offset 0: Input/output error"):
        file.write(0, memory(NBYTES)).wait()
    fault("read", 1, ALWAYS, limit=100)
    with pytest.raises(NvmeError, match=r"failed at offset 0: the file ends there"):
        file.read(0, memory(NBYTES)).wait()


def test_a_failure_that_nobody_waited_for_is_raised_by_close(tmp_path: Path) -> None:
    with Queue(1, chunk_bytes=CHUNK_BYTES) as queue:
        file = File(queue, tmp_path / "file", NBYTES)
        fault("write", 2, error=errno.EIO)
        file.write(0, memory(NBYTES), what="first")
        for _ in range(3):
            file.write(0, memory(PAGE_BYTES)).wait()  # later transfers do not hide it
        with pytest.raises(NvmeError, match=r"^Writing first, 3,145,728 bytes"):
            file.close()
        file.close()
    queue = Queue(1, chunk_bytes=CHUNK_BYTES)
    file = File(queue, tmp_path / "other", NBYTES)
    fault("write", 2, error=errno.EIO)
    file.write(0, memory(NBYTES), what="second")
    with pytest.raises(NvmeError, match=r"^Writing second, "):
        queue.close()
    fault("write", ALWAYS)


@pytest.mark.parametrize("depth", [1, 4])
def test_one_of_many_fails_and_the_others_do_not(tmp_path: Path, depth: int) -> None:
    with Queue(depth, chunk_bytes=CHUNK_BYTES) as queue, File(queue, tmp_path / "file", 8 * NBYTES) as file:
        sources = [memory(NBYTES, seed=i) for i in range(8)]
        fault("write", 10, error=errno.EIO)
        failed = []
        for i, transfer in enumerate([file.write(i * NBYTES, source) for i, source in enumerate(sources)]):
            try:
                transfer.wait()
            except NvmeError:
                failed.append(i)
        assert len(failed) == 1
        for i, source in enumerate(sources):
            into = memory(NBYTES)
            file.read(i * NBYTES, into).wait()
            assert torch.equal(source, into) == (i not in failed)


class Slices:
    """A native transfer of which it is counted how often it was waited for."""

    def __init__(self, native: object) -> None:
        self.native, self.count = native, 0

    def wait(self, milliseconds: int) -> bool:
        self.count += 1
        return self.native.wait(milliseconds)

    def __getattr__(self, name: str) -> object:
        return getattr(self.native, name)


def test_waiting_lets_other_python_threads_run(file: File) -> None:
    """The read goes on when another thread has run often in one slice of the wait."""
    fault("read", 1, held=True)
    transfer = file.read(0, memory(PAGE_BYTES))
    assert not transfer.done()
    transfer._native = slices = Slices(transfer._native)

    def run_often() -> None:
        times, slice_of_them = 0, 0
        while times < 20:
            time.sleep(0.001)
            times = times + 1 if slices.count == slice_of_them > 0 else 0
            slice_of_them = slices.count
        fault("read", ALWAYS)

    thread = threading.Thread(target=run_often)
    thread.start()
    transfer.wait()
    thread.join()


class AlarmError(Exception):
    pass


def test_a_signal_interrupts_a_wait_and_the_transfer_goes_on(file: File) -> None:
    def handler(*_: object) -> None:
        raise AlarmError

    before = signal.signal(signal.SIGALRM, handler)
    try:
        into = memory(NBYTES)
        fault("read", 1, held=True)
        transfer = file.read(0, into)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(AlarmError):
            transfer.wait()
        assert not transfer.done()
        fault("read", ALWAYS)
        transfer.wait()
        assert torch.equal(into, memory(NBYTES, seed=1))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_forked_child_neither_hangs_nor_touches_the_file(tmp_path: Path) -> None:
    source, into = memory(NBYTES, seed=4), memory(NBYTES)
    with Queue(2, chunk_bytes=CHUNK_BYTES) as queue, File(queue, tmp_path / "file", 2 * NBYTES) as file:
        file.write(0, source).wait()
        ended = file.read(NBYTES, memory(PAGE_BYTES))
        ended.wait()
        fault("read", 1, ALWAYS, held=True)
        transfer = file.read(0, into)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for refused in (
                    transfer.wait,
                    lambda: file.write(0, memory(PAGE_BYTES, seed=9)),
                    lambda: file.read(0, memory(PAGE_BYTES)),
                ):
                    with pytest.raises(RuntimeError, match="forked from"):
                        refused()
                ended.wait()
                assert not transfer.done()
                file.close()
                queue.close()
                del transfer, file, queue
                code = 0
            finally:
                os._exit(code)
        fault("read", ALWAYS)
        transfer.wait()
        assert torch.equal(into, source)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        file.read(0, into).wait()
        assert torch.equal(into, source)
