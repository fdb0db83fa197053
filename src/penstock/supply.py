"""What an engine is built of and does not make itself: memory and files of the tiers, and first values.

A rehearsal of a run that need not take place has others, of which nothing is taken.
"""

import contextlib
from collections.abc import Sequence

import torch
from torch import nn

from penstock.blueprint import Blueprint, Request
from penstock.budgets import MemoryBudget, check_device
from penstock.engine.units.source import Source, open_source
from penstock.machine.collectives import Ranks
from penstock.machine.reach import Grid, Reach
from penstock.machine.swap import remove_leftovers
from penstock.tiers.device import DeviceTier
from penstock.tiers.host import HostTier
from penstock.tiers.nvme import NvmeTier
from penstock.tiers.tier import TierMemory


class Supply:
    """The memory of this machine, the folders that the placement names, and the values that `prepare` was given."""

    def check(
        self, blueprint: Blueprint, model: nn.Module, grid: Grid, reach: Reach, device: torch.device
    ) -> MemoryBudget | None:
        """Refuse a blueprint that takes more of this rank's device than there is, before anything is taken.

        Returns:
            What it takes. Ranks of a host hold what they share against what there is next (`check_hosts`).

        Raises:
            MemoryBudgetError: it says of what, how much is missing, and what to do.
        """
        budget = check_device(blueprint, model, grid, reach, device)
        for parent, nbytes in budget.folders:
            if nbytes:
                remove_leftovers(parent)  # what dead runs have left counts as free
        return budget

    def tiers(self, request: Request, device: torch.device) -> Sequence[TierMemory]:
        """Make the tiers that state may rest on. Nothing is taken yet."""
        options = request.options
        folders = request.placement.nvme_folders()
        return [
            DeviceTier(device),
            HostTier(device, options.pinned_bytes, tile_bytes=options.tile_bytes),
            NvmeTier(folders, queue_depth=options.io_queue_depth, checksums=options.checksums),
        ]

    def source(
        self, model: nn.Module, request: Request, ranks: Ranks, device: torch.device, undo: contextlib.ExitStack
    ) -> Source:
        """Open where first values come from. Collective. See `open_source`."""
        return open_source(model, request.weights, ranks, device, undo, keeps_whole=request.stage < 3)
