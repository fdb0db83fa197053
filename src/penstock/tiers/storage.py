"""Storage of one unit's training state: segments of tiles, records in files, and rings of buffers."""

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.config import STAGING, Tier
from penstock.layout import round_up
from penstock.rules.rule import RecordChecksums
from penstock.runtime.aio import File, Transfer
from penstock.runtime.host_memory import PAGE_BYTES, Arena, page_aligned
from penstock.runtime.streams import DONE, Event, Pending, PendingEvent, all_of

# ----------------------------------------------------------------------------------------------------------------------
# Rings: buffers of a tile each, or of a tile range, used in turn.
# ----------------------------------------------------------------------------------------------------------------------


#: The most elements of a tile range.
STRETCH_NUMEL = 16 << 20

#: The name of the buffer of a slot that has only one.
PASSING = "passing"


class KeptRecord(NamedTuple):
    """A buffer that holds the values of a record after `ready`, until its slot is used again."""

    buffer: Tensor
    ready: Event
    slot: "RingSlot"


class RecordKeeper(Protocol):
    """A segment of records.

    Attributes:
        kept: the buffers from which records can be had without loading, by tile.
    """

    kept: dict[int, KeptRecord]


@dataclass(eq=False)
class RingSlot:
    """Buffers of bytes for one tile or tile range.

    Attributes:
        near: the buffers where the tile is used, by storage.
        host: the buffers where records are loaded and stored, by storage: the same ones, unless a device uses the tile.
        free: the event after which work on the slot is over.
        holds: the records that its buffers still hold.
    """

    near: Mapping[str, Tensor]
    host: Mapping[str, Tensor]
    free: Event = DONE
    holds: dict[tuple[RecordKeeper, int], None] = field(default_factory=dict)

    def keep(self, segment: RecordKeeper, number: int, buffer: Tensor, ready: Event) -> None:
        """Keep a record readable from the slot until the slot is used again."""
        segment.kept[number] = KeptRecord(buffer, ready, self)
        self.holds[segment, number] = None

    def forget(self) -> None:
        """Forget the records in the slot: it is used again."""
        for segment, number in self.holds:
            kept = segment.kept.get(number)
            # Another slot may hold the record since: its entry stays.
            if kept is not None and kept.slot is self:
                segment.kept.pop(number, None)  # the thread that frees a move's old storage drops it too
        self.holds.clear()

    def add_use(self, event: Event) -> None:
        """Add a use of the buffers' present values."""
        # A record may be copied from a slot that is also being stored: the slot is free after both.
        self.free = event if self.free.done() else all_of([self.free, event])  # site slot.earlier_use, slot.new_use


class Ring:
    """Slots that are used in turn.

    Arguments:
        before_use: fills the ring. Called by `take` where the ring has no slots.

    Attributes:
        tiles: how many tiles a slot holds.
        lock: held by a thread that takes several slots, where another thread may take some too.
    """

    def __init__(self, before_use: Callable[[], None] = lambda: None) -> None:
        self._before_use = before_use
        self.tiles = 1
        self.lock = threading.Lock()
        self._slots: deque[RingSlot] = deque()

    def fill(self, slots: Sequence[RingSlot]) -> None:
        """Use these slots from now on."""
        self._slots = deque(slots)

    def take(self, wanted: RingSlot | None = None) -> RingSlot:
        """Return the slot that was used least recently, or the wanted one."""
        if not self._slots:
            self._before_use()
        assert self._slots, "the ring was planned without slots"
        slot = next((slot for slot in self._slots if slot is wanted), self._slots[0])
        self._slots.remove(slot)
        self._slots.append(slot)
        return slot

    @property
    def free(self) -> Event:
        """The event after which work on all slots is over."""
        return all_of(slot.free for slot in self._slots)  # site ring.free

    def forget(self) -> None:
        """Forget the records in all slots: no later read uses them."""
        for slot in self._slots:
            slot.forget()

    def drop(self) -> None:
        """Drop the slots once work on them is over. Errors of that work are left to its own events."""
        for slot in self._slots:
            with contextlib.suppress(Exception):
                # The memory is handed out again at once, and a copy may still write it (ordering rule 1).
                slot.free.synchronize()  # site ring.free_to_drop
            slot.forget()
        self._slots.clear()
        self.tiles = 1


