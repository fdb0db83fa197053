"""The machine that numbers were measured on, to be stored with them."""

import os
import platform
from pathlib import Path
from typing import Any

import torch

#: Settings under which glibc gives no memory back between steps: no page faults for anybody.
TUNED_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "8000000000",
    "MALLOC_TRIM_THRESHOLD_": "16000000000",
    "MALLOC_TOP_PAD_": "268435456",
}


def describe() -> dict[str, Any]:
    """Processor, cores, memory, accelerator and versions."""
    device = torch.accelerator.current_accelerator(check_available=True)
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")  # not in every sandbox
    return {
        "processor": _field("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": int(_field("/proc/meminfo", "MemTotal").split()[0]) * 1024,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "accelerator": torch.get_device_module(device).get_device_name() if device is not None else None,
        "huge_pages": huge_pages.read_text().strip() if huge_pages.exists() else "unknown",
    }


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown 0"


def process_bytes(field: str) -> int:
    """`VmRSS` (now) or `VmHWM` (peak since `restart_peak`) of this process."""
    return int(_field("/proc/self/status", field).split()[0]) * 1024


def restart_peak() -> None:
    """Start the count of the peak resident set again."""
    Path("/proc/self/clear_refs").write_text("5")


def disk_bytes() -> tuple[int, int]:
    """Bytes that this process has read from disks and written to them, as the kernel counts."""
    lines = (line.split(":") for line in Path("/proc/self/io").read_text().splitlines())
    counts = {name: int(value) for name, value in lines}
    return counts["read_bytes"], counts["write_bytes"]
