"""Homes of changing sizes, cut from a few large slabs: what forward saves is of other sizes with every length of text.

To map and pin memory takes long, and stands in the way of collectives that are under way, so it is asked for in steps
that grow with what is there, and not for each tensor or each size. A home takes bytes wherever they are free
(`tiers/space.py`), in several sections if need be, so the slabs hold no more than

    what was wanted at once, each home rounded up to whole pages, + the last step

with steps as `step_bytes` says. In files each tile goes to the folder with most room.

A home is given back by whoever drops it last, in the middle of a garbage collection on any thread: it is put down
there, and swept up when the next one is wanted. Copies from it and to it may be under way then. Its bytes can be taken
at once all the same, because a home says what its own copies have to wait for: else the host, which runs ahead of the
device, would need memory for two steps.
"""

import contextlib
from bisect import bisect_left, insort
from collections import deque
from typing import NamedTuple

import torch

from penstock.errors import MemoryBudgetError, NvmeError
from penstock.kinds import Tier
from penstock.layout import round_up
from penstock.machine.arena import PAGE_BYTES
from penstock.machine.streams import Event, all_of
from penstock.tiers.home import CellPlan, Home, Section, SectionPlan
from penstock.tiers.space import Extent, Space
from penstock.tiers.store import Store

FIRST_BYTES = 16 << 20  # of the first slab, unless more is wanted at once
STEP_BYTES = 256 << 20  # from here on slabs are no longer as large as all before, until an eighth of these is more
LEAST_PINNED = 1 << 20  # less room in the budget of pinned memory is not worth a slab


