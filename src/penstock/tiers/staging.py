"""Staging buffers, through which tiles pass. None is larger than a tile, or than a tile range.

landing        tiles of gradients that are copied from the device in the reduce dtype, and added or cast on the host
update         the rings of the updates on the host and on the device: a buffer for each storage out of reach
transit        the ring of gathers and gradients that are loaded from files or stored in them

They are planned and allocated with the storages. When storages move, they are freed and planned again, and allocated
when they are needed.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from penstock.config import GRAD, MASTER, OPTIMIZER, PARAM, SHADOW, Tier
from penstock.runtime.topology import Reach
from penstock.tiers.storage import (
    PASSING,
    STRETCH_NUMEL,
    RecordLayout,
    Ring,
    RingPlan,
    RingSlot,
    Segment,
    SegmentPlan,
    record_sizes,
)
from penstock.tiers.tier import Reservation, Store
from penstock.tiers.transfer import in_reach

# Of two slots, one is filled while the other is used; of three, one is written back as well. Files need more in flight:
# as many tiles as these bytes hold, within limits.
MEMORY_SLOTS, STREAMED_SLOTS = 2, 3
LEAST_FILE_SLOTS, MOST_FILE_SLOTS, RING_BYTES = 4, 32, 256 << 20

# Neighbouring tiles in memory are updated as a tile range: a copy, or a call of the rule, costs the host as much for
# few values as for many, and a thread that waits for it wakes up late. The work on a tile range takes longer than that.
# Its size is bounded by elements, by the memory of the ring, and so that there are enough tile ranges to overlap, and
# to divide between the device and the host.
STRETCH_RING_BYTES, LEAST_STRETCHES = 768 << 20, 32

#: The tiers beside which updates run.
SIDES = (Tier.DEVICE, Tier.CPU)

#: The segments of one unit on this rank, by storage.
Sections = Mapping[str, Sequence[SegmentPlan]]


class StagingPlan:
    """Plan of the staging buffers.

    Arguments:
        units: the segments of all storages.
        reduce_dtype: the dtype of reduced gradients.
        reach: what compute reads in place.

    Attributes:
        rings: the rings of `Staging`, in its order.
    """

    def __init__(self, units: Sequence[Sections], *, reduce_dtype: torch.dtype, reach: Reach) -> None:
        self._reach = reach
        plans = [plan for unit in units for segments in unit.values() for plan in segments]
        self._tile = max((min(plan.numel, plan.tile_numel) for plan in plans), default=0)
        self.rings = [
            self._landing(units, reduce_dtype),
            *(self._ring_beside(beside, units) for beside in SIDES),
            transit_ring(plan for unit in units for storage in (PARAM, GRAD) for plan in unit.get(storage, ())),
        ]

    def segments(self) -> list[SegmentPlan]:
        """Return the plans of all buffers."""
        return [segment for ring in self.rings for segment in ring.segments()]

    def _landing(self, units: Sequence[Sections], reduce_dtype: torch.dtype) -> RingPlan:
        """Plan two slots of a tile range each: one is filled while the other is added or cast."""
        if in_reach(Tier.CPU, Tier.DEVICE, self._reach):
            return RingPlan()
        away = [p for unit in units for p in unit.get(GRAD, ()) if p.cells and p.tier is not Tier.DEVICE]
        if not any(plan.tier is Tier.CPU or plan.cells[0].dtype != reduce_dtype for plan in away):
            return RingPlan()
        nbytes = self._tile * reduce_dtype.itemsize
        nbytes *= _range_tiles(self._tile, _tiles(away), MEMORY_SLOTS * nbytes)
        return RingPlan("landing", MEMORY_SLOTS, sizes={PASSING: nbytes})

    def _ring_beside(self, beside: Tier, units: Sequence[Sections]) -> RingPlan:
        """Plan the ring of the updates beside one tier."""
        updated = (GRAD, MASTER, OPTIMIZER, SHADOW, PARAM)
        segments = (each for unit in units for each in worked_on(beside, unit, OPTIMIZER, updated, streams=True))
        streams = any(plan.streamed != "none" for unit in units for plan in unit.get(OPTIMIZER, ()))
        in_memory = STREAMED_SLOTS if streams and beside is Tier.DEVICE else MEMORY_SLOTS
        return plan_ring("update", beside, segments, self._reach, in_memory)


def plan_ring(
    name: str,
    beside: Tier,
    segments: Iterable[tuple[str, SegmentPlan]],
    reach: Reach,
    in_memory: int = MEMORY_SLOTS,
) -> RingPlan:
    """Plan the ring of the tiles that are used beside one tier.

    Arguments:
        name: the name of the work, for reports.
        beside: the tier that it runs beside.
        segments: the segments that it needs, by storage.
        reach: what compute reads in place.
        in_memory: the number of slots where no file is read.

    Returns:
        A ring without slots where all segments are in reach.
    """
    passing: dict[str, list[SegmentPlan]] = {}
    for storage, plan in segments:
        if plan.cells and not in_reach(plan.tier, beside, reach):
            passing.setdefault(storage, []).append(plan)
    if not passing:
        return RingPlan()
    files = {storage for storage, plans in passing.items() if any(not plan.tier.is_memory for plan in plans)}
    near = Tier.CPU if reach.aliases_host else beside  # records need page-aligned buffers, which that tier has
    tile = max(min(plan.numel, plan.tile_numel) for plans in passing.values() for plan in plans)
    sizes, tiles = _sizes(passing, tile), 1
    count = _slots(sum(sizes.values())) if files else in_memory
    if not files:  # a record holds one tile
        tiles = _range_tiles(tile, max(map(_tiles, passing.values())), count * sum(sizes.values()))
        sizes = _sizes(passing, tile * tiles)
    # Records for a device pass a buffer on the host.
    through_host = [storage for storage in sizes if storage in files] if near is Tier.DEVICE else []
    return RingPlan(name, count, tiles, near, sizes, through_host)


def _tiles(plans: Iterable[SegmentPlan]) -> int:
    """Return the number of tiles of segments."""
    return sum(-(-plan.numel // plan.tile_numel) for plan in plans)


def _range_tiles(tile: int, tiles: int, ring_bytes: int) -> int:
    """Return how many tiles a slot of a ring holds.

    Arguments:
        tile: elements of a tile.
        tiles: how many tiles pass the ring in a step.
        ring_bytes: bytes of all slots, if each held one tile.
    """
    if not tile:  # this rank has no element of these storages
        return 1
    return max(1, min(STRETCH_NUMEL // tile, STRETCH_RING_BYTES // ring_bytes, tiles // LEAST_STRETCHES))


def _sizes(passing: Mapping[str, Sequence[SegmentPlan]], numel: int) -> dict[str, int]:
    """Return the bytes of a slot's buffer for each storage, for so many elements."""
    return {
        storage: max(RecordLayout(plan.cells).record_bytes(numel) for plan in plans)
        for storage, plans in passing.items()
    }


