"""The most memory that was in use, of the device and of the host."""

import sys
from pathlib import Path
from typing import Any

import torch

import penstock
from penstock.cli.reporting.run import TIERS

_STATUS = Path("/proc/self/status")


def bytes_by_tier(report: penstock.LocationReport) -> dict[str, int]:
    """Sum up the bytes of training state on each tier that holds some."""
    return {tier: size_bytes for tier in TIERS if (size_bytes := report.bytes(tier=tier))}


def take_device_peak(device: torch.device) -> int | None:
    """Read the most bytes that torch has had in use on a device, and begin anew; `None` where it does not count."""
    if device.type == "cpu":
        return None
    module: Any = torch.get_device_module(device)
    if not (hasattr(module, "max_memory_allocated") and hasattr(module, "reset_peak_memory_stats")):
        return None  # not every accelerator's module has these two
    peak = int(module.max_memory_allocated(device))
    module.reset_peak_memory_stats(device)
    return peak


def host_peak_bytes() -> int | None:
    """Read the most bytes that this process has had resident; `None` where the system does not say."""
    # First: getrusage gives a process the peak of the one that has started it, where that is larger.
    try:
        for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # of bytes there, of KiB elsewhere
