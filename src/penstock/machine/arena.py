"""Host memory in exact sizes, allocated once and handed out in leases.

`tensor.pin_memory()` rounds up to a power of two and needs a second copy while it pins. An arena maps its slab
anonymously and asks for huge pages (fewer page faults, fewer TLB misses in the update). Where a device copies from it,
the slab lies on the device's NUMA node, is faulted in by several threads, and is registered once. Leases are cut from
it. Pages that are never touched cost nothing.
"""

import contextlib
import ctypes
import mmap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import MemoryBudgetError
from penstock.machine.lifetime import Phase, at_end, exiting
from penstock.machine.numa import device_node, prefer_node
from penstock.machine.threads import update_threads

PAGE_BYTES = 4096
TOUCH_BYTES = 64 << 20  # what one thread faults in at a time


class Arena:
    """A slab of `capacity` bytes of host memory.

    Arguments:
        pin: page-lock it for `device`, unless that is a cpu. A slab that cannot be stays pageable.
        private: nobody looks into it in the child of a fork; always so where it can be pinned.

    Attributes:
        pinned: it is page-locked.

    Raises:
        MemoryBudgetError: the slab cannot be mapped.
    """

    def __init__(self, capacity: int, device: torch.device, *, pin: bool = True, private: bool = False) -> None:
        self.capacity = capacity
        self.used = 0
        self.pinned = False
        self._device = device
        self._slab: Tensor | None = None
        if capacity == 0:
            return
        try:
            memory = _map(capacity, private=private or can_pin(device))
        except (OSError, ValueError, OverflowError) as error:
            raise MemoryBudgetError(
                f"The host refused {capacity:,} bytes for the cpu tier ({error}). "
                "Use more ranks, a higher stage, or keep less on the cpu tier."
            ) from error
        self._slab = torch.frombuffer(memory, dtype=torch.uint8)
        if pin and can_pin(device):
            node = device_node(device)
            if node is not None:
                prefer_node(self._slab.data_ptr(), capacity, node)
            touch(self._slab, update_threads())
            self.pinned = register(self._slab, device)
        if self.pinned:
            self._unpin = at_end(self, _unregister_unless_exiting, self._slab, device)

    @property
    def pageable(self) -> bool:
        """Whether the device has to copy from it and it is not page-locked."""
        return can_pin(self._device) and not self.pinned

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
            self._unpin()
        self._slab = None
        self.pinned = False
        self.used = 0


def page_aligned(nbytes: int) -> Tensor:
    """A buffer of `nbytes` zero bytes that begins on a page, outside any slab. It is not there in children."""
    return torch.frombuffer(_map(max(nbytes, 1), private=True), dtype=torch.uint8)[:nbytes]


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


def can_pin(device: torch.device) -> bool:
    """Whether memory can be page-locked for a device."""
    return device.type == "cuda"


def _map(capacity: int, *, private: bool) -> mmap.mmap:
    """Anonymous memory, in huge pages where the kernel has some.

    Arguments:
        capacity: bytes.
        private: of this process alone, and not there in its children: few kernels have huge pages for memory that is
            shared. Else children read it, and a write copies no page while they live.
    """
    memory = mmap.mmap(-1, capacity, flags=mmap.MAP_ANONYMOUS | (mmap.MAP_PRIVATE if private else mmap.MAP_SHARED))
    # A fork would have the next write of each page take a copy, and the device go on with the page that was registered.
    for advice in ("MADV_HUGEPAGE", *(("MADV_DONTFORK",) if private else ())):
        with contextlib.suppress(OSError, AttributeError):  # of another kernel: slower, not wrong
            memory.madvise(getattr(mmap, advice))
    return memory


def touch(slab: Tensor, threads: int) -> None:
    """Fault every page in, by several threads: registering untouched huge pages does so one by one."""

    def clear(start: int) -> None:  # a call through ctypes gives up Python's lock
        ctypes.memset(slab.data_ptr() + start, 0, min(TOUCH_BYTES, slab.numel() - start))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(clear, range(0, slab.numel(), TOUCH_BYTES)))


def register(slab: Tensor, device: torch.device) -> bool:
    """Page-lock a slab for a device; whether that was possible."""
    with torch.cuda.device(device):
        if int(_cudart().cudaHostRegister(slab.data_ptr(), slab.numel(), 0)) == 0:
            return True
        with contextlib.suppress(RuntimeError):  # the error is kept for the next launch to find: not for one of compute
            torch.ones(1, device=device)
    return False


def unregister(slab: Tensor, device: torch.device) -> None:
    """Undo `register`. Nothing on the device copies from the slab or to it any more."""
    torch.cuda.synchronize(device)
    _cudart().cudaHostUnregister(slab.data_ptr())


def _unregister_unless_exiting(slab: Tensor, device: torch.device) -> None:
    if not exiting(Phase.PROMISED):  # then the device's context may be gone, and goes with all that is registered
        unregister(slab, device)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
