"""Collectives between ranks: latency and bandwidth, of each dimension of a mesh, or of all ranks."""

import contextlib
import secrets
from collections.abc import Mapping
from dataclasses import astuple, replace
from functools import partial

import torch
import torch.distributed as dist

from penstock.planner.rates import Rate
from penstock.probe.sampling import Case, Deadline, Figures, seconds_of, take_turns
from penstock.runtime.control_group import ControlGroup, all_gather_flat, give_back, own_group
from penstock.runtime.system import hosts_of, ranks_of_host

LEAST_BYTES, MOST_BYTES = 1 << 10, 1 << 26  # of the whole buffer
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
    shared = [
        (name, "net" if hosts > 1 else "link", Rate(*bandwidth).scaled(rings), Rate(*latency))
        for name, (hosts, rings), (bandwidth, latency) in control_group.share(found)
    ]
    for name, kind, bandwidth, latency in sorted(shared, key=lambda each: -each[2].value):  # the slowest comes last
        among = [f"{other} {each.value / 1e9:.2f} GB/s" for other, of, each, _ in shared if of == kind]
        told = f"; {name}, the slowest of {', '.join(among)}" if len(among) > 1 else ""
        figures |= {f"{kind}_bandwidth": bandwidth.scaled(1, told), f"{kind}_seconds": latency.scaled(1, told)}
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
    sizes = [LEAST_BYTES, TRIAL_BYTES, MOST_BYTES]
    if not deadline.allows(5 * MOST_BYTES / TRIAL_BYTES * trial()):
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