# ----------------------------------------------------------------------------------------------------------------------
# Storage of some kinds of one unit: segments of whole tiles, each on one tier.
#
#     storage    | segment on the device | segment on the cpu     | segment in a file |
#     tiles      | 0 | 1 | 2 |           | 3 | 4 |                | 5 | 6 |
#
# Most storages are one segment. A storage has several where the placement splits its kinds between tiers. Offloading
# exchanges its segments. Elements are counted from the start of this rank's shard; in a segment, from its own start.
#
# A storage keeps the events of its last write and of the reads since then. Work beside compute that writes or reads it
# records its event here, and later work waits for these events: nothing else keeps them. Segments of records keep the
# event of each tile's last store instead.
# ----------------------------------------------------------------------------------------------------------------------


#: The values of a storage's kinds for a range of elements, in the order of its cells.
Views = tuple[Tensor, ...]

#: Which tiles with state on another tier a device updates.
Streamed = Literal["none", "some", "all"]


@dataclass(frozen=True)
class CellPlan:
    """Plan of a cell: one kind of a segment.

    Attributes:
        numel: the number of values.
        grain: the number of elements of the shard that share one value: 1, or the block size of a scale.
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
        """Bytes of memory that the cell takes: whole pages on the cpu tier."""
        return Arena.allocated_bytes(self.numel, self.dtype) if self.tier is Tier.CPU else self.nbytes

    def part(self, start: int, stop: int) -> slice:
        """Return the slice of values for elements `start` to `stop` of the segment. `start` begins a grain."""
        return slice(start // self.grain, -(-stop // self.grain))


@dataclass(frozen=True)
class SegmentPlan:
    """Plan of a segment.

    Attributes:
        storage: the storage that it belongs to: `"param"`, `"grad"`, `"master"`, `"optimizer"`, ...
        tier: the tier of its memory or files.
        cells: its kinds; empty where the storage keeps nothing of these elements.
        start: its first element.
        numel: the number of its elements.
        tile_numel: elements of a tile; the last one may be shorter.
        copied: True if a device copies it from or to the cpu tier. Otherwise only the host works on it there.
        streamed: which of its tiles a device updates, where it is on another tier.
    """

    storage: str
    tier: Tier
    cells: tuple[CellPlan, ...]
    start: int
    numel: int
    tile_numel: int
    copied: bool = field(default=True, compare=False)  # two plans of the same memory are equal
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
        """Name of its kinds and its unit, for errors. Cached, because every transfer is named in case it fails."""
        kinds = " and ".join(dict.fromkeys(cell.kind for cell in self.cells))
        return f"{kinds} of unit '{self.cells[0].unit}'"

    def part(self, values: Views, start: int, stop: int) -> Views:
        """Return the values of elements `start` to `stop` of some that begin with a grain."""
        return tuple(value[cell.part(start, stop)] for cell, value in zip(self.cells, values, strict=True))

    def on(self, tier: Tier) -> "SegmentPlan":
        """Return the plan of the same segment on another tier."""
        return replace(self, tier=tier, copied=True, cells=tuple(replace(cell, tier=tier) for cell in self.cells))


class RecordPlace(NamedTuple):
    """The location of a record: a range of a file."""

    file: File
    offset: int
    nbytes: int


class Segment(ABC):
    """Some kinds of a range of a unit's shard, on one tier.

    Attributes:
        tiles: the number of tiles.
        tensors: the values of each kind; empty where tiles are records.
        bounce: returns the rings of bounce buffers that copies between the values and the device pass, by the stream
            that reads. The first call may allocate them. `None` where the device copies without them.
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
        """Return views of elements `start` to `stop`. Only segments in memory have some."""
        raise AssertionError("records are loaded to be looked at")

    @abstractmethod
    def visit(self, start: int, stop: int, *, modify: bool = False) -> Iterator[tuple[int, int, Views]]:
        """Visit elements `start` to `stop`, piece by piece, in the calling thread. See `Storage.visit`."""

    @abstractmethod
    def cut(self, tile: int, start: int, plan: SegmentPlan) -> "Segment":
        """Make a segment over a part of this segment, whose only kind is bytes.

        Arguments:
            tile: the tile that the part lies in.
            start: the part's first byte in the tile.
            plan: the plan of the new segment.
        """

    def drop(self) -> None:
        """Drop the values."""
        self.tensors = ()


