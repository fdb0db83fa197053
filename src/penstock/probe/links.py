"""What host, accelerator and ranks share and hand each other: memory, copies, jobs on streams, collectives."""

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial

import torch
import torch.distributed as dist

from penstock.config import Tier
from penstock.planner.rates import Rate
from penstock.probe.sampling import Case, Deadline, Figures, seconds_of, take_turns
from penstock.runtime.accelerator import streams_for
from penstock.runtime.control_group import ControlGroup, all_gather_flat, give_back, own_group
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
from penstock.runtime.system import hosts_of, ranks_of_host
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
        return self._routes.copy(route, (target,), (source,), DONE, NO_LABEL)


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


SMALL_BYTES, LARGE_BYTES = 1 << 10, 1 << 26  # of the whole buffer
TRIAL_BYTES = 1 << 20


def measure_collectives(
    device: torch.device, groups: Mapping[str, dist.ProcessGroup], control_group: ControlGroup, seconds: float
) -> Figures:
    """Measure all-gathers. Collective.

    The time of one is taken for `latency + bytes * (n - 1) / n / bandwidth`, with the bytes of the whole buffer.

    Arguments:
        device: where the buffers are; the groups have a backend for it.
        groups: the dimensions of the mesh by name, or all ranks as one; those of one rank are passed over.
        control_group: of all ranks.
        seconds: when to be done, on the first rank.

    Returns:
        `link_bandwidth` and `link_seconds` of the slowest dimension whose ranks are on one host, `net_*` of the slowest
        one whose ranks are on several: of each as far as there is one.
    """
    groups = {name: group for name, group in groups.items() if dist.get_world_size(group) > 1}
    if not groups:
        return {}
    deadline = Deadline(seconds, control_group)
    with contextlib.ExitStack() as closing:
        groups |= _within_hosts(groups, control_group, closing)
        found = [
            (name, _spread(group, control_group.size), [*map(astuple, _measure_group(device, group, deadline))])
            for name, group in groups.items()
        ]
    # What every rank has seen is one figure on all of them: the first rank's.
    figures: Figures = {}
    for name, (hosts, rings), (bandwidth, latency) in control_group.share(found):
        kind, rate = "net" if hosts > 1 else "link", Rate(*bandwidth).scaled(rings, f"; {name}")
        slowest = figures.get(f"{kind}_bandwidth")
        if slowest is None or rate.value < slowest.value:
            figures |= {f"{kind}_bandwidth": rate, f"{kind}_seconds": Rate(*latency).scaled(1, f"; {name}")}
    return figures


def _within_hosts(
    groups: Mapping[str, dist.ProcessGroup], control_group: ControlGroup, closing: contextlib.ExitStack
) -> dict[str, dist.ProcessGroup]:
    """Make a group of the ranks of each host, where there are several hosts and no dimension lies within one."""
    spreads = control_group.share([_spread(group, control_group.size)[0] for group in groups.values()])
    here = ranks_of_host()
    if min(spreads) == 1 or here == 1:
        return {}
    name = control_group.share(f"penstock probe {secrets.token_hex(8)}")
    first = dist.get_rank() // here * here
    members = [rank for rank in control_group.members if first <= rank < first + here]
    group = own_group(members, next(iter(groups.values())), name, timeout_s=control_group.timeout_s)
    closing.callback(give_back, [group])
    return {"ranks of a host": group}


def _spread(group: dist.ProcessGroup, ranks: int) -> tuple[int, int]:
    """Return on how many hosts a group is, and how many such groups go through the network of this host."""
    here = ranks // hosts_of(ranks)
    hosts = [rank // here for rank in dist.get_process_group_ranks(group)]
    spread = len(set(hosts))
    return spread, max(1, here // hosts.count(dist.get_rank() // here)) if spread > 1 else 1


def _measure_group(device: torch.device, group: dist.ProcessGroup, deadline: Deadline) -> tuple[Rate, Rate]:
    """Measure one group: its bandwidth, and its latency."""
    count = dist.get_world_size(group)
    trial = partial(_gather, device, group, TRIAL_BYTES)
    trial()  # makes the connections
    sizes = [SMALL_BYTES, TRIAL_BYTES, LARGE_BYTES]
    if not deadline.allows(5 * LARGE_BYTES / TRIAL_BYTES * trial()):
        sizes.pop()  # too much for this link in this time
    cases: dict[str, Case] = {f"{nbytes:,} bytes": (partial(_gather, device, group, nbytes), "") for nbytes in sizes}
    found = take_turns(cases, deadline)
    latency, *_, largest = found.values()
    moved = sizes[-1] * (count - 1) / count
    value, high, low = (moved / max(each - latency.value, each / 10) for each in astuple(largest)[:3])
    told = ", ".join(f"{name} {1e6 * each.value:.0f} us" for name, each in found.items())
    how = f"all-gathers between {count} ranks ({told}){latency.how}"
    return Rate(value, low, high, how), replace(latency, how=how)


def _gather(device: torch.device, group: dist.ProcessGroup, nbytes: int) -> float:
    """Gather once, after all ranks have come; the seconds of it."""
    count = dist.get_world_size(group)
    own = torch.ones(nbytes // count // 4, dtype=torch.float32, device=device)
    whole = torch.empty(own.numel() * count, dtype=torch.float32, device=device)
    all_gather_flat(whole[:count], own[:1], group=group)
    return seconds_of(lambda: all_gather_flat(whole, own, group=group), device)
