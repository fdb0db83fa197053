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
from penstock.machine.streams import DONE, Event, PendingEvent
from penstock.tiers.home import CellPlan, Home, Views

_FIELD_BYTES = 64  # fields begin on a cache line


class RecordLayout:
    """What a record of each tile holds, and where in it.

    Arguments:
        plans: the kinds, in order.
        numel: elements of the shard.
        tile_numel: elements of a tile; the last one may be shorter.
    """

    def __init__(self, plans: Sequence[CellPlan], numel: int, tile_numel: int) -> None:
        self.plans = tuple(plans)
        self.numel = numel
        self.tile_numel = tile_numel

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tile's record."""
        whole, rest = divmod(self.numel, self.tile_numel)
        return [self.record_bytes(self.tile_numel)] * whole + ([self.record_bytes(rest)] if rest else [])

    def record_bytes(self, numel: int) -> int:
        """Bytes of the record of a tile of `numel` elements: whole pages."""
        offset = 0
        for plan in self.plans:
            offset = round_up(offset, _FIELD_BYTES) + plan.part(0, numel).stop * plan.dtype.itemsize
        return round_up(offset, PAGE_BYTES)

    def views(self, buffer: Tensor, numel: int) -> Views:
        """The kinds' values in a buffer that holds the record of a tile of `numel` elements."""
        offset, views = 0, []
        for plan in self.plans:
            offset = round_up(offset, _FIELD_BYTES)
            nbytes = plan.part(0, numel).stop * plan.dtype.itemsize
            views.append(buffer[offset : offset + nbytes].view(plan.dtype))
            offset += nbytes
        return tuple(views)


@dataclass(frozen=True)
class Place:
    """Where a record lies."""

    file: File
    offset: int
    nbytes: int


class Kept(NamedTuple):
    """A buffer that still holds what a record says, once `ready`, until its slot is used for something else."""

    buffer: Tensor
    ready: Event
    slot: object


class Records(Home):
    """Kinds in records.

    Arguments:
        layout: what the records hold.
        places: where each tile's record lies.
        checksums: verify what is read.

    Attributes:
        settled: for each tile, the event of the last work that wrote its record.
        kept: by tile, a buffer from which its record can be had without reading.
    """

    def __init__(self, layout: RecordLayout, places: Sequence[Place], *, checksums: bool) -> None:
        super().__init__(layout.plans, layout.numel, layout.tile_numel)
        self._layout = layout
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

    def read(self, number: int, buffer: Tensor) -> Transfer:
        """Start to read a tile's record into the front of a page-aligned buffer of bytes."""
        place, last = self._places[number], self._written[number]
        assert last is not None, f"{self._name(number)} was never written"
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

    def settle(self) -> None:
        """Wait for every write."""
        for event in self.settled:
            event.synchronize()

    def check(self) -> None:
        """Look at every write."""
        for event in self.settled:
            event.check()

    def at_rest(self) -> bool:
        """Whether every write is over."""
        return all(event.done() for event in self.settled)

    def visit(self, start: int, stop: int, *, modify: bool = False) -> Iterator[tuple[int, int, Views]]:
        """A piece for each tile, through a buffer of one record. Never written tiles are zeros."""
        buffer: Tensor | None = None
        for number in range(start // self.tile_numel, -(-stop // self.tile_numel)):
            if buffer is None:
                buffer = page_aligned(max(self._layout.sizes))
            self.settled[number].synchronize()
            if self._written[number] is None:
                buffer.zero_()
            else:
                self.read(number, buffer).wait()
            first, last = self.tile_range(number)
            inside = max(start, first), min(stop, last)
            views = self.views(number, buffer)
            yield (
                *inside,
                tuple(
                    view[plan.part(inside[0] - first, inside[1] - first)]
                    for plan, view in zip(self.plans, views, strict=True)
                ),
            )
            if modify:
                self.kept.pop(number, None)
                written = PendingEvent(self.write(number, buffer))
                self.settled[number] = written
                written.synchronize()

    def _name(self, number: int) -> str:
        kinds = " and ".join(dict.fromkeys(plan.kind for plan in self.plans))
        return f"{kinds} of unit '{self.plans[0].unit}', tile {number}"
