"""Storage of changing sizes, cut from a few large allocations. Saved activations have other sizes with every batch.

    allocation 0    | extent | hole | extent | extent | hole |
    allocation 1    | extent |                hole           |

Mapping and pinning memory is slow, and delays collectives that are under way. So allocations grow in steps, and are not
allocated for each tensor or each size. A storage is one extent in the smallest hole that holds it. Where no hole does,
it is several segments in the largest holes. Neighbouring holes are joined. So there is room whenever as many bytes are
free, and the allocations hold no more than

    the most bytes that were wanted at once, each storage rounded up to whole pages, + the last step

with steps as `step_bytes` says, in whatever order sizes come and go. In files each tile goes to the folder with the
most free bytes.

A storage is dropped by its last user, possibly in a garbage collection on any thread. It is queued there, and freed by
the next `take`. Copies from it and to it may be under way: its bytes are free once those are over, and `take` waits for
that before it allocates more.
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

FIRST_BYTES = 16 << 20  # of the first allocation, unless more is wanted at once
# From here on an allocation is no longer as large as all before, until an eighth of these is more.
STEP_BYTES = 256 << 20
LEAST_PINNED = 1 << 20  # less room in the budget of pinned memory is not worth an allocation


def step_bytes(present: int, missing: int) -> int:
    """Return the bytes of the next allocation.

    Arguments:
        present: bytes of all allocations.
        missing: bytes that are wanted beyond those that are free.
    """
    return max(missing, min(max(present, FIRST_BYTES), STEP_BYTES), present // 8)


class AllocationExtent(NamedTuple):
    """Whole pages of a block: allocated, or a hole."""

    block: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.stop - self.start


class ActivationStorage(NamedTuple):
    """A storage, and the extents that it was cut from."""

    storage: Storage
    extents: list[AllocationExtent]


class _Block(NamedTuple):
    """An allocation of memory, or one folder's part of an allocation of files.

    Attributes:
        segment: the whole allocation, as one segment.
        record: the number of the folder's record in files.
        space: the number of the folder; in memory 0 for pinned and 1 for pageable allocations. Extents are taken from
            one space at a time.
    """

    segment: Segment
    record: int
    space: int


class ActivationPool:
    """Allocates storages of any size.

    Arguments:
        store: the table that allocations are entered in.
        tier: the tier of the storages.
        unit: the name of the storages' unit in the table.
        kind: the name of their kind in the table. Values are bytes.
        tile_bytes: bytes of a tile in files.
        folders: the number of folders of the nvme tier.
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
        self._holes: list[AllocationExtent] = []  # neighbours are one
        self._made = 0
        self._dropped: deque[ActivationStorage] = deque()

    @property
    def capacity(self) -> int:
        """Bytes of all allocations."""
        return sum(block.segment.tile_numel for block in self._blocks.values())

    @property
    def free(self) -> int:
        """Bytes of all holes."""
        return _bytes_of(self._holes)

    def take(self, nbytes: int) -> ActivationStorage:
        """Allocate a storage of some bytes.

        Raises:
            MemoryBudgetError, NvmeError: there is no room for it.
        """
        wanted = round_up(nbytes, PAGE_BYTES)
        self._sweep(wanted)
        while self.free < wanted:
            self._grow(wanted - self.free)
        extents: list[AllocationExtent] = []
        segments: list[Segment] = []
        start = 0
        while start < nbytes:
            extent = self._take_extent(wanted - start)
            extents.append(extent)
            block, numel = self._blocks[extent.block], min(extent.nbytes, nbytes - start)
            segments.append(block.segment.cut(block.record, extent.start, self._plan(start, numel, numel)))
            start += extent.nbytes
        return ActivationStorage(Storage(segments), extents)

    def drop(self, cut: ActivationStorage) -> None:
        """Queue a storage to be freed. Any thread may call this at any time: it takes no lock."""
        self._dropped.append(cut)

    def release_memory(self) -> None:
        """Free the storages that were dropped, and the allocations without storages, once work on them is over."""
        self._sweep(math.inf)
        for segment in {block.segment for block in self._blocks.values()}:
            whole = [
                AllocationExtent(n, 0, segment.tile_numel)
                for n, block in self._blocks.items()
                if block.segment is segment
            ]
            if set(whole) <= set(self._holes):
                for hole in whole:
                    self._holes.remove(hole)
                    del self._blocks[hole.block]
                self._store.leave(segment)
                self._store.free(segment)

    def close(self) -> None:
        """Forget the allocations, which are freed with the store. Storages that are left keep their memory."""
        self._blocks.clear()
        self._holes.clear()
        self._dropped.clear()

    def _sweep(self, wanted: float) -> None:
        """Free dropped storages whose copies are over. Wait for copies while fewer bytes than `wanted` are free."""
        while self._dropped:
            storage, extents = self._dropped[0]
            over = all_of([storage.written, storage.read])  # site pool.returned_write, pool.returned_reads
            if not over.done() and self.free >= wanted:
                return  # in order: copies of those dropped later are mostly over later
            with contextlib.suppress(Exception):  # errors of copies of a dropped storage concern no user
                # site pool.memory_unused
                over.synchronize()  # the bytes are handed out again, or unmapped (ordering rule 1)
            self._dropped.popleft()
            for segment in storage.segments:
                segment.drop()
            self._holes = _joined([*self._holes, *extents])

    def _take_extent(self, wanted: int) -> AllocationExtent:
        """Take free bytes: in memory all of them in one hole if possible, in files a tile at most."""
        wanted = min(wanted, self.tile_bytes) if self._in_files else wanted
        spaces: dict[int, list[AllocationExtent]] = {}
        for hole in self._holes:
            spaces.setdefault(self._blocks[hole.block].space, []).append(hole)
        holes = max(spaces.values(), key=_bytes_of)
        if not self._in_files:  # the first space with so many free bytes, if there is one
            holes = next((spaces[space] for space in sorted(spaces) if _bytes_of(spaces[space]) >= wanted), holes)
        fitting = min((hole for hole in holes if hole.nbytes >= wanted), key=attrgetter("nbytes"), default=None)
        hole = max(holes, key=attrgetter("nbytes")) if fitting is None else fitting
        self._holes.remove(hole)
        cut = hole.start + min(wanted, hole.nbytes)
        if cut < hole.stop:
            self._holes.append(hole._replace(start=cut))
        return hole._replace(stop=cut)

    def _grow(self, missing: int) -> None:
        """Allocate another allocation."""
        nbytes = step_bytes(self.capacity, missing)
        pinnable = self._store.tiers[self._tier].pinnable(nbytes) // PAGE_BYTES * PAGE_BYTES
        if pinnable >= LEAST_PINNED:  # the rest of the budget first, then pageable allocations
            nbytes = min(nbytes, pinnable)
        try:
            self._add(nbytes)
        except (MemoryBudgetError, NvmeError):
            if nbytes <= missing:
                raise
            self._add(missing)  # no more than is needed: memory or disk is nearly full

    def _add(self, nbytes: int) -> None:
        each = round_up(-(-nbytes // self._folders), PAGE_BYTES)  # of files one record in each folder
        plan = self._plan(0, each * self._folders, each)
        segment = self._store.reserve([plan]).make(plan)
        for record in range(self._folders):
            space = record if self._in_files else int(segment.bounce is not None)
            self._blocks[self._made] = _Block(segment, record, space)
            self._holes.append(AllocationExtent(self._made, 0, each))
            self._made += 1

    def _plan(self, start: int, numel: int, tile_numel: int) -> SegmentPlan:
        cell = CellPlan(self._unit, self._kind, self._tier, torch.uint8, numel)
        return SegmentPlan(self._kind, self._tier, (cell,), start, numel, tile_numel)


def _joined(holes: list[AllocationExtent]) -> list[AllocationExtent]:
    """Make one hole of holes that follow each other."""
    joined: list[AllocationExtent] = []
    for hole in sorted(holes):
        if joined and (joined[-1].block, joined[-1].stop) == (hole.block, hole.start):
            hole = joined.pop()._replace(stop=hole.stop)
        joined.append(hole)
    return joined


def _bytes_of(holes: list[AllocationExtent]) -> int:
    return sum(hole.nbytes for hole in holes)
