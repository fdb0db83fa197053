"""Kinds of one unit on the nvme tier: a record for each tile.

A record holds a tile's values of all the kinds of its home, one kind after the other, and fills whole pages of a file:
one read brings everything that an update of the tile needs from there, one write takes it back.

    record of tile i    | master | exp_avg | exp_avg_sq | padding |
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from penstock.layout import round_up
from penstock.machine.aio import File, Transfer
from penstock.machine.arena import PAGE_BYTES, page_aligned
from penstock.machine.streams import DONE, Event, PendingEvent, all_of
from penstock.tiers.home import CellPlan, Section, SectionPlan, Views

_FIELD_BYTES = 64  # fields begin on a cache line


class RecordLayout:
    """What a record of each tile holds, and where in it.

    Arguments:
        cells: the kinds, in order.
    """

    def __init__(self, cells: Sequence[CellPlan]) -> None:
        self.cells = tuple(cells)

    def record_bytes(self, numel: int) -> int:
        """Bytes of the record of a tile of `numel` elements: whole pages."""
        offset = 0
        for cell in self.cells:
            offset = round_up(offset, _FIELD_BYTES) + cell.part(0, numel).stop * cell.dtype.itemsize
        return round_up(offset, PAGE_BYTES)

    def views(self, buffer: Tensor, numel: int) -> Views:
        """The kinds' values in a buffer that holds the record of a tile of `numel` elements."""
        offset, views = 0, []
        for cell in self.cells:
            offset = round_up(offset, _FIELD_BYTES)
            nbytes = cell.part(0, numel).stop * cell.dtype.itemsize
            views.append(buffer[offset : offset + nbytes].view(cell.dtype))
            offset += nbytes
        return tuple(views)


def record_sizes(plan: SectionPlan) -> list[int]:
    """Bytes of the record of each tile of a section."""
    layout = RecordLayout(plan.cells)
    whole, rest = divmod(plan.numel, plan.tile_numel)
    return [layout.record_bytes(plan.tile_numel)] * whole + ([layout.record_bytes(rest)] if rest else [])


@dataclass(frozen=True)
class Place:
    """Where a record lies."""

    file: File
    offset: int
    nbytes: int


class Stored(NamedTuple):
    """A record that was written."""

    place: Place
    checksum: int


class Kept(NamedTuple):
    """A buffer that still holds what a record says, once `ready`, until its slot is used for something else."""

    buffer: Tensor
    ready: Event
    slot: object


class Records(Section):
    """Kinds in records.

    Arguments:
        places: where each tile's record lies.
        checksums: verify what is read.

    Attributes:
        settled: for each tile, the event of the last work that wrote its record.
        kept: by tile, a buffer from which its record can be had without reading.
    """

    def __init__(self, plan: SectionPlan, places: Sequence[Place], *, checksums: bool) -> None:
        super().__init__(plan)
        self._layout = RecordLayout(plan.cells)
        self._places = places
        self._checksums = checksums
        self._written: list[Transfer | None] = [None] * len(places)
        self.settled: list[Event] = [DONE] * len(places)
        self.kept: dict[int, Kept] = {}

    def record_bytes(self, number: int) -> int:
        """Bytes of a tile's record."""
        return self._places[number].nbytes

    def views(self, number: int, buffer: Tensor) -> Views:
        """The values of a tile whose record a buffer holds."""
        start, stop = self.tile_range(number)
        return self._layout.views(buffer, stop - start)

    def cut(self, number: int, start: int, plan: SectionPlan) -> "Records":
        """Another section, with records of its own from a byte of a tile's record on; this one keeps nothing there."""
        places, place = [], self._places[number]
        for nbytes in record_sizes(plan):
            places.append(Place(place.file, place.offset + start, nbytes))
            start += nbytes
        return Records(plan, places, checksums=self._checksums)

    def read(self, number: int, buffer: Tensor) -> Transfer | None:
        """Start to read a tile's record into the front of a page-aligned buffer of bytes.

        One that was never written is zeros, at once.
        """
        place, last = self._places[number], self._written[number]
        if last is None:
            buffer[: place.nbytes].zero_()
            return None
        expected = last.checksum if self._checksums else None
        return place.file.read(place.offset, buffer[: place.nbytes], checksum=expected, what=self._name(number))

    def write(self, number: int, buffer: Tensor) -> Transfer:
        """Start to write a tile's record from the front of a page-aligned buffer of bytes."""
        place = self._places[number]
        transfer = place.file.write(
            place.offset, buffer[: place.nbytes], checksum=self._checksums, what=self._name(number)
        )
        self._written[number] = transfer
        return transfer

    def stored(self, number: int) -> "Stored | None":
        """Where a tile's record is, and its checksum; `None` if there is none to know, or it was never written."""
        last = self._written[number]
        if last is None or not self._checksums:
            return None
        return Stored(self._places[number], last.checksum)

    def settle(self) -> None:
        """Wait for every write."""
        for event in self.settled:
            event.synchronize()

    def arrival(self) -> Event:
        """Of every write so far."""
        return all_of(self.settled)

    def check(self) -> None:
        """Look at every write."""
        for event in self.settled:
            event.check()

    def at_rest(self) -> bool:
        """Whether every write is over."""
        return all(event.done() for event in self.settled)

    def visit(self, start: int, stop: int, *, modify: bool = False) -> Iterator[tuple[int, int, Views]]:
        """A piece for each tile, through a buffer of one record."""
        buffer: Tensor | None = None
        for number in range(start // self.tile_numel, -(-stop // self.tile_numel)):
            if buffer is None:
                buffer = page_aligned(max(place.nbytes for place in self._places))
            self.settled[number].synchronize()
            reading = self.read(number, buffer)
            if reading is not None:
                reading.wait()
            first, last = self.tile_range(number)
            inside = max(start, first), min(stop, last)
            views = self.views(number, buffer)
            yield (
                *inside,
                tuple(
                    view[cell.part(inside[0] - first, inside[1] - first)]
                    for cell, view in zip(self.plan.cells, views, strict=True)
                ),
            )
            if modify:
                self.kept.pop(number, None)
                written = PendingEvent(self.write(number, buffer))
                self.settled[number] = written
                written.synchronize()

    def drop(self) -> None:
        """Buffers that hold records hold nothing of use any more."""
        self.kept.clear()

    def _name(self, number: int) -> str:
        kinds = " and ".join(dict.fromkeys(cell.kind for cell in self.plan.cells))
        tile = self.plan.start // self.tile_numel + number
        return f"{kinds} of unit '{self.plan.cells[0].unit}', tile {tile}"
