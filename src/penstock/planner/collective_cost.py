"""What collectives cost: by bytes, ranks, and whether they leave the host."""

from math import ceil
from typing import NamedTuple

from penstock.planner.simulation.fair_share import Demand, Figures, demand
from penstock.planner.simulation.program import Collective

LINKS, NETWORK = "links between ranks", "network"

#: How often the other ranks' part of the buffer goes through each link. Of a ring an all-gather and a reduce-scatter
#: send (n-1)/n of the buffer, an all-reduce is one after the other (R. Thakur, R. Rabenseifner, W. Gropp, "Optimization
#: of Collective Communication Operations in MPICH", 2005, sections 3 and 4). In an all-to-all each rank keeps its own
#: part, and sends the others. A broadcast in a pipeline sends all of it once. NCCL's "bus bandwidth" divides by the
#: same numbers (nccl-tests, doc/PERFORMANCE.md), and so do our figures.
_ROUNDS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "broadcast": 1, "reduce": 1, "all_to_all": 1}


class Spread(NamedTuple):
    """Where the ranks of a collective are.

    Attributes:
        here: how many of them are on this host.
        hosts: on how many hosts they are.
        rings: how many collectives of the kind ranks of this host take part in at the same time, each with ranks of
            its own: they share the host's network.
    """

    here: int
    hosts: int
    rings: int


def spread_of(collective: Collective, by_host: int) -> Spread:
    """Say where the ranks of a collective are, by how far they lie apart.

    Arguments:
        collective: of this rank.
        by_host: how many ranks are on a host, one after the other.
    """
    here = max(1, min(collective.ranks, by_host // collective.stride))
    return Spread(here, ceil(collective.ranks / here), max(1, by_host // here))


def rounds(collective: Collective) -> int:
    """Say how often a collective goes around."""
    return _ROUNDS.get(collective.name, 1)


def through(collective: Collective) -> float:
    """Count the bytes that a rank sends, and receives."""
    ranks = collective.ranks
    part = 1.0 if collective.name in ("broadcast", "reduce") else (ranks - 1) / ranks
    return collective.nbytes * rounds(collective) * part


def ring(collective: Collective, figures: Figures, by_host: int) -> Demand:
    """Give what a collective takes.

    Arguments:
        collective: of this rank.
        figures: of the machine.
        by_host: how many ranks are on a host.

    Raises:
        ConfigError: the machine lacks the bandwidth or the latency of its links, or of its network.
    """
    if collective.ranks < 2:
        return Demand(0.0)
    nbytes = through(collective)
    here, hosts, rings = spread_of(collective, by_host)
    loads: dict[str, float] = {}
    latency = 0.0
    if here > 1:
        loads[LINKS] = nbytes / figures.value("link_bandwidth")
        latency += figures.value("link_seconds")
    if hosts > 1:
        loads[NETWORK] = nbytes * rings / figures.value("net_bandwidth")
        latency += figures.value("net_seconds")
    # The slowest link sets the pace of a ring, and what it waits for comes on top.
    slowest = max(loads.values())
    return demand(latency * rounds(collective) + slowest, loads)
