"""The nvme tier: preallocated files, in which sections keep their tiles as records."""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from penstock.config import Tier
from penstock.errors import ConfigError
from penstock.runtime.aio import File, Queue, Transfer
from penstock.runtime.swap import SwapFolder
from penstock.tiers.storage import RecordPlace, Records, Segment, SegmentPlan, SummedRecord, record_sizes
from penstock.tiers.tier import Slab, TierMemory


class FileRecords(Records):
    """Records in files.

    Arguments:
        places: where each tile's record lies.
        checksums: verify what is read.
    """

    def __init__(self, plan: SegmentPlan, places: Sequence[RecordPlace], *, checksums: bool) -> None:
        super().__init__(plan, [place.nbytes for place in places])
        self._places = places
        self._checksums = checksums
        self._transfers: list[Transfer | None] = [None] * len(places)  # the last write of each

    def load(self, number: int, into: Tensor) -> Transfer | None:
        """Start to read a tile's record. One that was never written is zeros, at once."""
        return self._read(number, into, sums=self._checksums)

    def _read(self, number: int, into: Tensor, *, sums: bool) -> Transfer | None:
        place, last = self._places[number], self._transfers[number]
        if last is None:
            into[: place.nbytes].zero_()
            return None
        expected = last.checksum if self._checksums else None
        return place.file.read(place.offset, into[: place.nbytes], checksum=expected, sums=sums, what=self.name(number))

    def store(self, number: int, source: Tensor) -> Transfer:
        """Start to write a tile's record."""
        return self._write(number, source)

    def _write(self, number: int, source: Tensor, known: int | None = None) -> Transfer:
        place = self._places[number]
        transfer = place.file.write(
            place.offset, source[: place.nbytes], checksum=self._checksums, known=known, what=self.name(number)
        )
        self._transfers[number] = transfer
        return transfer

    def summed(self, number: int, buffer: Tensor) -> SummedRecord | None:
        """Have an update sum a tile's record; see `Records.summed`."""
        if not self._checksums:
            return None
        return SummedRecord(buffer, partial(self._read, number, sums=False), partial(self._write, number))

    def cut(self, tile: int, start: int, plan: SegmentPlan) -> "FileRecords":
        """Make a section with records of its own from a byte of a tile's record on; this one keeps nothing there."""
        places, place = [], self._places[tile]
        for nbytes in record_sizes(plan):
            places.append(RecordPlace(place.file, place.offset + start, nbytes))
            start += nbytes
        return FileRecords(plan, places, checksums=self._checksums)


class Striping:
    """Lays records out over the files: each goes to the one that is filled least.

    Arguments:
        files: how many.

    Attributes:
        used: bytes laid out in each.
    """

    def __init__(self, files: int) -> None:
        self.used = [0] * files

    def place(self, sizes: Sequence[int]) -> list[tuple[int, int, int]]:
        """Lay records of these bytes out; returns the file, offset and bytes of each."""
        places = []
        for nbytes in sizes:
            file = min(range(len(self.used)), key=self.used.__getitem__)
            places.append((file, self.used[file], nbytes))
            self.used[file] += nbytes
        return places


def stripe(wanted: Mapping[str, Sequence[SegmentPlan]], folders: int) -> dict[str, Striping]:
    """Lay the records of sections out over folders, home by home."""
    planned = {home: Striping(folders) for home in wanted}
    for home, plans in wanted.items():
        for plan in plans:
            planned[home].place(record_sizes(plan))
    return planned


def bytes_by_folder(planned: Mapping[str, Striping], folders: int) -> list[int]:
    """Count the bytes that go to each folder, of all homes."""
    return [sum(striping.used[number] for striping in planned.values()) for number in range(folders)]


