"""Reading tensors of files ahead, in the order of their use, past the page cache.

    span of a tensor  |     [////////////////////////////]      |  in a file
    requests          |   |-------------|-------------|-------|   whole pages, each in a slot of the ring

Each slot of the ring has a request in flight. Elements that are asked for in another order, and tensors whose elements
lie across pages, are read without the ring.
"""

import contextlib
import json
import os
import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.checkpoint.tensorfiles import StoredTensors, WeightFiles
from penstock.errors import CheckpointError, NvmeError
from penstock.layout import round_up
from penstock.runtime.aio import CHUNK_BYTES, File, Queue, Transfer
from penstock.runtime.host_memory import PAGE_BYTES, page_aligned

SLOTS = 8
_LENGTH_BYTES = 8
_ENDED = "it ends before its tensors do"
_PROBES = 3  # places of a file that are looked for in the page cache


class ReadSpan(NamedTuple):
    """Elements of a tensor that will be read, counted as if it were flat."""

    name: str
    start: int
    stop: int


@dataclass
class _FilePlace:
    """The file of a tensor, and its first byte there."""

    files: WeightFiles
    path: Path
    offset: int


@dataclass
class _Request:
    """Pages of a file from byte `first` on, in which bytes `begin` to `end` of the file are wanted."""

    place: _FilePlace
    first: int
    begin: int
    end: int
    slot: Tensor
    transfer: Transfer | None


