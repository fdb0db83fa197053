"""What tells one machine from another: what its figures depend on, and nothing that names it or its owner."""

import contextlib
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from penstock.errors import one_line
from penstock.probe.disks import Folder, file_system
from penstock.runtime.system import core_quota, ranks_of_host

CPUINFO = Path("/proc/cpuinfo")
DRIVER = Path("/sys/module/nvidia/version")
#: The kernel keeps a little more or less for itself from one start to the next.
GRAIN_BYTES = 1 << 28
#: What kind of processor it is, where there is no name: the numbers of arm64.
_NUMBERS = ("CPU implementer", "CPU part", "CPU variant")


def fingerprint(device: torch.device, folders: Sequence[Folder] = ()) -> dict[str, Any]:
    """Describe the machine in values that JSON has. It is the same after a restart.

    Arguments:
        device: the one that computes.
        folders: the folders of the nvme tier. The numbers of their disks are in it, and not their paths.

    Returns:
        `cpu`, `cores`, `core_quota`, `ranks`, `memory_bytes`, `device`, `device_name`, `device_memory_bytes`,
        `devices`, `driver`, `torch`, `threads`, `kernel` and `disks`.
    """
    name, nbytes, count = accelerator(device)
    host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "core_quota": core_quota(),
        "ranks": ranks_of_host(),
        "memory_bytes": round(host_bytes / GRAIN_BYTES) * GRAIN_BYTES,
        "device": device.type,
        "device_name": name,
        "device_memory_bytes": nbytes,
        "devices": count,
        "driver": driver(device),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "kernel": platform.release(),
        "disks": sorted(_disk(folder) for folder in folders),
    }


def cpu_model(cpuinfo: Path = CPUINFO) -> str:
    """Return the name of the processor, or the numbers by which its maker knows it."""
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    named = fields.get("model name") or " ".join(fields[key] for key in _NUMBERS if key in fields)
    return one_line(named or platform.machine() or "unknown")


def accelerator(device: torch.device) -> tuple[str, int, int]:
    """Return the name of an accelerator, its bytes of memory, and how many of them there are; of a cpu, itself."""
    if device.type == "cpu":
        return "cpu", 0, 1
    module = torch.get_device_module(device)
    name, nbytes, count = device.type, 0, 1
    # It is somebody else's code, and not every device knows.
    with contextlib.suppress(Exception):
        name = one_line(str(module.get_device_name(device)))
    with contextlib.suppress(Exception):
        nbytes = int(module.get_device_properties(device).total_memory)
    with contextlib.suppress(Exception):
        count = int(module.device_count())
    return name, nbytes, count


def driver(device: torch.device, file: Path = DRIVER) -> str:
    """Return the versions of an accelerator's driver and runtime, as far as they are told."""
    if device.type == "cpu":
        return ""
    found = [str(version) for version in (torch.version.cuda, getattr(torch.version, "hip", None)) if version]
    with contextlib.suppress(OSError, ValueError):
        found.insert(0, file.read_text().strip())
    return one_line(" / ".join(found))


def _disk(folder: Folder) -> str:
    """Name a folder's file system among those of this machine."""
    number = os.stat(folder).st_dev
    return f"{file_system(folder) or 'unknown'} {os.major(number)}:{os.minor(number)}"
