"""Tiers: what each does, the table of state that they hold, and its report."""

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
# What a tier does: set memory or files aside for some sections, and make them there.
# ----------------------------------------------------------------------------------------------------------------------


class Slab(ABC):
    """Memory or a file for some sections, taken at once and given back at once.

    Attributes:
        pinned: whether its memory is page-locked.
        plans: the sections that it was taken for, in the order in which they are made.
        pin: whether its memory was to be page-locked.
        keep: whether it is kept once its sections are gone, for the next one who wants the same.
    """

    pinned = False
    plans: tuple[SegmentPlan, ...] = ()
    pin = True
    keep = False

    @abstractmethod
    def make(self, plan: SegmentPlan, *, unset: bool = False) -> Segment:
        """Make the next of the sections that the slab was sized for.

        Arguments:
            plan: the section.
            unset: make it with any values in it: all of them will be written before anybody reads one. Else they are
                zeros (in files: never written).
        """

    def rewind(self) -> bool:
        """Begin anew: make the same sections again, from the first one on. Return whether the slab can do that."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Give the slab back. Its sections have been dropped, or hold nothing of use any more."""


class TierMemory(ABC):
    """One tier."""

    name: Tier

    @abstractmethod
    def reserve(self, wanted: Mapping[str, Sequence[SegmentPlan]], *, pin: bool = True) -> dict[str, Slab]:
        """Take a slab for each home's sections, by the home's name.

        Arguments:
            wanted: the sections that will be made, in order.
            pin: page-lock host memory that a device copies from.

        Raises:
            MemoryBudgetError: there is not enough memory.
            NvmeError: there is not enough space, or no folder for it.
        """

    @property
    def own(self) -> Sequence[tuple[Segment, Slab]]:
        """Buffers that the tier keeps for itself, for the table to count."""
        return ()

    def pinnable(self, nbytes: int) -> int:
        """Say how many of some bytes can still be pinned, as far as the tier knows."""
        return nbytes

    def close(self) -> None:  # noqa: B027 - most tiers have nothing beside their slabs
        """Give back what is not a slab."""


# ----------------------------------------------------------------------------------------------------------------------
# The table of training state: unit, kind -> cells, and the memory and files that they take.
#
# It needs no engine: reports and checkpoints read it by name.
# ----------------------------------------------------------------------------------------------------------------------


#: What a slab is told by: its tier, and its name there or the home that it is for.
Place = tuple[Tier, str]


class Reservation:
    """Memory and files that were taken for some sections, until they are made.

    Arguments:
        store: enters what is made in the table.
        slabs: what was taken, by tier and home; sections that are `apart` have slabs of their own.
    """

    def __init__(self, store: "Store", slabs: Mapping[Place, Slab], apart: Collection[SegmentPlan]) -> None:
        self._store = store
        self._slabs = slabs
        self._apart = apart

    def make(self, plan: SegmentPlan, *, unset: bool = False) -> Segment:
        """Make one of the sections; those of one tier and home in the order in which they were reserved.

        Arguments:
            plan: the section.
            unset: all of it will be written before anybody reads it. Else it is zeros.
        """
        if not plan.cells:
            return MemorySegment(plan, ())
        slab = self._slabs[plan.tier, _slab_name(plan, self._apart)]
        section = slab.make(plan, unset=unset)
        self._store.enter(section, slab)
        return section

    def cancel(self) -> None:
        """Give everything back, with the sections that were made. Nothing works on them."""
        self._store.take_back(self._slabs.values())


