"""Elements of a tensor of which a box is here, counted as if either were flat. Pure arithmetic.

A box that is cut along the first dimension is one run of elements; one that is cut along others is a run for each row:

    a a a b b
    a a a b b      box a: runs 0 to 3, 5 to 8;  box b: runs 3 to 5, 8 to 10
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from penstock.layout import Slot


class Extent(NamedTuple):
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
    def of(cls, slot: Slot) -> "Extent":
        """Say where a slot lies in its parameter."""
        if slot.region is None:
            return cls(slot.shape, (0,) * len(slot.shape), slot.shape)
        return cls(slot.region.shape, slot.region.offsets, slot.shape)

    @property
    def numel(self) -> int:
        """Elements of the box."""
        return prod(self.sizes)

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Find the runs of the box that have elements `start` to `stop` of the tensor.

        Yields:
            For each its first element in the tensor and the one after its last, and where it begins in the box.
        """
        if not self.numel:
            return
        count, length, cut = self._rows()
        number = max(0, bisect_right(range(count), start, key=lambda run: self._begin(run, cut)) - 1)
        while number < count and (begin := self._begin(number, cut)) < stop:
            first, last = max(begin, start), min(begin + length, stop)
            if first < last:
                yield first, last, number * length + first - begin
            number += 1

    def places(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Find the runs that elements `start` to `stop` of the box are.

        Yields:
            For each its first element in the tensor and the one after its last, and where it begins in the box.
        """
        _, length, cut = self._rows()
        while start < stop:
            number, inside = divmod(start, length)
            first = self._begin(number, cut) + inside
            numel = min(length - inside, stop - start)
            yield first, first + numel, start
            start += numel

    def _rows(self) -> tuple[int, int, int]:
        """Count the runs and their elements, and say from which dimension on they go through all of it."""
        cut = max((number for number in range(len(self.shape)) if self.sizes[number] < self.shape[number]), default=0)
        return prod(self.sizes[:cut]), prod(self.sizes[cut:]), cut

    def _begin(self, run: int, cut: int) -> int:
        """Count where in the tensor a run begins: it goes through the dimensions from `cut` on as a whole."""
        begin = 0
        stride = 1
        for number in reversed(range(len(self.shape))):
            place = 0
            if number < cut:
                run, place = divmod(run, self.sizes[number])
            begin += (self.offsets[number] + place) * stride
            stride *= self.shape[number]
        return begin


def meet(source: Extent, start: int, stop: int, own: Extent) -> Iterator[tuple[int, int, int]]:
    """Find what elements `start` to `stop` of one box have of another box of the same tensor.

    Yields:
        For each run its first element in `own` and the one after its last, and where it begins in `source`.
    """
    if not _overlap(source, own):  # most of what other ranks have: not a look at each of its rows
        return
    for first, last, at in source.places(start, stop):
        for begin, end, inside in own.runs(first, last):
            yield inside, inside + end - begin, at + begin - first


def why_not_whole(shape: tuple[int, ...], extents: Sequence[Extent]) -> str | None:
    """Say why boxes are not a tensor of this shape, each element once; `None` where they are."""
    # Along the dimension in which they begin at most places, few boxes are beside each other.
    along = max(range(len(shape)), key=lambda d: len({extent.offsets[d] for extent in extents}), default=0)
    filled = sorted((e for e in extents if e.numel), key=lambda e: e.offsets[along] if shape else 0)
    for number, one in enumerate(filled):
        for other in filled[number + 1 :]:
            if shape and other.offsets[along] >= one.offsets[along] + one.sizes[along]:
                break
            if _overlap(one, other):
                return f"has parts that overlap, at {list(one.offsets)} and {list(other.offsets)}"
    if (there := sum(extent.numel for extent in filled)) != prod(shape):
        return f"has parts of {there:,} of its {prod(shape):,} elements"
    return None


def _overlap(one: Extent, other: Extent) -> bool:
    """Whether two boxes of a tensor have elements in common."""
    pairs = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + m and b < a + n for a, n, b, m in pairs)
