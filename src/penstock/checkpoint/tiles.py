"""Writing and reading the tiles of one rank, through a ring of buffers, past the page cache."""

import contextlib
import errno
import os
from collections import deque
from collections.abc import Container, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from penstock.checkpoint.format import FileEntry, named
from penstock.checkpoint.tables import TileKey, TileRecord, UnitTable
from penstock.checkpoint.tensorfiles import FILE_MODE
from penstock.errors import OPEN_FILES, CheckpointError, NvmeError
from penstock.runtime.aio import File, Queue, Transfer
from penstock.runtime.collectives import LocalRanks
from penstock.runtime.host_memory import Arena, page_aligned
from penstock.runtime.streams import Event, HostEvent, Streams
from penstock.tiers.storage import Storage
from penstock.tiers.transfer import take_tile
from penstock.trace import Label

#: Tiles in memory at once: one is used while the others are written or read.
RING_TILES = 3


# Written


@dataclass(frozen=True)
class UnitSource:
    """Tiles of a unit to save, and their storage.

    Attributes:
        table: the tiles and their offsets in the file, without checksums.
        storages: their storages, in the order of the table's.
        ready: their values are written, in files, too. Later writes wait for `copied`, never the reverse.
        copied: nothing reads them any more. Updates wait for it. The writer settles it after the last copy, and the
            owner of the save when that is over, however it ends.
    """

    table: UnitTable
    storages: tuple[Storage, ...]
    ready: Event
    copied: HostEvent


class RingMemory:
    """The buffers that one save's tiles pass, pinned if a device copies to them.

    They are allocated and freed on the user's thread: pinning may wait for device work (ordering rule 5).

    Arguments:
        sources: the tiles that will be written. Without any, nothing is allocated.
        device: the device that copies to them.
    """

    def __init__(self, sources: Sequence[UnitSource], device: torch.device) -> None:
        largest = max((source.table.largest_tile_bytes for source in sources), default=0)
        self._arena = Arena(RING_TILES * Arena.allocated_bytes(largest, torch.uint8), device, ring=True)
        count = RING_TILES if largest else 0
        self.buffers: Sequence[Tensor] = [self._arena.allocate(largest, torch.uint8) for _ in range(count)]

    def close(self) -> None:
        """Free them."""
        self.buffers = ()
        self._arena.close()


