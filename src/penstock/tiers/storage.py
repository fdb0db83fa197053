"""Storage of one unit's training state: sections of tiles, records in files, and buffers used in turn."""

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from penstock.config import STAGING, Tier
from penstock.layout import round_up
from penstock.rules.fused import RecordChecksums
from penstock.runtime.aio import File, Transfer
from penstock.runtime.host_memory import PAGE_BYTES, Arena, page_aligned
from penstock.runtime.streams import DONE, Event, Pending, PendingEvent, all_of

# ----------------------------------------------------------------------------------------------------------------------
# Buffers of a tile each, or of a stretch of tiles, used in turn.
# ----------------------------------------------------------------------------------------------------------------------


#: Elements of a stretch, at most.
STRETCH_NUMEL = 16 << 20

#: The one buffer of a slot whose values only pass.
PASSING = "passing"


@dataclass(eq=False)
class RingSlot:
    """Buffers of bytes for one tile, or for a stretch.

    Attributes:
        near: the buffers where the tile is used, by home.
        host: the buffers where records are loaded and stored, by home: the same ones, unless a device uses the tile.
        free: the event after which work on the slot is over.
    """

    near: Mapping[str, Tensor]
    host: Mapping[str, Tensor]
    free: Event = DONE


class Ring:
    """Slots, used in turn.

    Arguments:
        before_use: called when a slot is wanted and there is none: it fills the ring.

    Attributes:
        tiles: how many tiles a slot holds.
        lock: is held by whoever takes slots one after the other where another thread may do so, too.
    """

    def __init__(self, before_use: Callable[[], None] = lambda: None) -> None:
        self._before_use = before_use
        self.tiles = 1
        self.lock = threading.Lock()
        self._slots: deque[RingSlot] = deque()

    def fill(self, slots: Sequence[RingSlot]) -> None:
        """Use these slots."""
        self._slots = deque(slots)

    def take(self) -> RingSlot:
        """Take the slot that was used least recently."""
        if not self._slots:
            self._before_use()
        assert self._slots, "the ring was planned without slots"
        self._slots.rotate(-1)
        return self._slots[-1]

    @property
    def free(self) -> Event:
        """Work on all slots is over."""
        return all_of(slot.free for slot in self._slots)  # site ring.free

    def drop(self) -> None:
        """Let go of the slots, once work on them is over. Who needs what has failed gets its error from it."""
        for slot in self._slots:
            with contextlib.suppress(Exception):
                # Else the memory is taken by others while a copy still writes it.
                slot.free.synchronize()  # site ring.free_to_drop
        self._slots.clear()
        self.tiles = 1


# ----------------------------------------------------------------------------------------------------------------------
# Where some kinds of one unit rest, tile by tile: in sections, each on one tier.
#
#     home       | section on the device | section on the cpu     | section in a file |
#     tiles      | 0 | 1 | 2 |           | 3 | 4 |                | 5 | 6 |
#
# Most homes are one section. A home is split where the placement splits its kinds between tiers, and its sections are
# exchanged when it moves. Elements are counted from the start of this rank's shard, in a section from the start of the
# section; sections are whole tiles.
#
# A home knows the events of its last write and of its last read. Whoever writes it or reads it beside compute notes
# that here, and whoever needs it asks here: nobody else keeps an event of it. Sections whose tiles are records
# (`tiers/storage.py`) know each tile's last write by themselves.
# ----------------------------------------------------------------------------------------------------------------------


#: The values of a home's kinds for some range of elements, in the order of its cells.
Views = tuple[Tensor, ...]

#: Which tiles a device updates whose state rests elsewhere.
Streamed = Literal["none", "some", "all"]