class MemorySegment(Segment):
    """A segment whose kinds are tensors: on the device or the cpu tier.

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
        """Return views of elements `start` to `stop`."""
        if start == 0 and stop == self.numel:
            return self.tensors
        return self.plan.part(self.tensors, start, stop)

    def visit(self, start: int, stop: int, *, modify: bool = False) -> Iterator[tuple[int, int, Views]]:
        """Visit one piece, in place."""
        del modify
        yield start, stop, self.views(start, stop)

    def cut(self, tile: int, start: int, plan: SegmentPlan) -> "MemorySegment":
        """Make a segment over the same memory, from byte `start` of the tile on."""
        (memory,) = self.tensors
        first = self.tile_range(tile)[0] + start
        return MemorySegment(plan, [memory[first : first + plan.numel]], self.bounce)


class MemoryEvents:
    """Events of the last write and the last reads of a storage's memory. Storages over the same memory share them.

    Attributes:
        written: the last write: the values are complete after it.
    """

    def __init__(self, written: Event) -> None:
        self.written = written
        self._read = DONE

    def write(self, event: Event) -> None:
        """Record the last write, and drop earlier events. The work behind it waited for `free` (ordering rule 3)."""
        self.written, self._read = event, DONE  # else the reads would add up for as long as training goes on

    @property
    def read(self) -> Event:
        """The reads since the last write that are not over. The next write follows them (ordering rule 3)."""
        if self._read is not DONE:  # without those that are over: an event keeps its error, and the frames behind it
            self._read = all_of(part for part in self._read.parts() if not part.done())  # site storage.reads
        return self._read

    def add_read(self, event: Event) -> None:
        """Record a read."""
        self._read = all_of([event, *self.read.parts()])  # site storage.new_read, storage.earlier_reads

    @property
    def free(self) -> Event:
        """The event that the next write follows."""
        return all_of([self.written, self.read])  # site storage.free_of_write, storage.free_of_reads


class Storage:
    """Storage of some kinds of one unit.

    Arguments:
        segments: its segments, in order and without gaps.
        memory: the events of its memory, where another storage shares it.

    Attributes:
        memory: the events of those segments that are memory.
        records: those segments that are records.
    """

    def __init__(self, segments: Sequence[Segment], memory: MemoryEvents | None = None) -> None:
        self.segments = tuple(segments)
        self.records = [segment for segment in self.segments if isinstance(segment, Records)]
        self.memory = memory or MemoryEvents(DONE)
        assert all(a.plan.stop == b.plan.start for a, b in pairwise(self.segments)), "segments follow each other"

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.segments[-1].plan.stop

    def segment_at(self, element: int) -> Segment:
        """Return the segment that holds an element."""
        return next(segment for segment in self.segments if element < segment.plan.stop)

    def tile(self, number: int) -> tuple[Segment, int]:
        """Return the segment of a tile of the shard, and the tile's number in it."""
        segment = self.segments[0]
        if len(self.segments) > 1:
            segment = self.segment_at(number * segment.tile_numel)
        return segment, number - segment.plan.start // segment.tile_numel

    @property
    def in_files(self) -> bool:
        """True if some of its segments are records."""
        return bool(self.records)

    @property
    def plans(self) -> tuple[SegmentPlan, ...]:
        """The plans of its segments."""
        return tuple(segment.plan for segment in self.segments)

    @property
    def written(self) -> Event:
        """The event after which all writes are over, in memory and in files. Waiting for it raises their errors."""
        if not self.records:
            return self.memory.written
        stores = (event for segment in self.records for event in segment.last_stores)
        return all_of([self.memory.written, *stores])  # site storage.memory_written, storage.files_written

    @property
    def read(self) -> Event:
        """The reads of its memory beside compute that are not over."""
        return self.memory.read

    def note_write(self, event: Event) -> None:
        """Record the last write of the memory, which follows the writes and the reads before it."""
        self.memory.write(event)

    def note_read(self, event: Event) -> None:
        """Record a read of the memory: later writes wait for it."""
        self.memory.add_read(event)

    def visit(self, start: int, stop: int, *, modify: bool = False) -> Iterator[tuple[int, int, Views]]:
        """Visit elements `start` to `stop`, piece by piece, in the calling thread.

        The caller has waited for `written`, and to modify, for `read`. Yields the range of each piece and its values.
        With `modify`, what is written into them is stored when the next piece is asked for.
        """
        for segment in self.segments:
            first = segment.plan.start
            inside = max(start, first), min(stop, segment.plan.stop)
            if inside[0] < inside[1]:
                for begin, end, views in segment.visit(inside[0] - first, inside[1] - first, modify=modify):
                    yield begin + first, end + first, views

    def part(self, start: int, stop: int) -> "Storage":
        """Make a storage of elements `start` to `stop`, over the same memory. It is in memory as a whole."""
        segments = []
        for segment in self.segments:
            first, last = max(start, segment.plan.start), min(stop, segment.plan.stop)
            if first < last:
                views = segment.views(first - segment.plan.start, last - segment.plan.start)
                cells = tuple(replace(c, numel=v.numel()) for c, v in zip(segment.plan.cells, views, strict=True))
                plan = replace(segment.plan, cells=cells, start=first - start, numel=last - first)
                segments.append(MemorySegment(plan, views, segment.bounce))
        # With its events: a write through one of the two must be seen by a read through the other.
        return Storage(segments, self.memory)


