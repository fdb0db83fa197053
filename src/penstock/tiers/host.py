"""The cpu tier: host memory in slabs of exact size, pinned where a device copies from it."""

from collections.abc import Mapping, Sequence

import torch

from penstock.kinds import Tier
from penstock.machine.arena import Arena
from penstock.tiers.home import MemorySection, Section, SectionPlan
from penstock.tiers.tier import Slab, TierMemory


class HostTier(TierMemory):
    """Sections in arenas, one for each home."""

    name = Tier.CPU

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reserve(self, wanted: Mapping[str, Sequence[SectionPlan]], *, pin: bool = True) -> dict[str, Slab]:
        """Map (and pin) an arena for each home."""
        slabs: dict[str, Slab] = {}
        try:
            for home, plans in wanted.items():
                slabs[home] = _HostSlab(sum(c.lease_bytes for plan in plans for c in plan.cells), self._device, pin=pin)
        except BaseException:
            for slab in slabs.values():
                slab.close()
            raise
        return slabs


class _HostSlab(Slab):
    def __init__(self, nbytes: int, device: torch.device, *, pin: bool) -> None:
        self._arena = Arena(nbytes, device, pin=pin)
        self.pinned = self._arena.pinned

    def make(self, plan: SectionPlan) -> Section:
        return MemorySection(plan, [self._arena.lease(cell.numel, cell.dtype) for cell in plan.cells])

    def close(self) -> None:
        self._arena.close()
