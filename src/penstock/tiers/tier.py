"""What a tier does: set memory or files aside for some sections, and make them there."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from penstock.kinds import Tier
from penstock.tiers.home import Section, SectionPlan


class Slab(ABC):
    """Memory or a file for some sections, taken at once and given back at once.

    Attributes:
        pinned: whether its memory is page-locked.
        plans: the sections that it was taken for, in the order in which they are made.
        pin: whether its memory was to be page-locked.
        keep: whether it is kept once its sections are gone, for the next one who wants the same.
    """

    pinned = False
    plans: tuple[SectionPlan, ...] = ()
    pin = True
    keep = False

    @abstractmethod
    def make(self, plan: SectionPlan, *, unset: bool = False) -> Section:
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
    def reserve(self, wanted: Mapping[str, Sequence[SectionPlan]], *, pin: bool = True) -> dict[str, Slab]:
        """Take a slab for each home's sections, by the home's name.

        Arguments:
            wanted: the sections that will be made, in order.
            pin: page-lock host memory that a device copies from.

        Raises:
            MemoryBudgetError: there is not enough memory.
            NvmeError: there is not enough space, or no folder for it.
        """

    @property
    def own(self) -> Sequence[tuple[Section, Slab]]:
        """Buffers that the tier keeps for itself, for the table to count."""
        return ()

    def pinnable(self, nbytes: int) -> int:
        """Say how many of some bytes can still be pinned, as far as the tier knows."""
        return nbytes

    def close(self) -> None:  # noqa: B027 - most tiers have nothing beside their slabs
        """Give back what is not a slab."""