def buffer_storage(values: Tensor, written: Event = DONE) -> Storage:
    """Make a storage of a flat buffer in device memory, whose last write is `written`."""
    cell = CellPlan("", "", Tier.DEVICE, values.dtype, values.numel())
    plan = SegmentPlan("", Tier.DEVICE, (cell,), 0, values.numel(), values.numel())
    return Storage([MemorySegment(plan, [values])], MemoryEvents(written))


def visit_together(
    storages: Sequence[Storage], start: int, stop: int, *, modify: bool = False
) -> Iterator[tuple[int, int, list[Views]]]:
    """Visit several storages at once, as `Storage.visit` does one: each piece lies in one piece of all of them."""
    if not storages:
        yield start, stop, []
        return
    storage, *others = storages
    for first, last, views in storage.visit(start, stop, modify=modify):
        plan = storage.segment_at(first).plan
        for begin, end, rest in visit_together(others, first, last, modify=modify):
            yield begin, end, [plan.part(views, begin - first, end - first), *rest]


@dataclass(frozen=True)
class RingPlan:
    """Plan of a ring: equal slots with a buffer for each storage.

    Attributes:
        name: what its tiles are used for.
        count: the number of slots.
        tiles: how many tiles a slot holds.
        near: the tier where tiles are used.
        sizes: bytes of a slot's buffers, by storage.
        through_host: the storages whose records are loaded and stored in buffers of their own on the host.
    """

    name: str = ""
    count: int = 0
    tiles: int = 1
    near: Tier = Tier.CPU
    sizes: Mapping[str, int] = field(default_factory=dict)
    through_host: Collection[str] = ()

    def segments(self) -> list[SegmentPlan]:
        """Return the plans of its memory: a segment on `near`, and one on the host for `through_host`."""
        plans = []
        for name, tier, storages in ((self.name, self.near, self.sizes), ("file", Tier.CPU, self.through_host)):
            cells = tuple(
                CellPlan(f"({name} {number}, {storage})", STAGING, tier, torch.uint8, self.sizes[storage])
                for number in range(self.count)
                for storage in storages
            )
            if cells:
                nbytes = sum(cell.numel for cell in cells)
                plans.append(SegmentPlan(STAGING, tier, cells, 0, nbytes, max(nbytes, 1)))
        return plans

    def slots(self, made: Sequence[Segment]) -> list[RingSlot]:
        """Make the slots, of the segments that `segments` planned."""
        buffers = [iter(segment.tensors) for segment in made]
        slots = []
        for _ in range(self.count):
            near = dict(zip(self.sizes, buffers[0], strict=False))
            slots.append(RingSlot(near, near | dict(zip(self.through_host, buffers[-1], strict=False))))
        return slots


# ----------------------------------------------------------------------------------------------------------------------
# Records: segments on a tier whose bytes the host cannot address. Each tile is a record.
#
# A record holds a tile's values of all the kinds of its storage, one kind after the other, and fills whole pages. One
# load brings all of them for an update of the tile, one store takes them back. The optimizer's record of AdamW:
#
#     record of tile i    | exp_avg | exp_avg_sq | padding |
#
# A tier of records implements `Records.load` and `Records.store`; everything else is here and in `tiers/transfer.py`.
# ----------------------------------------------------------------------------------------------------------------------


_FIELD_BYTES = 64  # fields begin on a cache line


class RecordLayout:
    """Layout of the kinds in the record of a tile.

    Arguments:
        cells: the kinds, in order.
    """

    def __init__(self, cells: Sequence[CellPlan]) -> None:
        self.cells = tuple(cells)

    def record_bytes(self, numel: int) -> int:
        """Return the bytes of the record of a tile of `numel` elements: whole pages."""
        offset = 0
        for cell in self.cells:
            offset = round_up(offset, _FIELD_BYTES) + cell.part(0, numel).stop * cell.dtype.itemsize
        return round_up(offset, PAGE_BYTES)

    def views(self, buffer: Tensor, numel: int) -> Views:
        """Return views of the kinds in a buffer that holds the record of a tile of `numel` elements."""
        offset, views = 0, []
        for cell in self.cells:
            offset = round_up(offset, _FIELD_BYTES)
            nbytes = cell.part(0, numel).stop * cell.dtype.itemsize
            views.append(buffer[offset : offset + nbytes].view(cell.dtype))
            offset += nbytes
        return tuple(views)


