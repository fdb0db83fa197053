"""Tiers: what each provides, the table of the state that they hold, and its report."""

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.config import (
    ACTIVATION,
    GATHERED,
    GRAD,
    KEPT,
    LEAVING,
    MASTER,
    OPTIMIZER,
    PARAM,
    STAGING,
    Tier,
    TierName,
    parse_tier,
)
from penstock.errors import MemoryBudgetError, NvmeError, PenstockError
from penstock.runtime.aio import File, Queue
from penstock.tiers.storage import MemorySegment, Segment, SegmentPlan

# ----------------------------------------------------------------------------------------------------------------------
# A tier: it reserves memory or files for planned segments, and makes the segments there.
# ----------------------------------------------------------------------------------------------------------------------


class Allocation(ABC):
    """An allocation of memory or files for some segments, made at once and given back at once.

    Attributes:
        pinned: True if its memory is page-locked.
        plans: the segments that it is for, in the order in which they are made.
        pin: True if its memory was to be page-locked.
        keep: True if it is kept when its segments are freed, for the next request of the same segments.
    """

    pinned = False
    plans: tuple[SegmentPlan, ...] = ()
    pin = True
    keep = False

    @abstractmethod
    def make(self, plan: SegmentPlan, *, unset: bool = False) -> Segment:
        """Make the next of the segments that the allocation is for.

        Arguments:
            plan: the segment.
            unset: leave its values undefined, because all of them are written before one is read. Otherwise they are
                zeros (in files: never written).
        """

    def rewind(self) -> bool:
        """Prepare to make the same segments again, from the first one on. Return True if the allocation can do that."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Free the allocation. Its segments were dropped, or are not used any more."""


class TierMemory(ABC):
    """One tier.

    Attributes:
        name: which tier it is.
        own: buffers of the tier's own, which the table lists too.
    """

    name: Tier
    own: Sequence[tuple[Segment, Allocation]] = ()

    @abstractmethod
    def reserve(self, wanted: Mapping[str, Sequence[SegmentPlan]], *, pin: bool = True) -> dict[str, Allocation]:
        """Allocate an allocation for each storage's segments.

        Arguments:
            wanted: the segments that will be made, in order, by the storage's name.
            pin: page-lock host memory that a device copies from.

        Raises:
            MemoryBudgetError: there is not enough memory.
            NvmeError: there is not enough space, or no folder for it.
        """

    def pinnable(self, nbytes: int) -> int:
        """Return how many of some bytes can still be pinned, as far as the tier knows."""
        return nbytes

    @property
    def written_bytes(self) -> int:
        """Bytes written to files since the tier was made; 0 for memory."""
        return 0

    def close(self) -> None:  # noqa: B027 - most tiers have nothing beside their allocations
        """Free everything that is no allocation."""


# ----------------------------------------------------------------------------------------------------------------------
# The table of training state: segments, and the allocations that they are made of. It depends on no engine.
# ----------------------------------------------------------------------------------------------------------------------


#: Key of an allocation: its tier, and its name there or the name of its storage.
Place = tuple[Tier, str]


class Reservation:
    """Slabs for planned segments, until these are made.

    Arguments:
        store: the table that segments are entered in.
        allocations: the allocations by tier and storage. Segments in `apart` have allocations of their own.
        apart: see `Store.reserve`.
    """

    def __init__(self, store: "Store", allocations: Mapping[Place, Allocation], apart: Collection[SegmentPlan]) -> None:
        self._store = store
        self._allocations = allocations
        self._apart = apart

    def make(self, plan: SegmentPlan, *, unset: bool = False) -> Segment:
        """Make one of the segments; those of one tier and storage in the order in which they were reserved.

        Arguments:
            plan: the segment.
            unset: leave its values undefined, because all of them are written before one is read. Otherwise zeros.
        """
        if not plan.cells:
            return MemorySegment(plan, ())
        allocation = self._allocations[plan.tier, _allocation_name(plan, self._apart)]
        segment = allocation.make(plan, unset=unset)
        self._store.enter(segment, allocation)
        return segment

    def cancel(self) -> None:
        """Free everything, with the segments that were made. No work is under way on them."""
        self._store.take_back(self._allocations.values())


