"""What one rank's data file holds: for each unit, tile after tile, the bits of every kind as they rested.

    data file     | unit 0: tile 0 | tile 1 | ... | unit 1: tile 0 | ...
    tile          | param | master | optimizer |        an extent for each home, whole pages, with a checksum
    extent        as a record of the nvme tier (`tiers/records.py`)

A table says which elements of which parameters a tile has, so that they are found by parameter name and element,
whatever unit, shard or tile they are to go to.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import NamedTuple

from penstock.checkpoint.fields import Field, dtype_name, parse
from penstock.kinds import Tier
from penstock.layout import ALIGNMENT_NUMEL, Slot
from penstock.machine.arena import PAGE_BYTES
from penstock.tiers.home import CellPlan
from penstock.tiers.records import RecordLayout

#: A tile of a checkpoint is in memory as a whole when it is read.
MOST_TILE_BYTES = 1 << 30
_TABLE_BYTES_OF_ANY = 1 << 28


class Extent(NamedTuple):
    """Where a tile's bytes of one home are in the data file."""

    home: str
    offset: int
    nbytes: int
    checksum: int


@dataclass(frozen=True)
class HomeTable:
    """A home of a unit, as it rested when it was saved.

    Attributes:
        cells: its kinds; their tier and numel say nothing.
        tiers: bytes by tier, for people.
    """

    name: str
    cells: tuple[CellPlan, ...]
    tiers: tuple[tuple[str, int], ...]

    @cached_property
    def layout(self) -> RecordLayout:
        """How an extent is divided into kinds."""
        return RecordLayout(self.cells)


@dataclass(frozen=True)
class UnitTable:
    """Some tiles of a shard of a unit.

    Attributes:
        name: of the unit, for people.
        slots: the unit's parameters in its flat buffer.
        shard_start, shard_numel: the part of the flat buffer that is the shard.
        tile_numel: elements of a tile; the shard's last may be shorter.
        first_tile: the first of the shard's tiles that is here.
        homes: in the order of a tile's extents.
        offset: of the first tile in the file, bytes.
        checksums: CRC-32C of every extent, by tile.
    """

    name: str
    slots: tuple[Slot, ...]
    shard_start: int
    shard_numel: int
    tile_numel: int
    first_tile: int
    homes: tuple[HomeTable, ...]
    offset: int
    checksums: tuple[tuple[int, ...], ...]

    @property
    def tiles(self) -> range:
        """The numbers of its tiles."""
        return range(self.first_tile, self.first_tile + len(self.checksums))

    def tile_range(self, number: int) -> tuple[int, int]:
        """The first element of a tile and one past its last, counted from the start of the shard."""
        first = number * self.tile_numel
        return first, min(first + self.tile_numel, self.shard_numel)

    def extents(self, number: int) -> list[Extent]:
        """A tile's extents, one after the other."""
        start, stop = self.tile_range(number)
        offset = self.offset + (number - self.first_tile) * sum(self._home_bytes)
        extents = []
        sizes = self._home_bytes if stop - start == self.tile_numel else self._record_bytes(stop - start)
        for home, nbytes, checksum in zip(self.homes, sizes, self.checksums[number - self.first_tile], strict=True):
            extents.append(Extent(home.name, offset, nbytes, checksum))
            offset += nbytes
        return extents

    def tile_bytes(self, numel: int) -> int:
        """Bytes of a tile of so many elements."""
        return sum(self._record_bytes(numel))

    @cached_property
    def _home_bytes(self) -> tuple[int, ...]:
        """Bytes of a whole tile, by home: the same for every tile but a shard's last one."""
        return self._record_bytes(self.tile_numel)

    def _record_bytes(self, numel: int) -> tuple[int, ...]:
        return tuple(home.layout.record_bytes(numel) for home in self.homes)

    @cached_property
    def _slot_ends(self) -> tuple[list[int], list[int]]:
        """Where slots begin, and where they stop: in order, so that a tile's are found without a look at all."""
        return [slot.start for slot in self.slots], [slot.stop for slot in self.slots]

    def slots_in(self, start: int, stop: int) -> Sequence[Slot]:
        """The slots that have elements `start` to `stop` of the flat buffer, or some of them."""
        starts, stops = self._slot_ends
        return self.slots[bisect_right(stops, start) : bisect_left(starts, stop)]

    @property
    def largest_tile_bytes(self) -> int:
        """Bytes of its largest tile."""
        return self.tile_bytes(min(self.tile_numel, self.shard_numel))

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        if not self.checksums:
            return 0
        start, stop = self.tile_range(self.tiles[-1])
        return (len(self.checksums) - 1) * sum(self._home_bytes) + self.tile_bytes(stop - start)

    def with_checksums(self, checksums: Sequence[Sequence[int]]) -> "UnitTable":
        """The same, once its tiles are written."""
        return replace(self, checksums=tuple(map(tuple, checksums)))

    def to_json(self) -> dict[str, object]:
        """For `read`."""
        return {
            "name": self.name,
            "slots": [[slot.name, list(slot.shape), slot.start] for slot in self.slots],
            "shard_start": self.shard_start,
            "shard_numel": self.shard_numel,
            "tile_numel": self.tile_numel,
            "first_tile": self.first_tile,
            "homes": [
                {
                    "name": home.name,
                    "cells": [[cell.kind, dtype_name(cell.dtype), cell.grain] for cell in home.cells],
                    "tiers": [list(pair) for pair in home.tiers],
                }
                for home in self.homes
            ],
            "offset": self.offset,
            "checksums": [list(of_tile) for of_tile in self.checksums],
        }

    @classmethod
    def read(cls, field: Field, *, file_bytes: int) -> "UnitTable":
        """Check and take what a file says.

        Arguments:
            field: the unit's object.
            file_bytes: of the data file; every extent lies in it.

        Raises:
            CheckpointError: it cannot be; nothing of that size was allocated.
        """
        homes = tuple(_read_home(home, field["name"].string()) for home in field["homes"].items())
        table = cls(
            name=field["name"].string(),
            slots=_read_slots(field["slots"]),
            shard_start=field["shard_start"].multiple(ALIGNMENT_NUMEL),
            shard_numel=field["shard_numel"].multiple(ALIGNMENT_NUMEL, least=ALIGNMENT_NUMEL),
            tile_numel=field["tile_numel"].multiple(ALIGNMENT_NUMEL, least=ALIGNMENT_NUMEL),
            first_tile=field["first_tile"].integer(),
            homes=homes,
            offset=field["offset"].multiple(PAGE_BYTES),
            checksums=tuple(of_tile.integers(len(homes), most=0xFFFFFFFF) for of_tile in field["checksums"].items()),
        )
        if table.checksums and table.tile_range(table.tiles[-1])[0] >= table.shard_numel:
            raise field["checksums"].fail("has more tiles than the shard")
        if table.largest_tile_bytes > MOST_TILE_BYTES:
            raise field["tile_numel"].fail(f"gives tiles of more than {MOST_TILE_BYTES:,} bytes")
        if table.offset + table.nbytes > file_bytes:
            raise field["offset"].fail(f"and its tiles reach past the {file_bytes:,} bytes of the data file")
        return table


