"""Host memory: pinned where a device copies from it, in exact sizes."""

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import MemoryBudgetError
from penstock.runtime.finalizers import Phase, exiting
from penstock.runtime.system import CGROUPS, OWN, device_node, memory_left, prefer_node, update_cores

# ----------------------------------------------------------------------------------------------------------------------
# Page-locked (pinned) host memory, which a device copies while the host goes on.
#
#     register        locks mapped memory of exact size on the device's node: by cuda's runtime (or ROCm's), or by
#                     `host_register(address, nbytes)` and `host_unregister(address)` of another accelerator's module
#                     of torch
#     pinned_buffer   torch's own pinned memory, which most accelerators have, rounded up by torch: for a few buffers
#
# No other module knows which device has which of them.
# ----------------------------------------------------------------------------------------------------------------------


def needs_pinning(device: torch.device) -> bool:
    """Return True if a device copies from host memory. It copies pageable memory only while the host waits."""
    return device.type != "cpu"


def can_register(device: torch.device) -> bool:
    """Return True if mapped memory can be page-locked for a device."""
    return device.type == "cuda" or _module(device) is not None


def register(allocation: Tensor, device: torch.device) -> bool:
    """Page-lock an allocation for a device. Return True if that was possible."""
    if device.type == "cuda":
        return _register_for_cuda(allocation, device)
    module = _module(device)
    if module is None:
        return False
    try:
        return module.host_register(allocation.data_ptr(), allocation.numel()) in (None, True)
    except (RuntimeError, OSError, ValueError):
        return False


def unregister(address: int, device: torch.device) -> None:
    """Undo `register`.

    Arguments:
        address: the address of the allocation.
        device: the device that it was registered for.
    """
    module: Any = torch.get_device_module(device)
    # A copy that is under way would use pages that the system may move or hand out (ordering rule 1).
    module.synchronize(device)
    if device.type == "cuda":
        module.cudart().cudaHostUnregister(address)
    else:
        module.host_unregister(address)


def pinned_buffer(nbytes: int, device: torch.device, alignment: int) -> Tensor | None:
    """Allocate zero bytes of torch's own pinned memory.

    Arguments:
        nbytes: the number of bytes.
        device: the device that copies from it.
        alignment: the address is a multiple of it.

    Returns:
        uint8, [nbytes]; `None` where torch has no such memory, and for a cpu.
    """
    if not needs_pinning(device):
        return None
    for spare in (0, alignment):  # mostly it begins on a page already
        try:
            buffer = torch.zeros(nbytes + spare, dtype=torch.uint8, device="cpu", pin_memory=True)
        except (RuntimeError, NotImplementedError):
            return None
        start = -buffer.data_ptr() % alignment
        if start <= spare:
            return buffer[start : start + nbytes]
    return None


def _register_for_cuda(allocation: Tensor, device: torch.device) -> bool:
    """Page-lock an allocation with cuda's runtime. Return True if that was possible."""
    with torch.cuda.device(device):
        if int(torch.cuda.cudart().cudaHostRegister(allocation.data_ptr(), allocation.numel(), 0)) == 0:  # type: ignore[no-untyped-call]
            return True
        # The runtime keeps its last error, and torch raises it at the next launch. This launch takes it, so that it is
        # not raised in the user's forward.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, dtype=torch.uint8, device=device)
    return False


