"""What a tier does: hand out memory that holds cells of the table."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from penstock.kinds import Tier


class MemoryTier(ABC):
    """A tier whose cells are tensors."""

    name: Tier
    pinned: bool

    @abstractmethod
    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor of zeros."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""
