"""Elements of a tensor that lies in boxes, copied as if it were flat."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.integrations.engine_internals import BoxExtent, meet


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
            For each its first element in the tensor and the one after its last, and where it begins in the box.
        """
        box = BoxExtent(self.shape, self.offsets, self.sizes)
        for inside, end, first in meet(BoxExtent.whole(self.shape), start, stop, box):
            yield first, first + end - inside, inside


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
