"""The table of training state: unit, kind -> cells, and the memory and files that they take.

It needs no engine: reports and checkpoints read it by name.
"""

import contextlib
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.errors import MemoryBudgetError, NvmeError
from penstock.kinds import KEPT, LEAVING, STAGING, Tier
from penstock.tiers.home import CellPlan, MemorySection, Section, SectionPlan
from penstock.tiers.kept import KeptSlabs, Want
from penstock.tiers.tier import Slab, TierMemory

#: A slab: its tier and its name.
Place = tuple[Tier, str]


@dataclass(frozen=True)
class Cell:
    """One cell: the values of a kind of a unit in a section of its home."""

    plan: CellPlan
    pinned: bool
    section: Section


class Reservation:
    """Memory and files that were taken for some sections, until they are made.

    Arguments:
        store: enters what is made in the table.
        slabs: what was taken, by tier and home; sections that are `apart` have slabs of their own.
    """

    def __init__(self, store: "Store", slabs: Mapping[tuple[Tier, str], Slab], apart: Collection[SectionPlan]) -> None:
        self._store = store
        self._slabs = slabs
        self._apart = apart

    def make(self, plan: SectionPlan, *, unset: bool = False) -> Section:
        """Make one of the sections; those of one tier and home in the order in which they were reserved.

        Arguments:
            plan: the section.
            unset: all of it will be written before anybody reads it. Else it is zeros.
        """
        if not plan.cells:
            return MemorySection(plan, ())
        slab = self._slabs[plan.tier, _slab_name(plan, self._apart)]
        section = slab.make_unset(plan) if unset else slab.make(plan)
        self._store.enter(section, slab)
        return section

    def cancel(self) -> None:
        """Give everything back, with the sections that were made. Nothing works on them."""
        self._store.take_back(self._slabs.values())


