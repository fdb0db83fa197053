"""Host memory in exact sizes, allocated once and handed out in leases.

`tensor.pin_memory()` rounds up to a power of two and needs a second copy while it pins. An arena maps its slab
anonymously and asks for huge pages (fewer page faults, fewer TLB misses in the update). Where there is an accelerator,
it lies on the device's NUMA node; what the device copies from is faulted in by several threads, and registered once.
Leases are cut from it. Pages that are never touched cost nothing.

The child of a fork finds zeros in a slab, and what it writes there is its own: neither sees what the other writes. No
page is copied when the parent writes it while children live.
"""

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.errors import MemoryBudgetError
from penstock.machine import pinning
from penstock.machine.cgroups import CGROUPS, OWN, memory_left
from penstock.machine.lifetime import Phase, exiting
from penstock.machine.numa import device_node, prefer_node
from penstock.machine.threads import update_cores

PAGE_BYTES = 4096
MEMINFO = Path("/proc/meminfo")
MADV_WIPEONFORK = 18  # Linux's, which Python's mmap has no name for
TOUCH_BYTES = 64 << 20  # what one thread faults in at a time


class Arena:
    """A slab of `capacity` bytes of host memory.

    Arguments:
        pin: page-lock it for `device`, unless that is a cpu. A slab that cannot be stays pageable.
        ring: it is for a few buffers: torch's own pinned memory will do where what is mapped cannot be page-locked.

    Attributes:
        pinned: it is page-locked.

    Raises:
        MemoryBudgetError: the slab cannot be mapped.
    """

    def __init__(self, capacity: int, device: torch.device, *, pin: bool = True, ring: bool = False) -> None:
        self.capacity = capacity
        self.used = 0
        self.pinned = False
        self._device = device
        self._slab: Tensor | None = None
        if capacity == 0:
            return
        try:
            memory = _Memory(capacity)
        except (OSError, ValueError, OverflowError) as error:
            raise MemoryBudgetError(
                f"The host refused {capacity:,} bytes for the cpu tier ({error}). "
                "Use more ranks, a higher stage, or keep less on the cpu tier."
            ) from error
        self._memory = memory
        self._slab = torch.frombuffer(memory, dtype=torch.uint8)
        if pinning.needs_pinning(device):
            node = device_node(device)
            if node is not None:  # whether it is page-locked or not: updates run on that node
                prefer_node(self._slab.data_ptr(), capacity, node)
            self.pinned = pin and (self._register() or (ring and self._take_torchs()))

    def _register(self) -> bool:
        assert self._slab is not None
        if not pinning.can_register(self._device):
            return False
        self.fault_in()
        if not pinning.register(self._slab, self._device):
            return False
        self._memory.give_up_lock = partial(pinning.unregister, self._slab.data_ptr(), self._device)
        return True

    def _take_torchs(self) -> bool:
        buffer = pinning.pinned_buffer(self.capacity, self._device, PAGE_BYTES)
        if buffer is None:
            return False
        self._slab = buffer
        return True

    def fault_in(self) -> None:
        """Have every page there now, from where it is to come, by several threads."""
        if self._slab is not None:
            touch(self._slab, update_cores(self._device).count)

    @property
    def pageable(self) -> bool:
        """Whether the device has to copy from it and it is not page-locked."""
        return pinning.needs_pinning(self._device) and not self.pinned

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
        if self._slab is not None:
            self._memory.unregister()
            del self._memory
        self._slab = None
        self.pinned = False
        self.used = 0


class Words:
    """Single fp32 values that a device tells the host, each in a place of its own that is page-locked if possible.

    Arguments:
        device: that tells them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pages: list[tuple[Arena, Tensor]] = []

    def place(self, number: int) -> Tensor:
        """Where one of them is. Its pages are taken when the first of them is asked for, and kept."""
        page, offset = divmod(number, PAGE_BYTES // torch.float32.itemsize)
        while len(self._pages) <= page:
            arena = Arena(PAGE_BYTES, self._device, ring=True)
            self._pages.append((arena, arena.lease(PAGE_BYTES // torch.float32.itemsize, torch.float32)))
        return self._pages[page][1][offset : offset + 1]

    def close(self) -> None:
        """Give them back. Nothing is on its way to them."""
        for arena, _ in self._pages:
            arena.close()
        self._pages.clear()


def page_aligned(nbytes: int) -> Tensor:
    """A buffer of `nbytes` zero bytes that begins on a page, outside any slab."""
    return torch.frombuffer(_Memory(max(nbytes, 1)), dtype=torch.uint8)[:nbytes]


class HostMemory(NamedTuple):
    """What is left of host memory, and who limits it: for messages."""

    nbytes: int
    whose: str


def available_host_memory(
    meminfo: Path = MEMINFO, cgroups: Path = CGROUPS, own_cgroups: Path = OWN
) -> HostMemory | None:
    """What the host can still give this process, and its container or job with it; `None` where nothing says so."""
    left = []
    try:
        words = [line.split() for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:")]
        left += [HostMemory(int(kib) * 1024, "the host has") for _, kib, *_ in words]
    except (OSError, ValueError):
        pass  # another kernel
    limit = memory_left(cgroups, own_cgroups)
    if limit is not None:
        left.append(HostMemory(limit.nbytes, f"the container or job of this process ({limit.name}) has"))
    return min(left, default=None)


def return_free_memory() -> None:
    """Ask the C library to give freed memory back to the system; glibc keeps it otherwise. No effect elsewhere."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class _Memory(mmap.mmap):
    """Anonymous memory of this process alone, in huge pages where the kernel has some; few do for what is shared.

    A child gets zeros, or where the kernel cannot do that, nothing. Without either, a fork would have the next write of
    each page take a copy, and a device go on with the page that was registered.

    Attributes:
        give_up_lock: ends its page lock, if it has one. It lives as long as a tensor in it does, and the driver would
            keep the pages beyond that.
    """

    give_up_lock: Callable[[], None] | None = None
    _process = 0

    def __new__(cls, capacity: int) -> "_Memory":
        memory = super().__new__(cls, -1, capacity, flags=mmap.MAP_ANONYMOUS | mmap.MAP_PRIVATE)
        with contextlib.suppress(OSError, AttributeError):  # of another kernel: slower, not wrong
            memory.madvise(mmap.MADV_HUGEPAGE)
        try:
            memory.madvise(MADV_WIPEONFORK)
        except OSError:
            with contextlib.suppress(OSError, AttributeError):
                memory.madvise(mmap.MADV_DONTFORK)
        return memory

    def __init__(self, capacity: int) -> None:
        self._process = os.getpid()

    def unregister(self) -> None:
        """Give the page lock back, if there is one."""
        give_up, self.give_up_lock = self.give_up_lock, None
        if give_up is not None:
            give_up()

    def __del__(self) -> None:
        # At the exit the device's context may be gone already, with all that was registered; a child has none.
        if not exiting(Phase.PROMISED) and os.getpid() == self._process:
            self.unregister()


def touch(slab: Tensor, threads: int) -> None:
    """Fault every page in, by several threads: registering untouched huge pages does so one by one."""

    def clear(start: int) -> None:  # a call through ctypes gives up Python's lock
        ctypes.memset(slab.data_ptr() + start, 0, min(TOUCH_BYTES, slab.numel() - start))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(clear, range(0, slab.numel(), TOUCH_BYTES)))