class ReadAhead:
    """Read tensors of files before they are asked for.

    Arguments:
        tensors: the tensors. Those that are not stored as they are in files are not read ahead.
        spans: the elements that will be asked for, in order.
        most_bytes: the most memory of the ring.
    """

    def __init__(self, tensors: StoredTensors, spans: Sequence[ReadSpan], most_bytes: int) -> None:
        self._tensors = tensors
        self._dtypes = {name: dtype for name, (_, dtype) in tensors.forms().items()}
        self._places = self._find(spans)
        slot_bytes = max(PAGE_BYTES, min(CHUNK_BYTES, most_bytes // SLOTS // PAGE_BYTES * PAGE_BYTES))
        self._queue = Queue(SLOTS)
        self._opened: dict[Path, File] = {}
        self._wanted = self._cut(spans, slot_bytes)
        self._flying: deque[_Request] = deque()
        ring = page_aligned(slot_bytes * SLOTS)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for number in range(SLOTS):
                self._submit(ring[number * slot_bytes :][:slot_bytes])
            undo.pop_all()

    def pieces(self, name: str, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield elements `start` to `stop`, piece by piece: its first element, and the values.

        A piece is valid until the next one is asked for.

        Raises:
            CheckpointError: a file cannot be read.
        """
        place, dtype = self._places.get(name), self._dtypes[name]
        while start < stop:
            request = self._flying[0] if self._flying else None
            begin = -1 if place is None else place.offset + start * dtype.itemsize
            if request is None or request.place is not place or not request.begin <= begin < request.end:
                yield start, self._tensors.read(name, start, stop)
                return
            self._wait(request)
            end = min(request.end, begin + (stop - start) * dtype.itemsize)
            yield start, request.slot[begin - request.first : end - request.first].view(dtype)
            request.place.files.read_bytes += end - begin
            start += (end - begin) // dtype.itemsize
            if end == request.end:
                self._flying.popleft()
                self._submit(request.slot)

    def close(self) -> None:
        """End the reads that are under way, and close the files."""
        with contextlib.suppress(NvmeError):  # of reads that were not asked for
            self._queue.close()
        self._close(list(self._opened))
        self._flying.clear()

    def _find(self, spans: Sequence[ReadSpan]) -> dict[str, _FilePlace]:
        """Find the first bytes of tensors in files, of those that are aligned to their elements."""
        headers: dict[Path, dict[str, int]] = {}
        places = {}
        for name in dict.fromkeys(span.name for span in spans):
            origin = self._tensors.origin(name)
            if origin is None:
                continue
            files, stored = origin
            path = files.entries[stored].file
            if path not in headers:
                headers[path] = _offsets(path)
            offset = headers[path].get(stored)
            if offset is not None and offset % self._dtypes[name].itemsize == 0:
                places[name] = _FilePlace(files, path, offset)
        return places

    def _cut(self, spans: Sequence[ReadSpan], slot_bytes: int) -> Iterator[tuple[_FilePlace, int, int, int]]:
        """Cut spans into requests that fit a slot: location, first page, and range of bytes."""
        for name, start, stop in spans:
            place, itemsize = self._places.get(name), self._dtypes[name].itemsize
            if place is None:
                continue
            begin, end = place.offset + start * itemsize, place.offset + stop * itemsize
            # Direct I/O reads whole pages. The bytes behind a file's last whole page are read by themselves.
            whole = self._open(place.path).size // PAGE_BYTES * PAGE_BYTES
            while begin < end:
                first = begin // PAGE_BYTES * PAGE_BYTES
                stop = min(end, first + slot_bytes, whole if begin < whole else end)
                yield place, first, begin, stop
                begin = stop

    def _submit(self, slot: Tensor) -> None:
        """Start the next read, into a slot."""
        found = next(self._wanted, None)
        if found is not None:
            place, first, begin, end = found
            file, pages = self._open(place.path), slot[: round_up(end - first, PAGE_BYTES)]
            transfer = file.read(first, pages) if first + pages.nbytes <= file.size else None
            if transfer is None:
                _read_end(place.path, first, slot[: end - first])
            self._flying.append(_Request(place, first, begin, end, slot, transfer))

    def _open(self, path: Path) -> File:
        if path not in self._opened:
            self._close(self._opened.keys() - {request.place.path for request in self._flying})
            try:
                self._opened[path] = File.existing(self._queue, path, direct=not _is_cached(path))
            except OSError as error:
                raise _unread(path, error.strerror) from error
        return self._opened[path]

    def _close(self, paths: Iterable[Path]) -> None:
        """Close files: a model may have more of them than a process may have open."""
        for path in paths:
            with contextlib.suppress(NvmeError):
                self._opened.pop(path).close()

    def _wait(self, request: _Request) -> None:
        if request.transfer is None:
            return
        path = request.place.path
        try:
            request.transfer.wait()  # site read_ahead.over
        except NvmeError as error:
            raise _unread(path, _ENDED if error.errno is None else os.strerror(error.errno)) from error


def _offsets(path: Path) -> dict[str, int]:
    """Read the first byte of each tensor from a header; nothing if the header is unusual."""
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = json.loads(file.read(header_bytes))
        first = _LENGTH_BYTES + header_bytes
        return {name: first + about["data_offsets"][0] for name, about in header.items() if name != "__metadata__"}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _read_end(path: Path, first: int, into: Tensor) -> None:
    """Read the bytes behind the last whole page of a file, and wait for them."""
    try:
        with path.open("rb") as file:
            data = bytearray(os.pread(file.fileno(), into.nbytes, first))
    except OSError as error:
        raise _unread(path, error.strerror) from error
    if len(data) < into.nbytes:
        raise _unread(path, _ENDED)
    into.copy_(torch.frombuffer(data, dtype=torch.uint8))


def _unread(path: Path, reason: str | None) -> CheckpointError:
    return CheckpointError(f"Reading {path} failed: {reason}.", file=str(path))


def _is_cached(path: Path) -> bool:
    """Return True if the page cache seems to have a file, which is faster than the disk then."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # a probe brings in one page, and no more
        # At random offsets: at fixed ones a file would seem cached because of earlier probes or its header.
        size, places = os.fstat(descriptor).st_size, random.Random()
        page = [bytearray(1)]
        return all(os.preadv(descriptor, page, places.randrange(size), os.RWF_NOWAIT) for _ in range(_PROBES))
    except (OSError, ValueError):  # no such file, no support by the file system, or an empty file
        return False
    finally:
        os.close(descriptor)
