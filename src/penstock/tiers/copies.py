"""Copies of flat values within memory: the device's, the host's, and between the two.

Where the host's memory is pageable a device copies only while the host waits for it. So such values pass pinned bounce
buffers: a thread of the host fills one while the device empties another, or the other way round.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kinds import Tier
from penstock.machine.reach import Reach
from penstock.machine.streams import DOWNLOAD, UPDATE, UPLOAD, WRITE, Event, Streams, across, all_of, copy
from penstock.tiers.ring import PASSING, Ring
from penstock.trace import Label

#: What is done with the values of a buffer: the number of the first one among all that pass, and the values.
Use = Callable[[int, Tensor], None]


def in_reach(tier: Tier, of: Tier, reach: Reach) -> bool:
    """Whether arithmetic beside one tier reads and writes the other directly."""
    return tier.is_memory and (tier is of or reach.aliases_host)


class Way(NamedTuple):
    """Where values in memory go.

    Attributes:
        to: the tier.
        crosses: whether they go between the device and the host.
        bounce: the rings of bounce buffers that they pass, by the stream that reads; `None` for a copy.
    """

    to: Tier
    crosses: bool
    bounce: Mapping[str, Ring] | None = None


class Copies:
    """Copies of flat values within memory.

    Arguments:
        streams: where copies run beside compute.
        landing: host buffers in which values from the device land in their own dtype, where they are cast or added on
            the host: a device that casts would take a temporary, and send what is wider over the bus.
        reader: the stream on which the host reads its own memory, where values pass bounce buffers.
    """

    def __init__(self, streams: Streams, landing: Ring, reader: str) -> None:
        self._streams = streams
        self._landing = landing
        self._reader = reader

    def copy(self, way: Way, target: Tensor, source: Tensor, after: Event, label: Label) -> Event:
        """Copy values; those that go between the device and the host are cast on the host."""
        up = way.to is Tier.DEVICE
        put = partial(_put, target)
        if way.bounce is not None:
            ring = way.bounce[self._reader]
            # Two streams: the device fills or empties one buffer while a thread of the host is at another.
            fill, drain = (self._reader, UPLOAD) if up else (DOWNLOAD, WRITE)
            dtype = (target if up else source).dtype
            return self.through(ring, source, put, after, label, fill=fill, drain=drain, dtype=dtype, over=target)
        crosses = way.crosses and not self._streams.aliases_host
        # Cast where it lands: a device would need memory for the cast, and may send more bytes.
        if crosses and not up and target.dtype != source.dtype:
            return self.land(source, put, after, label, over=target)
        return self._streams.submit(
            UPLOAD if up else DOWNLOAD,
            across(target, source) if crosses else partial(copy, target, source),
            after=(after,),  # site copy.source_ready: the source is complete, and nobody reads the target any more
            writes=(target,),
            nbytes=source.numel() * source.element_size(),
            label=label,
        )

    def land(self, source: Tensor, use: Use, after: Event, label: Label, over: Tensor | None = None) -> Event:
        """Bring values of the device down as they are, and use them on the host: the first ones first."""
        return self.through(
            self._landing, source, use, after, label, fill=DOWNLOAD, drain=UPDATE, dtype=source.dtype, over=over
        )

    def through(
        self,
        ring: Ring,
        source: Tensor,
        use: Use,
        after: Event,
        label: Label,
        *,
        fill: str,
        drain: str,
        dtype: torch.dtype,
        over: Tensor | None,
    ) -> Event:
        """Pass flat values through the buffers of a ring: one is filled while the one before it is used.

            fill     | 0 | 1 | 2 |
            drain        | 0 | 1 | 2 |

        Arguments:
            ring: one whose slots have one buffer each.
            source: the values.
            use: what is done with those of a buffer.
            after: the event after which the source is complete, and what `use` writes may be overwritten.
            label: what it is for, in traces.
            fill: the stream that copies to the buffers.
            drain: the stream on which they are used.
            dtype: what the values in the buffers have.
            over: what `use` overwrites as a whole; `None` where it adds.
        """
        drained: list[Event] = []
        start = 0
        # Autograd's thread takes slots as well: one that came round to a slot before its new event is noted would not
        # wait for this use of it.
        with ring.lock:
            while start < source.numel():
                slot = ring.take()
                buffer = slot.near[PASSING]
                here = source[start : start + buffer.numel() // dtype.itemsize]
                nbytes = here.numel() * dtype.itemsize
                held = buffer[:nbytes].view(dtype)
                # Not before the values that the slot had last were used: they would be overwritten in the buffer.
                filled = self._streams.submit(
                    fill,
                    partial(copy, held, here),
                    after=(after, slot.free),  # site staged_copy.source_ready, staged_copy.slot_free
                    writes=(held,),
                    nbytes=nbytes,
                    label=label,
                )
                overwritten = () if over is None else (over[start : start + here.numel()],)
                slot.free = self._streams.submit(
                    drain,
                    partial(use, start, held),
                    # site staged_copy.filled
                    after=(filled,),  # on another stream: it would use what the buffer held before
                    writes=overwritten,
                    nbytes=nbytes,
                    label=label,
                )
                drained.append(slot.free)
                start += here.numel()
        return all_of(drained)  # site staged_copy.over: any of them may fail, and whoever waits is to hear of it


def _put(target: Tensor, start: int, values: Tensor) -> None:
    """Copy the values of a buffer to their place."""
    copy(target[start : start + values.numel()], values)