def transit_ring(plans: Iterable[SegmentPlan]) -> RingPlan:
    """Plan the ring through which records pass."""
    nbytes = max((max(record_sizes(plan)) for plan in plans if not plan.tier.is_memory and plan.cells), default=0)
    return RingPlan("transit", _slots(nbytes) if nbytes else 0, sizes={PASSING: nbytes})


class Buffers:
    """Buffers that are allocated and freed together."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._segments: list[Segment] = []

    def make_slots(self, ring: RingPlan, reserved: Reservation | None = None) -> list[RingSlot]:
        """Make the slots of a ring, in memory that was reserved before, or is reserved now."""
        plans = ring.segments()
        reserved = reserved or self._store.reserve(plans)
        made = [reserved.make(plan) for plan in plans]
        self._segments += made
        return ring.slots(made)

    def free(self) -> None:
        """Free all buffers, or keep them for the next time, if they were reserved for that. None is in use."""
        while self._segments:  # one by one: after an interrupt the next call continues
            self._store.leave(self._segments[-1])
            self._store.free(self._segments.pop(), keep=True)


class Staging:
    """The staging buffers, and the rings that hold them.

    Arguments:
        store: allocates their memory.

    Attributes:
        landing: the ring of gradients that come down to be added or cast.
        update: the rings of the updates, by the tier beside which they run.
        transit: the ring of gathers and gradients.
        rings: all of them.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._make_plan: Callable[[], StagingPlan] | None = None
        self._plan: StagingPlan | None = None
        self._buffers = Buffers(store)
        self._slots: Sequence[tuple[Ring, Sequence[RingSlot]]] | None = None
        self.landing = Ring(self.take)
        self.update = {beside: Ring(self.take) for beside in SIDES}
        self.transit = Ring(self.take)
        self.rings = [self.landing, *self.update.values(), self.transit]

    def give_back(self, make_plan: Callable[[], StagingPlan]) -> None:
        """Free all buffers, before storages move or units change.

        Arguments:
            make_plan: plans the buffers for the storages as they are when it is called. It is called when a buffer is
                needed at the latest, also where an interrupt came before `replan`.
        """
        self._make_plan, self._plan = make_plan, None
        for ring in self.rings:
            ring.drop()  # waits for work on the buffers, which are freed below
        self._slots = None
        self._buffers.free()

    def replan(self) -> StagingPlan:
        """Plan the buffers for the storages as they are. They are allocated when one is needed."""
        if self._plan is None:
            assert self._make_plan is not None
            self._plan = self._make_plan()
            for ring, planned in zip(self.rings, self._plan.rings, strict=True):
                ring.tiles = planned.tiles
        return self._plan

    def take(self, reserved: Reservation | None = None) -> None:
        """Allocate the buffers, in memory that was reserved before, or is reserved now."""
        if self._make_plan is None:
            return
        if self._slots is None:
            plan = self.replan()
            self._buffers.free()  # those of a call that was interrupted
            with contextlib.ExitStack() as undo:
                if reserved is None:
                    reserved = self._store.reserve(plan.segments())
                    undo.callback(reserved.cancel)
                made = [self._buffers.make_slots(planned, reserved) for planned in plan.rings]
                undo.pop_all()
            self._slots = list(zip(self.rings, made, strict=True))
        for ring, slots in self._slots:
            ring.fill(slots)