class Store:
    """The table: all segments of one engine on this rank.

    Attributes:
        tiers: the tiers that allocations come from.
    """

    def __init__(self, tiers: Collection[TierMemory]) -> None:
        self.tiers = {tier.name: tier for tier in tiers}
        self._segments: dict[Segment, Allocation | None] = {}
        self._leaving: dict[Segment, Allocation | None] = {}  # their values are being copied to others
        self._lock = threading.Lock()  # state that is in flight is freed by the thread that sees it arrive
        self._left: dict[Allocation, int] = {}  # number of segments that are not freed yet
        self._kept: dict[
            Place, Allocation
        ] = {}  # without values; one for a storage, so that at most one offload's is kept

    def reserve(
        self,
        plans: Sequence[SegmentPlan],
        *,
        pin: bool = True,
        apart: Collection[SegmentPlan] = frozenset(),
        keep: bool = False,
    ) -> Reservation:
        """Allocate allocations for segments. The segments of one storage on one tier share an allocation.

        Arguments:
            plans: segments, in the order in which those of a storage are made.
            apart: those that are freed while others of their storage stay. They have allocations of their own.
            pin: page-lock host memory that a device copies from.
            keep: keep the allocations of `apart` and of the buffers when they are freed, for the next request of the
                same.

        Raises:
            MemoryBudgetError, NvmeError: there is not enough. Nothing is allocated.
        """
        wanted: dict[Place, list[SegmentPlan]] = {}
        for plan in plans:
            if plan.cells:
                wanted.setdefault((plan.tier, _allocation_name(plan, apart)), []).append(plan)
        try:
            allocations = self._take(wanted, pin)
        except (MemoryBudgetError, NvmeError):
            if not self.give_back_kept():
                raise
            allocations = self._take(wanted, pin)  # there may be enough without the kept allocations
        for place, allocation in allocations.items():
            allocation.plans, allocation.pin = tuple(wanted[place]), pin
            allocation.keep = keep and (allocation.plans[0] in apart or allocation.plans[0].storage == STAGING)
        self._left |= {allocation: len(allocation.plans) for allocation in allocations.values()}
        return Reservation(self, allocations, apart)

    def _take(self, wanted: Mapping[Place, Sequence[SegmentPlan]], pin: bool) -> dict[Place, Allocation]:
        """Return allocations: kept ones of the same segments, and new ones."""
        allocations: dict[Place, Allocation] = {}
        try:
            with self._lock:
                for place, plans in wanted.items():
                    kept = self._kept.get((place[0], plans[0].storage))
                    if kept is not None and (kept.plans, kept.pin) == (tuple(plans), pin):
                        allocations[place] = self._kept.pop((place[0], plans[0].storage))
            for tier in sorted(self.tiers, key=lambda tier: tier.is_memory):  # disks refuse before memory is taken
                rest = {
                    name: plans for (of, name), plans in wanted.items() if of is tier and (of, name) not in allocations
                }
                taken = self.tiers[tier].reserve(rest, pin=pin) if rest else {}
                allocations |= {(tier, name): allocation for name, allocation in taken.items()}
        except BaseException:
            for allocation in allocations.values():
                allocation.close()
            raise
        return allocations

    def give_back_kept(self) -> bool:
        """Free all kept allocations. Return True if there were some."""
        with self._lock:
            allocations, self._kept = [*self._kept.values()], {}
        close_all(allocations)
        return bool(allocations)

    def enter(self, segment: Segment, allocation: Allocation | None) -> None:
        """Enter a segment. `allocation` is what it is made of, `None` for memory that has another owner."""
        with self._lock:
            self._segments[segment] = allocation

    def leave(self, segment: Segment) -> None:
        """Mark a segment as leaving: its values are copied to another one. `free` gives its memory back."""
        with self._lock:
            if segment in self._segments:  # one step: a report in between would miss its bytes, or count them twice
                self._leaving[segment] = self._segments.pop(segment)

    def free(self, segment: Segment, *, keep: bool = False) -> None:
        """Free a segment that is leaving. Its allocation is given back with the last of its segments.

        No work is under way on the segment.

        Arguments:
            segment: the segment.
            keep: keep the allocation, if it was reserved for that.
        """
        segment.drop()
        with self._lock:
            allocation = self._leaving.pop(segment, None)
            if allocation is not None and allocation in self._left:
                self._left[allocation] -= 1
                if self._left[allocation] == 0:
                    del self._left[allocation]
                    self._put(allocation, keep=keep)

    def _put(self, allocation: Allocation, *, keep: bool) -> None:
        """Keep an allocation whose segments are freed in place of the one kept before, or close it."""
        left: Allocation | None = allocation
        if keep and allocation.keep and allocation.rewind():
            place = allocation.plans[0].tier, allocation.plans[0].storage
            left, self._kept[place] = self._kept.get(place), allocation
        if left is not None:
            left.close()

    def take_back(self, allocations: Collection[Allocation]) -> None:
        """Free allocations, with every segment that was made of them. No work is under way on them."""
        with self._lock:
            for segment in [segment for segment, allocation in self._segments.items() if allocation in allocations]:
                del self._segments[segment]
                segment.drop()
            for allocation in allocations:
                del self._left[allocation]
            close_all(allocations)

    def table(self) -> list[tuple[SegmentPlan, Allocation | None, str | None]]:
        """List everything that takes memory or space, in the order of allocation, and the tiers' own buffers.

        Returns:
            For each segment its plan, its allocation, and its state: "leaving", "kept" (without values), or `None`.
        """
        with self._lock:
            here, leaving, kept = [*self._segments.items()], [*self._leaving.items()], [*self._kept.values()]
        here += [each for tier in self.tiers.values() for each in tier.own]
        return [
            *((segment.plan, allocation, None) for segment, allocation in here),
            *((segment.plan, allocation, LEAVING) for segment, allocation in leaving),
            *((plan, allocation, KEPT) for allocation in kept for plan in allocation.plans),
        ]

    def close(self) -> None:
        """Drop every segment and give everything back.

        Raises:
            NvmeError: a transfer that was not waited for has failed. Everything is given back all the same.
        """
        self._segments.clear()
        self._leaving.clear()
        allocations, self._left, self._kept = [*self._left, *self._kept.values()], {}, {}
        close_all([*allocations, *self.tiers.values()])  # files before the memory that they read and write


