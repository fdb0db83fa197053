"""The device tier and the cpu tier."""

import contextlib
import warnings
from collections.abc import Mapping, Sequence

import torch

from penstock.config import GRAD, PARAM, SHADOW, STAGING, Tier
from penstock.errors import MemoryBudgetError
from penstock.runtime import host_memory
from penstock.runtime.host_memory import Arena, ask_for_huge_pages
from penstock.runtime.streams import FETCH, READ
from penstock.tiers.storage import PASSING, MemorySegment, Ring, RingPlan, SegmentPlan
from penstock.tiers.tier import Allocation, TierMemory

# ----------------------------------------------------------------------------------------------------------------------
# The device tier: memory of the accelerator, or of a cpu that is the device.
# ----------------------------------------------------------------------------------------------------------------------


class DeviceTier(TierMemory):
    """Segments in device memory, each allocated by torch's allocator when it is made."""

    name = Tier.DEVICE

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reserve(self, wanted: Mapping[str, Sequence[SegmentPlan]], *, pin: bool = True) -> dict[str, Allocation]:
        """Allocate nothing yet: `prepare` moves a model that is on the device unit by unit, and frees each in turn."""
        del pin
        return {storage: _DeviceAllocation(self._device) for storage in wanted}


class _DeviceAllocation(Allocation):
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def make(self, plan: SegmentPlan, *, unset: bool = False) -> MemorySegment:
        tensors = [torch.empty(cell.numel, dtype=cell.dtype, device=self._device) for cell in plan.cells]
        for tensor in tensors:
            if self._device.type == "cpu":
                ask_for_huge_pages(tensor)  # before the first touch
            if not unset:
                tensor.zero_()
        return MemorySegment(plan, tensors)

    def close(self) -> None:
        pass


# ----------------------------------------------------------------------------------------------------------------------
# The cpu tier: host memory in allocations of exact size, pinned where a device copies from it or to it.
#
# Slabs that the budget or the system does not let pin are pageable. A device copies from pageable memory only while the
# host waits, so copies between the two pass a few pinned bounce buffers.
# ----------------------------------------------------------------------------------------------------------------------


# Storages that are pinned first: those that a device copies in every step, the rings before all others.
PINNED_FIRST = (STAGING, GRAD, PARAM, SHADOW)

BOUNCE_READERS = (READ, FETCH)  # a ring for each: gathers do not wait for updates, which are submitted all at once
BOUNCE_SLOTS = 4  # of each ring: for either direction, one buffer is filled while another is emptied


def bounce_bytes(tile_bytes: int) -> int:
    """Return the bytes of all bounce buffers for tiles of a size."""
    return len(BOUNCE_READERS) * BOUNCE_SLOTS * Arena.allocated_bytes(tile_bytes, torch.uint8)


