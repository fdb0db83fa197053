"""Tiles of one rank on their way to a data file and back, through a ring of buffers, past the page cache."""

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

#: Tiles in memory at once: one is being used while the others are being written or read.
RING_TILES = 3


# Written


@dataclass(frozen=True)
class UnitSource:
    """Some tiles of a unit, where they rest.

    Attributes:
        table: what they are and where in the file they go; its checksums are yet to come.
        homes: where they rest, in the order of the table's homes.
        ready: their values are there, in files too. What is written later waits for `copied`, never the reverse.
        copied: is settled once nothing reads them any more; updates wait for it. Settled by the writer after the last
            copy, and by the owner of the save when that is over, however it ends.
    """

    table: UnitTable
    homes: tuple[Storage, ...]
    ready: Event
    copied: HostEvent


class RingMemory:
    """The buffers through which one save's tiles pass, pinned where a device copies to them.

    Not to be taken or given back beside training: a device is asked for both, and may have to finish its work first.

    Arguments:
        sources: what will be written; none takes nothing.
        device: the device that copies to them.
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
        path: where the file will be; it must not exist.
        sources: the units, at the offsets of their tables; there is at least one tile.
        ring: the buffers of a `RingMemory`.
        streams: those that copy what is on the device.

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
            raise _write_failed(path, error) from error
        self._file.lock()  # whoever cleans the folder on a file system without locks of folders leaves it alone
        self._ring = ring
        self._started: list[list[Transfer]] = []  # of each tile

    def write(self) -> tuple[FileEntry, list[UnitTable]]:
        """Write every tile, and have them on the disk.

        Returns:
            The file, and the tables with their checksums.

        Raises:
            CheckpointError: a tile could not be written, or its record in a swap file is damaged.
            Exception: what was to give a tile its values has failed.
        """
        try:
            for source in self._sources:
                # site checkpoint.unit_updated
                source.ready.synchronize()  # else a tile is copied while its update still writes it
                for number in source.table.tiles:
                    self._write_tile(source, number)
                source.copied.settle()  # after the last copy: the unit's next update begins now
            _wait(self._started[-len(self._ring) :])
            self._file.sync()  # after the last write; whoever hears that this rank has written may write the marker
        except OSError as error:
            raise _write_failed(self._path, error) from error
        checksums = ([transfer.checksum for transfer in transfers] for transfers in self._started)
        tables = [
            source.table.with_checksums([next(checksums) for _ in source.table.tiles]) for source in self._sources
        ]
        return FileEntry(self._path.name, self._nbytes, 0), tables

    def close(self) -> None:
        """Close the file, which others may remove from then on."""
        with contextlib.suppress(NvmeError):  # it was said, or the save is given up
            self._queue.close()
        with contextlib.suppress(NvmeError):
            self._file.close()
        self._ring = ()

    def _write_tile(self, source: UnitSource, number: int) -> None:
        """Copy a tile into the next buffer of the ring and start to write it: nothing reads it afterwards."""
        turn, records = len(self._started), source.table.records(number)
        if turn >= len(self._ring):
            _wait([self._started[turn - len(self._ring)]])  # else its buffer is filled while it is still being written
        buffer = self._ring[turn % len(self._ring)][: sum(record.nbytes for record in records)]
        transfers: list[Transfer] = []
        self._started.append(transfers)
        for record, part, home in zip(records, _parts(buffer, records), source.homes, strict=True):
            section, index = home.tile(number)
            what = f"{record.home.name} of unit '{source.table.name}', tile {number}"
            take_tile(section, index, part, self._streams, Label("save", source.table.name, record.home.name, number))
            transfers.append(self._file.write(record.offset, part, checksum=True, what=what))


def _wait(tiles: Sequence[Sequence[Transfer]]) -> None:
    for transfer in (transfer for transfers in tiles for transfer in transfers):
        transfer.wait()  # site checkpoint.tile_written


def _write_failed(path: Path, error: OSError) -> CheckpointError:
    """Make the error of a write, without a file's advice that is about the nvme tier; the caller raises it.

    Unless the file that failed is one of the nvme tier, which was read: it keeps its own advice.
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
    """A tile that was read, until the next one is asked for.

    Attributes:
        key: which tile.
        data: its records, one after the other, as bytes.
        homes: the values of its kinds, by home: views of `data`.
    """

    key: TileKey
    data: Tensor
    homes: Mapping[str, Mapping[str, Tensor]]

    @classmethod
    def of(cls, key: TileKey, data: Tensor, records: Sequence[TileRecord]) -> "Tile":
        """View records that lie one after the other."""
        start, stop = key.unit.tile_range(key.number)
        homes = {}
        for record, part in zip(records, _parts(data, records), strict=True):
            views = record.home.layout.views(part, stop - start)
            homes[record.home.name] = {cell.kind: view for cell, view in zip(record.home.cells, views, strict=True)}
        return cls(key, data, homes)

    def values(self, kind: str) -> Tensor | None:
        """Return the values of a home that has one kind, which is called as it is; `None` where the tile has none."""
        return self.homes.get(kind, {}).get(kind)


