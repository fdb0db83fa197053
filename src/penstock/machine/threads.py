"""The threads of a rank's updates: how many, and on which cores. Its share of those that are near its memory."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.machine.cgroups import core_quota
from penstock.machine.numa import NODES, device_node, device_nodes, numbered_nodes


@dataclass(frozen=True)
class UpdateCores:
    """Where updates run.

    Attributes:
        count: threads.
        cores: that they are bound to; `None` leaves them to the system.
    """

    count: int
    cores: frozenset[int] | None = None

    def with_threads(self, count: int | None) -> UpdateCores:
        """The same for a number of threads that somebody has asked for: more than the cores are not crowded there."""
        if count is None:
            return self
        return UpdateCores(count, self.cores if self.cores and count <= len(self.cores) else None)


def update_cores(device: torch.device) -> UpdateCores:
    """Those of this rank, on the machine and in the container that it runs in, with host memory near a device."""
    return share_of_cores(quota=core_quota(), near=device_node(device), devices=device_nodes(device))


def share_of_cores(
    environment: Mapping[str, str] = os.environ,
    allowed: Collection[int] | None = None,
    nodes: Path = NODES,
    *,
    quota: float | None = None,
    near: int | None = None,
    devices: Sequence[int | None] = (),
) -> UpdateCores:
    """The cores of this rank's NUMA node that the process may use, shared among the ranks on that node; 1 or more.

    The device's node is the rank's, where it has one: its host memory lies there, and threads elsewhere would read it
    over the link between nodes. They are bound to it, unless the process was bound to a node by its launcher.

    Where nothing says the device's: if the process may use cores of one node alone, that is its node, and the ranks of
    this host are spread evenly over all nodes. Unbound, local rank i takes node i * nodes / ranks, as launchers number
    devices; with fewer ranks than nodes it takes several. A host without `/sys/devices/system/node` counts as one node.

    Arguments:
        environment: `LOCAL_RANK` and `LOCAL_WORLD_SIZE`, as a launcher sets them; one rank without them.
        allowed: cores that this process may use; `None` asks the system.
        nodes: folder with one folder for each node.
        quota: cores' worth of time that the container gives all ranks of this host.
        near: number of the device's node.
        devices: those of all devices that the process sees.
    """
    cores = set(os.sched_getaffinity(0) if allowed is None else allowed)
    ranks = max(1, _number(environment.get("LOCAL_WORLD_SIZE"), 1))
    rank = min(max(0, _number(environment.get("LOCAL_RANK"), 0)), ranks - 1)
    found = numbered_nodes(nodes)
    usable = {number: node & cores for number, node in found.items() if node & cores}
    if near in usable and len(usable) > 1:
        # A rank that sees its own device alone knows nothing of the others': they are spread evenly.
        ranks_here = devices[:ranks].count(near) if len(devices) >= ranks else -(-ranks // len(usable))
        count, bound = len(usable[near]) // max(1, ranks_here), frozenset(usable[near])
    else:
        count, bound = _unbound(rank, ranks, cores, list(found.values()) or [cores], list(usable.values())), None
    if quota is not None:
        count = min(count, int(quota / ranks))  # past it all threads are stopped until the period is over
    return UpdateCores(max(1, count), bound)


def _unbound(rank: int, ranks: int, cores: set[int], found: Sequence[set[int]], usable: Sequence[set[int]]) -> int:
    if not usable:  # nothing is said of nodes, or what is said does not fit the cores that the process may use
        return len(cores) // ranks
    if len(usable) == 1:
        ranks_here = -(-ranks // len(found))
        # Bound to cores of its own, a rank shares them with nobody.
        shared = len(usable[0]) > max(map(len, found)) // ranks_here
        return len(usable[0]) // (ranks_here if shared else 1)
    mine = rank * len(usable) // ranks
    ranks_here = sum(other * len(usable) // ranks == mine for other in range(ranks))
    if ranks < len(usable):  # fewer ranks than nodes: one has several nodes to itself
        last = (rank + 1) * len(usable) // ranks
        return sum(len(node) for node in usable[mine:last])
    return len(usable[mine]) // ranks_here


def _number(text: str | None, default: int) -> int:
    return int(text) if text is not None and text.strip().isdigit() else default