class HostTier(TierMemory):
    """Segments in arenas, one for each storage.

    Arguments:
        device: the device that copies from the host.
        pinned_bytes: the most bytes that may be page-locked; `None` sets no limit.
        tile_bytes: bytes of a bounce buffer.
        arena: the class of allocations' memory.

    Attributes:
        pinned_bytes: bytes that are page-locked now.
    """

    name = Tier.CPU

    def __init__(
        self,
        device: torch.device,
        pinned_bytes: int | None = None,
        *,
        tile_bytes: int = 4 << 20,
        arena: type[Arena] = Arena,
    ) -> None:
        self._device = device
        self._arena = arena
        self._budget = pinned_bytes
        self._tile_bytes = tile_bytes
        self._bounce: Mapping[str, Ring] | None = None
        self._warned = False
        self.pinned_bytes = 0

    def reserve(self, wanted: Mapping[str, Sequence[SegmentPlan]], *, pin: bool = True) -> dict[str, Allocation]:
        """Map an arena for each storage. Pin those that a device copies, as far as budget and system allow."""
        sizes = {storage: sum(c.taken_bytes for plan in plans for c in plan.cells) for storage, plans in wanted.items()}
        copied = [storage for storage, plans in wanted.items() if any(plan.copied for plan in plans)]
        self._check(sum(sizes.values()))
        allocations: dict[str, Allocation] = {}
        pageable: dict[str, int] = {}
        with contextlib.ExitStack() as undo:
            if pin and not self._fits(sum(sizes[storage] for storage in copied)):
                self.bounce()  # before the rest takes the budget
            for storage in sorted(sizes, key=lambda storage: (*PINNED_FIRST, storage).index(storage)):
                wanted_pinned = storage == STAGING or (pin and storage in copied)  # others pass the rings
                pinned = wanted_pinned and self._fits(sizes[storage])
                arena = self._arena(sizes[storage], self._device, pin=pinned, ring=storage == STAGING)
                allocations[storage] = allocation = _HostAllocation(self, arena)
                undo.callback(allocation.close)
                if allocation.pageable and storage in copied:
                    pageable[storage] = sizes[storage]
                    self.bounce()  # now: the system's limit may have room for them
                elif allocation.pageable:
                    arena.fault_in()  # missing memory is found here, and not in the first step
            undo.pop_all()
        if pin and pageable:
            self._warn(pageable)
        return allocations

    def bounce(self) -> Mapping[str, Ring]:
        """Return the rings of bounce buffers, by the stream that reads. The first call allocates them."""
        if self._bounce is None:
            nbytes = bounce_bytes(self._tile_bytes)
            allocation = _HostAllocation(self, self._arena(nbytes, self._device, pin=self._fits(nbytes), ring=True))
            plan = RingPlan("bounce", len(BOUNCE_READERS) * BOUNCE_SLOTS, sizes={PASSING: self._tile_bytes})
            (segment,) = [allocation.make(segment) for segment in plan.segments()]
            slots = plan.slots([segment])
            rings = {reader: Ring() for reader in BOUNCE_READERS}
            for number, ring in enumerate(rings.values()):
                ring.fill(slots[number * BOUNCE_SLOTS :][:BOUNCE_SLOTS])
            self.own, self._bounce = [(segment, allocation)], rings
        return self._bounce

    def pinnable(self, nbytes: int) -> int:
        """Return how many of some bytes the budget allows. If not all, the bounce buffers are pinned first."""
        if self._budget is None:
            return nbytes
        rings = bounce_bytes(self._tile_bytes) if self._bounce is None else 0
        if not self._fits(nbytes + rings):
            self.bounce()
        return max(0, min(nbytes, self._budget - self.pinned_bytes))

    def close(self) -> None:
        """Free the bounce buffers."""
        own, self.own, self._bounce = self.own, (), None
        for segment, allocation in own:
            segment.drop()
            allocation.close()

    def _fits(self, nbytes: int) -> bool:
        return self._budget is None or self.pinned_bytes + nbytes <= self._budget

    def _check(self, nbytes: int) -> None:
        """Raise `MemoryBudgetError` if the host has not so many bytes."""
        available = self._arena.available()
        if available is not None and nbytes > available.nbytes:
            raise MemoryBudgetError(
                f"{nbytes:,} bytes of host memory are needed, and {available.whose} {available.nbytes:,} available, "
                f"{nbytes - available.nbytes:,} too few. Keep less on the cpu tier, or move it to nvme."
            )

    def _warn(self, pageable: Mapping[str, int]) -> None:
        """Warn once about memory that is not pinned: how much, why, and what to do."""
        if self._warned:
            return
        self._warned = True
        ((_, ring),) = self.own
        storages = ", ".join(f"{storage} {nbytes:,}" for storage, nbytes in pageable.items())
        over_budget = any(not self._fits(nbytes) for nbytes in pageable.values())
        advice = (
            f"Options(pinned_bytes={self._budget:,}) has no room for more: raise it."
            if over_budget
            else "The system refused to pin more: raise its limit of locked memory (ulimit -l; --ulimit memlock=-1 "
            "for a container), or keep less on the cpu tier."
            if host_memory.can_register(self._device)
            else f"torch pins no memory in place for {self._device.type}: keep less on the cpu tier."
        )
        means = (
            "pinned buffers, which is slower"
            if ring.pinned
            else "buffers that could not be pinned either: the host waits for each of them"
        )
        warnings.warn(
            f"{sum(pageable.values()):,} bytes of the cpu tier are not pinned ({storages}). Copies between them and "
            f"the device pass {bounce_bytes(self._tile_bytes):,} bytes of {means}. {advice}",
            stacklevel=2,
        )


class _HostAllocation(Allocation):
    def __init__(self, tier: HostTier, arena: Arena) -> None:
        self._tier = tier
        self._arena = arena
        self.pinned = arena.pinned
        self.pageable = arena.pageable and arena.capacity > 0
        self._used_before = False
        tier.pinned_bytes += arena.capacity if self.pinned else 0

    def make(self, plan: SegmentPlan, *, unset: bool = False) -> MemorySegment:
        bounce = self._tier.bounce if self.pageable and plan.storage != STAGING else None
        tensors = [self._arena.allocate(cell.numel, cell.dtype) for cell in plan.cells]
        if self._used_before and not unset:
            for tensor in tensors:
                tensor.zero_()
        return MemorySegment(plan, tensors, bounce)

    def rewind(self) -> bool:
        self._arena.rewind()
        self._used_before = True
        return True

    def close(self) -> None:
        self._tier.pinned_bytes -= self._arena.capacity if self.pinned else 0
        self._arena.close()
