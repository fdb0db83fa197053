"""The device tier: memory of the accelerator (or of the cpu that stands for it)."""

from collections.abc import Mapping, Sequence

import torch

from penstock.kinds import Tier
from penstock.machine.arena import ask_for_huge_pages
from penstock.tiers.home import MemorySection, SectionPlan
from penstock.tiers.tier import Slab, TierMemory


class DeviceTier(TierMemory):
    """Sections in device memory, through torch's allocator, which is asked for each when it is made."""

    name = Tier.DEVICE

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reserve(self, wanted: Mapping[str, Sequence[SectionPlan]], *, pin: bool = True) -> dict[str, Slab]:
        """Take nothing yet: `prepare` moves a model that is on the device unit by unit, and frees what it moved."""
        del pin
        return {home: _DeviceSlab(self._device) for home in wanted}


class _DeviceSlab(Slab):
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def make(self, plan: SectionPlan, *, unset: bool = False) -> MemorySection:
        tensors = [torch.empty(cell.numel, dtype=cell.dtype, device=self._device) for cell in plan.cells]
        for tensor in tensors:
            if self._device.type == "cpu":
                ask_for_huge_pages(tensor)  # before the first touch
            if not unset:
                tensor.zero_()
        return MemorySection(plan, tensors)

    def close(self) -> None:
        pass