def _read_home(field: Field, unit: str) -> HomeTable:
    cells = []
    for item in field["cells"].items():
        kind, dtype, grain = item.items(3)
        if grain.integer(least=1) not in (1, ALIGNMENT_NUMEL):
            raise grain.fail(f"is {grain.value}, neither 1 nor {ALIGNMENT_NUMEL}")
        cells.append(CellPlan(unit, kind.string(), Tier.NVME, dtype.dtype(), 0, grain.integer()))
    tiers = []
    for item in field["tiers"].items():
        tier, nbytes = item.items(2)
        tiers.append((tier.string(), nbytes.integer()))
    if not cells:
        raise field["cells"].fail("is empty")
    return HomeTable(field["name"].string(), tuple(cells), tuple(tiers))


def _read_slots(field: Field) -> tuple[Slot, ...]:
    slots: list[Slot] = []
    cursor = 0
    for item in field.items():
        name, shape, start = item.items(3)
        if start.multiple(ALIGNMENT_NUMEL) < cursor:
            raise start.fail("lies in the slot before it")
        extents = shape.shape()
        slots.append(Slot(name.string(), extents, prod(extents), start.integer()))
        cursor = slots[-1].stop
    return tuple(slots)


@dataclass(frozen=True)
class RankTable:
    """What one rank has written.

    Attributes:
        units: in the order of the file.
        random: states of its random number generators, as `checkpoint.values` encodes them.
    """

    units: tuple[UnitTable, ...]
    random: object

    def to_json(self) -> dict[str, object]:
        """For `read`."""
        return {"units": [unit.to_json() for unit in self.units], "random": self.random}

    @classmethod
    def read(cls, file: Path, text: bytes, *, file_bytes: int, all_bytes: int) -> "RankTable":
        """Check and take a table file.

        Arguments:
            file: for messages.
            text: its bytes.
            file_bytes: of the data file.
            all_bytes: of every rank's data file: what a table says of them takes less memory than they do.

        Raises:
            CheckpointError: names the field that cannot be.
        """
        field = parse(file, text, most_bytes=_TABLE_BYTES_OF_ANY + all_bytes)
        units = tuple(UnitTable.read(item, file_bytes=file_bytes) for item in field["units"].items())
        return cls(units, field["random"].value)


class Piece(NamedTuple):
    """Elements `start` to `stop` of a parameter that one tile holds, the first of them at element `inside` of it."""

    name: str
    start: int
    stop: int
    inside: int


def pieces(unit: UnitTable, number: int) -> Iterator[Piece]:
    """What a tile holds, in order."""
    start, stop = (unit.shard_start + element for element in unit.tile_range(number))
    for slot in unit.slots_in(start, stop):
        first, last = max(slot.start, start), min(slot.stop, stop)
        if first < last:
            yield Piece(slot.name, first - slot.start, last - slot.start, first - start)