def _module(device: torch.device) -> Any:
    """Return the module of torch that registers memory for a device; `None` where it cannot."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    return module if hasattr(module, "host_register") and hasattr(module, "host_unregister") else None


# ----------------------------------------------------------------------------------------------------------------------
# Arenas: host memory in exact sizes, mapped once, from which tensors are cut.
#
# `tensor.pin_memory()` rounds up to a power of two and needs a second copy while it pins. An arena maps its allocation
# anonymously and asks for huge pages (fewer page faults, fewer TLB misses in the update). Where there is an
# accelerator, the allocation lies on the device's NUMA node. If the device copies from it, it is faulted in by several
# threads, and page-locked once. Pages that are never touched cost nothing.
#
# The child of a fork finds zeros in an allocation. Parent and child do not see each other's writes, and no page is
# copied when the parent writes to it while children live.
# ----------------------------------------------------------------------------------------------------------------------


PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
MEMINFO = Path("/proc/meminfo")
MADV_WIPEONFORK = 18  # Linux's, which Python's mmap has no name for
TOUCH_BYTES = 64 << 20  # what one thread faults in at a time


class Arena:
    """An allocation of host memory, from which tensors are cut.

    Arguments:
        capacity: the size of the allocation, in bytes.
        device: the device that computes.
        pin: page-lock the allocation for `device`, unless that is a cpu. An allocation that cannot be page-locked
            stays pageable.
        ring: the allocation is for a few buffers. Where mapped memory cannot be page-locked, it is torch's own pinned
            memory, which may be larger.

    Attributes:
        capacity: the size of the allocation, in bytes.
        used: the bytes that tensors were cut from.
        pinned: True if the allocation is page-locked.

    Raises:
        MemoryBudgetError: the allocation cannot be mapped.
    """

    def __init__(self, capacity: int, device: torch.device, *, pin: bool = True, ring: bool = False) -> None:
        self.capacity = capacity
        self.used = 0
        self.pinned = False
        self._device = device
        self._allocation: Tensor | None = None
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
        self._allocation = torch.frombuffer(memory, dtype=torch.uint8)
        if needs_pinning(device):
            # Before the first touch, which decides the node of a page. Also for pageable allocations: the threads of
            # the updates run on that node too.
            node = device_node(device)
            if node is not None:
                prefer_node(self._allocation.data_ptr(), capacity, node)
            self.pinned = pin and (self._register() or (ring and self._take_torchs()))

    def _register(self) -> bool:
        """Page-lock the allocation for the device. Return True if that was possible."""
        assert self._allocation is not None
        if not can_register(self._device):
            return False
        self.fault_in()  # first: the driver would fault the pages in on one thread, one by one
        if not register(self._allocation, self._device):
            return False
        # The lock belongs to the memory, which outlives the arena as long as a tensor in it does.
        self._memory.unlock = partial(unregister, self._allocation.data_ptr(), self._device)
        return True

    def _take_torchs(self) -> bool:
        """Use torch's own pinned memory for the allocation. Return True if torch has some."""
        buffer = pinned_buffer(self.capacity, self._device, PAGE_BYTES)
        if buffer is None:
            return False
        self._allocation = buffer
        return True

    def fault_in(self) -> None:
        """Fault in every page of the allocation, by several threads."""
        if self._allocation is not None:
            touch(self._allocation, update_cores(self._device).count)

    @staticmethod
    def available() -> "HostMemory | None":
        """Return how much host memory is left for allocations; `None` if that is unknown."""
        return available_host_memory()

    @property
    def pageable(self) -> bool:
        """True if the device copies from the allocation and it is not page-locked."""
        return needs_pinning(self._device) and not self.pinned

    @staticmethod
    def allocated_bytes(numel: int, dtype: torch.dtype) -> int:
        """Return how many bytes a tensor takes from an arena: its own, rounded up to whole pages."""
        return -(-numel * dtype.itemsize // PAGE_BYTES) * PAGE_BYTES

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Cut a tensor from the allocation.

        Arguments:
            numel: its number of elements.
            dtype: its dtype.

        Returns:
            Zeros, [numel], at the start of a page. It may be used until the arena is closed.
        """
        nbytes = self.allocated_bytes(numel, dtype)
        assert self._allocation is not None, "the arena is closed, or was planned empty"
        assert self.used + nbytes <= self.capacity, "the arena was planned too small"
        allocate = self._allocation[self.used : self.used + numel * dtype.itemsize].view(dtype)
        self.used += nbytes
        return allocate

    def rewind(self) -> None:
        """Cut tensors from the start again. They have the values of before, and are no zeros."""
        self.used = 0

    def close(self) -> None:
        """End the page lock and drop the allocation. Its memory is freed with the last tensor in it."""
        if self._allocation is not None:
            self._memory.unregister()  # waits for copies of the device (ordering rule 1)
            del self._memory
        self._allocation = None
        self.pinned = False
        self.used = 0


class Words:
    """Host memory for single fp32 values that a device writes, page-locked if possible.

    Arguments:
        device: the device that writes them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pages: list[tuple[Arena, Tensor]] = []

    def place(self, number: int) -> Tensor:
        """Return the memory of one value, fp32, [1]. Pages are allocated when they are first asked for, and kept."""
        page, offset = divmod(number, PAGE_BYTES // torch.float32.itemsize)
        while len(self._pages) <= page:
            arena = Arena(PAGE_BYTES, self._device, ring=True)
            self._pages.append((arena, arena.allocate(PAGE_BYTES // torch.float32.itemsize, torch.float32)))
        return self._pages[page][1][offset : offset + 1]

    def close(self) -> None:
        """Free the pages. No write to them may be under way."""
        for arena, _ in self._pages:
            arena.close()
        self._pages.clear()


def page_aligned(nbytes: int) -> Tensor:
    """Allocate a buffer of `nbytes` zero bytes, uint8, [nbytes], that begins on a page and belongs to no arena."""
    return torch.frombuffer(_Memory(max(nbytes, 1)), dtype=torch.uint8)[:nbytes]


def ask_for_huge_pages(memory: Tensor) -> None:
    """Ask the kernel for huge pages in memory that is not faulted in yet.

    Faulting them in takes a third of the time of small ones, and giving them back next to none.

    Arguments:
        memory: a contiguous tensor of torch's allocator on the cpu.
    """
    start = -(-memory.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    nbytes = (memory.data_ptr() + memory.nbytes - start) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if nbytes > 0:  # its result is ignored: without huge pages it is slower, not wrong
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), mmap.MADV_HUGEPAGE)


def view_apart(values: Tensor, buffer: Tensor) -> Tensor:
    """View host memory, of any dtype, through a torch storage of its own, which has a reference count of its own.

    For a process group, whose thread drops its tensors some time after the collective is over, because it needs the
    interpreter for that. Meanwhile the buffer would seem to be in use, and its memory would not be freed.

    Arguments:
        values: the values to view.
        buffer: the tensor that they are a part of, which the view keeps alive.
    """
    memory = (ctypes.c_char * values.nbytes).from_address(values.data_ptr())
    memory.buffer = buffer  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=values.dtype)


class HostMemory(NamedTuple):
    """Bytes of host memory that are left, and what limits them: the beginning of a sentence, for messages."""

    nbytes: int
    whose: str


def available_host_memory(
    meminfo: Path = MEMINFO, cgroups: Path = CGROUPS, own_cgroups: Path = OWN
) -> HostMemory | None:
    """Return how much memory this process can still get from the host, and from its container or job.

    Arguments:
        meminfo: the kernel's account of the host's memory.
        cgroups: where control groups are mounted.
        own_cgroups: the file in which the kernel lists the groups of the process.

    Returns:
        The smaller one; `None` if both are unknown.
    """
    left = []
    with contextlib.suppress(OSError, ValueError):  # another kernel
        words = [line.split() for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:")]
        left += [HostMemory(int(kib) * 1024, "the host has") for _, kib, *_ in words]
    limit = memory_left(cgroups, own_cgroups)
    if limit is not None:
        left.append(HostMemory(limit.nbytes, f"the container or job of this process ({limit.name}) has"))
    return min(left, default=None)


def return_free_memory() -> None:
    """Have the C library give freed memory back to the system. glibc keeps it otherwise; others do not."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class _Memory(mmap.mmap):
    """Private anonymous memory, in huge pages where the kernel has some. Few kernels have them for shared memory.

    Attributes:
        unlock: ends the page lock, if there is one. Called when the last tensor in the memory is dropped at the
            latest: the driver would keep the pages.
    """

    unlock: Callable[[], None] | None = None
    _process = 0

    def __new__(cls, capacity: int) -> "_Memory":
        memory = super().__new__(cls, -1, capacity, flags=mmap.MAP_ANONYMOUS | mmap.MAP_PRIVATE)
        with contextlib.suppress(OSError, AttributeError):  # of another kernel: slower, not wrong
            memory.madvise(mmap.MADV_HUGEPAGE)
        # A child gets zeros; where the kernel cannot do that, no mapping. Otherwise the parent's next write to a page
        # after a fork would go to a copy of the page, while the device uses the registered one.
        try:
            memory.madvise(MADV_WIPEONFORK)
        except OSError:
            with contextlib.suppress(OSError, AttributeError):
                memory.madvise(mmap.MADV_DONTFORK)
        return memory

    def __init__(self, capacity: int) -> None:
        self._process = os.getpid()

    def unregister(self) -> None:
        """End the page lock, if there is one."""
        unlock, self.unlock = self.unlock, None
        if unlock is not None:
            unlock()

    def __del__(self) -> None:
        # At the exit the device's context, with all registrations, may be gone; a child has none.
        if not exiting(Phase.PROMISED) and os.getpid() == self._process:
            self.unregister()


def touch(allocation: Tensor, threads: int) -> None:
    """Write zeros to every page of an allocation, by several threads. Page-locking untouched pages would use one."""

    def clear(start: int) -> None:
        # Through ctypes, which releases the GIL, so that the threads run in parallel.
        ctypes.memset(allocation.data_ptr() + start, 0, min(TOUCH_BYTES, allocation.numel() - start))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(clear, range(0, allocation.numel(), TOUCH_BYTES)))
