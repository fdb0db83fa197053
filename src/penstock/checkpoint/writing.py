"""Writes one rank's tiles: from wherever they rest, through a ring of buffers, past the page cache.

What lies in a file on the same disk does not pass through memory on its way: the kernel copies it, or lets both files
share the blocks. Nobody has seen those bytes then, so they are read back and verified at the end: a checkpoint must not
take the place of another one with a record that was damaged on the disk.
"""

import contextlib
import errno
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from penstock.checkpoint.folder import FILE_MODE
from penstock.checkpoint.manifest import FileEntry
from penstock.checkpoint.tables import Extent, UnitTable
from penstock.errors import CheckpointError, NvmeError
from penstock.machine.aio import File, Queue, Transfer
from penstock.machine.arena import Arena
from penstock.machine.streams import Event, HostEvent, Streams
from penstock.tiers.home import Home, Place, Section
from penstock.tiers.movement import take_tile
from penstock.trace import Label

#: Tiles in memory at once: one is being copied while others are being written.
RING_TILES = 3


@dataclass(frozen=True)
class UnitSource:
    """Some tiles of a unit, where they rest.

    Attributes:
        table: what they are and where in the file they go; its checksums are yet to come.
        homes: as the table lists them.
        ready: their values are there, in files too. What is written later waits for `copied`, never the reverse.
        copied: is set once nothing reads them any more; updates wait for it.
    """

    table: UnitTable
    homes: tuple[Home, ...]
    ready: Event
    copied: HostEvent


class _Checked(Protocol):
    """Something that has a checksum, once it is written."""

    @property
    def checksum(self) -> int: ...


@dataclass(frozen=True)
class _Copied:
    """An extent that the kernel copied from a record with this checksum."""

    extent: Extent
    source: Place
    what: str
    checksum: int


class RingMemory:
    """The buffers through which one save's tiles pass, pinned where a device copies to them.

    Not to be taken or given back beside training: a device is asked for both, and may have to finish its work first.

    Arguments:
        sources: what will be written; none takes nothing.
        device: that copies to them.
    """

    def __init__(self, sources: Sequence[UnitSource], device: torch.device) -> None:
        largest = max((source.table.largest_tile_bytes for source in sources), default=0)
        self._arena = Arena(RING_TILES * Arena.lease_bytes(largest, torch.uint8), device, ring=True)
        count = RING_TILES if largest else 0
        self.buffers: Sequence[Tensor] = [self._arena.lease(largest, torch.uint8) for _ in range(count)]

    def close(self) -> None:
        """Give them back."""
        self.buffers = ()
        self._arena.close()


