"""Pinned buffers that values pass between a device and host memory that is not pinned.

A device copies from pageable memory only while the host waits for it. So a thread of the host takes such values tile by
tile to a pinned buffer, as if they came from a file, and the device copies from there; and the other way round:

    up      READ      | 0 | 1 | 2 |                down    DOWNLOAD  | 0 | 1 | 2 |
            UPLOAD        | 0 | 1 | 2 |                    WRITE         | 0 | 1 | 2 |
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from penstock.machine.arena import Arena
from penstock.machine.streams import (
    DONE,
    DOWNLOAD,
    FETCH,
    READ,
    UPLOAD,
    WRITE,
    Event,
    Streams,
    Work,
    across,
    all_of,
    copy,
)

RINGS = (READ, FETCH)  # gathers do not wait for updates, which are submitted all at once
SLOTS = 4  # of each ring: for either direction, one buffer is filled while another is emptied


def bounce_bytes(tile_bytes: int) -> int:
    """Bytes of all buffers for tiles of a size."""
    return len(RINGS) * SLOTS * Arena.lease_bytes(tile_bytes, torch.uint8)


@dataclass(eq=False)
class _Slot:
    buffer: Tensor
    free: Event = DONE


class Bounce:
    """The buffers, and copies through them.

    Arguments:
        buffers: of bytes, all of one size; as many as `RINGS` and `SLOTS` say.
    """

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._rings = {
            reader: deque(_Slot(buffer) for buffer in buffers[first * SLOTS : (first + 1) * SLOTS])
            for first, reader in enumerate(RINGS)
        }
        self._lock = threading.Lock()  # autograd's thread submits too

    def upload(
        self, streams: Streams, target: Tensor, source: Tensor, after: Sequence[Event], *, reader: str, what: str
    ) -> Event:
        """Copy flat values from host memory to the device.

        Arguments:
            streams: of the device.
            target: on the device.
            source: as many values; those of another dtype are cast on the host.
            after: the source is complete, the target free.
            reader: the stream that reads the source, one of `RINGS`.
            what: what for, in traces.
        """
        return self._pass(streams, target, source, after, reader, (reader, UPLOAD), what)

    def download(
        self, streams: Streams, target: Tensor, source: Tensor, after: Sequence[Event], *, reader: str, what: str
    ) -> Event:
        """Copy flat values from the device to host memory.

        Arguments:
            streams: of the device.
            target: in host memory.
            source: as many values; those of another dtype are cast on the host.
            after: the source is complete, the target free.
            reader: whose buffers are used, one of `RINGS`.
            what: what for, in traces.
        """
        return self._pass(streams, target, source, after, reader, (DOWNLOAD, WRITE), what)

    def _pass(
        self,
        streams: Streams,
        target: Tensor,
        source: Tensor,
        after: Sequence[Event],
        reader: str,
        stages: tuple[str, str],
        what: str,
    ) -> Event:
        """Tile by tile into a buffer of a ring on the first stream, and out of it on the second."""
        into, out_of = stages
        up = out_of == UPLOAD
        ready, copied = all_of(after), []
        with self._lock:
            for there, here, slot, held in self._tiles(reader, target, source, (target if up else source).dtype):
                nbytes = held.numel() * held.element_size()
                enter: Work = partial(copy, held, here) if up else across(held, here)
                leave: Work = across(there, held) if up else partial(copy, there, held)
                landed = streams.submit(
                    into,
                    enter,
                    after=(ready, slot.free),
                    writes=(held,),
                    nbytes=nbytes,
                    what=what,
                )
                slot.free = streams.submit(out_of, leave, after=(landed,), writes=(there,), nbytes=nbytes, what=what)
                copied.append(slot.free)
        return all_of(copied)

    def _tiles(
        self, reader: str, target: Tensor, source: Tensor, dtype: torch.dtype
    ) -> Iterator[tuple[Tensor, Tensor, _Slot, Tensor]]:
        """Parts of both, each with the next slot and its buffer as values of the device's dtype."""
        ring = self._rings[reader]
        numel = ring[0].buffer.numel() // dtype.itemsize
        for start in range(0, source.numel(), numel):
            slot = ring.popleft()
            ring.append(slot)
            here = source[start : start + numel]
            yield target[start : start + numel], here, slot, slot.buffer[: here.numel() * dtype.itemsize].view(dtype)