class Store:
    """All sections of one engine on this rank. A unit and a kind may have several cells: in parts, or with a shadow.

    Attributes:
        tiers: what memory and files are taken from.
    """

    def __init__(self, tiers: Collection[TierMemory]) -> None:
        self.tiers = {tier.name: tier for tier in tiers}
        self._sections: dict[Segment, Slab | None] = {}
        self._leaving: dict[Segment, Slab | None] = {}  # their values are on the way to others
        self._lock = threading.Lock()  # state that is in flight is freed by the thread that sees it arrive
        self._left: dict[Slab, int] = {}  # sections that it still holds, or will
        self._kept: dict[Place, Slab] = {}  # without values; one a home, so no more than one move takes

    def reserve(
        self,
        plans: Sequence[SegmentPlan],
        *,
        pin: bool = True,
        apart: Collection[SegmentPlan] = frozenset(),
        keep: bool = False,
    ) -> Reservation:
        """Take the memory and files for some sections. What one home has on one tier is given back together.

        Arguments:
            plans: sections, in the order in which those of a home will be made.
            apart: those of them that are given back while others of their home stay.
            pin: page-lock host memory that a device copies from.
            keep: keep what `apart` and the buffers take, once they are freed, for the next one who wants the same.

        Raises:
            MemoryBudgetError, NvmeError: there is not enough; nothing was taken.
        """
        wanted: dict[Tier, dict[str, list[SegmentPlan]]] = {}
        for plan in plans:
            if plan.cells:
                wanted.setdefault(plan.tier, {}).setdefault(_slab_name(plan, apart), []).append(plan)
        try:
            slabs = self._take(wanted, pin)
        except (MemoryBudgetError, NvmeError):
            if not self.give_back_kept():
                raise
            slabs = self._take(wanted, pin)  # what was kept may be the room that was missing
        for (tier, name), slab in slabs.items():
            slab.plans, slab.pin = tuple(wanted[tier][name]), pin
            slab.keep = keep and (slab.plans[0] in apart or name == STAGING)
        self._left |= {slab: len(slab.plans) for slab in slabs.values()}
        return Reservation(self, slabs, apart)

    def _take(self, wanted: Mapping[Tier, Mapping[str, Sequence[SegmentPlan]]], pin: bool) -> dict[Place, Slab]:
        """Take slabs, those that were kept for the same sections first."""
        slabs: dict[Place, Slab] = {}
        try:
            with self._lock:
                for tier, names in wanted.items():
                    for name, plans in names.items():
                        kept = self._kept.get((tier, plans[0].home))
                        if kept is not None and (kept.plans, kept.pin) == (tuple(plans), pin):
                            slabs[tier, name] = self._kept.pop((tier, plans[0].home))
            for tier in sorted(wanted, key=lambda tier: tier.is_memory):  # disks refuse before memory is taken
                rest = {name: plans for name, plans in wanted[tier].items() if (tier, name) not in slabs}
                taken = self.tiers[tier].reserve(rest, pin=pin) if rest else {}
                slabs |= {(tier, name): slab for name, slab in taken.items()}
        except BaseException:
            for slab in slabs.values():
                slab.close()
            raise
        return slabs

    def give_back_kept(self) -> bool:
        """Give back what was kept for the next time. Return whether there was anything."""
        with self._lock:
            slabs, self._kept = [*self._kept.values()], {}
        close_all(slabs)
        return bool(slabs)

    def enter(self, section: Segment, slab: Slab | None) -> None:
        """Put a section in the table. `slab`: what it is made of; `None` for memory that somebody else owns."""
        with self._lock:
            self._sections[section] = slab

    def leave(self, section: Segment) -> None:
        """Take a section out of the table, whose values go elsewhere. `free` gives its memory back."""
        with self._lock:
            if section in self._sections:  # one step: a report in between would miss its bytes, or count them twice
                self._leaving[section] = self._sections.pop(section)

    def free(self, section: Segment, *, keep: bool = False) -> None:
        """Give back the memory of a section that has left, or its part of a slab that goes with the last one.

        Nothing works on it.

        Arguments:
            section: one that has left.
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
        """Keep a slab whose sections are gone, in place of the one before, if that is wanted; else close it."""
        left: Slab | None = slab
        if keep and slab.keep and slab.rewind():
            place = slab.plans[0].tier, slab.plans[0].home
            left, self._kept[place] = self._kept.get(place), slab
        if left is not None:
            left.close()

    def take_back(self, slabs: Collection[Slab]) -> None:
        """Give slabs back, with every section that was made of them. Nothing works on them."""
        with self._lock:
            for section in [section for section, slab in self._sections.items() if slab in slabs]:
                del self._sections[section]
                section.drop()
            for slab in slabs:
                del self._left[slab]
            close_all(slabs)

    def table(self) -> list[tuple[SegmentPlan, Slab | None, str | None]]:
        """List all that takes memory or space, in the order of allocation, and what the tiers keep for themselves.

        Returns:
            The sections, what each is made of, and what it is called whose values are on the way to others, or which
            holds none: "leaving", "kept". `None` where it is called what its kinds are.
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
        """Drop every section and give everything back.

        Raises:
            NvmeError: the failure of a transfer that nobody waited for. Everything is given back all the same.
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
    """Count the bytes that planned sections take on a tier."""
    return sum(cell.taken_bytes for plan in plans if plan.tier is tier for cell in plan.cells)


# ----------------------------------------------------------------------------------------------------------------------
# The table as a person or a program reads it.
# ----------------------------------------------------------------------------------------------------------------------


_NOT_A_STATE = frozenset((PARAM, GRAD, MASTER, STAGING, ACTIVATION, LEAVING, KEPT, GATHERED))


@dataclass(frozen=True)
class Location:
    """One cell of the table: `numel` values of a kind of a unit on this rank, in `nbytes` bytes.

    Attributes:
        in_flight: an update or a movement of it is under way.
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
        """Make it JSON-like: `{"rows": [...], "bytes": {kind: {tier: bytes}}, "totals": {tier: bytes}}`."""
        by_kind: dict[str, dict[str, int]] = {}
        for row in self.rows:
            by_tier = by_kind.setdefault(row.kind, {})
            by_tier[row.tier] = by_tier.get(row.tier, 0) + row.nbytes
        rows = [{**vars(row), "dtype": _name(row.dtype)} for row in self.rows]
        return {"rows": rows, "bytes": by_kind, "totals": self._totals()}

    def __str__(self) -> str:
        """A table: one line for each kind and tier, the units summed up, and one for each tier."""
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
        """Sum bytes by tier, the fastest first."""
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
