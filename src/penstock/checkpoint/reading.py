"""Reads tiles back, in the order of the files, through a ring of buffers, each verified."""

import contextlib
import os
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from penstock.checkpoint.tables import Extent, HomeTable, UnitTable
from penstock.errors import CheckpointError, NvmeError
from penstock.machine.aio import File, Queue, Transfer
from penstock.machine.arena import page_aligned
from penstock.tiers.home import Views

#: Tiles in memory at once: one is being used while others are being read.
RING_TILES = 3


class TileKey(NamedTuple):
    """A tile of a checkpoint: in which data file, in which unit, its number."""

    file: Path
    unit: UnitTable
    number: int


class Tile(NamedTuple):
    """A tile that was read: by home, the values of its kinds, until the next one is asked for."""

    key: TileKey
    homes: Mapping[str, Mapping[str, Tensor]]


class TileReader:
    """Open data files of a checkpoint."""

    def __init__(self) -> None:
        self._queue = Queue()
        self._files: dict[Path, File] = {}

    def read(self, keys: Iterable[TileKey], *, homes: Container[str] | None = None) -> Iterator[Tile]:
        """Read tiles, a few ahead of what is used.

        Arguments:
            keys: which, best in the order of the files.
            homes: what is read of each; `None` for everything.

        Raises:
            CheckpointError: a file cannot be read, or a tile is not what was written.
        """
        ring: deque[Tensor] = deque(page_aligned(0) for _ in range(RING_TILES))
        ahead: deque[tuple[TileKey, Tensor, list[tuple[HomeTable, Extent, Transfer]]]] = deque()
        waiting = iter(keys)
        try:
            while True:
                while ring and (key := next(waiting, None)) is not None:
                    buffer = ring.popleft()
                    nbytes = sum(extent.nbytes for extent in key.unit.extents(key.number))
                    if buffer.numel() < nbytes:  # not what the table says of other tiles: these are in the file
                        buffer = page_aligned(nbytes)
                    ahead.append((key, buffer, self._start(key, buffer, homes)))
                if not ahead:
                    return
                key, buffer, transfers = ahead.popleft()
                for _, extent, transfer in transfers:
                    _finish(key, extent, transfer)
                yield Tile(key, _views(key, buffer, [(home, extent) for home, extent, _ in transfers]))
                ring.append(buffer)
        finally:
            for _, _, transfers in ahead:
                for _, _, transfer in transfers:
                    with contextlib.suppress(NvmeError):
                        transfer.wait()

    def _start(
        self, key: TileKey, buffer: Tensor, homes: Container[str] | None
    ) -> list[tuple[HomeTable, Extent, Transfer]]:
        file = self._open(key.file)
        started, used = [], 0
        for home, extent in zip(key.unit.homes, key.unit.extents(key.number), strict=True):
            if homes is not None and home.name not in homes:
                continue
            part = buffer[used : used + extent.nbytes]
            used += extent.nbytes
            started.append((home, extent, file.read(extent.offset, part, checksum=extent.checksum)))
        return started

    def _open(self, path: Path) -> File:
        if path not in self._files:
            try:
                self._files[path] = File.existing(self._queue, path)
            except OSError as error:
                raise CheckpointError(f"Reading {path} failed: {error.strerror}.", file=str(path)) from error
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


def _finish(key: TileKey, extent: Extent, transfer: Transfer) -> None:
    try:
        transfer.wait()
    except NvmeError as error:
        what = f"{extent.home} of unit '{key.unit.name}', tile {key.number}"
        reason = os.strerror(error.errno) if error.errno else "the file ends there"
        raise CheckpointError(
            f"{key.file}: {what}, {extent.nbytes:,} bytes at offset {extent.offset:,}, is damaged ({reason}). Load "
            "another checkpoint.",
            file=str(key.file),
            field=what,
        ) from error


def _views(key: TileKey, buffer: Tensor, extents: Iterable[tuple[HomeTable, Extent]]) -> dict[str, dict[str, Tensor]]:
    start, stop = key.unit.tile_range(key.number)
    homes: dict[str, dict[str, Tensor]] = {}
    used = 0
    for home, extent in extents:
        views: Views = home.layout.views(buffer[used : used + extent.nbytes], stop - start)
        homes[home.name] = {cell.kind: view for cell, view in zip(home.cells, views, strict=True)}
        used += extent.nbytes
    return homes