class Store:
    """All sections of one engine on this rank. A unit and a kind may have several cells: in parts, or with a shadow."""

    def __init__(self, tiers: Collection[TierMemory]) -> None:
        self._tiers = {tier.name: tier for tier in tiers}
        self._sections: dict[Section, Slab | None] = {}
        self._leaving: dict[Section, Slab | None] = {}  # their values are on the way to others
        self._lock = threading.Lock()  # state that is in flight is freed by the thread that sees it arrive
        self._left: dict[Slab, int] = {}  # sections that it still holds, or will
        self._kept = KeptSlabs()

    def reserve(
        self,
        plans: Sequence[SectionPlan],
        *,
        pin: bool = True,
        apart: Collection[SectionPlan] = frozenset(),
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
        wanted: dict[Tier, dict[str, list[SectionPlan]]] = {}
        for plan in plans:
            if plan.cells:
                wanted.setdefault(plan.tier, {}).setdefault(_slab_name(plan, apart), []).append(plan)
        try:
            slabs = self._take(wanted, pin)
        except (MemoryBudgetError, NvmeError):
            if not self.give_back_kept():
                raise
            slabs = self._take(wanted, pin)  # what was kept may be the room that was missing
        self._left |= {slab: len(wanted[tier][home]) for (tier, home), slab in slabs.items()}
        if keep:
            names = {_slab_name(plan, apart) for plan in plans if plan in apart} | {STAGING}
            for (tier, home), slab in slabs.items():
                if home in names:
                    self._kept.promise(slab, Want(tier, home, pin), wanted[tier][home])
        return Reservation(self, slabs, apart)

    def _take(self, wanted: Mapping[Tier, Mapping[str, Sequence[SectionPlan]]], pin: bool) -> dict[Place, Slab]:
        """Take slabs, those that were kept for the same sections first."""
        slabs: dict[Place, Slab] = {}
        try:
            with self._lock:
                for tier, homes in wanted.items():
                    kept = {home: self._kept.take(Want(tier, home, pin), plans) for home, plans in homes.items()}
                    slabs |= {(tier, home): slab for home, slab in kept.items() if slab is not None}
            for tier in sorted(wanted, key=lambda tier: tier.is_memory):  # disks refuse before memory is taken
                rest = {home: plans for home, plans in wanted[tier].items() if (tier, home) not in slabs}
                taken = self._tiers[tier].reserve(rest, pin=pin) if rest else {}
                slabs |= {(tier, home): slab for home, slab in taken.items()}
        except BaseException:
            for slab in slabs.values():
                slab.close()
            raise
        return slabs

    def give_back_kept(self) -> bool:
        """Give back what was kept for the next time. Return whether there was anything."""
        with self._lock:
            slabs = self._kept.give_back()
        with contextlib.ExitStack() as closing:
            for slab in slabs:
                closing.callback(slab.close)
        return bool(slabs)

    def enter(self, section: Section, slab: Slab | None) -> None:
        """Put a section in the table. `slab`: what it is made of; `None` for memory that somebody else owns."""
        with self._lock:
            self._sections[section] = slab

    def leave(self, section: Section) -> None:
        """Take a section out of the table, whose values go elsewhere. `free` gives its memory back."""
        with self._lock:
            if section in self._sections:  # one step: a report in between would miss its bytes, or count them twice
                self._leaving[section] = self._sections.pop(section)

    def free(self, section: Section, *, keep: bool = False) -> None:
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
                    self._kept.put(slab, keep=keep)

    def take_back(self, slabs: Collection[Slab]) -> None:
        """Give slabs back, with every section that was made of them. Nothing works on them."""
        with self._lock:
            for section in [section for section, slab in self._sections.items() if slab in slabs]:
                del self._sections[section]
                section.drop()
            with contextlib.ExitStack() as closing:
                for slab in slabs:
                    del self._left[slab]
                    self._kept.forget(slab)
                    closing.callback(slab.close)

    def cells(self) -> Iterator[Cell]:
        """List every cell, in the order of allocation, and what the tiers keep for themselves."""
        yield from self._cells(self._sections)
        for tier in self._tiers.values():
            yield from self._cells(dict(tier.own))

    def leaving(self) -> Iterator[Cell]:
        """List the cells that have left the table and still have memory."""
        yield from self._cells(self._leaving)

    def table(self) -> Iterator[tuple[Cell, str]]:
        """List all that takes memory or space, and its kind: also what is leaving, and what is kept without values."""
        yield from ((cell, cell.plan.kind) for cell in self.cells())
        yield from ((cell, LEAVING) for cell in self.leaving())
        for plan, slab in self._kept.plans():
            yield from ((Cell(cell, slab.pinned, MemorySection(plan, ())), KEPT) for cell in plan.cells)

    def bytes_by_tier(self) -> dict[Tier, int]:
        """Add up the bytes of all cells, of those that have left and still have memory, and of what is kept."""
        with self._lock:
            sections = [*self._sections, *self._leaving]
        sections += [section for tier in self._tiers.values() for section, _ in tier.own]
        found: dict[Tier, int] = {}
        for plan in (*(section.plan for section in sections), *(plan for plan, _ in self._kept.plans())):
            found[plan.tier] = found.get(plan.tier, 0) + plan.nbytes
        return found

    def _cells(self, sections: Mapping[Section, Slab | None]) -> Iterator[Cell]:
        with self._lock:
            found = list(sections.items())
        for section, slab in found:
            for plan in section.plan.cells:
                yield Cell(plan, slab is not None and slab.pinned, section)

    @property
    def tiers(self) -> Mapping[Tier, TierMemory]:
        """What it takes memory and files from."""
        return self._tiers

    def close(self) -> None:
        """Drop every section and give everything back.

        Raises:
            NvmeError: the failure of a transfer that nobody waited for. Everything is given back all the same.
        """
        self._sections.clear()
        self._leaving.clear()
        slabs, self._left = [*self._left, *self._kept.give_back()], {}
        with contextlib.ExitStack() as closing:  # the last one first: files before the memory that they read and write
            for slab in slabs:
                closing.callback(slab.close)
            for tier in self._tiers.values():
                closing.callback(tier.close)


def _slab_name(plan: SectionPlan, apart: Collection[SectionPlan]) -> str:
    return f"{plan.home}-apart" if plan in apart else plan.home


def bytes_on(plans: Sequence[SectionPlan], tier: Tier) -> int:
    """Count the bytes that planned sections take on a tier."""
    cells = [cell for plan in plans if plan.tier is tier for cell in plan.cells]
    return sum(cell.lease_bytes if tier is Tier.CPU else cell.nbytes for cell in cells)