class TileWriter:
    """A data file that is being written.

    Arguments:
        path: must not exist.
        sources: the units, at the offsets of their tables; there is at least one tile.
        ring: buffers, those of a `RingMemory`.
        streams: that copy what is on the device.

    Raises:
        CheckpointError: the file cannot be made, or there is no room for it; nothing is left behind.
    """

    def __init__(self, path: Path, sources: Sequence[UnitSource], ring: Sequence[Tensor], streams: Streams) -> None:
        self._path = path
        self._sources = sources
        self._streams = streams
        self._nbytes = sum(source.table.nbytes for source in sources)
        self._queue = Queue()
        try:
            self._file = File(self._queue, path, self._nbytes, FILE_MODE)
        except NvmeError as error:
            self._queue.close()
            raise write_failed(path, error) from error
        self._file.lock()
        self._ring = ring
        self._in_flight: list[list[Transfer]] = [[] for _ in self._ring]
        self._turn = 0
        self._unseen: list[_Copied] = []

    def write(self) -> tuple[FileEntry, list[UnitTable]]:
        """Write every tile, and have them on the disk.

        Returns:
            The file, and the tables with their checksums.

        Raises:
            CheckpointError: a tile could not be written, or a record that the kernel copied is damaged.
            Exception: what was to give a tile its values has failed.
        """
        written: list[list[list[_Checked]]] = []
        try:
            for source in self._sources:
                source.ready.synchronize()
                written.append([self._write_tile(source, number) for number in source.table.tiles])
                set_event(source.copied)
            for transfers in self._in_flight:
                _wait(transfers)
            self._file.sync()
            self._verify_copies()
        except OSError as error:
            raise write_failed(self._path, error) from error
        finally:
            for source in self._sources:
                set_event(source.copied)
        tables = [
            source.table.with_checksums([[checked.checksum for checked in of_tile] for of_tile in of_unit])
            for source, of_unit in zip(self._sources, written, strict=True)
        ]
        return FileEntry(self._path.name, self._nbytes, 0), tables

    def close(self) -> None:
        """Close the file, which others may remove from then on."""
        with contextlib.suppress(NvmeError):  # it was said, or the save is given up
            self._queue.close()
        with contextlib.suppress(NvmeError):
            self._file.close()
        self._ring = ()

    def _write_tile(self, source: UnitSource, number: int) -> list[_Checked]:
        """Copy a tile into the next buffer of the ring and start to write it: nothing reads it afterwards."""
        buffer, transfers = self._ring[self._turn], self._in_flight[self._turn]
        self._turn = (self._turn + 1) % len(self._ring)
        _wait(transfers)
        checked: list[_Checked] = []
        used = 0
        for extent, home in zip(source.table.extents(number), source.homes, strict=True):
            section, index = home.tile(number)
            what = f"{extent.home} of unit '{source.table.name}', tile {number}"
            copied = self._copy_in_kernel(section, index, extent, what)
            if copied is not None:
                checked.append(copied)
                continue
            part = buffer[used : used + extent.nbytes]
            used += extent.nbytes
            take_tile(section, index, part, self._streams, Label("save", source.table.name, extent.home, number))
            transfers.append(self._file.write(extent.offset, part, checksum=True, what=what))
            checked.append(transfers[-1])
        return checked

    def _copy_in_kernel(self, section: Section, index: int, extent: Extent, what: str) -> _Copied | None:
        """Copy a record from its file; `None` where that is not possible."""
        stored = section.stored(index)
        if stored is None or not stored.place.file.is_on_disk_of(self._path):
            return None
        place = stored.place
        if not self._file.copy_from(place.file, place.offset, extent.offset, extent.nbytes):
            return None
        self._unseen.append(_Copied(extent, place, what, stored.checksum))
        return self._unseen[-1]

    def _verify_copies(self) -> None:
        """Read back what the kernel copied, a few extents at a time. It is on the disk, and the ring is free."""
        reading: deque[tuple[_Copied, Transfer]] = deque()
        try:
            for turn, copied in enumerate(self._unseen):
                if len(reading) == len(self._ring):
                    _check_copy(*reading.popleft(), self._path)
                buffer = self._ring[turn % len(self._ring)][: copied.extent.nbytes]
                reading.append((copied, self._file.read(copied.extent.offset, buffer, checksum=copied.checksum)))
            while reading:
                _check_copy(*reading.popleft(), self._path)
        finally:
            for _, transfer in reading:
                with contextlib.suppress(NvmeError):
                    transfer.wait()


def _check_copy(copied: _Copied, transfer: Transfer, path: Path) -> None:
    try:
        transfer.wait()
    except NvmeError as error:
        if error.errno != errno.EBADMSG:
            raise
        file, offset = copied.source.file.path, copied.source.offset
        raise CheckpointError(
            f"{copied.what}, {copied.extent.nbytes:,} bytes at offset {offset:,} of {file}, is not what was written "
            f"there when it was copied to {path}: the disk has damaged it, or another program. Nothing was saved, and "
            "checkpoints that were whole before still are. Go on from the newest of them.",
            file=file,
            field=copied.what,
        ) from error


def set_event(event: HostEvent) -> None:
    """Nobody has to wait for it any longer."""
    if not event.ran():
        event.run(_nothing)


def _nothing() -> None:
    pass


def _wait(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()
    transfers.clear()


def write_failed(path: Path, error: OSError) -> CheckpointError:
    """What a file said, without advice that is about the nvme tier; unless it is one of the nvme tier that was read."""
    if isinstance(error, NvmeError) and error.file not in (None, os.fspath(path)):
        return CheckpointError(f"{path} was not written. {error}", file=error.file)
    reason = os.strerror(error.errno) if error.errno else str(error)
    where = f" at offset {error.offset:,}" if isinstance(error, NvmeError) and error.offset is not None else ""
    advice = (
        "Free space there, or save elsewhere."
        if error.errno in (errno.ENOSPC, errno.EDQUOT)
        else "See the kernel's log (dmesg)."
    )
    return CheckpointError(
        f"Writing {path} failed{where}: {reason}. {advice} Checkpoints that were whole before still are.",
        file=str(path),
    )
