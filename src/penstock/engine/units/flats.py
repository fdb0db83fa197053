"""Values of parameters as if they were flat, in memory or cut out of whole ones."""

import math
from abc import ABC, abstractmethod

from torch import Tensor, nn

from penstock.engine.units.dtensors import cut, own_shape, region_of
from penstock.layout import Region


class Flat(ABC):
    """The values of one parameter, as if it were flat."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Tensor:
        """Return elements `start` to `stop`, 1-D."""


class Whole(Flat):
    """Values that are in memory."""

    def __init__(self, values: Tensor) -> None:
        self._values = values.detach().reshape(-1)

    def read(self, start: int, stop: int) -> Tensor:
        """View them in place."""
        return self._values[start:stop]


class Cut(Flat):
    """A box of values, of which no more is read than the rows that it lies in.

    Arguments:
        whole: the values that the box is in.
        shape: the box's.
        region: where it lies.
    """

    def __init__(self, whole: Flat, shape: tuple[int, ...], region: Region) -> None:
        self._whole = whole
        self._shape = shape
        self._region = region

    def read(self, start: int, stop: int) -> Tensor:
        """Cut them out of whole rows."""
        row, whole_row = math.prod(self._shape[1:]), math.prod(self._region.shape[1:])
        if start == stop:
            return self._whole.read(0, 0)
        first, last = start // row, -(-stop // row)
        above = self._region.offsets[0]
        rows = self._whole.read((above + first) * whole_row, (above + last) * whole_row)
        rows = rows.view(last - first, *self._region.shape[1:])
        offsets, shape = (0, *self._region.offsets[1:]), (last - first, *self._shape[1:])
        box = cut(rows, shape, Region(tuple(rows.shape), offsets)).reshape(-1)
        return box[start - first * row : stop - first * row]


def cut_to(flat: Flat, parameter: nn.Parameter) -> Flat:
    """Cut values to this rank's elements of a parameter."""
    region = region_of(parameter)
    return flat if region is None else Cut(flat, own_shape(parameter), region)
