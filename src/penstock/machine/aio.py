"""Files of the nvme tier: preallocated, read and written past the page cache, asynchronously.

A `Queue` is the threads of one disk, a `File` a file on it, a `Transfer` one read or write in flight. Transfers that
overlap, in a file or in memory, are for the caller to keep in order: wait for the first before the second.

A process that forks while a read is in flight needs memory that is kept from the child (open(2), O_DIRECT), as that of
`machine.arena` is.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Iterable
from os import PathLike

from torch import Tensor

from penstock import _native
from penstock.errors import EngineError, NvmeError
from penstock.machine.arena import PAGE_BYTES
from penstock.machine.lifetime import at_end

# Transfers are cut into requests of this size.
CHUNK_BYTES = 1 << 20

# How long a wait stays away from the interpreter, which handles signals in between.
SLICE_MS = 100

ADVICE = {
    errno.ENOSPC: "Free space there, or give another nvme_path.",
    errno.EDQUOT: "Free space in your quota, or give another nvme_path.",
    errno.EFBIG: "Raise the limit of file sizes (ulimit -f), or give an nvme_path on another file system.",
    errno.EMFILE: "Raise the limit of open files (ulimit -n).",
    errno.ENOENT: "Create the folder, or give another nvme_path.",
    errno.ENOTDIR: "Give an nvme_path that is a folder.",
    errno.EACCES: "Make the folder writable, or give another nvme_path.",
    errno.EPERM: "Make the folder writable, or give another nvme_path.",
    errno.EROFS: "Mount it writable, or give another nvme_path.",
    errno.EEXIST: "Give another nvme_path; remove the file if no other run uses it.",
}
# copy_file_range: other file systems, or one that has no such thing.
_NO_COPY = (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EPERM)

DISK_FAILED = "The disk or its driver failed: see the kernel's log (dmesg), and give an nvme_path on another disk."
CHANGED = "Another program wrote to the file, or the disk does not keep what it is given: give another nvme_path."
FILE_ENDED = "Another program truncated the file: nothing else may write to nvme_path."

logger = logging.getLogger("penstock")


class Queue:
    """The threads that serve the files of one disk, with up to `depth` requests in flight.

    What was submitted is finished before the interpreter exits. A forked child can submit nothing and waits for
    nothing.
    """

    def __init__(self, depth: int = 8) -> None:
        if depth < 1:
            raise ValueError(f"a queue of depth {depth} moves nothing; use 1 or more")
        self._native = _native.Queue(depth, CHUNK_BYTES)
        self._owner = os.getpid()
        self._said_buffered = False
        # Nothing frees a tensor that a thread still writes to: transfers stay here until they are seen done, and the
        # threads end before this set does, also when the interpreter exits.
        self._pending: set[Transfer] = set()
        self._end_threads = at_end(self, self._native.close)

    @property
    def depth(self) -> int:
        """Requests in flight at most."""
        return self._native.depth

    def close(self) -> None:
        """Finish all transfers and end the threads. May be called again.

        Raises:
            NvmeError: the first failure of a transfer that nobody waited for. The threads have ended all the same.
        """
        try:
            self._wait_for(list(self._pending))
        finally:
            self._end_threads()

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hold(self, transfer: Transfer) -> Transfer:
        for ended in [other for other in list(self._pending) if other.done() and other._failure() is None]:
            self._pending.discard(ended)
        self._pending.add(transfer)
        return transfer

    def _wait_for(self, transfers: Iterable[Transfer]) -> None:
        if os.getpid() != self._owner:
            return
        first: NvmeError | None = None
        for transfer in transfers:
            try:
                transfer.wait()
            except NvmeError as error:
                first = first or error
        if first is not None:
            raise first


class File:
    """A new file of `size` bytes, allocated in full, that only this user may read unless `mode` says more.

    Direct I/O where the file system takes it. Where it does not, the page cache is used, and the log says so once per
    queue.

    Args:
        queue: of the disk that the file is on.
        path: must not exist; its folder must.
        size: bytes, a multiple of 4096.
        mode: of the file, as `os.open` takes it.

    Raises:
        NvmeError: the file cannot be made, or there is no room for it; nothing is left behind.
        ValueError: `size` is not whole pages.
    """

    def __init__(self, queue: Queue, path: str | PathLike[str], size: int, mode: int = 0o600) -> None:
        if size <= 0 or size % PAGE_BYTES:
            raise ValueError(f"a file of {size:,} bytes is not whole pages of {PAGE_BYTES}; round it up")
        self._adopt(queue, os.fspath(path), size, _create(os.fspath(path), size, mode), writable=True)

    @classmethod
    def existing(cls, queue: Queue, path: str | PathLike[str]) -> File:
        """A file that is there already, to be read.

        Raises:
            OSError: it cannot be opened.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        file = cls.__new__(cls)
        file._adopt(queue, os.fspath(path), os.fstat(descriptor).st_size, descriptor, writable=False)
        return file

    def _adopt(self, queue: Queue, path: str, size: int, descriptor: int, *, writable: bool) -> None:
        self.path = path
        self.size = size
        self._queue = queue
        self._writable = writable
        self._descriptor = descriptor
        self._plain: int | None = None
        self._native: _native.File | None = _native.File(descriptor)
        self._moved_bytes = (0, 0)  # once closed
        self.direct = _set_direct(descriptor)
        if not self.direct and not queue._said_buffered:
            queue._said_buffered = True
            logger.warning("No direct I/O on the file system of %s: its files go through the page cache.", self.path)

    @property
    def bytes_read(self) -> int:
        """Bytes that reads have moved, failed ones included."""
        return self._native.bytes_read if self._native is not None else self._moved_bytes[0]

    @property
    def bytes_written(self) -> int:
        """Bytes that writes have moved, failed ones included."""
        return self._native.bytes_written if self._native is not None else self._moved_bytes[1]

    def read(self, offset: int, into: Tensor, *, checksum: int | None = None, what: str = "") -> Transfer:
        """Start to read `into.nbytes` bytes at `offset`. They are in `into` once the transfer was waited for.

        Args:
            offset: bytes, a multiple of 4096.
            into: contiguous, on the cpu, page-aligned, of whole pages.
            checksum: as the write of these bytes gave it; `None` checks nothing.
            what: the bytes' name in messages: "exp_avg of unit 'layers.3', tile 4".

        Raises:
            ValueError: offset or tensor are not as above, or reach past the end of the file.
            RuntimeError: file or queue are closed (as the interpreter's exit does), or belong to the process that this
                one was forked from.
        """
        native = self._submit(offset, into, write=False, checksum=checksum is not None)
        return self._queue._hold(Transfer(native, self, offset, into, what, write=False, expected=checksum))

    def write(self, offset: int, source: Tensor, *, checksum: bool = True, what: str = "") -> Transfer:
        """Start to write `source` at `offset`. It must not change until the transfer was waited for.

        Args:
            offset: bytes, a multiple of 4096.
            source: contiguous, on the cpu, page-aligned, of whole pages.
            checksum: compute one, which `Transfer.checksum` returns.
            what: the bytes' name in messages.

        Raises:
            ValueError, RuntimeError: as `read`.
        """
        native = self._submit(offset, source, write=True, checksum=checksum)
        return self._queue._hold(Transfer(native, self, offset, source, what, write=True, expected=None))

    def copy_from(self, source: File, source_offset: int, offset: int, nbytes: int) -> bool:
        """Copy bytes of another file inside the kernel, which shares the blocks where the file system can.

        Returns:
            Whether it was done. `False`: these files cannot be copied so, and nothing says what is there now.
        """
        try:
            while nbytes:
                descriptors = source._plain_descriptor(), self._plain_descriptor()
                moved = os.copy_file_range(*descriptors, nbytes, source_offset, offset)
                if moved == 0:
                    return False
                source_offset, offset, nbytes = source_offset + moved, offset + moved, nbytes - moved
        except OSError as error:
            if error.errno in _NO_COPY:
                return False
            raise
        return True

    def _plain_descriptor(self) -> int:
        """One through which the kernel copies: direct I/O would refuse it."""
        if self._plain is None:
            flags = (os.O_RDWR if self._writable else os.O_RDONLY) | os.O_CLOEXEC
            try:
                self._plain = os.open(f"/proc/self/fd/{self._descriptor}", flags)  # also where the path is gone
            except OSError:
                self._plain = os.open(self.path, flags)
        return self._plain

    def is_on_disk_of(self, path: str | PathLike[str]) -> bool:
        """Whether it is on the file system that a path is on. Its own path may be gone."""
        assert self._native is not None
        return os.fstat(self._descriptor).st_dev == os.stat(path).st_dev

    def remove(self) -> None:
        """Take its name away, if that is still its own; it goes when it is closed."""
        assert self._native is not None
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._descriptor), os.lstat(self.path)):
                os.unlink(self.path)

    def sync(self) -> None:
        """Have everything that was written on the disk.

        Raises:
            OSError: some of it is not.
        """
        assert self._native is not None
        os.fsync(self._descriptor)

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._native is None

    def lock(self) -> None:
        """Hold the file, as long as it is open, against others that ask for its lock, where there are locks."""
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Finish the file's transfers and close its descriptor. The file stays. May be called again.

        Raises:
            NvmeError: the first failure of a transfer that nobody waited for. The file is closed all the same.
        """
        try:
            self._queue._wait_for([transfer for transfer in list(self._queue._pending) if transfer.file is self])
        finally:
            self._moved_bytes = (self.bytes_read, self.bytes_written)
            self._native = None
            if self._plain is not None:
                os.close(self._plain)
                self._plain = None

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, offset: int, memory: Tensor, *, write: bool, checksum: bool) -> _native.Transfer:
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
        try:
            return self._queue._native.submit(
                self._native, write=write, offset=offset, memory=address, nbytes=nbytes, checksum=checksum
            )
        except RuntimeError as error:
            raise EngineError(f"{self.path} takes no transfer: {error}.") from error


class Transfer:
    """A read or a write in flight. Its tensor lives until it is done.

    One that nobody waits for is finished all the same, and if it failed, closing its file or queue says so.
    """

    def __init__(
        self,
        native: _native.Transfer,
        file: File,
        offset: int,
        memory: Tensor,
        what: str,
        *,
        write: bool,
        expected: int | None,
    ) -> None:
        self.file, self.offset, self.nbytes, self.what = file, offset, memory.nbytes, what
        self._native, self._write, self._expected = native, write, expected
        self._memory: Tensor | None = memory

    def done(self) -> bool:
        """Whether it ended, well or not: `wait` returns or raises at once."""
        return self._native.done

    def wait(self) -> None:
        """Block until done; other Python threads run, and signals are handled. May be called again.

        Raises:
            NvmeError: the transfer failed, or the bytes are not those that were written.
            RuntimeError: it was in flight when this process was forked.
        """
        while not self._native.wait(SLICE_MS):
            pass
        self._memory = None
        self.file._queue._pending.discard(self)
        failure = self._failure()
        if failure is not None:
            raise failure

    @property
    def checksum(self) -> int:
        """CRC-32C of all bytes, once waited for; 0 where none was asked for."""
        return self._native.checksum

    @property
    def ended(self) -> float:
        """When it ended, in seconds of `time.monotonic`, once done."""
        return self._native.ended

    def _failure(self) -> NvmeError | None:
        """Of a transfer that is done."""
        error = self._native.error
        offset = self._native.error_offset
        if error == 0:
            if self._expected is None or self._native.checksum == self._expected:
                return None
            error, offset = errno.EBADMSG, self.offset
            reason = f"the checksum is {self._native.checksum:#010x}, not {self._expected:#010x}"
            advice = CHANGED
        elif error == _native.END_OF_FILE:
            reason, advice = "the file ends there", FILE_ENDED
        else:
            reason, advice = os.strerror(error), ADVICE.get(error, DISK_FAILED)
        verb = "Writing" if self._write else "Reading"
        what = f"{self.what}, " if self.what else ""
        return NvmeError(
            f"{verb} {what}{self.nbytes:,} bytes at offset {self.offset:,} of {self.file.path} failed at offset "
            f"{offset:,}: {reason}. {advice}",
            file=self.file.path,
            offset=offset,
            errno=None if error == _native.END_OF_FILE else error,
        )


def checksum(memory: Tensor) -> int:
    """CRC-32C of a contiguous tensor's bytes, as a write of it returns."""
    assert memory.device.type == "cpu"
    assert memory.is_contiguous()
    return _native.crc32c(memory.data_ptr(), memory.nbytes)


def _create(path: str, size: int, mode: int) -> int:
    """Descriptor of a new file with all its blocks allocated."""
    descriptor = None
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if descriptor is not None:
            os.close(descriptor)
            os.unlink(path)
        raise NvmeError(
            f"Cannot make a file of {size:,} bytes at {path}: {error.strerror}. "
            f"{ADVICE.get(error.errno or 0, DISK_FAILED)}",
            file=path,
            errno=error.errno,
        ) from error
    return descriptor


def _set_direct(descriptor: int) -> bool:
    """Switch to direct I/O; whether the file system takes it. Asked for at creation, a refusal would leave the file."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_DIRECT)
    except OSError:
        return False
    return True
