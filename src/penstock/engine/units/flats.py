"""The values of one parameter, wherever they are, as if it were flat; cut out of whole ones; and whether they fit."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from penstock.checkpoint.ahead import ReadAhead, Span
from penstock.checkpoint.tensorfiles import StoredTensors
from penstock.engine.units.discover import UnitSpec
from penstock.engine.units.dtensors import box_of, cut
from penstock.layout import Region

_COMPARED_NUMEL = 1 << 24  # of tied values, at once


class Read(NamedTuple):
    """Elements of one of a unit's parameters, counted from its own first.

    Attributes:
        slot: the index of its slot in the unit's layout.
    """

    slot: int
    start: int
    stop: int


class Flat(ABC):
    """The values of one parameter, as if it were flat."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Tensor:
        """Return elements `start` to `stop`, 1-D."""

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the same piece by piece: its first element, and the values, until the next one is asked for."""
        yield start, self.read(start, stop)


class Whole(Flat):
    """Values that are in memory."""

    def __init__(self, values: Tensor) -> None:
        self._values = values.detach().reshape(-1)

    def read(self, start: int, stop: int) -> Tensor:
        """View them in place."""
        return self._values[start:stop]


class InFile(Flat):
    """Values in files, of which only what is asked for is read.

    Arguments:
        files: the files.
        name: the tensor's name there.
        ahead: what reads it ahead, if anything.
    """

    def __init__(self, files: StoredTensors, name: str, ahead: ReadAhead | None = None) -> None:
        self._files = files
        self._name = name
        self._ahead = ahead

    def read(self, start: int, stop: int) -> Tensor:
        """Read them."""
        return self._files.read(self._name, start, stop)

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield them as they come from the disk."""
        return super().pieces(start, stop) if self._ahead is None else self._ahead.pieces(self._name, start, stop)


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
    box = box_of(parameter)
    return flat if box is None else Cut(flat, *box)


def foreseen(
    names: Mapping[Tensor, str], specs: Sequence[UnitSpec], reads: Sequence[Sequence[Read]]
) -> tuple[list[Span], int]:
    """List what `pieces` will be asked for of values that are in files, in order, and the bytes of the largest unit.

    Arguments:
        names: the name in the files of each parameter.
        specs: the units.
        reads: what will be read of each of them.
    """
    spans, most_bytes = [], 0
    for spec, of_unit in zip(specs, reads, strict=True):
        most_bytes = max(most_bytes, sum(stop - start for _, start, stop in of_unit) * spec.dtype.itemsize)
        for slot, start, stop in of_unit:
            if box_of(spec.parameters[slot]) is None:  # else `Cut` asks for whole rows
                spans.append(Span(names[spec.parameters[slot]], start, stop))
    return spans, most_bytes


def oddity(name: str, value: object) -> list[str]:
    """Say why a value is no plain tensor with values; an empty list where it is one."""
    if not isinstance(value, Tensor):
        return [f"'{name}' is a {type(value).__module__}.{type(value).__qualname__}".replace(" builtins.", " ")]
    if value.is_meta:
        return [f"'{name}' is on the meta device and has no values"]
    is_wrapped = is_traceable_wrapper_subclass(value)
    if value.is_nested or value.is_quantized or is_wrapped:
        return [f"'{name}' is a {'nested' if value.is_nested else 'quantised or wrapped'} tensor, not a plain one"]
    return [] if value.layout is torch.strided else [f"'{name}' is {value.layout}, not a dense tensor"]


def same(one: Flat, other: Flat, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether two values are the same once they are in a dtype. Compares block by block; NaN is the same as NaN."""
    numel = math.prod(shape)
    for start in range(0, numel, _COMPARED_NUMEL):
        a, b = (flat.read(start, min(start + _COMPARED_NUMEL, numel)).to(dtype) for flat in (one, other))
        same = a == b.to(a.device)
        if dtype.is_floating_point:
            same |= a.isnan() & b.to(a.device).isnan()
        if not bool(same.all()):
            return False
    return True


def misfit(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, wanted: tuple[int, ...], wanted_dtype: torch.dtype
) -> list[str]:
    """Say why a value of a shape and dtype does not fit where others are wanted; an empty list where it does."""
    if shape != wanted:
        return [f"'{name}' has shape {shape}, not {wanted}"]
    if dtype != wanted_dtype and not (dtype.is_floating_point and wanted_dtype.is_floating_point):
        return [f"'{name}' is {dtype}, not {wanted_dtype}"]
    return []
