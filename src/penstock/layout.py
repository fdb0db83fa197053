"""Where each parameter lies in its unit's flat buffer, and how that buffer is cut. Pure arithmetic.

flat buffer   | slot 0 | gap | slot 1 | ... | slot k | tail gap |         layout.numel elements
shards        |   rank 0    |   rank 1    |  ...  |   rank N-1    |         layout.shard_numel each
tiles         | tile 0 | tile 1 | ... |  of one shard, tile_numel elements each, the last one shorter
pieces        the part of a slot that lies in one tile of one shard: one param group, one step count
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Parameters, shards and tiles start at multiples of this many elements: the blocks of 8-bit states and of random bits
# (rules.rule.BLOCK_NUMEL) never lie in two of them, and vector loads are aligned on every tier.
ALIGNMENT_NUMEL = 256


@dataclass(frozen=True)
class Slot:
    """One parameter's place in the flat buffer, in elements."""

    name: str
    shape: tuple[int, ...]
    numel: int
    start: int

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.numel


@dataclass(frozen=True)
class Piece:
    """The part of slot `slot` in one tile: elements `start` to `stop`, counted from the start of the shard."""

    slot: int
    start: int
    stop: int


@dataclass(frozen=True)
class FlatLayout:
    """A unit's flat buffer: its slots, padded so that it divides evenly into `shards` aligned shards."""

    slots: tuple[Slot, ...]
    numel: int
    shards: int

    @classmethod
    def build(cls, names: Sequence[str], shapes: Sequence[tuple[int, ...]], shards: int) -> "FlatLayout":
        """Lay the parameters out one after the other, each aligned, in the order given."""
        slots = []
        cursor = 0
        for name, shape in zip(names, shapes, strict=True):
            numel = 1
            for extent in shape:
                numel *= extent
            slots.append(Slot(name, tuple(shape), numel, cursor))
            cursor = round_up(cursor + numel, ALIGNMENT_NUMEL)
        return cls(tuple(slots), round_up(max(cursor, 1), ALIGNMENT_NUMEL * shards), shards)

    @property
    def shard_numel(self) -> int:
        """Elements of one shard."""
        return self.numel // self.shards

    def shard_range(self, rank: int) -> tuple[int, int]:
        """First element of the rank's shard in the flat buffer, and one past its last."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def slot_at(self, element: int) -> int:
        """The slot that an element of the flat buffer is in, or in the gap behind."""
        return bisect_right(self.slots, element, key=lambda slot: slot.start) - 1

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Ranges of the flat buffer that no parameter uses."""
        cursor = 0
        for slot in self.slots:
            if slot.start > cursor:
                yield cursor, slot.start
            cursor = slot.stop
        if self.numel > cursor:
            yield cursor, self.numel

    def overlap(self, slot: Slot, rank: int) -> tuple[int, int] | None:
        """The part of the slot in the rank's shard, in elements of the flat buffer; `None` where there is none."""
        first, last = self.shard_range(rank)
        start, stop = max(slot.start, first), min(slot.stop, last)
        return (start, stop) if start < stop else None

    def tiles(self, rank: int, tile_numel: int) -> list[tuple[Piece, ...]]:
        """The pieces of each tile of the rank's shard, in order. Gaps belong to no piece."""
        first, last = self.shard_range(rank)
        tiles: list[list[Piece]] = [[] for _ in range(0, last - first, tile_numel)]
        for index, slot in enumerate(self.slots):
            found = self.overlap(slot, rank)
            if found is None:
                continue
            cursor, stop = found[0] - first, found[1] - first
            while cursor < stop:
                tile = cursor // tile_numel
                end = min(stop, (tile + 1) * tile_numel)
                tiles[tile].append(Piece(index, cursor, end))
                cursor = end
        return [tuple(tile) for tile in tiles]


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is not below the value."""
    return -(-value // multiple) * multiple
