"""Memory, disks, rings and pinning of the test's choice."""

import math
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.runtime import host_memory
from penstock.runtime.host_memory import Arena
from penstock.tiers import staging


def disks(count: int = 1) -> list[Path]:
    """Folders for the nvme tier, on the file system of temporary files; each engine makes its own inside."""
    folders = [Path(tempfile.gettempdir(), "disks-of-tests", str(number)) for number in range(count)]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    return folders


def shorten_rings(patch: pytest.MonkeyPatch, slots: int = 2) -> None:
    """A few slots of a tile: next to nothing is still in them when it is wanted again."""
    patch.setattr(staging, "LEAST_FILE_SLOTS", slots)
    patch.setattr(staging, "RING_BYTES", 0)


def memory(nbytes: int, seed: int | None = None) -> Tensor:
    """Page-aligned bytes, random ones where there is a seed."""
    tensor = Arena(nbytes, torch.device("cpu")).allocate(nbytes, torch.uint8)
    if seed is not None:
        tensor.random_(0, 256, generator=torch.Generator().manual_seed(seed))
    return tensor


def pinning_on_cpu(patch: pytest.MonkeyPatch, limit: float = math.inf) -> dict[int, int]:
    """The cpu stands for a device that memory is pinned for, and that refuses more than some bytes.

    Returns:
        What is pinned: bytes by address.
    """
    pinned: dict[int, int] = {}

    def register(allocation: Tensor, device: torch.device) -> bool:
        fits = sum(pinned.values()) + allocation.numel() <= limit
        if fits:
            pinned[allocation.data_ptr()] = allocation.numel()
        return fits

    def unregister(address: int, device: torch.device) -> None:
        del pinned[address]

    patch.setattr(host_memory, "needs_pinning", lambda device: True)
    patch.setattr(host_memory, "can_register", lambda device: True)
    patch.setattr(host_memory, "register", register)
    patch.setattr(host_memory, "unregister", unregister)
    patch.setattr(host_memory, "pinned_buffer", lambda nbytes, device, alignment: None)
    return pinned
