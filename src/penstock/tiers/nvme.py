"""The nvme tier: segments of records in preallocated files."""

import contextlib
import os
import secrets
from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor

from penstock.config import Tier
from penstock.errors import ConfigError
from penstock.runtime.aio import File, Queue, Transfer, check_space, existing_folder
from penstock.tiers.storage import RecordPlace, Records, Segment, SegmentPlan, SummedRecord, record_sizes
from penstock.tiers.tier import Allocation, TierMemory, close_all


class FileRecords(Records):
    """Records in files.

    Arguments:
        places: the location of each tile's record.
        checksums: verify records that are loaded.
    """

    def __init__(self, plan: SegmentPlan, places: Sequence[RecordPlace], *, checksums: bool) -> None:
        super().__init__(plan, [place.nbytes for place in places])
        self._places = places
        self._checksums = checksums
        self._transfers: list[Transfer | None] = [None] * len(places)  # the last store of each

    def load(self, number: int, into: Tensor, *, sums: bool = True) -> Transfer | None:
        """Start to load a tile's record. One that was never stored is zeros."""
        place, last = self._places[number], self._transfers[number]
        if last is None:
            into[: place.nbytes].zero_()
            return None
        expected = last.checksum if self._checksums else None
        return place.file.read(place.offset, into[: place.nbytes], checksum=expected, sums=sums, what=self.name(number))

    def store(self, number: int, source: Tensor, known: int | None = None) -> Transfer:
        """Start to store a tile's record. `known` is its checksum, if the caller has computed it."""
        place = self._places[number]
        transfer = place.file.write(
            place.offset, source[: place.nbytes], checksum=self._checksums, known=known, what=self.name(number)
        )
        self._transfers[number] = transfer
        return transfer

    def summed(self, number: int, buffer: Tensor) -> SummedRecord | None:
        """Return a tile's record with checksums by the update. See `Records.summed`."""
        if not self._checksums:
            return None
        return SummedRecord(buffer, partial(self.load, number, sums=False), partial(self.store, number))

    def cut(self, tile: int, start: int, plan: SegmentPlan) -> "FileRecords":
        """Make a segment with records of its own, from a byte of a tile's record on."""
        places, place = [], self._places[tile]
        for nbytes in record_sizes(plan):
            places.append(RecordPlace(place.file, place.offset + start, nbytes))
            start += nbytes
        return FileRecords(plan, places, checksums=self._checksums)


class Striping:
    """Lays records out over files: each record goes to the file with the fewest bytes.

    Arguments:
        files: the number of files.

    Attributes:
        used: bytes laid out in each file.
    """

    def __init__(self, files: int) -> None:
        self.used = [0] * files

    def place(self, sizes: Sequence[int]) -> list[tuple[int, int, int]]:
        """Lay out records of these bytes. Return the file, offset and bytes of each."""
        places = []
        for nbytes in sizes:
            file = min(range(len(self.used)), key=self.used.__getitem__)
            places.append((file, self.used[file], nbytes))
            self.used[file] += nbytes
        return places


def stripe(wanted: Mapping[str, Sequence[SegmentPlan]], folders: int) -> dict[str, Striping]:
    """Lay the records of segments out over folders, storage by storage."""
    planned = {storage: Striping(folders) for storage in wanted}
    for storage, plans in wanted.items():
        for plan in plans:
            planned[storage].place(record_sizes(plan))
    return planned


def bytes_by_folder(planned: Mapping[str, Striping], folders: int) -> list[int]:
    """Return the bytes that go to each folder, of all storages."""
    return [sum(striping.used[number] for striping in planned.values()) for number in range(folders)]


class NvmeTier(TierMemory):
    """Files on one disk or several: one without a name for each storage in each folder.

    Arguments:
        parents: existing folders, one for each disk.
        queue_depth: requests in flight per folder.
        checksums: verify records that are loaded.
    """

    name = Tier.NVME

    def __init__(self, parents: Sequence[str | os.PathLike[str]], *, queue_depth: int, checksums: bool) -> None:
        self._parents = tuple(parents)
        self._queue_depth = queue_depth
        self._checksums = checksums
        self._queues: list[Queue] = []  # of the folders that files were made in

    def reserve(self, wanted: Mapping[str, Sequence[SegmentPlan]], *, pin: bool = True) -> dict[str, Allocation]:
        """Make a file for each storage in each folder, allocated in full."""
        del pin
        if not self._parents:
            raise ConfigError(
                "The nvme tier has no folder for its files. Name one on a fast disk: Placement(nvme_path=...)."
            )
        planned = stripe(wanted, len(self._parents))
        folders = []
        for parent, nbytes in zip(self._parents, bytes_by_folder(planned, len(self._parents)), strict=True):
            if nbytes:  # with fewer records than folders the last ones get none
                folders.append(existing_folder(parent))
                check_space(folders[-1], nbytes)
        self._queues += [Queue(self._queue_depth) for _ in folders[len(self._queues) :]]
        allocations: dict[str, Allocation] = {}
        with contextlib.ExitStack() as undo:
            for storage, striping in planned.items():
                files: list[File] = []
                for folder, queue, nbytes in zip(folders, self._queues, striping.used, strict=False):
                    if nbytes:
                        path = folder / f"penstock-{os.getpid()}-{secrets.token_hex(4)}-{storage}"
                        files.append(File(queue, path, nbytes, named=False))
                        undo.callback(files[-1].close)
                allocations[storage] = FileAllocation(files, checksums=self._checksums)
            undo.pop_all()
        return allocations

    @property
    def written_bytes(self) -> int:
        """Bytes of all writes to the files of this rank that were started, padding included."""
        return sum(queue.written_bytes for queue in self._queues)

    def close(self) -> None:
        """Finish all transfers, and end the threads.

        Raises:
            NvmeError: a transfer that was not waited for has failed. All threads have ended all the same.
        """
        queues, self._queues = self._queues, []
        close_all(queues)


class FileAllocation(Allocation):
    """One preallocated file in each folder, for the segments of one storage of every unit."""

    def __init__(self, files: Sequence[File], *, checksums: bool) -> None:
        self._files = files
        self._striping = Striping(len(files))
        self._checksums = checksums

    def make(self, plan: SegmentPlan, *, unset: bool = False) -> Segment:
        """Make the next of the planned segments."""
        del unset
        places = [RecordPlace(self._files[file], *place) for file, *place in self._striping.place(record_sizes(plan))]
        return FileRecords(plan, places, checksums=self._checksums)

    def rewind(self) -> bool:
        """Hand out the same locations again, as if nothing had been stored there."""
        self._striping = Striping(len(self._files))
        return not any(file.closed for file in self._files)

    def close(self) -> None:
        """Finish all transfers, and close the files, whose space is free then. May be called again.

        Raises:
            NvmeError: a transfer that was not waited for has failed. All files are closed all the same.
        """
        close_all(self._files)
