"""Slabs that are kept for the next time: the same sections are wanted again, and to take memory or files costs time.

What is kept holds no values. It is given back when something else has no room, and when nobody wants it kept any more.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.kinds import Tier
from penstock.tiers.home import SectionPlan
from penstock.tiers.tier import Slab


class Want(NamedTuple):
    """What a slab is for.

    Attributes:
        name: of the slab, one of its tier.
        pin: whether its memory was to be page-locked.
    """

    tier: Tier
    name: str
    pin: bool


@dataclass(frozen=True)
class _Kept:
    plans: tuple[SectionPlan, ...]
    slab: Slab


class KeptSlabs:
    """The slabs that are kept: one for each name on each tier, so at most what one move of everything takes there."""

    def __init__(self) -> None:
        self._terms: dict[Slab, tuple[Want, tuple[SectionPlan, ...]]] = {}  # of those in use that will be kept
        self._kept: dict[Want, _Kept] = {}

    def promise(self, slab: Slab, want: Want, plans: Sequence[SectionPlan]) -> None:
        """Note that a slab in use will be kept once its sections are gone."""
        self._terms[slab] = want, tuple(plans)

    def take(self, want: Want, plans: Sequence[SectionPlan]) -> Slab | None:
        """Take the slab that was kept for just these sections; `None` where there is none."""
        kept = self._kept.get(want)
        if kept is None or kept.plans != tuple(plans):
            return None
        del self._kept[want]
        return kept.slab

    def put(self, slab: Slab, *, keep: bool) -> None:
        """Keep a slab whose sections are gone, if that was promised and is still wanted; else close it."""
        terms = self._terms.pop(slab, None)
        if terms is None or not keep or not slab.rewind():
            slab.close()
            return
        want, plans = terms
        before = self._kept.pop(want, None)
        self._kept[want] = _Kept(plans, slab)
        if before is not None:
            before.slab.close()

    def forget(self, slab: Slab) -> None:
        """Drop what is promised for a slab, which its owner closes."""
        self._terms.pop(slab, None)

    def give_back(self) -> Sequence[Slab]:
        """Stop keeping: the slabs, for the caller to close."""
        slabs = [kept.slab for kept in self._kept.values()]
        self._kept.clear()
        return slabs

    def plans(self) -> Iterator[tuple[SectionPlan, Slab]]:
        """List what the kept slabs have room for."""
        for kept in list(self._kept.values()):
            yield from ((plan, kept.slab) for plan in kept.plans)
