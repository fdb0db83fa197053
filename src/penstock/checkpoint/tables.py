"""Which bytes of a checkpoint belong to which shard of which parameter."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
# Elements of a tensor of which a box is here, counted as if either were flat. Pure arithmetic.
#
# A box that is cut along the first dimension is one run of elements; one that is cut along others is a run for each
# row:
#
#     a a a b b
#     a a a b b      box a: runs 0 to 3, 5 to 8;  box b: runs 3 to 5, 8 to 10
# ----------------------------------------------------------------------------------------------------------------------


class BoxExtent(NamedTuple):
    """Where a box lies in a tensor.

    Attributes:
        shape: the whole tensor's.
        offsets: where in it the box begins.
        sizes: how far it reaches.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, slot: Slot) -> "BoxExtent":
        """Say where a slot lies in its parameter."""
        if slot.region is None:
            return cls.whole(slot.shape)
        return cls(slot.region.shape, slot.region.offsets, slot.shape)

    @property
    def numel(self) -> int:
        """Elements of the box."""
        return prod(self.sizes)

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "BoxExtent":
        """Return the box that is all of a tensor."""
        return cls(shape, (0,) * len(shape), shape)

    def element(self, place: Sequence[int]) -> int:
        """Count the elements of the box before the one that is at a place of the tensor."""
        number = 0
        for at, offset, size in zip(place, self.offsets, self.sizes, strict=True):
            number = number * size + at - offset
        return number

    def overlap(self, other: "BoxExtent") -> "BoxExtent | None":
        """Return the box of the elements that two boxes of a tensor have in common; `None` where there are none."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = [
            min(a + m, b + n) for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        ]
        sizes = tuple(end - offset for end, offset in zip(ends, offsets, strict=True))
        return BoxExtent(self.shape, offsets, sizes) if min(sizes, default=1) > 0 else None


def meet(source: BoxExtent, start: int, stop: int, own: BoxExtent) -> Iterator[tuple[int, int, int]]:
    """Find what elements `start` to `stop` of one box have of another box of the same tensor.

    Yields:
        For each run its first element in `own` and the one after its last, and where it begins in `source`.
    """
    both = source.overlap(own)
    if both is None:  # most of what other ranks have: not a look at each of its rows
        return
    # A row goes through all of the dimensions behind the last one along which either box has more.
    wider = [max(sizes) > size for *sizes, size in zip(source.sizes, own.sizes, both.sizes, strict=True)]
    cut = max((dimension for dimension, is_wider in enumerate(wider) if is_wider), default=0)
    rows, length = prod(both.sizes[:cut]), prod(both.sizes[cut:])

    def begin(row: int) -> list[int]:
        place = [*both.offsets]
        for dimension in reversed(range(cut)):
            row, inside = divmod(row, both.sizes[dimension])
            place[dimension] += inside
        return place

    row = max(0, bisect_right(range(rows), start, key=lambda row: source.element(begin(row))) - 1)
    while row < rows and (at := source.element(begin(row))) < stop:
        first, last = max(at, start), min(at + length, stop)
        if first < last:
            inside = own.element(begin(row)) + first - at
            yield inside, inside + last - first, first
        row += 1


def why_not_whole(shape: tuple[int, ...], extents: Sequence[BoxExtent]) -> str | None:
    """Say why boxes are not a tensor of this shape, each element once; `None` where they are."""
    # Along the dimension in which they begin at most places, few boxes are beside each other.
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
# What one rank's data file holds: for each unit, tile after tile, the bits of every kind as they rested.
#
#     data file     | unit 0: tile 0 | tile 1 | ... | unit 1: tile 0 | ...
#     tile          | param | master | optimizer |        a record for each home, with a checksum
#     record        as on the nvme tier (`tiers/storage.py`): one kind after the other, whole pages
#
# A table says which elements of which parameters a tile has, so that they are found by parameter name and element,
# whatever unit, shard or tile they are to go to. A **piece** is what one tile has of one parameter.
# ----------------------------------------------------------------------------------------------------------------------


#: A tile of a checkpoint is in memory as a whole when it is read.
MOST_TILE_BYTES = 1 << 30
_TABLE_BYTES_OF_ANY = 1 << 28
_SLOT_FIELDS = 3  # a fourth where it is a part of its parameter


def _read_cells(field: Field) -> tuple[CellPlan, ...]:
    """Read the kinds of a home, `[kind, dtype, grain]` each."""
    cells = []
    for item in field.items():
        kind, dtype, grain = item.items(3)
        cells.append(CellPlan("", kind.string(), Tier.NVME, read_dtype(dtype), 0, grain.integer(least=1)))
    if not cells:
        raise field.fail("is empty")
    return tuple(cells)


@dataclass(frozen=True)
class HomeTable:
    """A home of a unit, as it rested when it was saved.

    Attributes:
        name: the home's.
        cells: its kinds; their unit, tier and numel say nothing.
        tiers: how many of its bytes were on each tier, for people.
    """

    name: str
    cells: Annotated[tuple[CellPlan, ...], _read_cells]
    tiers: tuple[tuple[str, int], ...]

    @cached_property
    def layout(self) -> RecordLayout:
        """How a record of it is divided into kinds."""
        return RecordLayout(self.cells)

    def to_json(self) -> dict[str, object]:
        """Give what the table file says of it."""
        return members(self) | {"cells": [[cell.kind, dtype_name(cell.dtype), cell.grain] for cell in self.cells]}


def _read_slots(field: Field) -> tuple[Slot, ...]:
    """Read the slots of a unit, `[name, shape, start]` each, one after the other."""
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
    """Read where a slot lies in its parameter, `[shape, offsets]`."""
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
        name: the unit's, for people.
        slots: the unit's parameters in its flat buffer; of those that every tensor-parallel rank has whole, the first
            one's alone.
        shard_start: the first element of the unit's flat buffer that the shard has.
        shard_numel: how many elements it has.
        tile_numel: elements of a tile; the shard's last may be shorter.
        first_tile: the number of the first of the shard's tiles that is in the file.
        homes: the unit's homes, in the order of a tile's records.
        offset: where the first tile begins in the file, in bytes.
        checksums: the CRC-32C of every record, by tile; zeros until the tile is written.
    """

    name: str
    slots: Annotated[tuple[Slot, ...], _read_slots]
    shard_start: Annotated[int, partial(Field.multiple, of=ALIGNMENT_NUMEL)]
    shard_numel: Annotated[int, partial(Field.multiple, of=ALIGNMENT_NUMEL, least=ALIGNMENT_NUMEL)]
    tile_numel: Annotated[int, partial(Field.multiple, of=ALIGNMENT_NUMEL, least=ALIGNMENT_NUMEL)]
    first_tile: int
    homes: tuple[HomeTable, ...]
    offset: Annotated[int, partial(Field.multiple, of=PAGE_BYTES)]
    checksums: tuple[Annotated[tuple[int, ...], partial(Field.integers, most=MOST_CHECKSUM)], ...]

    @property
    def tiles(self) -> range:
        """The numbers of its tiles."""
        return range(self.first_tile, self.first_tile + len(self.checksums))

    def tile_range(self, number: int) -> tuple[int, int]:
        """Give the first element of a tile and one past its last, counted from the start of the shard."""
        first = number * self.tile_numel
        return first, min(first + self.tile_numel, self.shard_numel)

    def records(self, number: int) -> list["TileRecord"]:
        """List a tile's records, one after the other."""
        start, stop = self.tile_range(number)
        offset = self.offset + (number - self.first_tile) * sum(self._record_bytes(self.tile_numel))
        records = []
        checksums = self.checksums[number - self.first_tile]
        for home, nbytes, checksum in zip(self.homes, self._record_bytes(stop - start), checksums, strict=True):
            records.append(TileRecord(home, offset, nbytes, checksum))
            offset += nbytes
        return records

    def _record_bytes(self, numel: int) -> list[int]:
        """Compute the bytes of the records of a tile of so many elements, by home."""
        return [home.layout.record_bytes(numel) for home in self.homes]

    @property
    def held_range(self) -> tuple[int, int]:
        """First element of the unit's flat buffer that its tiles hold, and one past the last."""
        first, last = self.tiles.start * self.tile_numel, self.tiles.stop * self.tile_numel
        return self.shard_start + first, self.shard_start + min(last, self.shard_numel)

    def parts(self, number: int) -> Iterator["SlotPart"]:
        """Go through what a tile holds of each slot, in order."""
        start, stop = self.tile_range(number)
        return self.parts_between(self.shard_start + start, self.shard_start + stop)

    def parts_between(self, start: int, stop: int) -> Iterator["SlotPart"]:
        """Go through what elements `start` to `stop` of the unit's flat buffer are of each slot, in order."""
        first = bisect_right(self.slots, start, key=lambda slot: slot.stop)  # slots are in order: not a look at each
        for slot in self.slots[first : bisect_left(self.slots, stop, key=lambda slot: slot.start)]:
            first, last = max(slot.start, start), min(slot.stop, stop)
            if first < last:
                yield SlotPart(slot, first - slot.start, last - slot.start, first - start)

    def pieces(self, number: int) -> Iterator["ParameterPiece"]:
        """Go through what a tile holds of each whole parameter: of one that is cut in columns, a piece for each row."""
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
        """Copy it with the checksums that its tiles have once they are written."""
        return replace(self, checksums=tuple(map(tuple, checksums)))

    def to_json(self) -> dict[str, object]:
        """Give what the table file says of it, for `read`."""
        return members(self) | {"slots": [_slot_to_json(slot) for slot in self.slots]}

    @staticmethod
    def read(field: Field, *, file_bytes: int) -> "UnitTable":
        """Check and take what a file says.

        Arguments:
            field: the unit's object.
            file_bytes: the size of the data file, which every record lies in.

        Raises:
            CheckpointError: it cannot be; nothing of that size was allocated.
        """
        table = _read_unit(field)
        if any(len(of_tile) != len(table.homes) for of_tile in table.checksums):
            raise field["checksums"].fail(f"has not {len(table.homes)} for each tile")
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
    """What one rank has written.

    Attributes:
        units: in the order of the file.
        random: states of its random number generators, as `checkpoint.values` encodes them.
    """

    units: tuple[UnitTable, ...]
    random: object

    @classmethod
    def read(cls, file: Path, text: bytes, *, file_bytes: int, all_bytes: int) -> "RankTable":
        """Check and take a table file.

        Arguments:
            file: the table file, for messages.
            text: its bytes.
            file_bytes: the size of the data file.
            all_bytes: that of every rank's data file: what a table says of them takes less memory than they do.

        Raises:
            CheckpointError: names the field that cannot be.
        """
        field = parse(file, text, most_bytes=_TABLE_BYTES_OF_ANY + all_bytes)
        field.only(["units", "random"])
        units = tuple(UnitTable.read(item, file_bytes=file_bytes) for item in field["units"].items())
        return cls(units, field["random"].value)


