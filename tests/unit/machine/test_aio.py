"""Files of the nvme tier against plain bytes: any order, any size, many threads, and how transfers end."""

import contextlib
import errno
import gc
import logging
import os
import stat
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock import _native
from penstock.errors import NvmeError
from penstock.runtime.aio import File, Queue, Transfer, checksum, existing_folder
from penstock.runtime.host_memory import PAGE_BYTES
from tests.lib.fuzz import examples
from tests.lib.interrupts import interrupt
from tests.lib.memory import memory
from tests.lib.refusals import Refusal, refused, rows

MIB = 1 << 20
CHUNK_BYTES = MIB


@pytest.fixture
def queue() -> Iterator[Queue]:
    with Queue(3, chunk_bytes=CHUNK_BYTES) as queue:
        yield queue


PAGES = 64
STEP = st.tuples(st.booleans(), st.integers(0, PAGES - 1), st.integers(1, PAGES), st.integers(0, 2**31))


@settings(examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEP, max_size=12), depth=st.integers(1, 4))
def test_any_sequence_of_transfers_is_that_of_a_bytearray(tmp_path, steps, depth):
    """Whole sequences stay in flight; only what overlaps in the file is waited for, as the caller has to."""
    path = tmp_path / "file"
    model = bytearray(PAGES * PAGE_BYTES)
    in_flight: list[tuple[range, bool, Transfer]] = []
    reads = []
    try:
        with Queue(depth, chunk_bytes=CHUNK_BYTES) as queue, File(queue, path, len(model)) as file:
            for write, page, pages, seed in steps:
                where = range(page * PAGE_BYTES, min(page + pages, PAGES) * PAGE_BYTES)
                for other, other_write, transfer in in_flight:
                    if (write or other_write) and other.start < where.stop and where.start < other.stop:
                        transfer.wait()
                if write:
                    source = memory(len(where), seed)
                    transfer = file.write(where.start, source)
                    model[where.start : where.stop] = source.numpy().tobytes()
                else:
                    into = memory(len(where), seed)
                    transfer = file.read(where.start, into)
                    reads.append((transfer, into, bytes(model[where.start : where.stop])))
                in_flight.append((where, write, transfer))
            for transfer, into, expected in reversed(reads):
                transfer.wait()
                assert into.numpy().tobytes() == expected
        assert path.read_bytes() == bytes(model)
    finally:
        path.unlink()