def record_sizes(plan: SegmentPlan) -> list[int]:
    """Return the bytes of the record of each tile of a segment."""
    layout = RecordLayout(plan.cells)
    whole, rest = divmod(plan.numel, plan.tile_numel)
    return [layout.record_bytes(plan.tile_numel)] * whole + ([layout.record_bytes(rest)] if rest else [])


class SummedRecord:
    """A record whose checksums an update computes, in place of the threads that load and store it.

    Those threads would read each byte from memory once more. The update has each piece in the cache before and after
    it changes it.

    Arguments:
        buffer: all bytes of the record, where it is updated.
        read: starts to load it without a checksum; returns `None` where there is nothing to check.
        write: starts to store it with a given checksum.
    """

    def __init__(
        self, buffer: Tensor, read: Callable[[Tensor], Transfer | None], write: Callable[[Tensor, int], Transfer]
    ) -> None:
        self.buffer = buffer
        self._read, self._write = read, write
        self._loading: Transfer | None = None  # of a record that was not loaded there is nothing to check
        self._after: int | None = None

    def load(self) -> Transfer | None:
        """Start to load the record. `check` verifies it."""
        self._loading = self._read(self.buffer)
        return self._loading

    def check(self, sums: RecordChecksums) -> None:
        """Verify what was loaded, and keep the checksum of what is stored. Called before `store`.

        Raises:
            NvmeError: what was loaded is not what was stored.
        """
        before, after = sums.of(self.buffer)
        if self._loading is not None:
            self._loading.check(before)
        self._after = after

    def store(self) -> Transfer:
        """Start to store the record."""
        assert self._after is not None, "the record was not summed"
        return self._write(self.buffer, self._after)


class Records(Segment):
    """A segment of records.

    Arguments:
        sizes: bytes of each tile's record.

    Attributes:
        last_stores: the event of each record's last store.
        kept: the buffers that still hold a record, by tile: it needs no load.
    """

    def __init__(self, plan: SegmentPlan, sizes: Sequence[int]) -> None:
        super().__init__(plan)
        self._layout = RecordLayout(plan.cells)
        self._sizes = sizes
        self.last_stores: list[Event] = [DONE] * len(sizes)
        self.kept: dict[int, KeptRecord] = {}

    @abstractmethod
    def load(self, number: int, into: Tensor) -> Pending | None:
        """Start to load a tile's record into the front of a page-aligned buffer of bytes.

        Returns the transfer, or `None` where the record is complete: one that was never stored is zeros.
        """

    @abstractmethod
    def store(self, number: int, source: Tensor) -> Pending | None:
        """Start to store a tile's record from the front of a page-aligned buffer of bytes; return the transfer."""

    def summed(self, number: int, buffer: Tensor) -> SummedRecord | None:
        """Return a tile's record with checksums by the update; `None` where records have no checksums."""
        del number, buffer
        return None

    def record_bytes(self, number: int) -> int:
        """Return the bytes of a tile's record."""
        return self._sizes[number]

    def views_of(self, number: int, buffer: Tensor) -> Views:
        """Return views of the values of a tile, in a buffer that holds its record."""
        start, stop = self.tile_range(number)
        return self._layout.views(buffer, stop - start)

    def visit(self, start: int, stop: int, *, modify: bool = False) -> Iterator[tuple[int, int, Views]]:
        """Visit a piece for each tile, through a buffer of one record."""
        buffer: Tensor | None = None
        for number in range(start // self.tile_numel, -(-stop // self.tile_numel)):
            if buffer is None:
                buffer = page_aligned(max(self._sizes))
            # site records.visit_stored
            self.last_stores[number].synchronize()  # a read follows the last write (ordering rule 3)
            loading = self.load(number, buffer)
            if loading is not None:
                # site records.visit_loaded
                loading.wait()  # a transfer has started, and the buffer holds another tile until it is over
            first, last = self.tile_range(number)
            inside = max(start, first), min(stop, last)
            yield *inside, self.plan.part(self.views_of(number, buffer), inside[0] - first, inside[1] - first)
            if modify:
                self.kept.pop(number, None)  # it says what was before
                storing = self.store(number, buffer)
                if storing is not None:
                    self.last_stores[number] = written = PendingEvent(storing)
                    written.synchronize()  # site records.visit_written: the next tile is loaded into the same buffer

    def drop(self) -> None:
        """Drop the records: what buffers still hold of them is of no more use."""
        self.kept.clear()

    def name(self, number: int) -> str:
        """Return the name of a record, for errors: its kinds, unit and tile."""
        return f"{self.plan.label}, tile {self.plan.start // self.tile_numel + number}"
