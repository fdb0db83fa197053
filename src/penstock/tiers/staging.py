"""Buffers through which tiles pass: planned from where the homes are, none larger than a tile, or a stretch of some.

landing        tiles of gradients that come down in the reduce dtype, to be added to their home on the host, or cast
update         the rings of the updates on the host and on the device: what each cannot reach where it rests, a buffer
               for each such home
transit        the ring of gathers and gradients that come from files or go there

They are planned and taken with the homes. When homes move, they are given back and planned again, and taken when
they are needed.
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

# Of two slots, one is filled while the other is used; of three, one goes back as well. Files come and go at a pace of
# their own and want more in flight: as many tiles as these bytes hold, within limits.
MEMORY_SLOTS, STREAMED_SLOTS = 2, 3
LEAST_FILE_SLOTS, MOST_FILE_SLOTS, RING_BYTES = 4, 32, 256 << 20

# Neighbouring tiles in memory are worked on in a stretch: a copy, or a call of the rule, costs the host as much for few
# values as for many, and a thread that waits for it wakes up late, among others that want the interpreter. What a slot
# holds is to last longer than all of that. It is bounded as values, as memory of the ring, and so that there are enough
# of them to fill and empty the ring behind each other, and to divide between the device and the host.
STRETCH_RING_BYTES, LEAST_STRETCHES = 768 << 20, 32

#: The tiers beside which updates run.
SIDES = (Tier.DEVICE, Tier.CPU)

#: The sections of one unit on this rank, by home.
Sections = Mapping[str, Sequence[SegmentPlan]]


class StagingPlan:
    """Which buffers there will be.

    Arguments:
        units: where the homes are.
        reduce_dtype: what gradients on their way have.
        reach: what compute reads where it rests.

    Attributes:
        rings: the rings of `Staging`, in its order.
    """

    def __init__(self, units: Sequence[Sections], *, reduce_dtype: torch.dtype, reach: Reach) -> None:
        self._reach = reach
        plans = [plan for unit in units for sections in unit.values() for plan in sections]
        self._tile = max((min(plan.numel, plan.tile_numel) for plan in plans), default=0)
        self.rings = [
            self._landing(units, reduce_dtype),
            *(self._ring_beside(beside, units) for beside in SIDES),
            transit_ring(plan for unit in units for home in (PARAM, GRAD) for plan in unit.get(home, ())),
        ]

    def sections(self) -> list[SegmentPlan]:
        """Plan every buffer."""
        return [section for ring in self.rings for section in ring.sections()]

    def _landing(self, units: Sequence[Sections], reduce_dtype: torch.dtype) -> RingPlan:
        """Plan two slots of a stretch: one is filled while the other is added or cast."""
        if in_reach(Tier.CPU, Tier.DEVICE, self._reach):
            return RingPlan()
        away = [p for unit in units for p in unit.get(GRAD, ()) if p.cells and p.tier is not Tier.DEVICE]
        if not any(plan.tier is Tier.CPU or plan.cells[0].dtype != reduce_dtype for plan in away):
            return RingPlan()
        nbytes = self._tile * reduce_dtype.itemsize
        nbytes *= _stretch(self._tile, _tiles(away), MEMORY_SLOTS * nbytes)
        return RingPlan("landing", MEMORY_SLOTS, sizes={PASSING: nbytes})

    def _ring_beside(self, beside: Tier, units: Sequence[Sections]) -> RingPlan:
        """Plan the ring of the updates beside one tier."""
        updated = (GRAD, MASTER, OPTIMIZER, SHADOW, PARAM)
        sections = (each for unit in units for each in worked_on(beside, unit, OPTIMIZER, updated, streams=True))
        streams = any(plan.streamed != "none" for unit in units for plan in unit.get(OPTIMIZER, ()))
        in_memory = STREAMED_SLOTS if streams and beside is Tier.DEVICE else MEMORY_SLOTS
        return plan_ring("update", beside, sections, self._reach, in_memory)


def plan_ring(
    name: str,
    beside: Tier,
    sections: Iterable[tuple[str, SegmentPlan]],
    reach: Reach,
    in_memory: int = MEMORY_SLOTS,
) -> RingPlan:
    """Plan the ring through which tiles pass that are worked on beside one tier.

    Arguments:
        name: what the work is, for reports.
        beside: where it is done.
        sections: those that it needs, by home.
        reach: what compute reads where it rests.
        in_memory: how many slots there are where no file is read.

    Returns:
        A ring without slots where all is in reach.
    """
    passing: dict[str, list[SegmentPlan]] = {}
    for home, plan in sections:
        if plan.cells and not in_reach(plan.tier, beside, reach):
            passing.setdefault(home, []).append(plan)
    if not passing:
        return RingPlan()
    files = {home for home, plans in passing.items() if any(not plan.tier.is_memory for plan in plans)}
    near = Tier.CPU if reach.aliases_host else beside  # files want pages, which that tier hands out
    tile = max(min(plan.numel, plan.tile_numel) for plans in passing.values() for plan in plans)
    sizes, stretch = _sizes(passing, tile), 1
    count = _slots(sum(sizes.values())) if files else in_memory
    if not files:  # a record holds one tile
        stretch = _stretch(tile, max(map(_tiles, passing.values())), count * sum(sizes.values()))
        sizes = _sizes(passing, tile * stretch)
    # What is taken from files to a device passes the host.
    through_host = [home for home in sizes if home in files] if near is Tier.DEVICE else []
    return RingPlan(name, count, stretch, near, sizes, through_host)


def _tiles(plans: Iterable[SegmentPlan]) -> int:
    """Count the tiles of sections."""
    return sum(-(-plan.numel // plan.tile_numel) for plan in plans)


def _stretch(tile: int, tiles: int, ring_bytes: int) -> int:
    """Say how many tiles a slot of a ring holds.

    Arguments:
        tile: elements of a tile.
        tiles: how many tiles pass the ring in a step.
        ring_bytes: of all slots, if each held one tile.
    """
    if not tile:  # a rank that has no element of what passes
        return 1
    return max(1, min(STRETCH_NUMEL // tile, STRETCH_RING_BYTES // ring_bytes, tiles // LEAST_STRETCHES))


def _sizes(passing: Mapping[str, Sequence[SegmentPlan]], numel: int) -> dict[str, int]:
    """Count the bytes of a slot's buffer for each home, for so many elements."""
    return {
        home: max(RecordLayout(plan.cells).record_bytes(numel) for plan in plans) for home, plans in passing.items()
    }