class TileWriter:
    """A data file that is being written.

    Arguments:
        path: where the file will be; it must not exist.
        sources: the units, at the offsets of their tables; there is at least one tile.
        ring: the buffers of a `RingMemory`.
        streams: those that copy what is on the device.

    Raises:
        CheckpointError: the file cannot be made, or there is no room for it. Nothing of it is left.
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
            raise _write_failed(path, error) from error
        self._file.lock()  # a cleaning of the folder skips it, also on file systems without locks of folders
        self._ring = ring
        self._started: list[list[Transfer]] = []  # of each tile

    def write(self) -> tuple[FileEntry, list[UnitTable]]:
        """Write every tile, and sync the file to the disk.

        Returns:
            The file, and the tables with their checksums.

        Raises:
            CheckpointError: a tile could not be written, or its record in a swap file is damaged.
            Exception: the work that writes a tile's values has failed.
        """
        try:
            for source in self._sources:
                # site checkpoint.unit_updated
                source.ready.synchronize()  # a read follows the last write: the update of the tile (ordering rule 3)
                for number in source.table.tiles:
                    self._write_tile(source, number)
                source.copied.settle()  # after the last copy: the unit's next update follows it (ordering rule 3)
            _wait(self._started[-len(self._ring) :])
            self._file.sync()  # after the last write: once all ranks report this, the marker is written
        except OSError as error:
            raise _write_failed(self._path, error) from error
        checksums = ([transfer.checksum for transfer in transfers] for transfers in self._started)
        tables = [
            source.table.with_checksums([next(checksums) for _ in source.table.tiles]) for source in self._sources
        ]
        return FileEntry(self._path.name, self._nbytes, 0), tables

    def close(self) -> None:
        """Close the file. Others may remove it from then on."""
        with contextlib.suppress(NvmeError):  # `write` has raised it
            self._queue.close()
        with contextlib.suppress(NvmeError):
            self._file.close()
        self._ring = ()

    def _write_tile(self, source: UnitSource, number: int) -> None:
        """Copy a tile into the next buffer of the ring, and start to write it. The copy is over at the return."""
        turn, records = len(self._started), source.table.records(number)
        if turn >= len(self._ring):
            # A write into a buffer follows all reads of it (ordering rule 3).
            _wait([self._started[turn - len(self._ring)]])
        buffer = self._ring[turn % len(self._ring)][: sum(record.nbytes for record in records)]
        transfers: list[Transfer] = []
        self._started.append(transfers)
        for record, part, storage in zip(records, _parts(buffer, records), source.storages, strict=True):
            segment, index = storage.tile(number)
            what = f"{record.storage.name} of unit '{source.table.name}', tile {number}"
            take_tile(
                segment, index, part, self._streams, Label("save", source.table.name, record.storage.name, number)
            )
            transfers.append(self._file.write(record.offset, part, checksum=True, what=what))


def _wait(tiles: Sequence[Sequence[Transfer]]) -> None:
    for transfer in (transfer for transfers in tiles for transfer in transfers):
        transfer.wait()  # site checkpoint.tile_written


def _write_failed(path: Path, error: OSError) -> CheckpointError:
    """Return the error of a failed write, with advice about checkpoints in place of that about the nvme tier.

    If reading a file of the nvme tier has failed, its own advice stays.
    """
    if isinstance(error, NvmeError) and error.file not in (None, os.fspath(path)):
        return CheckpointError(f"{path} was not written. {error}", file=error.file)
    reason = os.strerror(error.errno) if error.errno else str(error)
    where = f" at offset {error.offset:,}" if isinstance(error, NvmeError) and error.offset is not None else ""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    advice = "Free space there, or save elsewhere." if is_full else "See the kernel's log (dmesg)."
    if error.errno in (errno.EMFILE, errno.ENFILE):
        advice = OPEN_FILES
    return CheckpointError(
        f"Writing {path} failed{where}: {reason}. {advice} Checkpoints that were whole before still are.",
        file=str(path),
    )


# Read


class Tile(NamedTuple):
    """A tile that was read. It is valid until the next one is asked for.

    Attributes:
        key: which tile.
        data: its records in their order, uint8.
        storages: the values of its kinds, by storage: views of `data`.
    """

    key: TileKey
    data: Tensor
    storages: Mapping[str, Mapping[str, Tensor]]

    @classmethod
    def of(cls, key: TileKey, data: Tensor, records: Sequence[TileRecord]) -> "Tile":
        """Make a tile of its records in `data`."""
        start, stop = key.unit.tile_range(key.number)
        storages = {}
        for record, part in zip(records, _parts(data, records), strict=True):
            views = record.storage.layout.views(part, stop - start)
            storages[record.storage.name] = {
                cell.kind: view for cell, view in zip(record.storage.cells, views, strict=True)
            }
        return cls(key, data, storages)

    def values(self, kind: str) -> Tensor | None:
        """Return the values of a storage with one kind of the same name; `None` if the tile lacks it."""
        return self.storages.get(kind, {}).get(kind)


class TileReader:
    """Read tiles from data files of a checkpoint."""

    def __init__(self) -> None:
        self._queue = Queue()
        self._files: dict[Path, File] = {}

    def read(self, keys: Iterable[TileKey], *, storages: Container[str] | None = None) -> Iterator[Tile]:
        """Read and verify tiles, a few ahead of their use.

        Arguments:
            keys: the tiles, best in the order of the files.
            storages: the names of the storages that are read; `None` for all.

        Raises:
            CheckpointError: a file cannot be read, or a tile is damaged.
        """
        ring: deque[Tensor] = deque(page_aligned(0) for _ in range(RING_TILES))
        ahead: deque[tuple[Tile, Tensor, list[tuple[TileRecord, Transfer]]]] = deque()
        waiting = iter(keys)
        try:
            while True:
                while ring and (key := next(waiting, None)) is not None:
                    buffer = ring.popleft()
                    nbytes = sum(record.nbytes for record in key.records())
                    if buffer.numel() < nbytes:  # sized by tiles that are in the file, not by the table alone
                        buffer = page_aligned(nbytes)
                    tile, transfers = self._start(key, buffer, storages)
                    ahead.append((tile, buffer, transfers))
                if not ahead:
                    return
                tile, buffer, transfers = ahead.popleft()
                for record, transfer in transfers:
                    _finish(tile.key, record, transfer)
                yield tile
                ring.append(buffer)  # a write follows all reads: the caller is done with the tile (ordering rule 3)
        finally:
            # If the caller stops early: buffers live until the last read into them is over (ordering rule 1).
            for _, _, transfers in ahead:
                for _, transfer in transfers:
                    with contextlib.suppress(NvmeError):
                        transfer.wait()  # site checkpoint.reads_abandoned

    def _start(
        self, key: TileKey, buffer: Tensor, storages: Container[str] | None
    ) -> tuple[Tile, list[tuple[TileRecord, Transfer]]]:
        """Begin to read a tile into a buffer. Its values are valid once the transfers are over."""
        file = self._open(key.file)
        records = [record for record in key.records() if storages is None or record.storage.name in storages]
        data = buffer[: sum(record.nbytes for record in records)]
        transfers = [
            (record, file.read(record.offset, part, checksum=record.checksum))
            for record, part in zip(records, _parts(data, records), strict=True)
        ]
        return Tile.of(key, data, records), transfers

    def _open(self, path: Path) -> File:
        if path not in self._files:
            with named("Reading", path):
                self._files[path] = File.existing(self._queue, path)
        return self._files[path]

    def close(self) -> None:
        """Close the files."""
        with contextlib.suppress(NvmeError):  # of transfers that were not waited for
            self._queue.close()
        for file in self._files.values():
            with contextlib.suppress(NvmeError):
                file.close()
        self._files.clear()

    def __enter__(self) -> "TileReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _parts(data: Tensor, records: Sequence[TileRecord]) -> Sequence[Tensor]:
    """Return a view of each record."""
    parts: Sequence[Tensor] = data.split([record.nbytes for record in records])  # type: ignore[no-untyped-call]
    return parts


def _finish(key: TileKey, record: TileRecord, transfer: Transfer) -> None:
    """Wait until a record is read and verified. Name it if it is damaged."""
    try:
        transfer.wait()  # site checkpoint.tile_read
    except NvmeError as error:
        what = f"{record.storage.name} of unit '{key.unit.name}', tile {key.number}"
        reason = os.strerror(error.errno) if error.errno else "the file ends there"
        raise CheckpointError(
            f"{key.file}: {what}, {record.nbytes:,} bytes at offset {record.offset:,}, is damaged ({reason}). Load "
            "another checkpoint.",
            file=str(key.file),
            field=what,
        ) from error


# Read by the ranks of a host together


def digest(keys: Sequence[TileKey]) -> str:
    """Return a digest of tiles: ranks that read the same ones have the same. It is empty for none."""
    said = "|".join(f"{key.file.name} {key.unit.name} {key.number}" for key in keys)
    return f"{crc32(said.encode()):08x} of {len(keys)}" if keys else ""


def read_together(reader: TileReader, keys: Sequence[TileKey], ranks: LocalRanks | None) -> Generator[Tile]:
    """Read tiles, each on one of the ranks, and yield all of them in order. Collective over these ranks.

    If the caller closes the generator early, the other ranks fail in the next round.

    Arguments:
        reader: reads and verifies this rank's part of them.
        keys: the tiles, the same on all of these ranks.
        ranks: the ranks, all of this host; `None` for this one alone.

    Raises:
        CheckpointError: on all of them, if a tile cannot be read, or is damaged.
    """
    if ranks is None:
        yield from reader.read(keys)
        return
    own = reader.read(keys[ranks.number :: ranks.size])
    for first in range(0, len(keys), ranks.size):
        of_round = [(key, key.records()) for key in keys[first : first + ranks.size]]
        sizes = [sum(record.nbytes for record in records) for _, records in of_round]
        packed = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        failure: Exception | None = None
        try:
            tile = next(own, None)
            if tile is not None:
                packed[: tile.data.numel()] = tile.data
        except Exception as error:
            failure = error  # exchanged first: the others wait for this rank (ordering rule 4)
        if ranks.any(failure is not None):
            raise failure or CheckpointError("Another rank of this host could not read its part of the tiles.")
        parts = ranks.exchange(packed).cpu().view(-1, max(sizes))
        for (key, records), nbytes, part in zip(of_round, sizes, parts, strict=False):
            try:
                yield Tile.of(key, part[:nbytes], records)
            except GeneratorExit:
                if first + ranks.size < len(keys):
                    ranks.any(True)
                raise