def step_bytes(present: int, missing: int) -> int:
    """Decide how many bytes the next slab has.

    Arguments:
        present: how many all slabs have together.
        missing: how many are wanted beyond those that are free.
    """
    return max(missing, min(max(present, FIRST_BYTES), STEP_BYTES), present // 8)


class Cut(NamedTuple):
    """A home, and the bytes that it was cut from."""

    home: Home
    extents: list[Extent]


class Cuts:
    """Hands them out.

    Arguments:
        unit: what the table calls whom they belong to.
        kind: what the table calls their values, which are bytes.
        tile_bytes: how large a tile in files is.
        folders: how many the nvme tier has, if it is that.
    """

    def __init__(self, store: Store, tier: Tier, *, unit: str, kind: str, tile_bytes: int, folders: int) -> None:
        self._store = store
        self._tier = tier
        self._unit = unit
        self._kind = kind
        self._in_files = not tier.is_memory
        self.tile_bytes = round_up(tile_bytes, PAGE_BYTES)
        # Of memory the pinned slabs, which are used first, and the others. Of files those in each folder.
        self._spaces = [Space(PAGE_BYTES) for _ in range(folders if self._in_files else 2)]
        self._slabs: dict[int, _Slab] = {}  # by number
        self._made = 0
        self._dropped: deque[Cut] = deque()
        self._under_way = _UnderWay()

    @property
    def capacity(self) -> int:
        """Bytes of all slabs."""
        return sum(space.capacity for space in self._spaces)

    @property
    def free(self) -> int:
        """Bytes of which no home was cut."""
        return sum(space.free for space in self._spaces)

    def take(self, nbytes: int) -> Cut:
        """Cut a home of some bytes.

        Raises:
            MemoryBudgetError, NvmeError: there is no room for it.
        """
        self._sweep()
        wanted = round_up(nbytes, PAGE_BYTES)
        while self.free < wanted:
            self._grow(wanted - self.free)
        extents = self._extents(wanted)
        sections, start = [], 0
        for extent in extents:
            numel = min(extent.nbytes, nbytes - start)
            sections.append(self._section(extent, start, numel))
            start += numel
        home = Home(sections)
        # Copies from and to whoever had these bytes before may be under way: nothing is written over them.
        # site pool.earlier_copies
        under_way = all_of(event for extent in extents for event in self._under_way.take(extent))
        home.note_read(under_way)  # site pool.earlier_copies_noted: the copy that fills the home follows it
        return Cut(home, extents)

    def drop(self, cut: Cut) -> None:
        """Give a home back. On any thread, at any time: no lock is taken."""
        self._dropped.append(cut)

    def rest(self) -> None:
        """Give slabs back of which no home is left, once what is under way on them is over."""
        self._sweep()
        idle = {number for space in self._spaces for number in space.idle()}
        for section in {slab.section for slab in self._slabs.values()}:
            numbers = [number for number, slab in self._slabs.items() if slab.section is section]
            if not idle.issuperset(numbers):
                continue
            for number in numbers:
                for event in self._under_way.take(Extent(number, 0, section.plan.numel)):
                    with contextlib.suppress(Exception):  # of what nobody wants any more
                        # site pool.memory_unused
                        event.synchronize()  # a copy would write memory that is unmapped, or somebody else's
                self._slabs.pop(number).space.remove(number)
            self._store.leave(section)
            self._store.free(section)

    def close(self) -> None:
        """Let go of the slabs, which go with their store: homes that are left keep theirs."""
        self._slabs.clear()
        self._dropped.clear()
        self._spaces.clear()

    def _sweep(self) -> None:
        """Free what was dropped."""
        while self._dropped:
            cut = self._dropped.popleft()
            # site pool.returned_write, pool.returned_reads
            over = all_of([cut.home.written, cut.home.read])  # asked now: the home goes, its copies may not be over
            for section in cut.home.sections:
                section.drop()
            for extent in cut.extents:
                self._slabs[extent.slab].space.give_back(extent)
                if not over.done():
                    self._under_way.note(extent, over)

    def _extents(self, wanted: int) -> list[Extent]:
        """Take bytes that are free: of memory whole if possible, of files tile by tile."""
        extents, left = [], wanted
        while left:
            part = min(left, self.tile_bytes) if self._in_files else left
            fullest = max(self._spaces, key=lambda space: space.free)
            if not self._in_files:
                fullest = next((space for space in self._spaces if space.free >= part), fullest)
            taken = fullest.take(min(part, fullest.free))
            extents += taken
            left -= sum(extent.nbytes for extent in taken)
        return extents

    def _section(self, extent: Extent, start: int, numel: int) -> Section:
        """Make a section of some bytes of a slab, which are a home's bytes from `start` on."""
        slab, record, _ = self._slabs[extent.slab]
        return slab.cut(record, extent.start, self._plan(start, numel, numel))

    def _grow(self, missing: int) -> None:
        """Take another slab."""
        nbytes = step_bytes(self.capacity, missing)
        pinnable = self._store.tiers[self._tier].pinnable(nbytes) // PAGE_BYTES * PAGE_BYTES
        if pinnable >= LEAST_PINNED:  # what is left of the budget, then pageable ones
            nbytes = min(nbytes, pinnable)
        try:
            self._add(nbytes)
        except (MemoryBudgetError, NvmeError):
            if nbytes <= missing:
                raise
            self._add(missing)  # nearly full: no more than is needed

    def _add(self, nbytes: int) -> None:
        folders = len(self._spaces) if self._in_files else 1
        each = round_up(-(-nbytes // folders), PAGE_BYTES)  # of files one record in each folder
        plan = self._plan(0, each * folders, each)
        section = self._store.reserve([plan]).make(plan)
        for record in range(folders):
            pageable = section.bounce is not None
            space = self._spaces[record if self._in_files else pageable]
            self._slabs[self._made] = _Slab(section, record, space)
            space.add(self._made, each)
            self._made += 1

    def _plan(self, start: int, numel: int, tile_numel: int) -> SectionPlan:
        cell = CellPlan(self._unit, self._kind, self._tier, torch.uint8, numel)
        return SectionPlan(self._kind, self._tier, (cell,), start, numel, tile_numel)


class _Slab(NamedTuple):
    """What a number stands for: a slab of memory, or what one has in a folder.

    Attributes:
        section: all of it, as one section.
        record: the number of the folder's record in files.
        space: where its bytes are counted.
    """

    section: Section
    record: int
    space: Space


class _UnderWay:
    """Work on bytes that were given back."""

    def __init__(self) -> None:
        self._events: dict[Extent, Event] = {}
        self._extents: list[Extent] = []  # the same, sorted; no two overlap
        self._many = 64

    def note(self, extent: Extent, event: Event) -> None:
        """Note that something is under way on bytes of which nothing is known."""
        if len(self._extents) >= self._many:
            self._events = {other: event for other, event in self._events.items() if not event.done()}
            self._extents = sorted(self._events)
            self._many = max(64, 2 * len(self._extents))
        insort(self._extents, extent)
        self._events[extent] = event

    def take(self, extent: Extent) -> list[Event]:
        """Say what is under way on some bytes, and forget it: they are somebody else's from now on."""
        slab, start, stop = extent
        first = bisect_left(self._extents, (slab, start))
        if first and self._extents[first - 1].slab == slab and self._extents[first - 1].stop > start:
            first -= 1
        last = bisect_left(self._extents, (slab, stop), lo=first)
        events: list[Event] = []
        beside: dict[Extent, Event] = {}
        for other in self._extents[first:last]:
            event = self._events.pop(other)
            if not event.done():
                events.append(event)
                parts = Extent(slab, other.start, start), Extent(slab, stop, other.stop)
                beside |= {part: event for part in parts if part.start < part.stop}
        self._extents[first:last] = sorted(beside)
        self._events |= beside
        return events