def close_all(parts: Collection[Allocation | TierMemory | File | Queue]) -> None:
    """Close parts, the last one first, each of them whatever the others raise."""
    with contextlib.ExitStack() as closing:
        for part in parts:
            closing.callback(part.close)


def _allocation_name(plan: SegmentPlan, apart: Collection[SegmentPlan]) -> str:
    return f"{plan.storage}-apart" if plan in apart else plan.storage


def bytes_on(plans: Sequence[SegmentPlan], tier: Tier) -> int:
    """Return the bytes that planned segments take on a tier."""
    return sum(cell.taken_bytes for plan in plans if plan.tier is tier for cell in plan.cells)


# ----------------------------------------------------------------------------------------------------------------------
# The report of the table.
# ----------------------------------------------------------------------------------------------------------------------


_NOT_A_STATE = frozenset((PARAM, GRAD, MASTER, STAGING, ACTIVATION, LEAVING, KEPT, GATHERED))


@dataclass(frozen=True)
class Location:
    """One cell of the table: `numel` values of a kind of a unit on this rank, in `nbytes` bytes.

    Attributes:
        in_flight: True if an update or a transfer of it is under way.
    """

    unit: str
    kind: str
    tier: TierName
    dtype: torch.dtype
    numel: int
    nbytes: int
    pinned: bool
    in_flight: bool


