"""How many threads a rank's updates take: its share of the cores that are near its memory."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from penstock.machine.numa import NODES, read_nodes


def update_threads(
    environment: Mapping[str, str] = os.environ, allowed: Collection[int] | None = None, nodes: Path = NODES
) -> int:
    """The cores of this rank's NUMA node that the process may use, shared among the ranks on that node; 1 or more.

    Where the process may use cores of one node alone (its launcher bound it), that is its node, and the ranks of this
    host are spread evenly over all nodes. Unbound, local rank i takes node i * nodes / ranks, as launchers number
    devices; with fewer ranks than nodes it takes several. A host without `/sys/devices/system/node` counts as one node.

    Arguments:
        environment: `LOCAL_RANK` and `LOCAL_WORLD_SIZE`, as a launcher sets them; one rank without them.
        allowed: cores that this process may use; `None` asks the system.
        nodes: folder with one folder for each node.
    """
    cores = set(os.sched_getaffinity(0) if allowed is None else allowed)
    ranks = max(1, _number(environment.get("LOCAL_WORLD_SIZE"), 1))
    rank = min(max(0, _number(environment.get("LOCAL_RANK"), 0)), ranks - 1)
    found = read_nodes(nodes) or [cores]
    usable = [node & cores for node in found if node & cores]
    if not usable:  # what the system says of its nodes does not fit the cores it lets us use
        return max(1, len(cores) // ranks)
    if len(usable) == 1:
        ranks_here = -(-ranks // len(found))
        # Bound to cores of its own, a rank shares them with nobody.
        shared = len(usable[0]) > len(_largest(found)) // ranks_here
        return max(1, len(usable[0]) // (ranks_here if shared else 1))
    mine = rank * len(usable) // ranks
    ranks_here = sum(other * len(usable) // ranks == mine for other in range(ranks))
    if ranks < len(usable):  # fewer ranks than nodes: one has several nodes to itself
        last = (rank + 1) * len(usable) // ranks
        return max(1, sum(len(node) for node in usable[mine:last]))
    return max(1, len(usable[mine]) // ranks_here)


def _largest(nodes: list[set[int]]) -> set[int]:
    return max(nodes, key=len)


def _number(text: str | None, default: int) -> int:
    return int(text) if text is not None and text.strip().isdigit() else default
