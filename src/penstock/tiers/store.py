"""The table of training state: unit, kind -> cell.

It needs no engine: reports and checkpoints read it by name.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kinds import Tier
from penstock.machine.arena import Arena
from penstock.tiers.tier import MemoryTier


@dataclass(frozen=True)
class CellPlan:
    """A cell before its memory: what will be allocated, where."""

    unit: str
    kind: str
    tier: Tier
    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        """Bytes of the cell's values."""
        return self.numel * self.dtype.itemsize

    @property
    def lease_bytes(self) -> int:
        """Bytes that the cell takes on the cpu tier, whole pages."""
        return Arena.lease_bytes(self.numel, self.dtype)


@dataclass(frozen=True)
class Cell:
    """One cell: the values of a kind of a unit, on one tier."""

    plan: CellPlan
    values: Tensor
    pinned: bool


class Store:
    """All cells of one engine on this rank. A unit and a kind may have several cells (a value and its shadow)."""

    def __init__(self, tiers: Mapping[Tier, MemoryTier]) -> None:
        self._tiers = tiers
        self._cells: list[Cell] = []

    def allocate(self, plan: CellPlan) -> Tensor:
        """Allocate a planned cell, all zeros, and enter it in the table."""
        tier = self._tiers[plan.tier]
        values = tier.allocate(plan.numel, plan.dtype)
        self._cells.append(Cell(plan, values, tier.pinned))
        return values

    def cells(self) -> Iterator[Cell]:
        """Every cell, in the order of allocation."""
        return iter(self._cells)

    def close(self) -> None:
        """Drop every cell and give the tiers' memory back."""
        self._cells.clear()
        for tier in self._tiers.values():
            tier.close()


def bytes_on(plans: Sequence[CellPlan], tier: Tier) -> int:
    """Bytes that planned cells take on a tier."""
    return sum(p.lease_bytes if tier is Tier.CPU else p.nbytes for p in plans if p.tier is tier)
