"""The cpu tier: host memory in slabs of exact size, pinned where a device copies from it."""

from collections.abc import Mapping, Sequence

import torch

from penstock.errors import MemoryBudgetError
from penstock.kinds import Tier
from penstock.machine.arena import Arena, available_host_bytes
from penstock.tiers.home import MemorySection, Section, SectionPlan
from penstock.tiers.tier import Slab, TierMemory


class HostTier(TierMemory):
    """Sections in arenas, one for each home.

    Arguments:
        device: that copies from it.
        pinned_bytes: page-locked memory at most; `None` sets no limit.
    """

    name = Tier.CPU

    def __init__(self, device: torch.device, pinned_bytes: int | None = None) -> None:
        self._device = device
        self._budget = pinned_bytes
        self.pinned_bytes = 0

    def reserve(self, wanted: Mapping[str, Sequence[SectionPlan]], *, pin: bool = True) -> dict[str, Slab]:
        """Map (and pin) an arena for each home."""
        sizes = {home: sum(c.lease_bytes for plan in plans for c in plan.cells) for home, plans in wanted.items()}
        self._check(sum(sizes.values()), pin=pin)
        slabs: dict[str, Slab] = {}
        try:
            for home, nbytes in sizes.items():
                slabs[home] = _HostSlab(self, Arena(nbytes, self._device, pin=pin))
        except BaseException:
            for slab in slabs.values():
                slab.close()
            raise
        return slabs

    def _check(self, nbytes: int, *, pin: bool) -> None:
        """Refuse what the host or the budget does not have."""
        available = available_host_bytes()
        if available is not None and nbytes > available:
            raise MemoryBudgetError(
                f"{nbytes:,} bytes of host memory are needed, and the host has {available:,} available, "
                f"{nbytes - available:,} too few. Keep less on the cpu tier, or move it to nvme."
            )
        excess = 0 if self._budget is None else self.pinned_bytes + nbytes - self._budget
        if pin and self._device.type == "cuda" and excess > 0:
            raise MemoryBudgetError(
                f"{nbytes:,} bytes of pinned memory are needed beside {self.pinned_bytes:,}, {excess:,} more than "
                f"Options(pinned_bytes={self._budget:,}). Raise it, or use pin_memory=False."
            )


class _HostSlab(Slab):
    def __init__(self, tier: HostTier, arena: Arena) -> None:
        self._tier = tier
        self._arena = arena
        self.pinned = arena.pinned
        tier.pinned_bytes += arena.capacity if self.pinned else 0

    def make(self, plan: SectionPlan) -> Section:
        return MemorySection(plan, [self._arena.lease(cell.numel, cell.dtype) for cell in plan.cells])

    def close(self) -> None:
        self._tier.pinned_bytes -= self._arena.capacity if self.pinned else 0
        self._arena.close()
