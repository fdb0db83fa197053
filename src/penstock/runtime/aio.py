"""Files of the nvme tier: preallocated, read and written past the page cache, asynchronously.

A `Queue` is the threads of one disk, a `File` a file on it, a `Transfer` one read or write in flight. Transfers run in
no particular order: of two that overlap, in a file or in memory, the caller waits for the first before it starts the
second.

Memory that a read fills must be kept from the children of a fork (open(2), O_DIRECT), as that of `Arena` is. Otherwise
the disk may write to the child's copy of a page.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
from collections.abc import Iterable
from os import PathLike
from pathlib import Path

from torch import Tensor

from penstock import _native
from penstock.errors import OPEN_FILES, EngineError, NvmeError
from penstock.runtime.finalizers import at_end
from penstock.runtime.host_memory import PAGE_BYTES

# Transfers are cut into requests of this size. With 1 MiB the system takes twice as much processor time, and a disk
# that reads and writes at the same time is slower (docs/benchmarks.md).
CHUNK_BYTES = 4 << 20

# How long a wait stays in native code at a time. In between, the interpreter handles signals such as Ctrl-C.
SLICE_MS = 100

ADVICE = {
    errno.ENOSPC: "Free space there, or give another nvme_path.",
    errno.EDQUOT: "Free space in your quota, or give another nvme_path.",
    errno.EFBIG: "Raise the limit of file sizes (ulimit -f), or give an nvme_path on another file system.",
    errno.EMFILE: OPEN_FILES,
    errno.ENFILE: OPEN_FILES,
    errno.ENOENT: "Create the folder, or give another nvme_path.",
    errno.ENOTDIR: "Give an nvme_path that is a folder.",
    errno.EACCES: "Make the folder writable, or give another nvme_path.",
    errno.EPERM: "Make the folder writable, or give another nvme_path.",
    errno.EROFS: "Mount it writable, or give another nvme_path.",
    errno.EEXIST: "Give another nvme_path; remove the file if no other run uses it.",
}

ELSEWHERE = "choose another folder with Placement(nvme_path=...)"
DISK_FAILED = "The disk or its driver failed: see the kernel's log (dmesg), and give an nvme_path on another disk."
CHANGED = "Another program wrote to the file, or the disk does not keep what it is given: give another nvme_path."
FILE_ENDED = "Another program truncated the file: nothing else may write to nvme_path."

logger = logging.getLogger("penstock")


class Queue:
    """The threads that serve the files of one disk.

    Submitted transfers are finished before the interpreter exits. In the child of a fork nothing can be submitted, and
    nothing is waited for.

    Arguments:
        depth: the most requests in flight, 1 or more.
        chunk_bytes: the largest request, in bytes: a multiple of 4096.

    Attributes:
        written_bytes: bytes of all writes that were started, those that still run or have failed included.

    Raises:
        ValueError: `depth` is below 1, or `chunk_bytes` is not whole pages.
    """

    def __init__(self, depth: int = 16, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        if depth < 1:
            raise ValueError(f"a queue of depth {depth} moves nothing; use 1 or more")
        self._native = _native.Queue(depth, chunk_bytes)
        self._owner = os.getpid()
        self._said_buffered = False
        self.written_bytes = 0
        self._counting = threading.Lock()  # several streams write
        # Transfers keep their tensors, and are kept here from before native code has the address until they are seen
        # done, whatever is raised meanwhile: memory that is freed is handed out again at once (ordering rule 1). The
        # threads end before this set is dropped, also when the interpreter exits.
        self._pending: set[Transfer] = set()
        self._end_threads = at_end(self, self._native.close)

    def close(self) -> None:
        """Finish all transfers and end the threads. May be called again.

        Raises:
            NvmeError: the first failure of a transfer that was not waited for. The threads have ended all the same.
        """
        try:
            self._wait_for(list(self._pending))  # before the threads end, so that failures are raised
        finally:
            self._end_threads()
            if os.getpid() == self._owner:  # no transfer is running now, not even one that an interrupt has cut off
                self._pending = {transfer for transfer in self._pending if transfer._native is not None}

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hold(self, transfer: Transfer) -> None:
        """Keep a transfer until it is seen done, and drop those that are. Failed ones stay, for `close` to raise."""
        for ended in [other for other in list(self._pending) if other.done() and other._failure() is None]:
            self._pending.discard(ended)
        self._pending.add(transfer)

    def _wait_for(self, transfers: Iterable[Transfer]) -> None:
        """Wait for all of the transfers, then raise the error of the first one that has failed."""
        if os.getpid() != self._owner:
            return  # the threads that would finish them are the parent's
        first: NvmeError | None = None
        for transfer in transfers:
            try:
                if transfer._native is not None:
                    transfer.wait()
            except NvmeError as error:
                first = first or error
        if first is not None:
            raise first


class File:
    """A new file, allocated in full.

    It is read and written by direct I/O where the file system supports it. Otherwise the page cache is used, and the
    log has one warning per queue.

    Arguments:
        queue: the queue of the disk that the file is on.
        path: where to make it. The path must not exist; its folder must.
        size: its size in bytes, a multiple of 4096.
        mode: its permissions, as `os.open` takes them.
        named: keep the file's name. A file without one exists as long as it is open: the system frees its blocks when
            it is closed, and however the process ends.

    Raises:
        NvmeError: the file cannot be made, or there is no room for it; nothing is left behind.
        ValueError: `size` is not whole pages.
    """

    def __init__(
        self, queue: Queue, path: str | PathLike[str], size: int, mode: int = 0o600, *, named: bool = True
    ) -> None:
        if size <= 0 or size % PAGE_BYTES:
            raise ValueError(f"a file of {size:,} bytes is not whole pages of {PAGE_BYTES}; round it up")
        self._adopt(queue, os.fspath(path), size, _create(os.fspath(path), size, mode, named=named))

    @classmethod
    def existing(cls, queue: Queue, path: str | PathLike[str], *, direct: bool = True) -> File:
        """Open an existing file to read it.

        Arguments:
            queue: the queue of the disk that the file is on.
            path: the path of the file.
            direct: read past the page cache, where the file system supports it.

        Raises:
            OSError: it cannot be opened.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        file = cls.__new__(cls)
        file._adopt(queue, os.fspath(path), os.fstat(descriptor).st_size, descriptor, direct=direct)
        return file

    def _adopt(self, queue: Queue, path: str, size: int, descriptor: int, *, direct: bool = True) -> None:
        """Initialize the object for an open file, and own the descriptor."""
        self.path = path
        self.size = size
        self._queue = queue
        self._descriptor = descriptor
        self._native: _native.File | None = _native.File(descriptor)
        self.direct = direct and _set_direct(descriptor)
        if direct and not self.direct and not queue._said_buffered:
            queue._said_buffered = True
            logger.warning("No direct I/O on the file system of %s: its files go through the page cache.", self.path)

    def read(
        self, offset: int, into: Tensor, *, checksum: int | None = None, sums: bool = True, what: str = ""
    ) -> Transfer:
        """Start to read `into.nbytes` bytes at `offset`. They are in `into` after `Transfer.wait`.

        Arguments:
            offset: where they begin in the file, in bytes: a multiple of 4096.
            into: the tensor to fill: contiguous, on the cpu, page-aligned, of whole pages, of any dtype.
            checksum: the checksum that the write of these bytes returned; `None` verifies nothing.
            sums: have the queue's threads compute the checksum of the bytes. Otherwise the caller computes it, and
                passes it to `Transfer.check`.
            what: the name of the bytes in messages: "exp_avg of unit 'layers.3', tile 4".

        Raises:
            ValueError: offset or tensor are not as above, or reach past the end of the file.
            RuntimeError: file or queue are closed, as at the exit of the interpreter, or belong to the process that
                this one was forked from.
        """
        return self._start(offset, into, what, write=False, sums=sums and checksum is not None, known=checksum)

    def write(
        self, offset: int, source: Tensor, *, checksum: bool = True, known: int | None = None, what: str = ""
    ) -> Transfer:
        """Start to write `source` at `offset`. It must not change before `Transfer.wait` returns.

        Arguments:
            offset: where they go in the file, in bytes: a multiple of 4096.
            source: the tensor to write: contiguous, on the cpu, page-aligned, of whole pages, of any dtype.
            checksum: compute the checksum that `Transfer.checksum` returns.
            known: the checksum, where the caller has computed it. None is computed then.
            what: the name of the bytes in messages.

        Raises:
            ValueError, RuntimeError: as `read`.
        """
        return self._start(offset, source, what, write=True, sums=checksum and known is None, known=known)

    def sync(self) -> None:
        """Block until everything that was written is on the disk.

        Raises:
            OSError: a part of it could not be written.
        """
        assert self._native is not None
        os.fsync(self._descriptor)

    @property
    def closed(self) -> bool:
        """True if the file was closed."""
        return self._native is None

    def lock(self) -> None:
        """Hold the lock of the file as long as it is open. Do nothing on a file system without locks."""
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Finish the file's transfers and close its descriptor. The file stays. May be called again.

        Raises:
            NvmeError: a transfer that was not waited for has failed; the first one. The file is closed all the same.
        """
        try:
            # Transfers keep the descriptor open by themselves. This wait raises their errors.
            self._queue._wait_for([transfer for transfer in list(self._queue._pending) if transfer.file is self])
        finally:
            self._native = None

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, offset: int, memory: Tensor, what: str, *, write: bool, sums: bool, known: int | None) -> Transfer:
        """Validate a transfer, because native code trusts address and length, and start it."""
        if self._native is None:
            raise RuntimeError(f"{self.path} is closed")
        if memory.device.type != "cpu" or not memory.is_contiguous():
            raise ValueError(
                f"a transfer takes a contiguous tensor on the cpu, not strides {memory.stride()} on {memory.device}"
            )
        address, nbytes = memory.data_ptr(), memory.nbytes
        if offset % PAGE_BYTES or address % PAGE_BYTES or nbytes % PAGE_BYTES:
            raise ValueError(
                f"direct I/O takes multiples of {PAGE_BYTES}, not {nbytes:,} bytes at address {address:#x} for offset "
                f"{offset:,}; pad and align the tensor"
            )
        if offset < 0 or offset + nbytes > self.size:
            raise ValueError(f"{nbytes:,} bytes at offset {offset:,} are outside {self.path} of {self.size:,} bytes")
        transfer = Transfer(self, offset, memory, what, write=write, sums=sums, known=known)
        self._queue._hold(transfer)
        try:
            transfer._native = self._queue._native.submit(
                self._native, write=write, offset=offset, memory=address, nbytes=nbytes, checksum=sums
            )
        except RuntimeError as error:
            self._queue._pending.discard(transfer)
            raise EngineError(f"{self.path} takes no transfer: {error}.") from error
        if write:
            with self._queue._counting:
                self._queue.written_bytes += nbytes
        return transfer


class Transfer:
    """A read or a write in flight. It keeps its tensor alive until it is done.

    A transfer that is not waited for is finished all the same. If it has failed, closing its file or queue raises that.

    Arguments:
        file: the file that it reads or writes.
        offset: the offset in the file, in bytes.
        memory: the tensor that it fills or writes.
        what: the name of the bytes in messages.
        write: True for a write.
        sums: True if native code computes the checksum of the bytes.
        known: the checksum that a read must find, or that the caller has computed for a write.
    """

    def __init__(
        self,
        file: File,
        offset: int,
        memory: Tensor,
        what: str,
        *,
        write: bool,
        sums: bool,
        known: int | None,
    ) -> None:
        self.file, self.offset, self.nbytes, self.what = file, offset, memory.nbytes, what
        self._write, self._sums, self._known = write, sums, known
        self._memory: Tensor | None = memory
        # The transfer of native code. `None` until it is submitted, and for good where an interrupt came right after
        # that: its memory is then kept until the queue is closed.
        self._native: _native.Transfer | None = None

    def done(self) -> bool:
        """Return True if the transfer has ended, with an error or without: `wait` does not block then."""
        return self._native is not None and self._native.done

    def wait(self) -> None:
        """Block until the transfer is done. Other threads run, and signals are handled. May be called again.

        Raises:
            NvmeError: the transfer failed, or the bytes are not those that were written.
            RuntimeError: it was in flight when this process was forked.
        """
        assert self._native is not None
        while not self._native.wait(SLICE_MS):
            pass
        # A thread of the queue reads or writes this memory until here (ordering rule 1).
        self._memory = None
        self.file._queue._pending.discard(self)
        failure = self._failure()
        if failure is not None:
            raise failure

    def check(self, found: int) -> None:
        """Verify the bytes that were read by a checksum that the caller has computed, after `wait`.

        Raises:
            NvmeError: the bytes are not those that were written.
        """
        if self._known is not None and found != self._known:
            raise self._mismatch(found, self._known)

    @property
    def checksum(self) -> int:
        """The CRC-32C of all bytes, after `wait`; 0 where none was asked for."""
        assert self._native is not None
        return self._known if self._write and self._known is not None else self._native.checksum

    @property
    def ended(self) -> float:
        """The time at which the transfer ended, in seconds of `time.monotonic`, once done."""
        assert self._native is not None
        return self._native.ended

    def _failure(self) -> NvmeError | None:
        """Return the error of a transfer that is done; `None` if it has none."""
        assert self._native is not None
        error, offset = self._native.error, self._native.error_offset
        if error == _native.END_OF_FILE:
            return self._failed(None, offset, "the file ends there", FILE_ENDED)
        if error:
            return self._failed(error, offset, os.strerror(error), ADVICE.get(error, DISK_FAILED))
        if self._sums and self._known is not None and self._native.checksum != self._known:
            return self._mismatch(self._native.checksum, self._known)
        return None

    def _mismatch(self, found: int, known: int) -> NvmeError:
        """Return the error of bytes that are not those that were written."""
        reason = f"the checksum is {found:#010x}, not {known:#010x}"
        return self._failed(errno.EBADMSG, self.offset, reason, CHANGED)

    def _failed(self, error: int | None, offset: int, reason: str, advice: str) -> NvmeError:
        """Return an error with the bytes, the offset that failed, the reason, and the next action."""
        verb = "Writing" if self._write else "Reading"
        what = f"{self.what}, " if self.what else ""
        return NvmeError(
            f"{verb} {what}{self.nbytes:,} bytes at offset {self.offset:,} of {self.file.path} failed at offset "
            f"{offset:,}: {reason}. {advice}",
            file=self.file.path,
            offset=offset,
            errno=error,
        )


def checksum(memory: Tensor) -> int:
    """Return the CRC-32C of the bytes of a contiguous tensor on the cpu, of any dtype, as a write computes it."""
    assert memory.device.type == "cpu"
    assert memory.is_contiguous()
    return _native.crc32c(memory.data_ptr(), memory.nbytes)


def _create(path: str, size: int, mode: int, *, named: bool) -> int:
    """Make a file with all its blocks allocated, and return its descriptor. A failure leaves nothing behind."""
    descriptor = None
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        if not named:
            os.unlink(path)  # before it has blocks: a process that is killed here leaves none behind
        # All blocks now: a full disk is found here, and not by a write in the middle of a step.
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if descriptor is not None:  # made, but without room
            os.close(descriptor)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        raise NvmeError(
            f"Cannot make a file of {size:,} bytes at {path}: {error.strerror}. "
            f"{ADVICE.get(error.errno or 0, DISK_FAILED)}",
            file=path,
            errno=error.errno,
        ) from error
    return descriptor


def _set_direct(descriptor: int) -> bool:
    """Switch an open file to direct I/O. Return True if the file system supports it.

    A file system that refuses direct I/O when a file is made leaves the file behind.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_DIRECT)
    except OSError:
        return False
    return True


