"""Homes of changing sizes, cut from a few large slabs: what forward saves is of other sizes with every length of text.

    slab 0    | extent | hole | extent | extent | hole |
    slab 1    | extent |                hole           |

To map and pin memory takes long, and stands in the way of collectives that are under way, so it is asked for in steps
that grow with what is there, and not for each tensor or each size. A home is one extent in the smallest hole that holds
it; where none does, it is put together from the largest ones, in several sections. What is free between two extents is
one hole, however it came to be. So there is room whenever as many bytes are free, and the slabs hold no more than

    what was wanted at once, each home rounded up to whole pages, + the last step

with steps as `step_bytes` says, in whatever order sizes come and go. In files each tile goes to the folder with most
room.

A home is given back by whoever drops it last, in the middle of a garbage collection on any thread: it is put down
there, and swept up when the next one is wanted. Copies from it and to it may be under way then: its bytes are free once
those are over, and who finds no room waits for that before more is taken.
"""

import contextlib
import math
from collections import deque
from operator import attrgetter
from typing import NamedTuple

import torch

from penstock.config import Tier
from penstock.errors import MemoryBudgetError, NvmeError
from penstock.layout import round_up
from penstock.runtime.host_memory import PAGE_BYTES
from penstock.runtime.streams import all_of
from penstock.tiers.storage import CellPlan, Segment, SegmentPlan, Storage
from penstock.tiers.tier import Store

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


class SlabExtent(NamedTuple):
    """Whole pages of a block: taken, or a hole."""

    block: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """How many bytes."""
        return self.stop - self.start


class ActivationStorage(NamedTuple):
    """A home, and the bytes that it was cut from."""

    home: Storage
    extents: list[SlabExtent]


class _Block(NamedTuple):
    """A slab of memory, or what one of files has in one folder.

    Attributes:
        section: all of the slab, as one section.
        record: the number of the folder's record in files.
        space: blocks are taken from one space at a time: of files a folder's; of memory the pinned ones, then others.
    """

    section: Segment
    record: int
    space: int


class ActivationPool:
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
        self._folders = folders if self._in_files else 1
        self.tile_bytes = round_up(tile_bytes, PAGE_BYTES)
        self._blocks: dict[int, _Block] = {}  # by number
        self._holes: list[SlabExtent] = []  # neighbours are one
        self._made = 0
        self._dropped: deque[ActivationStorage] = deque()

    @property
    def capacity(self) -> int:
        """Bytes of all slabs."""
        return sum(block.section.tile_numel for block in self._blocks.values())

    @property
    def free(self) -> int:
        """Bytes of all holes."""
        return _bytes_of(self._holes)

    def take(self, nbytes: int) -> ActivationStorage:
        """Cut a home of some bytes.

        Raises:
            MemoryBudgetError, NvmeError: there is no room for it.
        """
        wanted = round_up(nbytes, PAGE_BYTES)
        self._sweep(wanted)
        while self.free < wanted:
            self._grow(wanted - self.free)
        extents: list[SlabExtent] = []
        sections: list[Segment] = []
        start = 0
        while start < nbytes:
            extent = self._take_extent(wanted - start)
            extents.append(extent)
            block, numel = self._blocks[extent.block], min(extent.nbytes, nbytes - start)
            sections.append(block.section.cut(block.record, extent.start, self._plan(start, numel, numel)))
            start += extent.nbytes
        return ActivationStorage(Storage(sections), extents)

    def drop(self, cut: ActivationStorage) -> None:
        """Give a home back. On any thread, at any time: no lock is taken."""
        self._dropped.append(cut)

    def rest(self) -> None:
        """Give slabs back of which no home is left, once what is under way on them is over."""
        self._sweep(math.inf)
        for section in {block.section for block in self._blocks.values()}:
            whole = [
                SlabExtent(n, 0, section.tile_numel) for n, block in self._blocks.items() if block.section is section
            ]
            if set(whole) <= set(self._holes):
                for hole in whole:
                    self._holes.remove(hole)
                    del self._blocks[hole.block]
                self._store.leave(section)
                self._store.free(section)

    def close(self) -> None:
        """Let go of the slabs, which go with their store: homes that are left keep theirs."""
        self._blocks.clear()
        self._holes.clear()
        self._dropped.clear()

    def _sweep(self, wanted: float) -> None:
        """Free what was dropped and is not copied any more; wait for the copies while fewer bytes are free."""
        while self._dropped:
            home, extents = self._dropped[0]
            over = all_of([home.written, home.read])  # site pool.returned_write, pool.returned_reads
            if not over.done() and self.free >= wanted:
                return  # in turn: those that were dropped later are mostly over later
            with contextlib.suppress(Exception):  # of what nobody wants any more
                # site pool.memory_unused
                over.synchronize()  # else a copy would write what is another one's, or memory that is unmapped
            self._dropped.popleft()
            for section in home.sections:
                section.drop()
            self._holes = _joined([*self._holes, *extents])

    def _take_extent(self, wanted: int) -> SlabExtent:
        """Take bytes that are free: of memory whole if possible, of files a tile at most."""
        wanted = min(wanted, self.tile_bytes) if self._in_files else wanted
        spaces: dict[int, list[SlabExtent]] = {}
        for hole in self._holes:
            spaces.setdefault(self._blocks[hole.block].space, []).append(hole)
        holes = max(spaces.values(), key=_bytes_of)
        if not self._in_files:  # the first that has as many, if one has
            holes = next((spaces[space] for space in sorted(spaces) if _bytes_of(spaces[space]) >= wanted), holes)
        fitting = min((hole for hole in holes if hole.nbytes >= wanted), key=attrgetter("nbytes"), default=None)
        hole = max(holes, key=attrgetter("nbytes")) if fitting is None else fitting
        self._holes.remove(hole)
        cut = hole.start + min(wanted, hole.nbytes)
        if cut < hole.stop:
            self._holes.append(hole._replace(start=cut))
        return hole._replace(stop=cut)

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
        each = round_up(-(-nbytes // self._folders), PAGE_BYTES)  # of files one record in each folder
        plan = self._plan(0, each * self._folders, each)
        section = self._store.reserve([plan]).make(plan)
        for record in range(self._folders):
            space = record if self._in_files else int(section.bounce is not None)
            self._blocks[self._made] = _Block(section, record, space)
            self._holes.append(SlabExtent(self._made, 0, each))
            self._made += 1

    def _plan(self, start: int, numel: int, tile_numel: int) -> SegmentPlan:
        cell = CellPlan(self._unit, self._kind, self._tier, torch.uint8, numel)
        return SegmentPlan(self._kind, self._tier, (cell,), start, numel, tile_numel)


def _joined(holes: list[SlabExtent]) -> list[SlabExtent]:
    """Make one hole of holes that follow each other."""
    joined: list[SlabExtent] = []
    for hole in sorted(holes):
        if joined and (joined[-1].block, joined[-1].stop) == (hole.block, hole.start):
            hole = joined.pop()._replace(stop=hole.stop)
        joined.append(hole)
    return joined


def _bytes_of(holes: list[SlabExtent]) -> int:
    return sum(hole.nbytes for hole in holes)