def transit_ring(plans: Iterable[SegmentPlan]) -> RingPlan:
    """Plan the ring through which records pass."""
    nbytes = max((max(record_sizes(plan)) for plan in plans if not plan.tier.is_memory and plan.cells), default=0)
    return RingPlan("transit", _slots(nbytes) if nbytes else 0, sizes={PASSING: nbytes})


class Buffers:
    """Buffers that are taken and given back together."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sections: list[Segment] = []

    def make_slots(self, ring: RingPlan, reserved: Reservation | None = None) -> list[RingSlot]:
        """Make the slots of a ring, in memory that was reserved with others or now."""
        plans = ring.sections()
        reserved = reserved or self._store.reserve(plans)
        made = [reserved.make(plan) for plan in plans]
        self._sections += made
        return ring.slots(made)

    def free(self) -> None:
        """Give all buffers back, or keep them for the next time, if they were reserved for that. None is in use."""
        while self._sections:  # one by one: after an interrupt the next call goes on
            self._store.leave(self._sections[-1])
            self._store.free(self._sections.pop(), keep=True)


class Staging:
    """The buffers, and the rings that hold them.

    Arguments:
        store: where their memory comes from.

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
        """Give back all buffers, before homes move or units change.

        Arguments:
            make_plan: plans the buffers of the homes as they are when it is called: at the latest when a buffer is
                needed, also where an interrupt has kept the caller from `replan`.
        """
        self._make_plan, self._plan = make_plan, None
        for ring in self.rings:
            ring.drop()  # waits for what is under way: its memory goes below
        self._slots = None
        self._buffers.free()

    def replan(self) -> StagingPlan:
        """Plan the buffers of the homes as they are. They are taken when one is needed."""
        if self._plan is None:
            assert self._make_plan is not None
            self._plan = self._make_plan()
            for ring, planned in zip(self.rings, self._plan.rings, strict=True):
                ring.tiles = planned.tiles
        return self._plan

    def take(self, reserved: Reservation | None = None) -> None:
        """Make the buffers, in memory that was reserved with others or now."""
        if self._make_plan is None:
            return
        if self._slots is None:
            plan = self.replan()
            self._buffers.free()  # those that an interrupt has left
            with contextlib.ExitStack() as undo:
                if reserved is None:
                    reserved = self._store.reserve(plan.sections())
                    undo.callback(reserved.cancel)
                made = [self._buffers.make_slots(planned, reserved) for planned in plan.rings]
                undo.pop_all()
            self._slots = list(zip(self.rings, made, strict=True))
        for ring, slots in self._slots:
            ring.fill(slots)


def worked_on(
    beside: Tier, unit: Sections, at: str, homes: Sequence[str], *, streams: bool = False
) -> Iterator[tuple[str, SegmentPlan]]:
    """Find the sections of a unit that work beside one tier needs, by home.

    Arguments:
        beside: the tier.
        unit: where its homes are.
        at: the home whose tiles are worked on where they rest: beside the device, or else beside the host.
        homes: what the work needs of each tile; of the parameters nothing where there is a shadow of them.
        streams: whether the device also works on tiles that rest elsewhere, as their sections say.
    """
    for section in unit.get(at, ()):
        if section.tier is Tier.DEVICE or not streams:
            works = (section.tier is Tier.DEVICE) == (beside is Tier.DEVICE)
        else:
            works = section.streamed != ("none" if beside is Tier.DEVICE else "all")
        if not works:
            continue
        shadowed = [plan for plan in unit[SHADOW] if plan.cells and _overlap(plan, section)]
        for home in homes:
            for plan in unit[home]:
                covered = home == PARAM and any(_covers(shadow, plan, section) for shadow in shadowed)
                if _overlap(plan, section) and not covered:
                    yield home, plan


def _overlap(one: SegmentPlan, other: SegmentPlan) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def _covers(shadow: SegmentPlan, plan: SegmentPlan, update: SegmentPlan) -> bool:
    """Whether the update of a part of a section needs its shadow alone."""
    return shadow.start <= max(plan.start, update.start) and min(plan.stop, update.stop) <= shadow.stop


def _slots(nbytes: int) -> int:
    return max(LEAST_FILE_SLOTS, min(MOST_FILE_SLOTS, RING_BYTES // max(nbytes, 1)))
