"""The table of training state: unit, kind -> cells, and the memory and files that they take.

It needs no engine: reports and checkpoints read it by name.
"""

import contextlib
import threading
from collections.abc import Collection, Mapping, Sequence

from penstock.errors import MemoryBudgetError, NvmeError
from penstock.kinds import KEPT, LEAVING, STAGING, Tier
from penstock.tiers.home import MemorySection, Section, SectionPlan
from penstock.tiers.tier import Slab, TierMemory

#: What a slab is told by: its tier, and its name there or the home that it is for.
Place = tuple[Tier, str]


class Reservation:
    """Memory and files that were taken for some sections, until they are made.

    Arguments:
        store: enters what is made in the table.
        slabs: what was taken, by tier and home; sections that are `apart` have slabs of their own.
    """

    def __init__(self, store: "Store", slabs: Mapping[Place, Slab], apart: Collection[SectionPlan]) -> None:
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
        section = slab.make(plan, unset=unset)
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
        self._kept: dict[Place, Slab] = {}  # without values; one a home, so no more than one move takes

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
        for (tier, name), slab in slabs.items():
            slab.plans, slab.pin = tuple(wanted[tier][name]), pin
            slab.keep = keep and (slab.plans[0] in apart or name == STAGING)
        self._left |= {slab: len(slab.plans) for slab in slabs.values()}
        return Reservation(self, slabs, apart)

    def _take(self, wanted: Mapping[Tier, Mapping[str, Sequence[SectionPlan]]], pin: bool) -> dict[Place, Slab]:
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
                taken = self._tiers[tier].reserve(rest, pin=pin) if rest else {}
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
            with contextlib.ExitStack() as closing:
                for slab in slabs:
                    del self._left[slab]
                    closing.callback(slab.close)

    def table(self) -> list[tuple[SectionPlan, Slab | None, str | None]]:
        """List all that takes memory or space, in the order of allocation, and what the tiers keep for themselves.

        Returns:
            The sections, what each is made of, and what it is called whose values are on the way to others, or which
            holds none: "leaving", "kept". `None` where it is called what its kinds are.
        """
        with self._lock:
            here, leaving, kept = [*self._sections.items()], [*self._leaving.items()], [*self._kept.values()]
        here += [each for tier in self._tiers.values() for each in tier.own]
        return [
            *((section.plan, slab, None) for section, slab in here),
            *((section.plan, slab, LEAVING) for section, slab in leaving),
            *((plan, slab, KEPT) for slab in kept for plan in slab.plans),
        ]

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
        slabs, self._left, self._kept = [*self._left, *self._kept.values()], {}, {}
        with contextlib.ExitStack() as closing:  # the last one first: files before the memory that they read and write
            for slab in slabs:
                closing.callback(slab.close)
            for tier in self._tiers.values():
                closing.callback(tier.close)


def _slab_name(plan: SectionPlan, apart: Collection[SectionPlan]) -> str:
    return f"{plan.home}-apart" if plan in apart else plan.home


def bytes_on(plans: Sequence[SectionPlan], tier: Tier) -> int:
    """Count the bytes that planned sections take on a tier."""
    return sum(cell.taken_bytes for plan in plans if plan.tier is tier for cell in plan.cells)