class LocationReport:
    """Where every byte of the training state of this rank is.

    Kinds are `"param"`, `"grad"`, `"master"` and the rule's states by name, which `"optimizer"` selects together;
    `"gathered"` is the device memory of parameters that are gathered now, `"staging"` buffers of a tile, `"leaving"`
    what is given back once its values have arrived elsewhere, `"kept"` what `offload_states(keep=True)` keeps for the
    next time. Print it for a table.

    Example:
        >>> row = Location("layers.0", "param", "cpu", torch.bfloat16, 8, 16, False, False)
        >>> LocationReport([row]).bytes(kind="param", tier="cpu")
        16
    """

    def __init__(self, rows: Sequence[Location]) -> None:
        self.rows: Sequence[Location] = tuple(rows)

    def bytes(self, *, kind: str | None = None, tier: str | None = None, unit: str | None = None) -> int:
        """Sum the bytes of the rows that match."""
        return sum(row.nbytes for row in self._select(kind, tier, unit))

    def assert_on(self, kind: str, tier: str) -> None:
        """Raise `PenstockError` that names the first cell of the kind that is on another tier."""
        for row in self._select(kind, None, None):
            if row.tier != parse_tier(tier, what="tier"):
                raise PenstockError(
                    f"'{row.kind}' of unit '{row.unit}' ({row.nbytes:,} bytes, {row.dtype}) is on the {row.tier} "
                    f"tier, not on {tier}."
                )

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-like values: `{"rows": [...], "bytes": {kind: {tier: bytes}}, "totals": {tier: bytes}}`."""
        by_kind: dict[str, dict[str, int]] = {}
        for row in self.rows:
            by_tier = by_kind.setdefault(row.kind, {})
            by_tier[row.tier] = by_tier.get(row.tier, 0) + row.nbytes
        rows = [{**vars(row), "dtype": _name(row.dtype)} for row in self.rows]
        return {"rows": rows, "bytes": by_kind, "totals": self._totals()}

    def __str__(self) -> str:
        """Return a table: a line for each kind and tier, summed over units, and one for each tier."""
        lines = [
            f"{'kind':<12} {'tier':<7} {'dtype':<9} {'pinned':<7} {'units':>6} {'values':>16} {'bytes':>18} "
            f"{'in flight':>18}"
        ]
        groups: dict[tuple[str, str, torch.dtype, bool], list[Location]] = {}
        for row in self.rows:
            groups.setdefault((row.kind, row.tier, row.dtype, row.pinned), []).append(row)
        for (kind, tier, dtype, pinned), rows in groups.items():
            units, numel = len({r.unit for r in rows}), sum(r.numel for r in rows)
            lines.append(
                f"{kind:<12} {tier:<7} {_name(dtype):<9} {'yes' if pinned else 'no':<7} {units:>6} {numel:>16,} "
                f"{_bytes(rows)}"
            )
        lines += [f"{'total':<12} {tier:<48} {_bytes(self._select(None, tier, None))}" for tier in self._totals()]
        return "\n".join(lines)

    def _totals(self) -> dict[str, int]:
        """Return the bytes by tier, the fastest tier first."""
        tiers = {tier.value: self.bytes(tier=tier) for tier in Tier}
        return {tier: nbytes for tier, nbytes in tiers.items() if nbytes}

    def _select(self, kind: str | None, tier: str | None, unit: str | None) -> list[Location]:
        wanted_tier = None if tier is None else parse_tier(tier, what="tier")
        return [
            row
            for row in self.rows
            if (kind in (None, row.kind) or (kind == OPTIMIZER and row.kind not in _NOT_A_STATE))
            and wanted_tier in (None, row.tier)
            and unit in (None, row.unit)
        ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(rows: Sequence[Location]) -> str:
    """Format the last columns: bytes, and those of them that are in flight."""
    flying = sum(row.nbytes for row in rows if row.in_flight)
    return f"{sum(row.nbytes for row in rows):>18,} {f'{flying:,}' if flying else '-':>18}"