def worked_on(
    beside: Tier, unit: Sections, at: str, storages: Sequence[str], *, streams: bool = False
) -> Iterator[tuple[str, SegmentPlan]]:
    """Yield the segments of a unit that the work beside one tier needs, with the names of their storages.

    Arguments:
        beside: the tier.
        unit: the segments of its storages.
        at: the storage that decides where a tile is used: beside the device if it is there, otherwise beside the host.
        storages: the storages that the work needs; of the parameters nothing where parameter staging covers them.
        streams: True if the device also works on tiles of other tiers, as `SegmentPlan.streamed` says.
    """
    for segment in unit.get(at, ()):
        if segment.tier is Tier.DEVICE or not streams:
            works = (segment.tier is Tier.DEVICE) == (beside is Tier.DEVICE)
        else:
            works = segment.streamed != ("none" if beside is Tier.DEVICE else "all")
        if not works:
            continue
        shadowed = [plan for plan in unit[SHADOW] if plan.cells and _overlap(plan, segment)]
        for storage in storages:
            for plan in unit[storage]:
                covered = storage == PARAM and any(_covers(param_staging, plan, segment) for param_staging in shadowed)
                if _overlap(plan, segment) and not covered:
                    yield storage, plan


def _overlap(one: SegmentPlan, other: SegmentPlan) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def _covers(param_staging: SegmentPlan, plan: SegmentPlan, update: SegmentPlan) -> bool:
    """Return True if the update of a part of a segment needs its parameter staging alone."""
    return param_staging.start <= max(plan.start, update.start) and min(plan.stop, update.stop) <= param_staging.stop


def _slots(nbytes: int) -> int:
    return max(LEAST_FILE_SLOTS, min(MOST_FILE_SLOTS, RING_BYTES // max(nbytes, 1)))