class NvmeTier(TierMemory):
    """Files on one disk or several: one in each folder for each home.

    The folders are this run's own, locked; they are there while there are files, and gone at close and when the process
    ends (`runtime/swap.py`).

    Arguments:
        parents: existing folders, one for each disk.
        queue_depth: requests in flight per folder.
        checksums: verify what is read.
    """

    name = Tier.NVME

    def __init__(self, parents: Sequence[str | os.PathLike[str]], *, queue_depth: int, checksums: bool) -> None:
        self._parents = tuple(parents)
        self._queue_depth = queue_depth
        self._checksums = checksums
        self._folders: list[SwapFolder] = []
        self._queues: list[Queue] = []
        self._slabs: list[FileSlab] = []
        self._made = 0

    def reserve(self, wanted: Mapping[str, Sequence[SegmentPlan]], *, pin: bool = True) -> dict[str, Slab]:
        """Make a file for each home in each folder, allocated in full."""
        del pin
        if not self._parents:
            raise ConfigError(
                "The nvme tier has no folder for its files. Name one on a fast disk: Placement(nvme_path=...)."
            )
        slabs: dict[str, Slab] = {}
        planned = stripe(wanted, len(self._parents))
        needed = bytes_by_folder(planned, len(self._parents))
        try:
            self._open_folders(needed)
            for home, striping in planned.items():
                slabs[home] = self._make_slab(home, striping.used)
        except BaseException:
            for slab in slabs.values():
                slab.close()
            self._close_folders()
            raise
        return slabs

    def _open_folders(self, needed: Sequence[int]) -> None:
        """Make folders, with room for these bytes, where there are none yet."""
        for parent, nbytes in list(zip(self._parents, needed, strict=True))[len(self._folders) :]:
            if nbytes == 0:
                break  # more folders than records: the first ones were filled
            self._folders.append(SwapFolder(parent, nbytes))
            self._queues.append(Queue(self._queue_depth))

    def _make_slab(self, home: str, sizes: Sequence[int]) -> "FileSlab":
        self._made += 1
        for folder in self._folders:
            folder.check()
        files: list[File] = []
        with contextlib.ExitStack() as undo:
            for folder, queue, nbytes in zip(self._folders, self._queues, sizes, strict=False):
                if nbytes:
                    files.append(File(queue, Path(folder.path, f"{home}.{self._made}"), nbytes))
                    undo.callback(files[-1].close)
            undo.pop_all()
        slab = FileSlab(files, checksums=self._checksums, closed=self._closed)
        self._slabs.append(slab)
        return slab

    def _closed(self, slab: "FileSlab") -> None:
        if slab in self._slabs:
            self._slabs.remove(slab)
            self._close_folders()

    def _close_folders(self) -> None:
        if not self._slabs:
            folders, queues, self._folders, self._queues = self._folders, self._queues, [], []
            with contextlib.ExitStack() as closing:  # the last one first, each whatever the others raise
                for parts in (folders, queues):
                    for part in parts:
                        closing.callback(part.close)

    def close(self) -> None:
        """Finish what is under way, and remove files and folders.

        Raises:
            NvmeError: the failure of a transfer that nobody waited for. Everything is removed all the same.
        """
        with contextlib.ExitStack() as closing:
            closing.callback(self._close_folders)
            for slab in list(self._slabs):
                closing.callback(slab.close)


class FileSlab(Slab):
    """One preallocated file in each folder, for the sections of one home of every unit."""

    def __init__(self, files: Sequence[File], *, checksums: bool, closed: Callable[["FileSlab"], None]) -> None:
        self._files = files
        self._striping = Striping(len(files))
        self._checksums = checksums
        self._report_closed = closed
        self._owner = os.getpid()

    def make(self, plan: SegmentPlan, *, unset: bool = False) -> Segment:
        """Make the next of the planned sections."""
        del unset
        places = [RecordPlace(self._files[file], *place) for file, *place in self._striping.place(record_sizes(plan))]
        return FileRecords(plan, places, checksums=self._checksums)

    def rewind(self) -> bool:
        """Hand out the same places again, as if nothing had been written there."""
        self._striping = Striping(len(self._files))
        return not any(file.closed for file in self._files)

    def close(self) -> None:
        """Finish what is under way, and remove the files. Once is enough.

        Raises:
            NvmeError: the failure of a transfer that nobody waited for. Everything is removed all the same.
        """
        with contextlib.ExitStack() as closing:
            closing.callback(self._report_closed, self)
            for file in self._files:
                closing.callback(file.close)
                if os.getpid() == self._owner and not file.closed:  # a forked child has no part in it
                    closing.callback(file.remove)
