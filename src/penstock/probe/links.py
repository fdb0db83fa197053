"""The links between an accelerator and the host, through the engine's own streams and buffers."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from penstock.config import Tier
from penstock.probe.sampling import Deadline, Measurement, Turns, seconds_of, take_turns
from penstock.probe.updates import BF16, Update, fill
from penstock.rules import Pool
from penstock.runtime.accelerator import streams_for
from penstock.runtime.hardware import free_device_memory
from penstock.runtime.host_memory import Arena, page_aligned
from penstock.runtime.streams import DONE, DOWNLOAD, FETCH, UPDATE, UPLOAD, Event, Streams, across, all_of
from penstock.runtime.system import update_cores
from penstock.tiers.host import HostTier
from penstock.tiers.transfer import CopyRoute, CopyRoutes
from penstock.trace import NO_LABEL

MOST_BYTES, LEAST_BYTES = 128 << 20, 1 << 20  # of a copy
PIECE_BYTES = 16 << 20  # in which the engine's copies come, about
UPDATE_BYTES = 64 << 20
#: Below so many seconds copies are small: a page-locked allocation takes its time as well.
LITTLE_SECONDS = 0.75


def measure_links(device: torch.device, deadline: Deadline) -> dict[str, Measurement]:
    """Measure copies between an accelerator and the host.

    Arguments:
        device: the one that computes; a cpu has no links.
        deadline: when to be done.

    Returns:
        `h2d`, `d2h`, `h2d_pageable`, `d2h_pageable` and `duplex`; nothing of a cpu.
    """
    if device.type == "cpu":
        return {}
    nbytes = LEAST_BYTES if deadline.left() < LITTLE_SECONDS else MOST_BYTES
    free = free_device_memory(device)
    if free is not None:
        nbytes = max(LEAST_BYTES, min(nbytes, free // 16 // LEAST_BYTES * LEAST_BYTES))
    with Link(device, nbytes) as link:
        turns = take_turns(link.cases(), deadline)
        return _figures(turns, nbytes, pinned=link.pinned)


class Link:
    """Memory on both ends of a link, and copies between them, as a context.

    Arguments:
        device: an accelerator.
        nbytes: how many bytes a copy has.

    Attributes:
        pinned: whether host memory could be page-locked.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._nbytes = nbytes
        self._closing = contextlib.ExitStack()
        with self._closing:
            self._streams: Streams = streams_for(device)
            self._closing.callback(self._streams.close)
            allocation = Arena(2 * nbytes, device, ring=True)
            self._closing.callback(allocation.close)
            self.pinned = allocation.pinned
            self._host = [allocation.allocate(nbytes, torch.uint8) for _ in range(2)]
            self._device = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
            self._pageable = page_aligned(nbytes).fill_(1)
            tier = HostTier(device)
            self._closing.callback(tier.close)
            self._bounce = tier.bounce()
            self._copies = CopyRoutes(self._streams, self._bounce[FETCH], FETCH)
            cores = update_cores(device)
            self._pool = Pool(cores.count, sorted(cores.cores or ()))
            self._closing.callback(self._pool.close)
            memory = page_aligned(UPDATE_BYTES)
            fill(memory)
            self._update = Update("adamw", BF16, memory)
            self._closing = self._closing.pop_all()

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, *_: object) -> None:
        self._host.clear()  # leases are given up before their allocation is
        self._closing.close()

    def cases(self) -> dict[str, Callable[[], float]]:
        """Give what is measured, by name: bytes/s each."""
        return {
            "h2d": lambda: self._rate(self._up),
            "d2h": lambda: self._rate(self._down),
            "duplex": lambda: 2 * self._rate(lambda: [*self._up(), *self._down()]),
            "h2d_pageable": lambda: self._rate(partial(self._through, Tier.DEVICE)),
            "d2h_pageable": lambda: self._rate(partial(self._through, Tier.CPU)),
            "h2d during an update": lambda: self._during(self._up),
            "d2h during an update": lambda: self._during(self._down),
        }

    def _rate(self, submit: Callable[[], Sequence[Event]]) -> float:
        """Submit copies, wait for them, and return the bytes/s of one direction."""
        self._streams.now().synchronize()
        return self._nbytes / seconds_of(lambda: all_of(submit()).synchronize())

    def _up(self) -> Sequence[Event]:
        return list(self._pieces(UPLOAD, self._device[0], self._host[0]))

    def _down(self) -> Sequence[Event]:
        return list(self._pieces(DOWNLOAD, self._host[1], self._device[1]))

    def _pieces(self, stream: str, target: Tensor, source: Tensor) -> Iterator[Event]:
        for start in range(0, self._nbytes, PIECE_BYTES):
            here = slice(start, start + PIECE_BYTES)
            yield self._streams.submit(stream, across(target[here], source[here]), writes=(target[here],))

    def _through(self, to: Tier) -> Sequence[Event]:
        """Copy between the device and pageable memory, by the bounce buffers."""
        ends = (self._device[0], self._pageable)
        target, source = ends if to is Tier.DEVICE else ends[::-1]
        way = CopyRoute(to, crosses=True, bounce=self._bounce)
        return [self._copies.copy(way, target, source, DONE, NO_LABEL)]

    def _during(self, submit: Callable[[], Sequence[Event]]) -> float:
        """Copy while the host updates, until the copies are over."""
        going = True

        def update() -> None:
            while going:
                self._update.run(self._pool)

        updating = self._streams.submit(UPDATE, update)
        try:
            return self._rate(submit)
        finally:
            going = False
            updating.synchronize()


def _figures(turns: Turns, nbytes: int, *, pinned: bool) -> dict[str, Measurement]:
    """Make the figures of the links."""
    memory = "page-locked memory" if pinned else "memory that could not be page-locked"
    figures = {}
    for name, way in (("h2d", "to the device"), ("d2h", "from the device")):
        busy = turns.median(f"{name} during an update") / 1e9
        how = f"{nbytes >> 20} MiB of {memory} {way}; {busy:.1f} GB/s while the host updates"
        figures[name] = turns.measurement(name, how)
        passing = f"{nbytes >> 20} MiB of pageable memory {way}, through the bounce buffers"
        figures[f"{name}_pageable"] = turns.measurement(f"{name}_pageable", passing)
    figures["duplex"] = turns.measurement("duplex", f"{nbytes >> 20} MiB of {memory} each way at once, both together")
    return figures