def kept_homes(cells: Mapping[str, Sequence[CellPlan]]) -> list[str]:
    """Choose the homes that a checkpoint keeps of a unit: a full master says all of its parameters.

    Arguments:
        cells: the kinds of each home of the unit, by the home's name.
    """
    kept = [name for name, kinds in cells.items() if kinds]
    if MASTER in kept and cells[MASTER][0].dtype == torch.float32:
        kept.remove(PARAM)
    return kept


def own_slots(slots: Sequence[Slot], grid: Grid) -> tuple[Slot, ...]:
    """Choose the slots that a rank's table names: of tensor-parallel ranks that have one whole, the first names it."""
    return tuple(slot for slot in slots if slot.region is not None or grid.tp_rank == 0)


def draw_table(
    name: str, layout: FlatLayout, homes: Sequence[HomeTable], tile_numel: int, grid: Grid, offset: int
) -> UnitTable:
    """Draw up what a rank saves of a unit. Of the ranks that have a copy of a shard, each saves some of its tiles.

    Arguments:
        name: the unit's.
        layout: its flat buffer.
        homes: what is kept of it.
        tile_numel: elements of a tile.
        grid: where the rank stands.
        offset: where its tiles begin in the data file.
    """
    start, stop = layout.shard_range(grid.shard_rank)
    count = -(-(stop - start) // tile_numel)
    # By numbers alone, which every replica knows: no tile is left out or written twice.
    first, last = (count * number // grid.replicas for number in (grid.replica_rank, grid.replica_rank + 1))
    return UnitTable(
        name=name,
        slots=own_slots(layout.slots, grid),
        shard_start=start,
        shard_numel=stop - start,
        tile_numel=tile_numel,
        first_tile=first,
        homes=tuple(homes),
        offset=offset,
        checksums=((0,) * len(homes),) * (last - first),
    )


class TileKey(NamedTuple):
    """A tile of a checkpoint: in which data file, in which unit, its number."""

    file: Path
    unit: UnitTable
    number: int

    def records(self) -> list["TileRecord"]:
        """List its records, one after the other."""
        return self.unit.records(self.number)


class TileRecord(NamedTuple):
    """A tile's bytes of one home: where they are in the data file."""

    home: HomeTable
    offset: int
    nbytes: int
    checksum: int


class SlotPart(NamedTuple):
    """Elements `start` to `stop` of a slot that one tile holds, the first of them at element `inside` of it."""

    slot: Slot
    start: int
    stop: int
    inside: int


class ParameterPiece(NamedTuple):
    """Elements `start` to `stop` of a parameter that one tile holds, the first of them at element `inside` of it."""

    name: str
    start: int
    stop: int
    inside: int
