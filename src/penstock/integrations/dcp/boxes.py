"""Elements of a tensor that lies in boxes, counted as if it were flat. Pure arithmetic, and copies.

A box that is cut along the first dimension is one run of elements; one that is cut along others is a run for each row:

    a a a b b
    a a a b b      box a: runs 0 to 3, 5 to 8;  box b: runs 3 to 5, 8 to 10
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from penstock.errors import CheckpointError


@dataclass(frozen=True)
class Box:
    """A box of a tensor's elements.

    Attributes:
        shape: the whole tensor's.
        offsets: where in it the box begins.
        sizes: how far it reaches.
        values: gives the box's own elements, flat, as bytes; asked for when they are needed.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    values: Callable[[], Tensor]

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Find the runs of the box that have elements `start` to `stop` of the tensor.

        Yields:
            For each its first and last element in the tensor, and where it begins in the box.
        """
        if not prod(self.sizes):
            return
        cut = max((number for number in range(len(self.shape)) if self.sizes[number] < self.shape[number]), default=0)
        length = prod(self.sizes[cut:])
        count = prod(self.sizes[:cut])
        number = max(0, bisect_right(range(count), start, key=lambda run: self._begin(run, cut)) - 1)
        while number < count and (begin := self._begin(number, cut)) < stop:
            first, last = max(begin, start), min(begin + length, stop)
            if first < last:
                yield first, last, number * length + first - begin
            number += 1

    def _begin(self, run: int, cut: int) -> int:
        """Count where in the tensor a run begins: it goes through the dimensions from `cut` on as a whole."""
        begin = 0
        for number in reversed(range(len(self.shape))):
            place = 0
            if number < cut:
                run, place = divmod(run, self.sizes[number])
            begin += (self.offsets[number] + place) * prod(self.shape[number + 1 :])
        return begin


def read_boxes(boxes: Sequence[Box], dtype: torch.dtype, start: int, stop: int) -> Tensor:
    """Copy elements of a tensor from the boxes that it lies in.

    Arguments:
        boxes: all of the tensor's.
        dtype: of its elements.
        start: the first element.
        stop: the one after the last.

    Raises:
        CheckpointError: the boxes do not have them all.
    """
    size = dtype.itemsize
    copied = torch.empty((stop - start) * size, dtype=torch.uint8)
    found = 0
    for box in boxes:
        for first, last, inside in box.runs(start, stop):
            values = box.values()
            copied[(first - start) * size : (last - start) * size] = values[inside * size :][: (last - first) * size]
            found += last - first
    if found != stop - start:
        raise CheckpointError(f"The chunks of a tensor have {found:,} of its elements {start:,} to {stop:,}.")
    return copied.view(dtype)