@dataclass(frozen=True)
class CellPlan:
    """A cell before its memory: what will be allocated, where.

    Attributes:
        numel: how many values it has.
        grain: how many elements of the shard one value belongs to: 1, or the block of a scale.
    """

    unit: str
    kind: str
    tier: Tier
    dtype: torch.dtype
    numel: int
    grain: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of the cell's values."""
        return self.numel * self.dtype.itemsize

    @property
    def taken_bytes(self) -> int:
        """Bytes of memory that the cell takes: on the cpu tier whole pages."""
        return Arena.lease_bytes(self.numel, self.dtype) if self.tier is Tier.CPU else self.nbytes

    def part(self, start: int, stop: int) -> slice:
        """Place the values of elements `start` to `stop` of the section; `start` is the first of a grain."""
        return slice(start // self.grain, -(-stop // self.grain))


@dataclass(frozen=True)
class SegmentPlan:
    """A section before its memory.

    Attributes:
        home: which home it is a section of: `"param"`, `"grad"`, `"master"`, `"optimizer"`, ...
        tier: where it will be.
        cells: its kinds; none where the home keeps nothing of these elements.
        start: its first element.
        numel: its elements.
        tile_numel: elements of a tile; the last one may be shorter.
        copied: whether a device copies it from or to the cpu tier, where it is there; else the host alone works on it.
        streamed: which of its tiles a device updates, where it is on another tier.
    """

    home: str
    tier: Tier
    cells: tuple[CellPlan, ...]
    start: int
    numel: int
    tile_numel: int
    copied: bool = field(default=True, compare=False)  # says nothing of where it is
    streamed: Streamed = field(default="none", compare=False)

    @cached_property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.numel

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the values of all its cells."""
        return sum(cell.nbytes for cell in self.cells)

    @cached_property
    def label(self) -> str:
        """Say which kinds of which unit they are, for errors: every transfer is named, in case that it fails."""
        kinds = " and ".join(dict.fromkeys(cell.kind for cell in self.cells))
        return f"{kinds} of unit '{self.cells[0].unit}'"

    def on(self, tier: Tier) -> "SegmentPlan":
        """Plan the same on another tier, where it is brought."""
        return replace(self, tier=tier, copied=True, cells=tuple(replace(cell, tier=tier) for cell in self.cells))


class RecordPlace(NamedTuple):
    """Where a record lies."""

    file: File
    offset: int
    nbytes: int


class StoredRecord(NamedTuple):
    """A record that was written."""

    place: RecordPlace
    checksum: int


class Segment(ABC):
    """Some kinds of a part of a unit's shard, on one tier.

    Attributes:
        tiles: how many tiles there are.
        tensors: the values of each kind, where arithmetic can reach them; none of those whose tiles are records.
        bounce: asks for the rings through which copies between the values and the device pass, one for each stream that
            may read; `None` where the device copies by itself. They may be taken by the first call.
    """

    tensors: tuple[Tensor, ...] = ()
    bounce: Callable[[], Mapping[str, Ring]] | None = None

    def __init__(self, plan: SegmentPlan) -> None:
        self.plan = plan
        self.tier = plan.tier
        self.numel = plan.numel
        self.tile_numel = plan.tile_numel
        self.tiles = -(-plan.numel // plan.tile_numel)

    def tile_range(self, number: int, count: int = 1) -> tuple[int, int]:
        """Return the first element of a tile, and one past the last of so many from there on."""
        first = number * self.tile_numel
        return first, min(first + count * self.tile_numel, self.numel)

    def views(self, start: int, stop: int) -> Views:
        """View the values of elements `start` to `stop` in place. Of memory alone."""
        raise AssertionError("records are loaded to be looked at")

    @abstractmethod
    def visit(self, start: int, stop: int, *, modify: bool = False) -> Iterator[tuple[int, int, Views]]:
        """Look at elements `start` to `stop`, piece by piece, on the caller's time. See `Storage.visit`."""

    @abstractmethod
    def cut(self, tile: int, start: int, plan: SegmentPlan) -> "Segment":
        """Make a section of its own over a part of a section of bytes.

        Arguments:
            tile: the tile that the part lies in.
            start: the part's first byte in it.
            plan: what the new section is.
        """

    def drop(self) -> None:
        """Let go of the values: they are elsewhere now."""
        self.tensors = ()

    def stored(self, number: int) -> StoredRecord | None:
        """Say where the record of a tile is in a file; `None` where it is in none."""
        del number
        return None


class MemorySegment(Segment):
    """Kinds that are tensors: on the device or the cpu tier.

    Arguments:
        tensors: the values of each kind.
        bounce: see `Segment.bounce`.
    """

    def __init__(
        self,
        plan: SegmentPlan,
        tensors: Sequence[Tensor],
        bounce: Callable[[], Mapping[str, Ring]] | None = None,
    ) -> None:
        super().__init__(plan)
        self.tensors = tuple(tensors)
        self.bounce = bounce

    def views(self, start: int, stop: int) -> Views:
        """View the values of elements `start` to `stop` in place."""
        if start == 0 and stop == self.numel:
            return self.tensors
        return tuple(tensor[cell.part(start, stop)] for cell, tensor in zip(self.plan.cells, self.tensors, strict=True))

    def visit(self, start: int, stop: int, *, modify: bool = False) -> Iterator[tuple[int, int, Views]]:
        """Look at one piece, in place."""
        del modify
        yield start, stop, self.views(start, stop)

    def cut(self, tile: int, start: int, plan: SegmentPlan) -> "MemorySegment":
        """Make a section over the same memory, of the only kind's values from `start` of the tile on."""
        (memory,) = self.tensors
        first = self.tile_range(tile)[0] + start
        return MemorySegment(plan, [memory[first : first + plan.numel]], self.bounce)


class MemoryEvents:
    """Who wrote and who read a home's memory last. Homes over the same memory share it.

    Attributes:
        written: the last write: values are there after it.
    """

    def __init__(self, written: Event) -> None:
        self.written = written
        self._read = DONE

    def write(self, event: Event) -> None:
        """Note the last write. It follows all before it, so nobody has to wait for those any longer."""
        self.written, self._read = event, DONE  # else the reads would add up for as long as training goes on

    @property
    def read(self) -> Event:
        """The reads since then that are not over yet: memory is written again after them."""
        if self._read is not DONE:  # not those that are over: events keep their errors, and what those refer to
            self._read = all_of(part for part in self._read.parts() if not part.done())  # site storage.reads
        return self._read

    def add_read(self, event: Event) -> None:
        """Note one more read."""
        self._read = all_of([*self.read.parts(), event])  # site storage.earlier_reads, storage.new_read

    @property
    def free(self) -> Event:
        """Everything that a write has to follow."""
        return all_of([self.written, self.read])  # site storage.free_of_write, storage.free_of_reads


class Storage:
    """Some kinds of one unit, in sections.

    Arguments:
        sections: one after the other, without gaps.
        memory: the events of its memory, where another home shares it.

    Attributes:
        memory: the events of what of it is memory.
        records: the sections that arithmetic cannot reach.
    """

    def __init__(self, sections: Sequence[Segment], memory: MemoryEvents | None = None) -> None:
        self.sections = tuple(sections)
        self.records = [section for section in self.sections if isinstance(section, Records)]
        self.memory = memory or MemoryEvents(DONE)
        assert all(a.plan.stop == b.plan.start for a, b in pairwise(self.sections)), "sections follow each other"

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.sections[-1].plan.stop

    def section_at(self, element: int) -> Segment:
        """Find the section that holds an element."""
        return next(section for section in self.sections if element < section.plan.stop)

    def tile(self, number: int) -> tuple[Segment, int]:
        """Find the section that a tile of the shard is in, and its number there."""
        section = self.sections[0]
        if len(self.sections) > 1:
            section = self.section_at(number * section.tile_numel)
        return section, number - section.plan.start // section.tile_numel

    @property
    def in_files(self) -> bool:
        """Whether any of it is where arithmetic cannot reach."""
        return bool(self.records)

    @property
    def plans(self) -> tuple[SegmentPlan, ...]:
        """Its sections as they are now."""
        return tuple(section.plan for section in self.sections)

    @property
    def written(self) -> Event:
        """The last write: after it everything is where it rests, in memory and in files. It raises what has failed."""
        if not self.records:
            return self.memory.written
        stores = (event for section in self.records for event in section.last_stores)
        return all_of([self.memory.written, *stores])  # site storage.memory_written, storage.files_written

    @property
    def read(self) -> Event:
        """The last read that goes on beside compute: nothing is written before it is over."""
        return self.memory.read

    def note_write(self, event: Event) -> None:
        """Note the last write of the memory. It follows the writes and the reads before it."""
        self.memory.write(event)

    def note_read(self, event: Event) -> None:
        """Note a read of the memory: writes wait for it."""
        self.memory.add_read(event)

    def visit(self, start: int, stop: int, *, modify: bool = False) -> Iterator[tuple[int, int, Views]]:
        """Look at elements `start` to `stop`, piece by piece, on the caller's time.

        Work under way has been waited for. Yields the range of each piece and its values; what a `modify` visitor
        writes into them is kept once it asks for the next piece.
        """
        for section in self.sections:
            first = section.plan.start
            inside = max(start, first), min(stop, section.plan.stop)
            if inside[0] < inside[1]:
                for begin, end, views in section.visit(inside[0] - first, inside[1] - first, modify=modify):
                    yield begin + first, end + first, views

    def part(self, start: int, stop: int) -> "Storage":
        """Make a home of the elements `start` to `stop` of one in memory, counted from there, over the same memory."""
        sections = []
        for section in self.sections:
            first, last = max(start, section.plan.start), min(stop, section.plan.stop)
            if first < last:
                views = section.views(first - section.plan.start, last - section.plan.start)
                cells = tuple(replace(c, numel=v.numel()) for c, v in zip(section.plan.cells, views, strict=True))
                plan = replace(section.plan, cells=cells, start=first - start, numel=last - first)
                sections.append(MemorySegment(plan, views, section.bounce))
        # With its events: who writes through one home would not be seen by who reads through the other.
        return Storage(sections, self.memory)


def buffer_home(values: Tensor, written: Event = DONE) -> Storage:
    """Make a home of a flat buffer in device memory, to copy from and to; `written` is its last write so far."""
    cell = CellPlan("", "", Tier.DEVICE, values.dtype, values.numel())
    plan = SegmentPlan("", Tier.DEVICE, (cell,), 0, values.numel(), values.numel())
    return Storage([MemorySegment(plan, [values])], MemoryEvents(written))


def visit_together(
    homes: Sequence[Storage], start: int, stop: int, *, modify: bool = False
) -> Iterator[tuple[int, int, list[Views]]]:
    """Visit several homes at once, as `Storage.visit` does one: each piece lies in one piece of all of them."""
    if not homes:
        yield start, stop, []
        return
    home, *others = homes
    for first, last, views in home.visit(start, stop, modify=modify):
        cells = home.section_at(first).plan.cells
        for begin, end, rest in visit_together(others, first, last, modify=modify):
            own = tuple(v[c.part(begin - first, end - first)] for c, v in zip(cells, views, strict=True))
            yield begin, end, [own, *rest]


@dataclass(frozen=True)
class RingPlan:
    """The slots of a ring before their memory: each has a buffer for each home.

    Attributes:
        name: what tiles pass it for.
        count: how many slots there are.
        tiles: how many tiles a slot holds.
        near: the tier where tiles are used.
        sizes: bytes of a slot's buffers, by home.
        through_host: the homes whose records are loaded and stored in a buffer of their own on the host.
    """

    name: str = ""
    count: int = 0
    tiles: int = 1
    near: Tier = Tier.CPU
    sizes: Mapping[str, int] = field(default_factory=dict)
    through_host: Collection[str] = ()

    def sections(self) -> list[SegmentPlan]:
        """Plan all buffers: a section of those where tiles are used, and one of those of `through_host`."""
        plans = []
        for name, tier, homes in ((self.name, self.near, self.sizes), ("file", Tier.CPU, self.through_host)):
            cells = tuple(
                CellPlan(f"({name} {number}, {home})", STAGING, tier, torch.uint8, self.sizes[home])
                for number in range(self.count)
                for home in homes
            )
            if cells:
                nbytes = sum(cell.numel for cell in cells)
                plans.append(SegmentPlan(STAGING, tier, cells, 0, nbytes, max(nbytes, 1)))
        return plans

    def slots(self, made: Sequence[Segment]) -> list[RingSlot]:
        """Make the slots of the sections that were planned."""
        buffers = [iter(section.tensors) for section in made]
        slots = []
        for _ in range(self.count):
            near = dict(zip(self.sizes, buffers[0], strict=False))
            slots.append(RingSlot(near, near | dict(zip(self.through_host, buffers[-1], strict=False))))
        return slots


# ----------------------------------------------------------------------------------------------------------------------
# Kinds of one unit on a tier that arithmetic cannot reach: a record for each tile.
#
# A record holds a tile's values of all the kinds of its home, one kind after the other, and fills whole pages: one load
# brings everything that an update of the tile needs from there, one store takes it back. The optimizer's record of
# AdamW:
#
#     record of tile i    | exp_avg | exp_avg_sq | padding |
#
# A tier of records says how one is loaded into a buffer and stored from it (`Records.load`, `Records.store`);
# everything else is here and in `tiers/transfer.py`.
# ----------------------------------------------------------------------------------------------------------------------


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


def record_sizes(plan: SegmentPlan) -> list[int]:
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

    def check(self, sums: RecordChecksums) -> None:
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


class Records(Segment):
    """Kinds in records.

    Arguments:
        sizes: bytes of each tile's record.

    Attributes:
        last_stores: the event of the last work that stored each tile's record.
    """

    def __init__(self, plan: SegmentPlan, sizes: Sequence[int]) -> None:
        super().__init__(plan)
        self._layout = RecordLayout(plan.cells)
        self._sizes = sizes
        self.last_stores: list[Event] = [DONE] * len(sizes)

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
                storing = self.store(number, buffer)
                if storing is not None:
                    self.last_stores[number] = written = PendingEvent(storing)
                    written.synchronize()  # site records.visit_written: the next tile is loaded into the same buffer

    def name(self, number: int) -> str:
        """Say which tile of which unit a record is, for errors."""
        return f"{self.plan.label}, tile {self.plan.start // self.tile_numel + number}"