def existing_folder(parent: str | PathLike[str]) -> Path:
    """Return the path of a folder without symlinks.

    Raises:
        NvmeError: there is no such folder.
    """
    try:
        folder = Path(os.path.realpath(parent, strict=True))
    except OSError as error:
        text = f"The nvme path {os.fspath(parent)!r} cannot be found ({error.strerror}). Create it, or {ELSEWHERE}."
        raise NvmeError(text, file=os.fspath(parent), errno=error.errno) from error
    if not folder.is_dir():
        text = f"The nvme path {str(folder)!r} is no folder. Remove that file and create a folder, or {ELSEWHERE}."
        raise NvmeError(text, file=str(folder), errno=errno.ENOTDIR)
    return folder


def free_disk_bytes(folder: str | PathLike[str]) -> int:
    """Return the bytes that this user can still write on a folder's file system.

    Raises:
        OSError: there is no such folder, or it cannot be looked at.
    """
    system = os.statvfs(folder)
    return system.f_bavail * system.f_frsize


def check_space(folder: Path, nbytes: int) -> None:
    """Check that a file system has room for files of some bytes together.

    Raises:
        NvmeError: it has too little free space (`errno.ENOSPC`).
    """
    free_bytes = free_disk_bytes(folder)
    if nbytes > free_bytes:
        text = (
            f"The nvme tier needs {nbytes:,} bytes, and {str(folder)!r} has {free_bytes:,} bytes free. Free "
            f"{nbytes - free_bytes:,} bytes, keep less on the nvme tier, or {ELSEWHERE}."
        )
        raise NvmeError(text, file=str(folder), errno=errno.ENOSPC)
