"""The device tier: memory of the accelerator (or of the cpu that stands for it)."""

import torch
from torch import Tensor

from penstock.kinds import Tier
from penstock.tiers.tier import MemoryTier


class DeviceTier(MemoryTier):
    """Cells in device memory, through torch's allocator."""

    name = Tier.DEVICE
    pinned = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor of zeros on the device."""
        return torch.zeros(numel, dtype=dtype, device=self._device)

    def close(self) -> None:
        """Nothing is kept beside the cells."""
