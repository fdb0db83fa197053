"""Kinds of one unit on a tier that arithmetic cannot reach: a record for each tile.

A record holds a tile's values of all the kinds of its home, one kind after the other, and fills whole pages: one load
brings everything that an update of the tile needs from there, one store takes it back. The optimizer's record of AdamW:

    record of tile i    | exp_avg | exp_avg_sq | padding |

A tier of records says how one is loaded into a buffer and stored from it (`Records.load`, `Records.store`); everything
else is here and in `tiers/movement.py`.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from penstock.layout import round_up
from penstock.machine.aio import Transfer
from penstock.machine.arena import PAGE_BYTES, page_aligned
from penstock.machine.streams import DONE, Event, Pending, PendingEvent, all_of
from penstock.rules.sums import Sums
from penstock.tiers.home import CellPlan, Section, SectionPlan, Views
from penstock.tiers.ring import Kept

_FIELD_BYTES = 64  # fields begin on a cache line


class RecordLayout:
    """What a record of each tile holds, and where in it.

    Arguments:
        cells: the kinds, in order.
    """

    def __init__(self, cells: Sequence[CellPlan]) -> None:
        self.cells = tuple(cells)

    def record_bytes(self, numel: int) -> int:
        """Count the bytes of the record of a tile of `numel` elements: whole pages."""
        offset = 0
        for cell in self.cells:
            offset = round_up(offset, _FIELD_BYTES) + cell.part(0, numel).stop * cell.dtype.itemsize
        return round_up(offset, PAGE_BYTES)

    def views(self, buffer: Tensor, numel: int) -> Views:
        """View the kinds' values in a buffer that holds the record of a tile of `numel` elements."""
        offset, views = 0, []
        for cell in self.cells:
            offset = round_up(offset, _FIELD_BYTES)
            nbytes = cell.part(0, numel).stop * cell.dtype.itemsize
            views.append(buffer[offset : offset + nbytes].view(cell.dtype))
            offset += nbytes
        return tuple(views)


def record_sizes(plan: SectionPlan) -> list[int]:
    """Count the bytes of the record of each tile of a section."""
    layout = RecordLayout(plan.cells)
    whole, rest = divmod(plan.numel, plan.tile_numel)
    return [layout.record_bytes(plan.tile_numel)] * whole + ([layout.record_bytes(rest)] if rest else [])


class SummedRecord:
    """A record on its way to an update and back, whose checksums the update takes, and not the threads that move it.

    Those would read each byte from memory once more, on its way here and on its way back. An update has each piece in
    the cache before it changes it, and after.

    Arguments:
        buffer: where it is updated: all of its bytes.
        read: starts to bring it there, and sums nothing; `None` where there is nothing to check.
        write: starts to put it back, with its checksum.
    """

    def __init__(
        self, buffer: Tensor, read: Callable[[Tensor], Transfer | None], write: Callable[[Tensor, int], Transfer]
    ) -> None:
        self.buffer = buffer
        self._read, self._write = read, write
        self._loading: Transfer | None = None  # of a record that was not loaded there is nothing to check
        self._after: int | None = None

    def load(self) -> Transfer | None:
        """Start to bring the record: what is there then is checked by `check`."""
        self._loading = self._read(self.buffer)
        return self._loading

    def check(self, sums: Sums) -> None:
        """Take over what the update has summed of the record. Before this, nothing of it is stored.

        Raises:
            NvmeError: what was loaded is not what was stored.
        """
        before, after = sums.of(self.buffer)
        if self._loading is not None:
            self._loading.check(before)
        self._after = after

    def store(self) -> Transfer:
        """Start to put the record back."""
        assert self._after is not None, "the record was not summed"
        return self._write(self.buffer, self._after)


class Records(Section):
    """Kinds in records.

    Arguments:
        sizes: bytes of each tile's record.

    Attributes:
        last_stores: the event of the last work that stored each tile's record.
        kept: the buffers from which records can be had without loading, by tile.
    """

    def __init__(self, plan: SectionPlan, sizes: Sequence[int]) -> None:
        super().__init__(plan)
        self._layout = RecordLayout(plan.cells)
        self._sizes = sizes
        self.last_stores: list[Event] = [DONE] * len(sizes)
        self.kept: dict[int, Kept] = {}

    @abstractmethod
    def load(self, number: int, into: Tensor) -> Pending | None:
        """Start to bring a tile's record into the front of a page-aligned buffer of bytes.

        Returns the transfer, or `None` where it is there at once: a record that was never stored is zeros.
        """

    @abstractmethod
    def store(self, number: int, source: Tensor) -> Pending | None:
        """Start to put a tile's record from the front of a page-aligned buffer of bytes; returns the transfer."""

    def summed(self, number: int, buffer: Tensor) -> SummedRecord | None:
        """Have an update sum a tile's record in a buffer of its bytes; `None` where records have no checksums."""
        del number, buffer
        return None

    def record_bytes(self, number: int) -> int:
        """Count the bytes of a tile's record."""
        return self._sizes[number]

    def views_of(self, number: int, buffer: Tensor) -> Views:
        """View the values of a tile whose record a buffer holds."""
        start, stop = self.tile_range(number)
        return self._layout.views(buffer, stop - start)

    def views(self, start: int, stop: int) -> Views:
        """Refuse to view records: they have no values in place."""
        raise AssertionError("records are loaded to be looked at")

    @property
    def written(self) -> Event:
        """The last store of every tile."""
        return all_of(self.last_stores)  # site records.stored

    def visit(self, start: int, stop: int, *, modify: bool = False) -> Iterator[tuple[int, int, Views]]:
        """Look at a piece for each tile, through a buffer of one record."""
        buffer: Tensor | None = None
        for number in range(start // self.tile_numel, -(-stop // self.tile_numel)):
            if buffer is None:
                buffer = page_aligned(max(self._sizes))
            # site records.visit_stored
            self.last_stores[number].synchronize()  # what is still being stored would be loaded half
            loading = self.load(number, buffer)
            if loading is not None:
                # site records.visit_loaded
                loading.wait()  # a transfer has started, and the buffer holds another tile until it is over
            first, last = self.tile_range(number)
            inside = max(start, first), min(stop, last)
            views = self.views_of(number, buffer)
            yield (
                *inside,
                tuple(
                    view[cell.part(inside[0] - first, inside[1] - first)]
                    for cell, view in zip(self.plan.cells, views, strict=True)
                ),
            )
            if modify:
                self.kept.pop(number, None)  # it says what was before
                storing = self.store(number, buffer)
                if storing is not None:
                    self.last_stores[number] = written = PendingEvent(storing)
                    written.synchronize()  # site records.visit_written: the next tile is loaded into the same buffer

    def drop(self) -> None:
        """Let go of the records: buffers that hold some hold nothing of use any more."""
        self.kept.clear()

    def name(self, number: int) -> str:
        """Say which tile of which unit a record is, for errors."""
        return f"{self.plan.label}, tile {self.plan.start // self.tile_numel + number}"
