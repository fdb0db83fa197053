"""Collectives between ranks: latency and bandwidth, of each dimension of a mesh, or of all ranks."""

import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from penstock.machine.council import Council
from penstock.machine.threads import hosts_of
from penstock.probe.arithmetic import Stopwatch
from penstock.probe.sampling import Deadline, Measurement, quartiles

SIZES = (1 << 10, 1 << 20, 1 << 26)  # bytes of the whole buffer
MOST_ROUNDS = 15

# torch 2.13 renamed the flat collectives; the older names still work in torch 2.8 to 2.12.
_all_gather_flat: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def measure_collectives(
    device: torch.device, groups: Mapping[str, dist.ProcessGroup], council: Council, deadline: Deadline
) -> dict[str, Measurement]:
    """Measure all-gathers. Collective.

    The time of one is taken for `latency + bytes * (n - 1) / n / bandwidth`, with the bytes of the whole buffer.

    Arguments:
        device: where the buffers are; the groups have a backend for it.
        groups: the dimensions of the mesh by name, or all ranks as one; those of one rank are passed over.
        council: of all ranks.
        deadline: when to be done, the first rank's.

    Returns:
        `link_bandwidth` and `link_seconds` of the slowest dimension, or `net_*` where the ranks are on several hosts.
    """
    groups = {name: group for name, group in groups.items() if dist.get_world_size(group) > 1}
    if not groups:
        return {}
    watch = Stopwatch(device)
    found = {name: _measure_group(watch, group, council, deadline) for name, group in groups.items()}
    slowest = min(found, key=lambda name: found[name][0].value)
    beside = ", ".join(
        f"{name} {each.value / 1e9:.2f} GB/s and {1e6 * latency.value:.0f} us"
        for name, (each, latency) in found.items()
    )
    told = f"; dimensions: {beside}" if len(found) > 1 else ""
    kind = "net" if hosts_of(council.size) > 1 else "link"
    bandwidth, latency = found[slowest]
    return {
        f"{kind}_bandwidth": bandwidth._replace(how=bandwidth.how + told),
        f"{kind}_seconds": latency._replace(how=latency.how + told),
    }


def _measure_group(
    watch: Stopwatch, group: dist.ProcessGroup, council: Council, deadline: Deadline
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
        left, of_first = council.share([deadline.left(), longest])
        if rounds > 1 and left < of_first:
            break
        if rounds == 1 and left < 2 * of_first and len(sizes) == len(SIZES):
            sizes = sizes[:-1]  # the largest one is too much for this link in this time
    used = [nbytes for nbytes in SIZES if runs[nbytes]]
    # What every rank has seen is one figure on all of them: the first rank's.
    medians = [council.share([median(runs[nbytes]), *quartiles(runs[nbytes])]) for nbytes in used]
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
    _all_gather_flat(whole[: dist.get_world_size(group)], own[:1], group=group)
    return watch.seconds(lambda: _all_gather_flat(whole, own, group=group))
