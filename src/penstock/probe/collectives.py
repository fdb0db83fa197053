"""Collectives between ranks: latency and bandwidth, of each dimension of a mesh, or of all ranks."""

import contextlib
import secrets
import time
from collections.abc import Mapping
from statistics import median

import torch
import torch.distributed as dist

from penstock.probe.arithmetic import Stopwatch
from penstock.probe.sampling import LEAST_ROUNDS, Deadline, Measurement, quartiles
from penstock.runtime.control_group import ControlGroup, all_gather_flat, give_back, own_group
from penstock.runtime.system import hosts_of, ranks_of_host

SIZES = (1 << 10, 1 << 20, 1 << 26)  # bytes of the whole buffer
MOST_ROUNDS = 15


def measure_collectives(
    device: torch.device, groups: Mapping[str, dist.ProcessGroup], control_group: ControlGroup, deadline: Deadline
) -> dict[str, Measurement]:
    """Measure all-gathers. Collective.

    The time of one is taken for `latency + bytes * (n - 1) / n / bandwidth`, with the bytes of the whole buffer.

    Arguments:
        device: where the buffers are; the groups have a backend for it.
        groups: the dimensions of the mesh by name, or all ranks as one; those of one rank are passed over.
        control_group: of all ranks.
        deadline: when to be done, the first rank's.

    Returns:
        `link_bandwidth` and `link_seconds` of the slowest dimension whose ranks are on one host, `net_*` of the slowest
        one whose ranks are on several: of each as far as there is one.
    """
    groups = {name: group for name, group in groups.items() if dist.get_world_size(group) > 1}
    if not groups:
        return {}
    with contextlib.ExitStack() as closing:
        groups |= _within_hosts(groups, control_group, closing)
        watch = Stopwatch(device)
        found = {name: _measure_group(watch, group, control_group, deadline) for name, group in groups.items()}
        spreads = {name: _spread(group, control_group.size) for name, group in groups.items()}
    kinds: dict[str, dict[str, tuple[Measurement, Measurement]]] = {}
    for name, (bandwidth, latency) in found.items():
        hosts, rings = control_group.share(spreads[name])  # the first rank's, as what it has measured
        if hosts > 1:  # rings of the host's other ranks went through its network at the same time
            value, low, high = (each * rings for each in bandwidth[:3])
            bandwidth = bandwidth._replace(value=value, low=low, high=high)
        kinds.setdefault("net" if hosts > 1 else "link", {})[name] = bandwidth, latency
    return {name: figure for kind, of_kind in kinds.items() for name, figure in _slowest(kind, of_kind).items()}


def _slowest(kind: str, found: Mapping[str, tuple[Measurement, Measurement]]) -> dict[str, Measurement]:
    """Give the figures of the slowest of some dimensions, and say what the others do."""
    slowest = min(found, key=lambda name: found[name][0].value)
    beside = ", ".join(
        f"{name} {each.value / 1e9:.2f} GB/s and {1e6 * latency.value:.0f} us"
        for name, (each, latency) in found.items()
    )
    told = f"; dimensions: {beside}" if len(found) > 1 else ""
    bandwidth, latency = found[slowest]
    return {
        f"{kind}_bandwidth": bandwidth._replace(how=bandwidth.how + told),
        f"{kind}_seconds": latency._replace(how=latency.how + told),
    }


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
    """Say on how many hosts a group is, and how many such groups the ranks of this host are in."""
    here = ranks // hosts_of(ranks)
    hosts = [rank // here for rank in dist.get_process_group_ranks(group)]
    return len(set(hosts)), max(1, here // hosts.count(dist.get_rank() // here))


def _measure_group(
    watch: Stopwatch, group: dist.ProcessGroup, control_group: ControlGroup, deadline: Deadline
) -> tuple[Measurement, Measurement]:
    """Measure one group: its bandwidth, and its latency."""
    count = dist.get_world_size(group)
    runs: dict[int, list[float]] = {nbytes: [] for nbytes in SIZES}
    sizes = list(SIZES)
    rounds, longest = 0, 0.0
    while rounds <= MOST_ROUNDS:
        start = time.perf_counter()
        for nbytes in tuple(sizes):
            seconds = _gather(watch, group, nbytes // count // 4)
            if rounds:  # the first one makes the connections
                runs[nbytes].append(seconds)
        longest = time.perf_counter() - start
        rounds += 1
        # One rank's clock decides for all: a rank that went on alone would wait for the others in vain.
        left, of_first = control_group.share([deadline.left(), longest])
        if rounds > LEAST_ROUNDS and left < of_first:
            break
        if rounds == 1 and left < 2 * of_first and len(sizes) == len(SIZES):
            sizes = sizes[:-1]  # the largest one is too much for this link in this time
    used = [nbytes for nbytes in SIZES if runs[nbytes]]
    # What every rank has seen is one figure on all of them: the first rank's.
    medians = [control_group.share([median(runs[nbytes]), *quartiles(runs[nbytes])]) for nbytes in used]
    latency, largest = medians[0], medians[-1]
    moved = used[-1] * (count - 1) / count
    rates = [moved / max(seconds - latency[0], seconds / 10) for seconds in largest]
    told = ", ".join(f"{nbytes:,} bytes {1e6 * m[0]:.0f} us" for nbytes, m in zip(used, medians, strict=True))
    how = f"all-gathers between {count} ranks ({told}), {len(runs[used[0]])} of each"
    return Measurement(rates[0], rates[2], rates[1], how), Measurement(latency[0], latency[1], latency[2], how)


def _gather(watch: Stopwatch, group: dist.ProcessGroup, numel: int) -> float:
    """Gather once, after all ranks have come; the seconds of it."""
    own = torch.ones(numel, dtype=torch.float32, device=watch.device)
    whole = torch.empty(numel * dist.get_world_size(group), dtype=torch.float32, device=watch.device)
    all_gather_flat(whole[: dist.get_world_size(group)], own[:1], group=group)
    return watch.seconds(lambda: all_gather_flat(whole, own, group=group))
