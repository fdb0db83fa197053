"""What host and accelerator share and hand each other, by the engine's streams and buffers: memory, copies, jobs."""

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from penstock.config import Tier
from penstock.planner.rates import Rate
from penstock.probe.sampling import Case, Deadline, Figures, seconds_of, take_turns
from penstock.runtime.accelerator import streams_for
from penstock.runtime.hardware import free_device_memory, shares_host_memory, visible_devices
from penstock.runtime.host_memory import (
    PAGE_BYTES,
    Arena,
    available_host_memory,
    can_register,
    needs_pinning,
    page_aligned,
)
from penstock.runtime.streams import DONE, DOWNLOAD, FETCH, UPDATE, Event, Streams, all_of
from penstock.tiers.host import HostTier
from penstock.tiers.transfer import CopyRoute, CopyRoutes
from penstock.trace import NO_LABEL

LEAST_BYTES, MOST_BYTES = 1 << 20, 128 << 20  # of a copy: a page-locked allocation takes its time as well
PIN_STEP_BYTES, MOST_PIN_BYTES = 1 << 28, 1 << 34
JOBS, HAND_OVERS = 200, 50


def measure_links(device: torch.device, deadline: Deadline) -> Figures:
    """Measure copies between an accelerator and the host: `h2d`, `d2h`, `h2d_pageable`, `d2h_pageable` and `duplex`.

    Arguments:
        device: the accelerator.
        deadline: when to be done.
    """
    free = free_device_memory(device)
    nbytes = deadline.nbytes(LEAST_BYTES, MOST_BYTES if free is None else min(MOST_BYTES, free // 16))
    with contextlib.ExitStack() as closing:
        link = Link(device, nbytes, closing)
        size = f"{nbytes >> 20} MiB of"
        memory = f"{size} page-locked memory" if link.pinned else f"{size} memory that could not be page-locked"
        through = f"{size} pageable memory, through the bounce buffers,"
        cases: dict[str, Case] = {
            "h2d": (partial(link.rate, True), f"{memory} to the device"),
            "d2h": (partial(link.rate, False), f"{memory} from the device"),
            "duplex": (partial(link.rate, True, False), f"{memory} each way at once, both together"),
            "h2d_pageable": (partial(link.rate, True, bounces=True), f"{through} to the device"),
            "d2h_pageable": (partial(link.rate, False, bounces=True), f"{through} from the device"),
        }
        return take_turns(cases, deadline)


class Link:
    """Memory on both ends of a link, and the engine's copies between them.

    Arguments:
        device: an accelerator.
        nbytes: how many bytes a copy has.
        closing: gives memory and streams back.
    """

    def __init__(self, device: torch.device, nbytes: int, closing: contextlib.ExitStack) -> None:
        self._nbytes = nbytes
        self._streams: Streams = closing.enter_context(contextlib.closing(streams_for(device)))
        arena = closing.enter_context(contextlib.closing(Arena(2 * nbytes, device, ring=True)))
        self.pinned = arena.pinned
        # Each way has its own, for both at once: of downloads the first one, of uploads the second.
        self.host = [arena.allocate(nbytes, torch.uint8) for _ in range(2)]
        closing.callback(self.host.clear)  # tensors are given up before their arena is
        self.device = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self.pageable = page_aligned(nbytes).fill_(1)
        self._bounce = closing.enter_context(contextlib.closing(HostTier(device))).bounce()
        self._routes = CopyRoutes(self._streams, self._bounce[FETCH], FETCH)

    def rate(self, *ups: bool, bounces: bool = False) -> float:
        """Copy once each way, and return the bytes/s of all.

        Arguments:
            ups: True for a copy to the device, False for one from it.
            bounces: True for pageable memory, by the bounce buffers.
        """
        self._streams.now().synchronize()
        seconds = seconds_of(lambda: all_of([self._copy(up, bounces) for up in ups]).synchronize())
        return len(ups) * self._nbytes / seconds

    def _copy(self, up: bool, bounces: bool) -> Event:
        target, source = self.device[up], self.pageable if bounces else self.host[up]
        if not up:
            target, source = source, target
        route = CopyRoute(Tier.DEVICE if up else Tier.CPU, crosses=True, bounce=self._bounce if bounces else None)
        return self._routes.copy(route, target, source, DONE, NO_LABEL)


def measure_jobs(device: torch.device, deadline: Deadline) -> Figures:
    """Measure the cost of a job on a stream beside its work: `job_seconds`; of an accelerator `wake_seconds` too.

    Arguments:
        device: the one that computes.
        deadline: when to be done.
    """
    with contextlib.closing(streams_for(device)) as streams:
        how = f"{JOBS} jobs with nothing to do on the stream of updates, each after the one before it"
        cases: dict[str, Case] = {"job_seconds": (partial(_job_seconds, streams, [UPDATE] * JOBS), how)}
        if device.type != "cpu":
            ways = f"{HAND_OVERS} times from a stream of the device to a thread of the host and back"
            how = f"{ways}, with nothing to do, while another thread enqueues operations"
            value = torch.zeros(1, dtype=torch.float32, device=device)
            # A thread that goes on wants the interpreter, which in a forward is busy: so it is here.
            run = partial(_job_seconds, streams, [DOWNLOAD, UPDATE] * HAND_OVERS, partial(value.add_, 1.0))
            cases["wake_seconds"] = run, how
        return take_turns(cases, deadline)


def _job_seconds(streams: Streams, names: Sequence[str], meanwhile: Callable[[], object] | None = None) -> float:
    """Run jobs without work one after the other, and return the seconds of each.

    Arguments:
        streams: the streams.
        names: the stream of each job.
        meanwhile: what this thread does until they are done.
    """

    def chain() -> None:
        event: Event = DONE
        for name in names:
            event = streams.submit(name, lambda: None, after=(event,))
        while meanwhile is not None and not event.done():
            meanwhile()
        event.synchronize()

    return seconds_of(chain) / len(names)


def measure_room(device: torch.device, deadline: Deadline) -> Figures:
    """Measure how much memory is free now.

    Arguments:
        device: the one that computes.
        deadline: when to be done.

    Returns:
        `device_memory`, `host_memory` and `pinnable_memory`, and `devices` of an accelerator; what nothing tells is
        left out.
    """
    figures, visible = free_memory(device), visible_devices()
    if visible is not None and device.type != "cpu":
        figures["devices"] = Rate.stated(visible.count, "that this process sees")
    if "host_memory" in figures:
        figures["pinnable_memory"] = _pinnable(device, int(figures["host_memory"].value), deadline)
    return figures


def free_memory(device: torch.device) -> Figures:
    """Return how much memory is free now: `device_memory` and `host_memory`, as far as something tells."""
    figures = {}
    free, on_device = available_host_memory(), free_device_memory(device)
    if free is not None:
        figures["host_memory"] = Rate.stated(free.nbytes, f"{free.whose} so much available now")
    if on_device is not None:
        figures["device_memory"] = Rate.stated(on_device, "free on the device now")
    elif free is not None and shares_host_memory(device):
        figures["device_memory"] = Rate.stated(free.nbytes, "the device's memory is the host's")
    return figures


def _pinnable(device: torch.device, free: int, deadline: Deadline) -> Rate:
    """Find out how much memory can be page-locked, by doing so in steps that double. All of it is given back."""
    if not needs_pinning(device):
        return Rate.stated(free, "a cpu needs no page-locked memory: all that the host has")
    if not can_register(device):
        return Rate.stated(PAGE_BYTES, f"torch page-locks no memory in place for {device.type}")
    nbytes, locked, seconds = PIN_STEP_BYTES, PAGE_BYTES, 0.0
    # A step takes twice the time of the one before it, and the host has to keep room for everybody else.
    while nbytes <= min(MOST_PIN_BYTES, free // 4) and deadline.left() > 2 * seconds:
        start = time.perf_counter()
        with contextlib.closing(Arena(nbytes, device)) as arena:
            seconds, pinned = time.perf_counter() - start, arena.pinned
        if not pinned:
            how = f"page-locked {locked:,} bytes at once; {nbytes:,} were refused"
            return Rate(locked, locked, nbytes, how)
        nbytes, locked = 2 * nbytes, nbytes
    how = f"page-locked {locked:,} bytes at once, and was refused none: taken for all that the host has"
    return Rate(free, locked, free, how)
