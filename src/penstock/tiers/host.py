"""The cpu tier: host memory in one slab of exact size, pinned where a device copies from it."""

import torch
from torch import Tensor

from penstock.kinds import Tier
from penstock.machine.arena import Arena
from penstock.tiers.tier import MemoryTier


class HostTier(MemoryTier):
    """Cells in an arena of `capacity` bytes."""

    name = Tier.CPU

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._arena = Arena(capacity, device)
        self.pinned = self._arena.pinned

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor of zeros in the slab."""
        return self._arena.lease(numel, dtype)

    def close(self) -> None:
        """Unpin and drop the slab."""
        self._arena.close()
