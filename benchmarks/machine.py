"""The machine that numbers were measured on, to be stored with them."""

import contextlib
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import parts
import torch

#: Settings under which glibc gives no memory back between steps: no page faults for anybody.
TUNED_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "8000000000",
    "MALLOC_TRIM_THRESHOLD_": "16000000000",
    "MALLOC_TOP_PAD_": "268435456",
}


def describe() -> dict[str, Any]:
    """Processor, cores, memory, accelerator, its driver and link, versions, and which sources were measured."""
    device = torch.accelerator.current_accelerator(check_available=True)
    module = None if device is None else torch.get_device_module(device)
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")  # not in every sandbox
    return {
        "processor": _field("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": _kilobytes("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "accelerator": None if module is None else _name(module, device),
        "accelerators": 0 if module is None else torch.accelerator.device_count(),
        "cuda": torch.version.cuda,
        **_driver_and_link(),
        "source": parts.source(),
        "huge_pages": huge_pages.read_text().strip() if huge_pages.exists() else "unknown",
    }


def _driver_and_link() -> dict[str, str | None]:
    """Version of the driver and PCIe link of the first NVIDIA device; `None` where nvidia-smi does not say."""
    fields = "driver_version,pcie.link.gen.max,pcie.link.width.max"  # the current ones are lower while it is idle
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        driver, generation, width = done.stdout.splitlines()[0].split(", ")
    except (OSError, subprocess.SubprocessError, LookupError, ValueError):
        return {"driver": None, "link": None}
    return {"driver": driver, "link": f"PCIe {generation} x{width}"}


def _name(module: Any, device: Any) -> str:
    """Of the device, as its vendor says; some device modules of torch do not know."""
    name = getattr(module, "get_device_name", None)
    return device.type if name is None else name()


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"


def _kilobytes(path: str, name: str) -> int:
    """A field in kB, as bytes; 0 where this kernel, or what stands for one in a sandbox, has no such field."""
    number = _field(path, name).split()[0]
    return int(number) * 1024 if number.isdigit() else 0


def process_bytes(field: str) -> int:
    """`VmRSS` (now) or `VmHWM` (peak since `restart_peak`) of this process; 0 where the system does not say."""
    return _kilobytes("/proc/self/status", field)


def restart_peak() -> None:
    """Start the count of the peak resident set again, where the system can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def disk_bytes() -> tuple[int, int]:
    """Bytes that this process has read from disks and written to them, as the kernel counts."""
    path = Path("/proc/self/io")  # not in every sandbox
    lines = (line.split(":") for line in path.read_text().splitlines()) if path.exists() else ()
    counts = {name: int(value) for name, value in lines}
    return counts.get("read_bytes", 0), counts.get("write_bytes", 0)