def test_many_threads_submit_at_once(tmp_path, queue):
    nbytes, rounds = 3 * CHUNK_BYTES // 2, 6
    wrong = []

    def work(file: File, lane: int) -> None:
        for turn in range(rounds):
            source, into = memory(nbytes, seed=lane * 100 + turn), memory(nbytes)
            write = file.write(lane * nbytes, source)
            write.wait()
            file.read(lane * nbytes, into, checksum=write.checksum).wait()
            if not torch.equal(source, into):
                wrong.append((lane, turn))

    with File(queue, tmp_path / "a", 4 * nbytes) as a, File(queue, tmp_path / "b", 4 * nbytes) as b:
        threads = [threading.Thread(target=work, args=(file, lane)) for file in (a, b) for lane in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert a._native.bytes_written == b._native.bytes_read == 4 * rounds * nbytes
        assert queue.written_bytes == 2 * 4 * rounds * nbytes
    assert not wrong


def test_a_queue_moves_at_most_depth_chunks_at_once_and_finishes_on_close(tmp_path):
    queue = Queue(1)
    file = File(queue, tmp_path / "file", 32 * MIB)
    transfers = [file.write(i * 4 * MIB, memory(4 * MIB, seed=i)) for i in range(8)]
    transfers[3].wait()  # one thread takes chunks in order
    assert all(transfer.done() for transfer in transfers[:4])
    queue.close()
    assert all(transfer.done() for transfer in transfers)
    assert file._native.bytes_written == 32 * MIB
    queue.close()
    with pytest.raises(RuntimeError, match="the queue is closed"):
        file.read(0, memory(PAGE_BYTES))
    file.close()
    file.close()
    with pytest.raises(RuntimeError, match=r"file is closed"):
        file.read(0, memory(PAGE_BYTES))


def descriptors() -> set[str]:
    return {f"{fd}: {os.readlink(f'/proc/self/fd/{fd}')}" for fd in os.listdir("/proc/self/fd") if _is_open(fd)}


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_nothing_is_left_after_close(tmp_path):
    threads, open_before = len(os.listdir("/proc/self/task")), descriptors()
    queue = Queue(4)
    assert len(os.listdir("/proc/self/task")) == threads + 4
    file = File(queue, tmp_path / "file", MIB)
    file.write(0, memory(MIB))
    file.close()
    assert descriptors() == open_before
    queue.close()
    assert len(os.listdir("/proc/self/task")) == threads
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    assert (tmp_path / "file").stat().st_blocks * 512 >= MIB


def test_what_nobody_keeps_ends_by_itself(tmp_path):
    threads, open_before = len(os.listdir("/proc/self/task")), descriptors()
    source = memory(8 * MIB, seed=5)
    queue = Queue(2)
    File(queue, tmp_path / "file", 8 * MIB).write(0, source)
    del queue
    gc.collect()
    assert len(os.listdir("/proc/self/task")) == threads
    assert descriptors() == open_before
    assert (tmp_path / "file").read_bytes() == source.numpy().tobytes()


def test_a_tensor_lives_until_its_transfer_is_done_and_no_longer(tmp_path):
    with Queue(1, chunk_bytes=CHUNK_BYTES) as queue, File(queue, tmp_path / "file", 64 * MIB) as file:
        source = memory(32 * MIB, seed=1)
        alive = weakref.ref(source)
        expected = source.clone()
        file.write(0, source)  # nobody keeps the transfer
        del source
        assert alive() is not None
        file.write(32 * MIB, memory(PAGE_BYTES)).wait()  # behind it: one thread takes writes in order
        into = memory(32 * MIB)
        read = file.read(0, into)
        read.wait()
        assert torch.equal(into, expected)
        dropped = weakref.ref(into)
        del into
        assert dropped() is None  # though the transfer is still held
        file.write(0, memory(PAGE_BYTES)).wait()
        assert alive() is None


def moving(offset: int, start: int = 0, nbytes: int = PAGE_BYTES, text: str = "") -> Refusal:
    """To read and to write some bytes of memory."""

    def do(file: File, submit: Callable[..., Transfer]) -> None:
        submit(offset, memory(4 * PAGE_BYTES)[start : start + nbytes])

    return Refusal(do, text or f"{nbytes:,} bytes at offset {offset:,} are outside", ValueError)


def odd(do: Callable[[File, Callable[..., Transfer]], object], text: str) -> Refusal:
    return Refusal(do, text, ValueError)


REFUSED = {
    "offset": moving(1, text="multiples of 4096, not 4,096 bytes at address"),
    "address": moving(0, start=8, text="8 for offset 0;"),
    "size": moving(0, nbytes=100, text="multiples of 4096, not 100 bytes"),
    "behind the end": moving(MIB),
    "before the beginning": moving(-PAGE_BYTES),
    "over the end": moving(MIB - PAGE_BYTES, nbytes=2 * PAGE_BYTES),
    "strides": odd(
        lambda _, submit: submit(0, memory(2 * PAGE_BYTES)[::2]),
        "contiguous tensor on the cpu, not strides (2,) on cpu",
    ),
    "no memory": odd(
        lambda _, submit: submit(0, torch.empty(PAGE_BYTES, dtype=torch.uint8, device="meta")), " on meta"
    ),
    "an empty file": odd(
        lambda file, _: File(file._queue, "nowhere", 0), "a file of 0 bytes is not whole pages of 4096"
    ),
    "a part of a page": odd(
        lambda file, _: File(file._queue, "nowhere", PAGE_BYTES + 1), "a file of 4,097 bytes is not whole pages of 4096"
    ),
    "no depth": odd(lambda *_: Queue(0), "a queue of depth 0 moves nothing; use 1 or more"),
}


@rows(REFUSED)
def test_what_direct_io_cannot_move_is_refused(row, tmp_path, queue):
    with File(queue, tmp_path / "file", MIB) as file:
        for submit in (file.read, file.write):
            refused(row, file, submit)
        assert (file._native.bytes_read, file._native.bytes_written) == (0, 0)
    assert not Path("nowhere").exists()


def test_buffered_files_are_said_once(tmp_path, queue, caplog, monkeypatch):
    def refuse(descriptor: int, command: int, argument: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("penstock.runtime.aio.fcntl.fcntl", refuse)
    source, into = memory(MIB, seed=3), memory(MIB)
    with caplog.at_level(logging.WARNING, logger="penstock"):
        for name in ("a", "b"):
            with File(queue, tmp_path / name, MIB) as file:
                assert not file.direct
                file.write(0, source).wait()
                file.read(0, into).wait()
                assert torch.equal(source, into)
    assert [record.getMessage() for record in caplog.records] == [
        f"No direct I/O on the file system of {tmp_path / 'a'}: its files go through the page cache."
    ]


def test_checksums_that_the_caller_computes(tmp_path):
    """The queue's threads compute none: a read is checked when the caller says what is there, a write has his."""
    source, into = memory(3 * PAGE_BYTES, seed=1), memory(3 * PAGE_BYTES)
    with Queue(1) as queue, File(queue, tmp_path / "file", MIB) as file:
        write = file.write(0, source, known=checksum(source))
        write.wait()
        assert (write.checksum, write._native.checksum) == (checksum(source), 0)
        read = file.read(0, into, checksum=write.checksum, sums=False, what="param of unit 'head', tile 0")
        read.wait()
        assert read._native.checksum == 0
        read.check(checksum(into))
        wrong = file.read(0, into, checksum=write.checksum ^ 1, what="param of unit 'head', tile 0")
        with pytest.raises(NvmeError) as seen_by_the_queue:
            wrong.wait()
        late = file.read(0, into, checksum=write.checksum ^ 1, sums=False, what="param of unit 'head', tile 0")
        late.wait()
        with pytest.raises(NvmeError) as seen_by_the_caller:
            late.check(checksum(into))
        first, second = seen_by_the_queue.value, seen_by_the_caller.value
        assert str(first) == str(second)
        assert (first.file, first.offset, first.errno) == (second.file, second.offset, second.errno)
        with contextlib.suppress(NvmeError):  # the first one that failed
            file.close()


@examples(20)
@given(cut=st.integers(0, 5000), nbytes=st.integers(0, 5000), seed=st.integers(0, 2**31))
def test_checksums_of_neighbours_are_joined(cut, nbytes, seed):
    tensor = memory(3 * PAGE_BYTES, seed)
    address = tensor.data_ptr()
    parts = _native.crc32c(address, cut), _native.crc32c(address + cut, nbytes)
    assert _native.crc32c_join(*parts, nbytes) == _native.crc32c(address, cut + nbytes)


@pytest.mark.parametrize("way", _native.crc32c_ways())
def test_the_checksum_is_crc32c(way):
    def crc(data: bytes) -> int:
        tensor = torch.frombuffer(bytearray(data or b"?"), dtype=torch.uint8)
        return _native.crc32c_by(way, tensor.data_ptr(), len(data))

    # RFC 3720, B.4, and the check value of the catalogue of CRCs
    assert crc(b"123456789") == 0xE3069283
    assert crc(bytes(32)) == 0x8A9136AA
    assert crc(b"\xff" * 32) == 0x62A8AB43
    assert crc(bytes(range(32))) == 0x46DD794E
    assert crc(bytes(reversed(range(32)))) == 0x113FDB5C
    assert crc(b"") == 0


@examples(20)
@given(nbytes=st.integers(0, 5000), start=st.integers(0, 9), seed=st.integers(0, 2**31))
def test_the_checksum_does_not_depend_on_the_processor(nbytes, start, seed):
    tensor = memory(3 * PAGE_BYTES, seed)
    address = tensor.data_ptr() + start
    found = {way: _native.crc32c_by(way, address, nbytes) for way in _native.crc32c_ways()}
    assert set(found.values()) == {_native.crc32c(address, nbytes)}, found


def test_reads_and_writes_are_served_at_once(tmp_path, queue):
    """A write does not wait until the reads before it are all done, nor a read for writes."""
    with File(queue, tmp_path / "file", 49 * MIB) as file:
        many, one = memory(48 * MIB, seed=1), memory(MIB, seed=2)
        for ahead, behind in ((file.write, file.read), (file.read, file.write)):
            transfers = long, short = ahead(0, many), behind(48 * MIB, one)
            for transfer in transfers:
                transfer.wait()
            assert short.ended < long.ended


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_buffer_outlives_its_transfer_whatever_is_raised(tmp_path, kind):
    """An interrupt at any line: once native code has the address, the memory is there until the queue has ended."""
    submitted = 0

    class Counted:
        """The native queue; an interrupt may come when it has returned, and nobody has what it returned."""

        def __init__(self, native: _native.Queue, raises: bool) -> None:
            self.close, self._native, self._raises = native.close, native, raises

        def submit(self, *arguments: object, **named: object) -> _native.Transfer:
            nonlocal submitted
            submitted += 1
            transfer = self._native.submit(*arguments, **named)
            if self._raises:
                raise KeyboardInterrupt
            return transfer

    for line in range(60):
        submitted = 0
        queue = Queue(1, chunk_bytes=CHUNK_BYTES)
        queue._native = Counted(queue._native, raises=line == 0)  # type: ignore[assignment]
        with File(queue, tmp_path / str(line), CHUNK_BYTES) as file:
            buffer = memory(CHUNK_BYTES)
            held = weakref.ref(buffer)
            with contextlib.suppress(KeyboardInterrupt), interrupt(line) as happened:
                getattr(file, kind)(0, buffer)
            del buffer
            gc.collect()
            assert held() is not None or not submitted, happened.where
            queue.close()
        gc.collect()
        assert held() is None, happened.where
    assert not happened.where, "all lines were met"


@pytest.mark.parametrize(
    ("name", "says", "number"),
    [
        ("missing", "cannot be found (No such file or directory). Create it, or choose another", errno.ENOENT),
        ("file", "is no folder. Remove that file and create a folder, or choose another", errno.ENOTDIR),
        ("circle", "cannot be found (Too many levels of symbolic links). Create it, or choose", errno.ELOOP),
    ],
)
def test_what_is_no_folder(tmp_path, name, says, number):
    (tmp_path / "file").touch()
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(NvmeError) as caught:
        existing_folder(tmp_path / name)
    assert f"The nvme path '{tmp_path / name}' {says}" in str(caught.value)
    assert "Placement(nvme_path=...)" in str(caught.value)
    assert caught.value.errno == number
