"""What collectives cost: by bytes, ranks, and whether they leave the host."""

from math import ceil

from penstock.forecast.program import Collective
from penstock.forecast.sharing import Demand, Figures, demand

LINKS, NETWORK = "links between ranks", "network"

#: How often the other ranks' part of the buffer goes through each link. Of a ring an all-gather and a reduce-scatter
#: send (n-1)/n of the buffer, an all-reduce is one after the other (R. Thakur, R. Rabenseifner, W. Gropp, "Optimization
#: of Collective Communication Operations in MPICH", 2005, sections 3 and 4). In an all-to-all each rank keeps its own
#: part, and sends the others. A broadcast in a pipeline sends all of it once. NCCL's "bus bandwidth" divides by the
#: same numbers (nccl-tests, doc/PERFORMANCE.md), and so do our figures.
_ROUNDS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "broadcast": 1, "all_to_all": 1}


def ring(collective: Collective, figures: Figures, world_size: int, by_host: int) -> Demand:
    """Give what a collective takes.

    Arguments:
        collective: of this rank; the ranks of a shard are neighbours, copies of it are a whole shard apart.
        figures: of the machine.
        world_size: how many ranks there are.
        by_host: how many of them are on a host.

    Raises:
        ConfigError: the machine lacks the bandwidth or the latency of its links, or of its network.
    """
    ranks = collective.ranks
    if ranks < 2:
        return Demand(0.0)
    whole = collective.name == "broadcast"
    through = collective.nbytes * _ROUNDS.get(collective.name, 1) * (1.0 if whole else (ranks - 1) / ranks)
    stride = 1 if collective.dimension in ("shard", "inside") else max(1, world_size // ranks)
    here = max(1, min(ranks, by_host // stride))  # of its ranks, how many are on this host
    loads: dict[str, float] = {}
    latency = 0.0
    if here > 1:
        loads[LINKS] = through / figures.value("link_bandwidth")
        latency += figures.value("link_seconds")
    if ceil(ranks / here) > 1:
        # Rings of other ranks of the host go through the same network at the same time.
        rings = max(1, by_host // here)
        loads[NETWORK] = through * rings / figures.value("net_bandwidth")
        latency += figures.value("net_seconds")
    # The slowest link sets the pace of a ring, and what it waits for comes on top.
    slowest = max(loads.values())
    return demand(latency * _ROUNDS.get(collective.name, 1) + slowest, loads)
