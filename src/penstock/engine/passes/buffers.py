"""Device buffers for gradients on their way: a few of each size, reused in turn.

Memory that is given back to the allocator and mapped again every step costs page faults on a cpu and fragmentation on
a device, so buffers are kept.
"""

from collections import deque

import torch
from torch import Tensor

from penstock.machine.streams import Event, Streams

BUFFERS_OF_A_SIZE = 2  # one being filled by backward while the other is being reduced


class BufferRing:
    """Flat device buffers, leased and returned. A returned buffer is used again once its event is waited for."""

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self._device = device
        self._streams = streams
        self._free: dict[tuple[int, torch.dtype], deque[tuple[Tensor, Event]]] = {}
        self._leased: dict[tuple[int, torch.dtype], int] = {}

    def lease(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Lease a 1-D buffer with undefined contents."""
        key = (numel, dtype)
        free = self._free.setdefault(key, deque())
        self._leased[key] = self._leased.get(key, 0) + 1
        # Prefer one that is idle; make another only while the ring is not full.
        if free and (free[0][1].done() or len(free) + self._leased[key] > BUFFERS_OF_A_SIZE):
            buffer, event = free.popleft()
            # site reduce.buffer_free
            event.wait()  # else compute overwrites what a collective or a copy of the last gradient still reads
        else:
            buffer = torch.empty(numel, dtype=dtype, device=self._device)
        self._streams.lease(buffer)
        return buffer

    def give_back(self, buffer: Tensor, event: Event) -> None:
        """Return a buffer, which is used again after `event`: work on it is over then."""
        key = (buffer.numel(), buffer.dtype)
        self._leased[key] -= 1
        self._free.setdefault(key, deque()).append((buffer, event))

    def forget(self, buffer: Tensor) -> None:
        """Count a leased buffer as gone: it does not come back, and another may be made in its place."""
        self._leased[buffer.numel(), buffer.dtype] -= 1

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that are kept for reuse."""
        return sum(b.numel() * b.element_size() for ring in self._free.values() for b, _ in ring)

    def clear(self) -> None:
        """Drop every returned buffer. Gradients are there, so work on them is over."""
        self._free.clear()
