"""Flat buffers and their cuts into slots, shards, tiles and tiers. Pure arithmetic."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from penstock.config import Tier

# ----------------------------------------------------------------------------------------------------------------------
# The tier of each tile, where a kind of state is split between tiers. Pure arithmetic.
#
#     tiles of unit 0        | tiles of unit 1        | tiles of unit 2        |
#     device device device     device cpu    cpu        cpu    nvme   nvme
#
# All units are cut together, in forward order, fastest tier first: forward needs first the units that are updated
# first, and last those on a slow tier. Equal fractions of two kinds give equal cuts, so that a tile's gradient and
# parameters are on the tier of its update. Only units on a cut have several tiers.
# ----------------------------------------------------------------------------------------------------------------------


FASTEST_FIRST = (Tier.DEVICE, Tier.CPU, Tier.NVME)


class TierRange(NamedTuple):
    """Elements `start` to `stop`, on one tier."""

    tier: Tier
    start: int
    stop: int


def split(
    units: Sequence[Sequence[int]], fractions: Mapping[Tier, float], bytes_of: Sequence[float] | None = None
) -> list[tuple[TierRange, ...]]:
    """Split the tiles of all units between tiers: each gets its fraction of all bytes, to within one tile.

    Arguments:
        units: the number of elements of each tile of each unit, the units in forward order.
        fractions: each tier's fraction of the bytes; they sum to 1.
        bytes_of: the bytes of an element of each unit; `None` if they are the same for all.

    Returns:
        The spans of each unit, in order, each of whole tiles.

    Example:
        >>> split([[4, 4], [4, 2]], {Tier.DEVICE: 0.25, Tier.CPU: 0.75})[0]
        (TierRange(tier=<Tier.DEVICE: 'device'>, start=0, stop=4), TierRange(tier=<Tier.CPU: 'cpu'>, start=4, stop=8))
    """
    tiers = [tier for tier in FASTEST_FIRST if fractions.get(tier)]
    weights = bytes_of or [1.0] * len(units)
    total = sum(weight * sum(tiles) for weight, tiles in zip(weights, units, strict=True))
    ends, share = [], 0.0
    for tier in tiers[:-1]:
        share += fractions[tier]
        ends.append(share * total)
    spans: list[tuple[TierRange, ...]] = []
    passed, current = 0.0, 0
    for tiles, weight in zip(units, weights, strict=True):
        unit: list[TierRange] = []
        cursor = 0
        for numel in tiles:
            # The cut is rounded to whole tiles: a tile goes to the next tier if half of it or more is behind the cut.
            while current < len(ends) and passed + weight * numel / 2 >= ends[current]:
                current += 1
            if unit and unit[-1].tier is tiers[current]:
                unit[-1] = unit[-1]._replace(stop=cursor + numel)
            else:
                unit.append(TierRange(tiers[current], cursor, cursor + numel))
            cursor += numel
            passed += weight * numel
        spans.append(tuple(unit))
    return spans


def part(spans: Sequence[TierRange], start: int, stop: int) -> tuple[TierRange, ...]:
    """Cut a range out of spans.

    Arguments:
        spans: the spans, in order.
        start: the first element of the range.
        stop: the element after its last one.

    Returns:
        The spans inside of the range, counted from its start.
    """
    inside = (TierRange(tier, max(first, start) - start, min(last, stop) - start) for tier, first, last in spans)
    return tuple(span for span in inside if span.start < span.stop)


# ----------------------------------------------------------------------------------------------------------------------
# The slots of parameters in their unit's flat buffer, and the cuts of that buffer. Pure arithmetic.
#
# flat buffer   | slot 0 | gap | slot 1 | ... | slot k | tail gap |         layout.numel elements
# shards        |   rank 0    |   rank 1    |  ...  |   rank N-1  |         equal, across slots
# tiles         | tile 0 | tile 1 | ... |  of one shard, tile_numel elements each, the last one shorter
# pieces        the part of a slot that lies in one tile of one shard: one param group, one step count
#
# Where a rule looks at whole parameters, none is cut. All parameters of the unit have one size, that of a tile:
#
# flat buffer   | slot 0   | slot 1   | slot 2   |  |                       of three parameters, over three ranks
# shards        |   rank 0            |  rank 1  |r2|                       whole slots; a rank without one has a gap
# tiles         | tile 0   | tile 1   | tile 0   |t0|                       one slot each
# ----------------------------------------------------------------------------------------------------------------------


# Parameters, shards and tiles start at multiples of this many elements: the blocks of 8-bit states and of random bits
# (rules.rule.BLOCK_NUMEL) never lie in two of them, and vector loads are aligned on every tier.
ALIGNMENT_NUMEL = 256


class Region(NamedTuple):
    """The location of a slot's elements in a whole parameter of which this rank has a part: a box of the slot's shape.

    Attributes:
        shape: the whole parameter's shape.
        offsets: the box's first index in each dimension.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Slot:
    """The elements of one parameter in the flat buffer.

    Attributes:
        name: the parameter's name.
        shape: its shape; of a parameter that is divided over ranks, that of this rank's part.
        numel: the number of its elements.
        start: its first element's index in the flat buffer.
        region: its location in the whole parameter; `None` if it is the whole.
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    start: int
    region: Region | None = None

    @cached_property
    def stop(self) -> int:
        """The element after the last one."""
        return self.start + self.numel


class SlotPiece(NamedTuple):
    """The part of a slot that lies in one shard, or in one tile of it.

    Attributes:
        slot: the index of the slot in its layout.
        start: the first element, counted from the start of the shard.
        stop: the element after the last one.
    """

    slot: int
    start: int
    stop: int


@dataclass(frozen=True)
class FlatLayout:
    """The plan of a unit's flat buffer, which is padded so that it divides into aligned shards.

    Attributes:
        slots: the slots of the parameters, in order.
        cuts: the first element of each shard, and the end of the last one.
    """

    slots: tuple[Slot, ...]
    cuts: tuple[int, ...]

    @classmethod
    def build(
        cls,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        shards: int,
        regions: Sequence[Region | None] | None = None,
    ) -> "FlatLayout":
        """Lay parameters out one after the other, each aligned.

        Arguments:
            names: the parameters' names, in order.
            shapes: their shapes.
            shards: the number of shards.
            regions: their locations in whole parameters; `None` if all are whole.
        """
        slots = []
        cursor = 0
        for name, shape, region in zip(names, shapes, regions or [None] * len(names), strict=True):
            numel = math.prod(shape)
            slots.append(Slot(name, tuple(shape), numel, cursor, region))
            cursor = round_up(cursor + numel, ALIGNMENT_NUMEL)
        shard_numel = round_up(max(cursor, 1), ALIGNMENT_NUMEL * shards) // shards
        return cls(tuple(slots), tuple(range(0, (shards + 1) * shard_numel, shard_numel)))

    @classmethod
    def build_whole(
        cls, names: Sequence[str], shapes: Sequence[tuple[int, ...]], counts: Sequence[int], tile_numel: int
    ) -> "FlatLayout":
        """Lay out parameters of which none is cut: each is a tile of its rank.

        Arguments:
            names: the parameters' names, in order.
            shapes: their shapes, none with more elements than a tile.
            counts: the number of parameters of each rank.
            tile_numel: elements of a tile.
        """
        slots: list[Slot] = []
        cuts = [0]
        given = zip(names, shapes, strict=True)
        for count in counts:
            for number, (name, shape) in zip(range(count), given, strict=False):
                slots.append(Slot(name, tuple(shape), math.prod(shape), cuts[-1] + number * tile_numel))
            # A rank without a parameter gets a gap: its storages exist, and no work uses them.
            cuts.append(cuts[-1] + max(count * tile_numel, ALIGNMENT_NUMEL))
        return cls(tuple(slots), tuple(cuts))

    @property
    def shards(self) -> int:
        """The number of shards."""
        return len(self.cuts) - 1

    @cached_property
    def numel(self) -> int:
        """The number of elements of the buffer, with padding."""
        return self.cuts[-1]

    @cached_property
    def is_even(self) -> bool:
        """True if all shards have the same number of elements."""
        return len({stop - start for start, stop in pairwise(self.cuts)}) == 1

    @cached_property
    def _starts(self) -> list[int]:
        return [slot.start for slot in self.slots]

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Return the first element of a rank's shard in the flat buffer, and the one after its last."""
        return self.cuts[rank], self.cuts[rank + 1]

    def shard_numel(self, rank: int) -> int:
        """Return the number of elements of a rank's shard."""
        return self.cuts[rank + 1] - self.cuts[rank]

    def slot_at(self, element: int) -> int:
        """Return the index of the slot that contains an element of the flat buffer, or that is before its gap."""
        return bisect_right(self._starts, element) - 1

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges of the flat buffer that no parameter uses: the first element, and the one after the last."""
        cursor = 0
        for slot in self.slots:
            if slot.start > cursor:
                yield cursor, slot.start
            cursor = slot.stop
        if self.numel > cursor:
            yield cursor, self.numel

    def overlap(self, slot: Slot, rank: int) -> tuple[int, int] | None:
        """Return the part of a slot that lies in a rank's shard, or `None`.

        Returns:
            Its first element in the flat buffer, and the one after its last.
        """
        first, last = self.shard_range(rank)
        start, stop = max(slot.start, first), min(slot.stop, last)
        return (start, stop) if start < stop else None

    def parts(self, rank: int) -> list[SlotPiece]:
        """List the parts of slots that are in a rank's shard, counted from its start."""
        first, last = self.shard_range(rank)
        ranges = [(max(slot.start, first) - first, min(slot.stop, last) - first) for slot in self.slots]
        return [SlotPiece(index, start, stop) for index, (start, stop) in enumerate(ranges) if start < stop]

    def tiles(self, rank: int, tile_numel: int) -> list[tuple[SlotPiece, ...]]:
        """Cut a rank's shard into tiles.

        Arguments:
            rank: the rank's number among the shards.
            tile_numel: the number of elements of a tile; the last one may have less.

        Returns:
            The pieces of each tile, in order. Gaps belong to no piece.
        """
        tiles: list[list[SlotPiece]] = [[] for _ in range(0, self.shard_numel(rank), tile_numel)]
        for index, cursor, stop in self.parts(rank):
            while cursor < stop:
                tile = cursor // tile_numel
                end = min(stop, (tile + 1) * tile_numel)
                tiles[tile].append(SlotPiece(index, cursor, end))
                cursor = end
        return [tuple(tile) for tile in tiles]


def least_divisor(value: int, least: int) -> int:
    """Return the least divisor of a number that is not below `least`, which is no more than the number."""
    return next(found for found in range(max(least, 1), value + 1) if value % found == 0)


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple of a number that is not below the value."""
    return -(-value // multiple) * multiple
