"""The table of training state: unit, kind -> cell.

It needs no engine: reports and checkpoints read it by name.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from penstock.kinds import Tier
from penstock.tiers.home import CellPlan, Home, MemoryHome
from penstock.tiers.nvme import NvmeTier
from penstock.tiers.tier import MemoryTier


@dataclass(frozen=True)
class Cell:
    """One cell: the values of a kind of a unit, in `home` on its tier."""

    plan: CellPlan
    pinned: bool
    home: Home | None  # None: a buffer


class Store:
    """All cells of one engine on this rank. A unit and a kind may have several cells (a value and its shadow)."""

    def __init__(self, tiers: Mapping[Tier, MemoryTier], nvme: NvmeTier | None) -> None:
        self._tiers = tiers
        self._nvme = nvme
        self._cells: list[Cell] = []

    def allocate(self, plan: CellPlan) -> Tensor:
        """Allocate a buffer in memory, all zeros, and enter it in the table."""
        tier = self._tiers[plan.tier]
        values = tier.allocate(plan.numel, plan.dtype)
        self._cells.append(Cell(plan, tier.pinned, None))
        return values

    def make_home(self, plans: Sequence[CellPlan], numel: int, tile_numel: int) -> Home:
        """Allocate the cells of one home, all zeros (in files: never written), and enter them in the table.

        Arguments:
            plans: cells on one tier.
            numel: elements of the shard.
            tile_numel: elements of a tile.
        """
        home: Home
        pinned = False
        if plans[0].tier is Tier.NVME:
            assert self._nvme is not None
            home = self._nvme.make_home(plans, numel, tile_numel)
        else:
            tier = self._tiers[plans[0].tier]
            home = MemoryHome(plans, [tier.allocate(p.numel, p.dtype) for p in plans], numel, tile_numel)
            pinned = tier.pinned
        self._cells += [Cell(plan, pinned, home) for plan in plans]
        return home

    def cells(self) -> Iterator[Cell]:
        """Every cell, in the order of allocation."""
        return iter(self._cells)

    def close(self) -> None:
        """Drop every cell and give the tiers' memory back."""
        self._cells.clear()
        try:
            if self._nvme is not None:
                self._nvme.close()  # before the memory that its transfers read and write
        finally:
            for tier in self._tiers.values():
                tier.close()


def bytes_on(plans: Sequence[CellPlan], tier: Tier) -> int:
    """Bytes that planned cells take on a tier."""
    return sum(p.lease_bytes if tier is Tier.CPU else p.nbytes for p in plans if p.tier is tier)
