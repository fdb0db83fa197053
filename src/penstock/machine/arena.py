"""Host memory in exact sizes, allocated once and handed out in leases.

`tensor.pin_memory()` rounds up to a power of two and needs a second copy while it pins. An arena maps its slab
anonymously, asks for huge pages (fewer page faults, fewer TLB misses in the update), registers the slab with the
device once where one copies from it, and cuts leases from it. Pages that are never touched cost nothing.
"""

import contextlib
import ctypes
import mmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import MemoryBudgetError

PAGE_BYTES = 4096


class Arena:
    """A slab of `capacity` bytes of host memory.

    Arguments:
        pin: page-lock it for `device`, unless that is a cpu.

    Raises:
        MemoryBudgetError: the slab cannot be mapped or registered with the device.
    """

    def __init__(self, capacity: int, device: torch.device, *, pin: bool = True) -> None:
        self.capacity = capacity
        self.used = 0
        self.pinned = pin and device.type == "cuda"
        self._device = device
        self._slab: Tensor | None = None
        if capacity == 0:
            return
        try:
            memory = mmap.mmap(-1, capacity)
        except (OSError, ValueError, OverflowError) as error:
            raise MemoryBudgetError(
                f"The host refused {capacity:,} bytes for the cpu tier ({error}). "
                "Use more ranks, a higher stage, or keep less on the cpu tier."
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without transparent huge pages: slower, not wrong
                memory.madvise(mmap.MADV_HUGEPAGE)
        self._slab = torch.frombuffer(memory, dtype=torch.uint8)
        if self.pinned:
            _register(self._slab, device)

    @staticmethod
    def lease_bytes(numel: int, dtype: torch.dtype) -> int:
        """Bytes that a lease of this shape takes from an arena: its own, rounded up to whole pages."""
        return -(-numel * dtype.itemsize // PAGE_BYTES) * PAGE_BYTES

    def lease(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor of `numel` zeros, page-aligned. It lives until the arena is closed."""
        nbytes = self.lease_bytes(numel, dtype)
        assert self._slab is not None, "the arena is closed, or was planned empty"
        assert self.used + nbytes <= self.capacity, "the arena was planned too small"
        lease = self._slab[self.used : self.used + numel * dtype.itemsize].view(dtype)
        self.used += nbytes
        return lease

    def close(self) -> None:
        """Unregister the slab and drop it: the memory goes once no lease is referenced any more."""
        if self._slab is not None and self.pinned:
            torch.cuda.synchronize(self._device)
            _cudart().cudaHostUnregister(self._slab.data_ptr())
        self._slab = None
        self.used = 0


def page_aligned(nbytes: int) -> Tensor:
    """A buffer of `nbytes` zero bytes that begins on a page, outside any slab."""
    return torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8)[:nbytes]


def available_host_bytes() -> int | None:
    """Bytes that the host can still give, from /proc/meminfo; `None` where there is none."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def return_free_memory() -> None:
    """Ask the C library to give freed memory back to the system; glibc keeps it otherwise. No effect elsewhere."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _register(slab: Tensor, device: torch.device) -> None:
    """Page-lock the slab. Touch it first: registering untouched huge pages faults them in one by one."""
    ctypes.memset(slab.data_ptr(), 0, slab.numel())
    with torch.cuda.device(device):
        result = int(_cudart().cudaHostRegister(slab.data_ptr(), slab.numel(), 0))
    if result != 0:
        raise MemoryBudgetError(
            f"The device refused to pin {slab.numel():,} bytes of host memory (cudaHostRegister returned {result}). "
            "Raise the limit of locked memory (ulimit -l), or keep less on the cpu tier."
        )
