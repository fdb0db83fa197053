"""Tables: the elements of parameters that each tile of a checkpoint holds."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Annotated, NamedTuple

import torch

from penstock.checkpoint.format import MOST_CHECKSUM, dtype_name, parse, read_dtype, read_shape
from penstock.config import MASTER, PARAM, Tier
from penstock.files import Field, members, reader
from penstock.layout import ALIGNMENT_NUMEL, FlatLayout, Region, Slot
from penstock.runtime.host_memory import PAGE_BYTES
from penstock.runtime.topology import Grid
from penstock.tiers.storage import CellPlan, RecordLayout

# ----------------------------------------------------------------------------------------------------------------------
# Boxes of a tensor, and the elements that two of them have in common. Elements are counted as if the tensor, or the
# box, were flat.
#
# A box that is cut along the first dimension is one run of elements. One that is cut along others is a run for each
# row:
#
#     a a a b b
#     a a a b b      box a: runs 0 to 3, 5 to 8;  box b: runs 3 to 5, 8 to 10
# ----------------------------------------------------------------------------------------------------------------------


class BoxExtent(NamedTuple):
    """A box of a tensor.

    Attributes:
        shape: the shape of the whole tensor.
        offsets: the first index of the box along each dimension.
        sizes: the shape of the box.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, slot: Slot) -> "BoxExtent":
        """Return the box of a slot in its parameter."""
        if slot.region is None:
            return cls.whole(slot.shape)
        return cls(slot.region.shape, slot.region.offsets, slot.shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "BoxExtent":
        """Return the box that is all of a tensor."""
        return cls(shape, (0,) * len(shape), shape)

    def element(self, index: Sequence[int]) -> int:
        """Return the number of an element in the box, by its index in the tensor."""
        number = 0
        for at, offset, size in zip(index, self.offsets, self.sizes, strict=True):
            number = number * size + at - offset
        return number

    def overlap(self, other: "BoxExtent") -> "BoxExtent | None":
        """Return the intersection of two boxes of a tensor; `None` if it is empty."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = [
            min(a + m, b + n) for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        ]
        sizes = tuple(end - offset for end, offset in zip(ends, offsets, strict=True))
        return BoxExtent(self.shape, offsets, sizes) if min(sizes, default=1) > 0 else None


def meet(source: BoxExtent, start: int, stop: int, own: BoxExtent) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of elements that two boxes of a tensor have in common.

    Arguments:
        source: the box that is read.
        start: its first element that is looked at.
        stop: one past its last.
        own: the box that is written.

    Yields:
        The first element of each run in `own`, one past its last, and its first element in `source`.
    """
    both = source.overlap(own)
    if both is None:  # of most tiles of other ranks: no look at each row
        return
    # A row is contiguous in both boxes: it begins at the last dimension along which one of them is wider than both.
    wider = [max(sizes) > size for *sizes, size in zip(source.sizes, own.sizes, both.sizes, strict=True)]
    cut = max((dimension for dimension, is_wider in enumerate(wider) if is_wider), default=0)
    rows, length = prod(both.sizes[:cut]), prod(both.sizes[cut:])

    def begin(row: int) -> list[int]:
        index = [*both.offsets]
        for dimension in reversed(range(cut)):
            row, inside = divmod(row, both.sizes[dimension])
            index[dimension] += inside
        return index

    row = max(0, bisect_right(range(rows), start, key=lambda row: source.element(begin(row))) - 1)
    while row < rows and (at := source.element(begin(row))) < stop:
        first, last = max(at, start), min(at + length, stop)
        if first < last:
            inside = own.element(begin(row)) + first - at
            yield inside, inside + last - first, first
        row += 1


def why_not_whole(shape: tuple[int, ...], extents: Sequence[BoxExtent]) -> str | None:
    """Return the reason if boxes are not a partition of a tensor of this shape, else `None`."""
    # Sorted along the dimension with the most offsets, a box is compared with few others.
    along = max(range(len(shape)), key=lambda d: len({extent.offsets[d] for extent in extents}), default=0)
    filled = sorted((e for e in extents if e.numel), key=lambda e: e.offsets[along] if shape else 0)
    for number, one in enumerate(filled):
        for other in filled[number + 1 :]:
            if shape and other.offsets[along] >= one.offsets[along] + one.sizes[along]:
                break
            if one.overlap(other) is not None:
                return f"has parts that overlap, at {list(one.offsets)} and {list(other.offsets)}"
    if (there := sum(extent.numel for extent in filled)) != prod(shape):
        return f"has parts of {there:,} of its {prod(shape):,} elements"
    return None


# ----------------------------------------------------------------------------------------------------------------------
# The data file of one rank: for each unit, tile after tile, the bytes of every kind as they were stored.
#
#     data file     | unit 0: tile 0 | tile 1 | ... | unit 1: tile 0 | ...
#     tile          | param | master | optimizer |        a record for each storage, with a checksum
#     record        as on the nvme tier (`tiers/storage.py`): one kind after the other, whole pages
#
# A table lists the elements of parameters that each tile has. They are found by name and index, so units, shards and
# tiles may be others at a load. A **piece** is the elements of one parameter in one tile.
# ----------------------------------------------------------------------------------------------------------------------


#: A tile is read into memory as a whole.
MOST_TILE_BYTES = 1 << 30
_TABLE_BYTES_OF_ANY = 1 << 28
_SLOT_FIELDS = 3  # and a fourth for a part of a parameter


def _read_cells(field: Field) -> tuple[CellPlan, ...]:
    """Read the kinds of a storage, `[kind, dtype, grain]` each."""
    cells = []
    for item in field.items():
        kind, dtype, grain = item.items(3)
        cells.append(CellPlan("", kind.string(), Tier.NVME, read_dtype(dtype), 0, grain.integer(least=1)))
    if not cells:
        raise field.fail("is empty")
    return tuple(cells)


@dataclass(frozen=True)
class HomeTable:
    """A storage of a unit when it was saved.

    Attributes:
        name: the storage's.
        cells: its kinds. Their unit, tier and numel are unset.
        tiers: the bytes that were on each tier, for reports.
    """

    name: str
    cells: Annotated[tuple[CellPlan, ...], _read_cells]
    tiers: tuple[tuple[str, int], ...]

    @cached_property
    def layout(self) -> RecordLayout:
        """The layout of kinds in a record."""
        return RecordLayout(self.cells)

    def to_json(self) -> dict[str, object]:
        """Return its JSON value in the table file."""
        return members(self) | {"cells": [[cell.kind, dtype_name(cell.dtype), cell.grain] for cell in self.cells]}


def _read_slots(field: Field) -> tuple[Slot, ...]:
    """Read the slots of a unit, `[name, shape, start]` each, in the order of the flat buffer."""
    slots: list[Slot] = []
    for item in field.items():
        is_part = isinstance(item.value, list) and len(item.value) == _SLOT_FIELDS + 1
        name, shape, start, *region = item.items(_SLOT_FIELDS + is_part)
        if start.multiple(ALIGNMENT_NUMEL) < (slots[-1].stop if slots else 0):
            raise start.fail("lies in the slot before it")
        sizes = read_shape(shape)
        where = _read_region(region[0], name.string(), sizes) if region else None
        slots.append(Slot(name.string(), sizes, prod(sizes), start.integer(), where))
    return tuple(slots)


def _read_region(field: Field, name: str, sizes: tuple[int, ...]) -> Region:
    """Read the region of a slot in its parameter, `[shape, offsets]`."""
    shape, offsets = field.items(2)
    region = Region(read_shape(shape), offsets.integers())
    if not len(region.shape) == len(region.offsets) == len(sizes):
        raise field.fail(f"of '{name}' has other dimensions than its {len(sizes)}")
    if any(begin + size > most for begin, size, most in zip(region.offsets, sizes, region.shape, strict=True)):
        raise field.fail(f"of '{name}' reaches past its shape {region.shape}")
    return region


def _slot_to_json(slot: Slot) -> list[object]:
    region = [] if slot.region is None else [[slot.region.shape, slot.region.offsets]]
    return [slot.name, slot.shape, slot.start, *region]


@dataclass(frozen=True)
class UnitTable:
    """Some tiles of a shard of a unit.

    Attributes:
        name: the unit's, for messages.
        slots: the unit's parameters in its flat buffer. The first tensor-parallel rank alone lists those that all of
            them have whole.
        shard_start: the shard's first element in the unit's flat buffer.
        shard_numel: elements of the shard.
        tile_numel: elements of a tile; the shard's last one may be shorter.
        first_tile: the number of the first tile of the shard in the file.
        storages: the unit's storages, in the order of a tile's records.
        offset: the first byte of the first tile in the file.
        checksums: the CRC-32C of every record, by tile; zeros until the tile is written.
    """

    name: str
    slots: Annotated[tuple[Slot, ...], _read_slots]
    shard_start: Annotated[int, partial(Field.multiple, of=ALIGNMENT_NUMEL)]
    shard_numel: Annotated[int, partial(Field.multiple, of=ALIGNMENT_NUMEL, least=ALIGNMENT_NUMEL)]
    tile_numel: Annotated[int, partial(Field.multiple, of=ALIGNMENT_NUMEL, least=ALIGNMENT_NUMEL)]
    first_tile: int
    storages: tuple[HomeTable, ...] = field(metadata={"key": "homes"})
    offset: Annotated[int, partial(Field.multiple, of=PAGE_BYTES)]
    checksums: tuple[Annotated[tuple[int, ...], partial(Field.integers, most=MOST_CHECKSUM)], ...]

    @property
    def tiles(self) -> range:
        """The numbers of its tiles."""
        return range(self.first_tile, self.first_tile + len(self.checksums))

    def tile_range(self, number: int) -> tuple[int, int]:
        """Return the first element of a tile in the shard, and one past its last."""
        first = number * self.tile_numel
        return first, min(first + self.tile_numel, self.shard_numel)

    def records(self, number: int) -> list["TileRecord"]:
        """List a tile's records in their order."""
        start, stop = self.tile_range(number)
        offset = self.offset + (number - self.first_tile) * sum(self._record_bytes(self.tile_numel))
        records = []
        checksums = self.checksums[number - self.first_tile]
        for storage, nbytes, checksum in zip(self.storages, self._record_bytes(stop - start), checksums, strict=True):
            records.append(TileRecord(storage, offset, nbytes, checksum))
            offset += nbytes
        return records

    def _record_bytes(self, numel: int) -> list[int]:
        """Return the bytes of each record of a tile of some elements."""
        return [storage.layout.record_bytes(numel) for storage in self.storages]

    @property
    def held_range(self) -> tuple[int, int]:
        """First element of the unit's flat buffer in its tiles, and one past the last."""
        first, last = self.tiles.start * self.tile_numel, self.tiles.stop * self.tile_numel
        return self.shard_start + first, self.shard_start + min(last, self.shard_numel)

    def parts(self, number: int) -> Iterator["SlotPart"]:
        """Yield the elements of each slot in a tile, in order."""
        start, stop = self.tile_range(number)
        return self.parts_between(self.shard_start + start, self.shard_start + stop)

    def parts_between(self, start: int, stop: int) -> Iterator["SlotPart"]:
        """Yield the elements of each slot in a range of the unit's flat buffer, in order."""
        first = bisect_right(self.slots, start, key=lambda slot: slot.stop)  # slots are sorted
        for slot in self.slots[first : bisect_left(self.slots, stop, key=lambda slot: slot.start)]:
            first, last = max(slot.start, start), min(slot.stop, stop)
            if first < last:
                yield SlotPart(slot, first - slot.start, last - slot.start, first - start)

    def pieces(self, number: int) -> Iterator["ParameterPiece"]:
        """Yield the elements of each whole parameter in a tile. Parts cut in columns have a piece for each row."""
        for slot, start, stop, inside in self.parts(number):
            extent = BoxExtent.of(slot)
            for first, last, at in meet(extent, start, stop, BoxExtent.whole(extent.shape)):
                yield ParameterPiece(slot.name, first, last, inside + at - start)

    @property
    def largest_tile_bytes(self) -> int:
        """Bytes of its largest tile."""
        return sum(self._record_bytes(min(self.tile_numel, self.shard_numel)))

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        if not self.checksums:
            return 0
        start, stop = self.tile_range(self.tiles[-1])
        return (len(self.checksums) - 1) * sum(self._record_bytes(self.tile_numel)) + sum(
            self._record_bytes(stop - start)
        )

    def with_checksums(self, checksums: Sequence[Sequence[int]]) -> "UnitTable":
        """Return a copy with the checksums of written tiles."""
        return replace(self, checksums=tuple(map(tuple, checksums)))

    def to_json(self) -> dict[str, object]:
        """Return its JSON value in the table file, for `read`."""
        return members(self) | {"slots": [_slot_to_json(slot) for slot in self.slots]}

    @staticmethod
    def read(field: Field, *, file_bytes: int) -> "UnitTable":
        """Read and check a unit.

        Arguments:
            field: the unit's object.
            file_bytes: the size of the data file, which holds every record.

        Raises:
            CheckpointError: it is invalid. Nothing of its sizes was allocated.
        """
        table = _read_unit(field)
        if any(len(of_tile) != len(table.storages) for of_tile in table.checksums):
            raise field["checksums"].fail(f"has not {len(table.storages)} for each tile")
        if table.checksums and table.tile_range(table.tiles[-1])[0] >= table.shard_numel:
            raise field["checksums"].fail("has more tiles than the shard")
        if table.largest_tile_bytes > MOST_TILE_BYTES:
            raise field["tile_numel"].fail(f"gives tiles of more than {MOST_TILE_BYTES:,} bytes")
        if table.offset + table.nbytes > file_bytes:
            raise field["offset"].fail(f"and its tiles reach past the {file_bytes:,} bytes of the data file")
        return table


_read_unit = reader(UnitTable)


@dataclass(frozen=True)
class RankTable:
    """The table of one rank.

    Attributes:
        units: in the order of the file.
        random: the states of its random number generators, as `encode` writes them.
    """

    units: tuple[UnitTable, ...]
    random: object

    @classmethod
    def read(cls, file: Path, text: bytes, *, file_bytes: int, all_bytes: int) -> "RankTable":
        """Read and check a table file.

        Arguments:
            file: the table file, for messages.
            text: its bytes.
            file_bytes: the size of the data file.
            all_bytes: the size of all data files, which bounds the memory of a table.

        Raises:
            CheckpointError: names the invalid field.
        """
        field = parse(file, text, most_bytes=_TABLE_BYTES_OF_ANY + all_bytes)
        field.only(["units", "random"])
        units = tuple(UnitTable.read(item, file_bytes=file_bytes) for item in field["units"].items())
        return cls(units, field["random"].value)


def kept_storages(cells: Mapping[str, Sequence[CellPlan]]) -> list[str]:
    """Return the names of the storages that a checkpoint keeps of a unit. An fp32 master replaces its parameters.

    Arguments:
        cells: the kinds of each storage of the unit, by its name.
    """
    kept = [name for name, kinds in cells.items() if kinds]
    if MASTER in kept and cells[MASTER][0].dtype == torch.float32:
        kept.remove(PARAM)
    return kept


def own_slots(slots: Sequence[Slot], grid: Grid) -> tuple[Slot, ...]:
    """Return the slots of a rank's table. The first tensor-parallel rank lists those that all of them have whole."""
    return tuple(slot for slot in slots if slot.region is not None or grid.tp_rank == 0)


def draw_table(
    name: str, layout: FlatLayout, storages: Sequence[HomeTable], tile_numel: int, grid: Grid, offset: int
) -> UnitTable:
    """Make the table of the tiles of a unit that a rank saves. Ranks with copies of a shard divide its tiles.

    Arguments:
        name: the unit's.
        layout: its flat buffer.
        storages: the storages that are kept.
        tile_numel: elements of a tile.
        grid: the rank's position in the mesh.
        offset: the first byte of its tiles in the data file.
    """
    start, stop = layout.shard_range(grid.shard_rank)
    count = -(-(stop - start) // tile_numel)
    # Every replica computes the same division: no tile is left out or written twice.
    first, last = (count * number // grid.replicas for number in (grid.replica_rank, grid.replica_rank + 1))
    return UnitTable(
        name=name,
        slots=own_slots(layout.slots, grid),
        shard_start=start,
        shard_numel=stop - start,
        tile_numel=tile_numel,
        first_tile=first,
        storages=tuple(storages),
        offset=offset,
        checksums=((0,) * len(storages),) * (last - first),
    )


class TileKey(NamedTuple):
    """A tile of a checkpoint: data file, unit, number."""

    file: Path
    unit: UnitTable
    number: int

    def records(self) -> list["TileRecord"]:
        """List its records in their order."""
        return self.unit.records(self.number)


class TileRecord(NamedTuple):
    """A tile's bytes of one storage in the data file."""

    storage: HomeTable
    offset: int
    nbytes: int
    checksum: int


class SlotPart(NamedTuple):
    """Elements `start` to `stop` of a slot in one tile, from its element `inside` on."""

    slot: Slot
    start: int
    stop: int
    inside: int


class ParameterPiece(NamedTuple):
    """Elements `start` to `stop` of a parameter in one tile, from its element `inside` on."""

    name: str
    start: int
    stop: int
    inside: int
