"""How many threads a rank's updates get, and on which cores: its share of the cores that are near its memory."""

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
    """Where the updates of a rank run.

    Attributes:
        count: how many threads.
        cores: the numbers of the cores that they are bound to; `None` leaves that to the system.
    """

    count: int
    cores: frozenset[int] | None = None

    def with_threads(self, count: int | None) -> UpdateCores:
        """Take another number of threads, if somebody has asked for one.

        More threads than there are cores to be bound to are not bound: crowded there they would be slower.
        """
        if count is None:
            return self
        return UpdateCores(count, self.cores if self.cores and count <= len(self.cores) else None)


def update_cores(device: torch.device) -> UpdateCores:
    """Choose the cores of this rank, on the machine and in the container that it runs in, near a device's memory."""
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
    """Share the cores of this rank's NUMA node that the process may use among the ranks on that node.

    The device's node is the rank's, where it has one: its host memory lies there, and threads elsewhere would read it
    over the link between nodes. They are bound to it, unless the process was bound to a node by its launcher.

    Where nothing says which node is the device's: if the process may use cores of one node alone, that is its node, and
    the ranks of this host are taken to be spread evenly over all nodes. Else local rank i takes node i * nodes / ranks,
    as launchers number devices; with fewer ranks than nodes it takes several. A host without
    `/sys/devices/system/node` counts as one node.

    Arguments:
        environment: the variables that may hold `LOCAL_RANK` and `LOCAL_WORLD_SIZE`, as a launcher sets them; without
            them there is one rank.
        allowed: the cores that this process may use; `None` asks the system.
        nodes: the folder with one folder for each node.
        quota: how many cores' worth of time the container gives all ranks of this host; `None` for no limit.
        near: the number of the device's node; `None` where nothing says it.
        devices: the nodes of all devices that the process sees, by their index.

    Returns:
        One thread or more.
    """
    cores = set(os.sched_getaffinity(0) if allowed is None else allowed)
    ranks = ranks_of_host(environment)
    rank = min(max(0, _number(environment.get("LOCAL_RANK"), 0)), ranks - 1)
    found = numbered_nodes(nodes)
    usable = {number: node & cores for number, node in found.items() if node & cores}
    if near in usable and len(usable) > 1:
        # A rank that sees its own device alone knows nothing of the others': they are taken to be spread evenly.
        ranks_here = devices[:ranks].count(near) if len(devices) >= ranks else -(-ranks // len(usable))
        count, bound = len(usable[near]) // max(1, ranks_here), frozenset(usable[near])
    else:
        count, bound = _unbound(rank, ranks, cores, list(found.values()) or [cores], list(usable.values())), None
    if quota is not None:
        # Threads that use up the quota are all stopped until its period is over, those that feed the device too.
        count = min(count, int(quota / ranks))
    return UpdateCores(max(1, count), bound)


def ranks_of_host(environment: Mapping[str, str] = os.environ, *, default: int = 1) -> int:
    """Return how many ranks the launcher has started on this host (`LOCAL_WORLD_SIZE`), or a default."""
    return _number(environment.get("LOCAL_WORLD_SIZE"), 0) or default


def neighbours_of_host(line: Sequence[int], by_host: int) -> int:
    """Return how many neighbours in a line of ranks share a host; all of them where hosts do not divide it evenly.

    Arguments:
        line: numbers of ranks in the job.
        by_host: how many ranks there are on each host, which have consecutive numbers; 0 where nobody says it.
    """
    hosts = [rank // by_host for rank in line] if by_host > 0 else [0] * len(line)
    size = hosts.count(hosts[0])
    found = [hosts[first : first + size] for first in range(0, len(hosts), size)]
    even = all(len(host) == size and len(set(host)) == 1 for host in found)
    return size if even and len({host[0] for host in found}) == len(found) else len(line)


def hosts_of(ranks: int, environment: Mapping[str, str] = os.environ) -> int:
    """Return on how many hosts some ranks are; 1 where the launcher does not say: it has started all of them here."""
    here = _number(environment.get("LOCAL_WORLD_SIZE"), 0)
    return ranks // here if here > 0 and ranks % here == 0 else 1


def _unbound(rank: int, ranks: int, cores: set[int], found: Sequence[set[int]], usable: Sequence[set[int]]) -> int:
    """Count the cores of this rank where nothing says which node its device is on.

    Arguments:
        rank: the local rank.
        ranks: how many there are on this host.
        cores: all that the process may use.
        found: the cores of each node.
        usable: those of them that the process may use, of each node that has some.
    """
    if not usable:  # nothing is said of nodes, or what is said does not fit the cores that the process may use
        return len(cores) // ranks
    if len(usable) == 1:
        ranks_here = -(-ranks // len(found))
        # A launcher may have given each rank cores of its own: then there are fewer than a node's share, and a rank
        # shares them with nobody.
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