class TileReader:
    """Open data files of a checkpoint, from which tiles are read."""

    def __init__(self) -> None:
        self._queue = Queue()
        self._files: dict[Path, File] = {}

    def read(self, keys: Iterable[TileKey], *, homes: Container[str] | None = None) -> Iterator[Tile]:
        """Read tiles, a few ahead of what is used, each verified.

        Arguments:
            keys: which tiles, best in the order of the files.
            homes: the homes that are read of each; `None` for everything.

        Raises:
            CheckpointError: a file cannot be read, or a tile is not what was written.
        """
        ring: deque[Tensor] = deque(page_aligned(0) for _ in range(RING_TILES))
        ahead: deque[tuple[Tile, Tensor, list[tuple[TileRecord, Transfer]]]] = deque()
        waiting = iter(keys)
        try:
            while True:
                while ring and (key := next(waiting, None)) is not None:
                    buffer = ring.popleft()
                    nbytes = sum(record.nbytes for record in key.records())
                    if buffer.numel() < nbytes:  # not what the table says of other tiles: these are in the file
                        buffer = page_aligned(nbytes)
                    tile, transfers = self._start(key, buffer, homes)
                    ahead.append((tile, buffer, transfers))
                if not ahead:
                    return
                tile, buffer, transfers = ahead.popleft()
                for record, transfer in transfers:
                    _finish(tile.key, record, transfer)
                yield tile
                ring.append(buffer)  # after the caller is done with the tile: it is filled with another one next
        finally:
            for _, _, transfers in ahead:  # of a caller who stopped early: they write into buffers that go now
                for _, transfer in transfers:
                    with contextlib.suppress(NvmeError):
                        transfer.wait()  # site checkpoint.reads_abandoned

    def _start(
        self, key: TileKey, buffer: Tensor, homes: Container[str] | None
    ) -> tuple[Tile, list[tuple[TileRecord, Transfer]]]:
        """Begin to read a tile into a buffer; what the tile says is there once the transfers are over."""
        file = self._open(key.file)
        records = [record for record in key.records() if homes is None or record.home.name in homes]
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
        with contextlib.suppress(NvmeError):  # of what nobody waited for
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
    """View each of some records that lie one after the other."""
    parts: Sequence[Tensor] = data.split([record.nbytes for record in records])  # type: ignore[no-untyped-call]
    return parts


def _finish(key: TileKey, record: TileRecord, transfer: Transfer) -> None:
    """Wait until a record was read and verified; name what is damaged."""
    try:
        transfer.wait()  # site checkpoint.tile_read
    except NvmeError as error:
        what = f"{record.home.name} of unit '{key.unit.name}', tile {key.number}"
        reason = os.strerror(error.errno) if error.errno else "the file ends there"
        raise CheckpointError(
            f"{key.file}: {what}, {record.nbytes:,} bytes at offset {record.offset:,}, is damaged ({reason}). Load "
            "another checkpoint.",
            file=str(key.file),
            field=what,
        ) from error


# Read by several ranks of a host


def digest(keys: Sequence[TileKey]) -> str:
    """Tell apart what is read: ranks that read the same tiles have the same digest; of none it is empty."""
    said = "|".join(f"{key.file.name} {key.unit.name} {key.number}" for key in keys)
    return f"{crc32(said.encode()):08x} of {len(keys)}" if keys else ""


def read_together(reader: TileReader, keys: Sequence[TileKey], ranks: LocalRanks | None) -> Generator[Tile]:
    """Read tiles, each on one of the ranks, and yield all of them in order. Collective over these ranks.

    A caller who stops early closes the generator: the others are told in the next round.

    Arguments:
        reader: reads and verifies this rank's part of them.
        keys: which tiles, the same on all of these ranks.
        ranks: of this host; `None` for this one alone.

    Raises:
        CheckpointError: a tile of any of them cannot be read, or is not what was written.
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
            failure = error  # told first: the others wait for this rank
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
