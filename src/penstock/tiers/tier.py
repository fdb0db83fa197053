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


class Slab(ABC):
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
        """Make the next of the segments that the slab is for.

        Arguments:
            plan: the segment.
            unset: leave its values undefined, because all of them are written before one is read. Otherwise they are
                zeros (in files: never written).
        """

    def rewind(self) -> bool:
        """Prepare to make the same segments again, from the first one on. Return True if the slab can do that."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Give the slab back. Its segments were dropped, or are not used any more."""


class TierMemory(ABC):
    """One tier.

    Attributes:
        name: which tier it is.
        own: buffers of the tier's own, which the table lists too.
    """

    name: Tier
    own: Sequence[tuple[Segment, Slab]] = ()

    @abstractmethod
    def reserve(self, wanted: Mapping[str, Sequence[SegmentPlan]], *, pin: bool = True) -> dict[str, Slab]:
        """Allocate a slab for each storage's segments.

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

    def close(self) -> None:  # noqa: B027 - most tiers have nothing beside their slabs
        """Give back everything that is no slab."""


# ----------------------------------------------------------------------------------------------------------------------
# The table of training state: segments, and the slabs that they are made of. It depends on no engine.
# ----------------------------------------------------------------------------------------------------------------------


#: Key of a slab: its tier, and its name there or the name of its storage.
Place = tuple[Tier, str]


class Reservation:
    """Slabs for planned segments, until these are made.

    Arguments:
        store: the table that segments are entered in.
        slabs: the slabs by tier and storage. Segments in `apart` have slabs of their own.
        apart: see `Store.reserve`.
    """

    def __init__(self, store: "Store", slabs: Mapping[Place, Slab], apart: Collection[SegmentPlan]) -> None:
        self._store = store
        self._slabs = slabs
        self._apart = apart

    def make(self, plan: SegmentPlan, *, unset: bool = False) -> Segment:
        """Make one of the segments; those of one tier and storage in the order in which they were reserved.

        Arguments:
            plan: the segment.
            unset: leave its values undefined, because all of them are written before one is read. Otherwise zeros.
        """
        if not plan.cells:
            return MemorySegment(plan, ())
        slab = self._slabs[plan.tier, _slab_name(plan, self._apart)]
        section = slab.make(plan, unset=unset)
        self._store.enter(section, slab)
        return section

    def cancel(self) -> None:
        """Give everything back, with the segments that were made. No work is under way on them."""
        self._store.take_back(self._slabs.values())


class Store:
    """The table: all segments of one engine on this rank.

    Attributes:
        tiers: the tiers that slabs come from.
    """

    def __init__(self, tiers: Collection[TierMemory]) -> None:
        self.tiers = {tier.name: tier for tier in tiers}
        self._sections: dict[Segment, Slab | None] = {}
        self._leaving: dict[Segment, Slab | None] = {}  # their values are being copied to others
        self._lock = threading.Lock()  # state that is in flight is freed by the thread that sees it arrive
        self._left: dict[Slab, int] = {}  # number of segments that are not freed yet
        self._kept: dict[Place, Slab] = {}  # without values; one for a storage, so that at most one offload's is kept

    def reserve(
        self,
        plans: Sequence[SegmentPlan],
        *,
        pin: bool = True,
        apart: Collection[SegmentPlan] = frozenset(),
        keep: bool = False,
    ) -> Reservation:
        """Allocate slabs for segments. The segments of one storage on one tier share a slab.

        Arguments:
            plans: segments, in the order in which those of a storage are made.
            apart: those that are freed while others of their storage stay. They have slabs of their own.
            pin: page-lock host memory that a device copies from.
            keep: keep the slabs of `apart` and of the buffers when they are freed, for the next request of the same.

        Raises:
            MemoryBudgetError, NvmeError: there is not enough. Nothing is allocated.
        """
        wanted: dict[Place, list[SegmentPlan]] = {}
        for plan in plans:
            if plan.cells:
                wanted.setdefault((plan.tier, _slab_name(plan, apart)), []).append(plan)
        try:
            slabs = self._take(wanted, pin)
        except (MemoryBudgetError, NvmeError):
            if not self.give_back_kept():
                raise
            slabs = self._take(wanted, pin)  # there may be enough without the kept slabs
        for place, slab in slabs.items():
            slab.plans, slab.pin = tuple(wanted[place]), pin
            slab.keep = keep and (slab.plans[0] in apart or slab.plans[0].home == STAGING)
        self._left |= {slab: len(slab.plans) for slab in slabs.values()}
        return Reservation(self, slabs, apart)

    def _take(self, wanted: Mapping[Place, Sequence[SegmentPlan]], pin: bool) -> dict[Place, Slab]:
        """Return slabs: kept ones of the same segments, and new ones."""
        slabs: dict[Place, Slab] = {}
        try:
            with self._lock:
                for place, plans in wanted.items():
                    kept = self._kept.get((place[0], plans[0].home))
                    if kept is not None and (kept.plans, kept.pin) == (tuple(plans), pin):
                        slabs[place] = self._kept.pop((place[0], plans[0].home))
            for tier in sorted(self.tiers, key=lambda tier: tier.is_memory):  # disks refuse before memory is taken
                rest = {name: plans for (of, name), plans in wanted.items() if of is tier and (of, name) not in slabs}
                taken = self.tiers[tier].reserve(rest, pin=pin) if rest else {}
                slabs |= {(tier, name): slab for name, slab in taken.items()}
        except BaseException:
            for slab in slabs.values():
                slab.close()
            raise
        return slabs

    def give_back_kept(self) -> bool:
        """Give back all kept slabs. Return True if there were some."""
        with self._lock:
            slabs, self._kept = [*self._kept.values()], {}
        close_all(slabs)
        return bool(slabs)

    def enter(self, section: Segment, slab: Slab | None) -> None:
        """Enter a segment. `slab` is what it is made of, `None` for memory that has another owner."""
        with self._lock:
            self._sections[section] = slab

    def leave(self, section: Segment) -> None:
        """Mark a segment as leaving: its values are copied to another one. `free` gives its memory back."""
        with self._lock:
            if section in self._sections:  # one step: a report in between would miss its bytes, or count them twice
                self._leaving[section] = self._sections.pop(section)

    def free(self, section: Segment, *, keep: bool = False) -> None:
        """Free a segment that is leaving. Its slab is given back with the last of its segments.

        No work is under way on the segment.

        Arguments:
            section: the segment.
            keep: keep the slab, if it was reserved for that.
        """
        section.drop()
        with self._lock:
            slab = self._leaving.pop(section, None)
            if slab is not None and slab in self._left:
                self._left[slab] -= 1
                if self._left[slab] == 0:
                    del self._left[slab]
                    self._put(slab, keep=keep)

    def _put(self, slab: Slab, *, keep: bool) -> None:
        """Keep a slab whose segments are freed in place of the one kept before, or close it."""
        left: Slab | None = slab
        if keep and slab.keep and slab.rewind():
            place = slab.plans[0].tier, slab.plans[0].home
            left, self._kept[place] = self._kept.get(place), slab
        if left is not None:
            left.close()

    def take_back(self, slabs: Collection[Slab]) -> None:
        """Give slabs back, with every segment that was made of them. No work is under way on them."""
        with self._lock:
            for section in [section for section, slab in self._sections.items() if slab in slabs]:
                del self._sections[section]
                section.drop()
            for slab in slabs:
                del self._left[slab]
            close_all(slabs)

    def table(self) -> list[tuple[SegmentPlan, Slab | None, str | None]]:
        """List everything that takes memory or space, in the order of allocation, and the tiers' own buffers.

        Returns:
            For each segment its plan, its slab, and its state: "leaving", "kept" (without values), or `None`.
        """
        with self._lock:
            here, leaving, kept = [*self._sections.items()], [*self._leaving.items()], [*self._kept.values()]
        here += [each for tier in self.tiers.values() for each in tier.own]
        return [
            *((section.plan, slab, None) for section, slab in here),
            *((section.plan, slab, LEAVING) for section, slab in leaving),
            *((plan, slab, KEPT) for slab in kept for plan in slab.plans),
        ]

    def close(self) -> None:
        """Drop every segment and give everything back.

        Raises:
            NvmeError: a transfer that was not waited for has failed. Everything is given back all the same.
        """
        self._sections.clear()
        self._leaving.clear()
        slabs, self._left, self._kept = [*self._left, *self._kept.values()], {}, {}
        close_all([*slabs, *self.tiers.values()])  # files before the memory that they read and write


def close_all(parts: Collection[Slab | TierMemory | File | Queue]) -> None:
    """Close parts, the last one first, each of them whatever the others raise."""
    with contextlib.ExitStack() as closing:
        for part in parts:
            closing.callback(part.close)


def _slab_name(plan: SegmentPlan, apart: Collection[SegmentPlan]) -> str:
    return f"{plan.home}-apart" if plan in apart else plan.home


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
