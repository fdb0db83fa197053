"""Which ranks of a collective are on one host, and what that costs: by where the ranks of a dimension lie."""

from dataclasses import replace
from itertools import product

import pytest

from penstock.errors import ConfigError
from penstock.planner.cost import LINKS, NETWORK, Spread, ring, spread_of
from penstock.planner.machine import Machine
from penstock.planner.rates import Rate
from penstock.planner.simulation.program import Collective
from penstock.runtime.topology import Grid

#: 1 s and 100 bytes/s between neighbours, 3 s and 10 bytes/s between hosts.
RATES = {"link_bandwidth": 100.0, "link_seconds": 1.0, "net_bandwidth": 10.0, "net_seconds": 3.0}
MACHINE = Machine("machine", "cuda", {name: Rate.stated(value) for name, value in RATES.items()})
DIMENSIONS = ("shard", "replicate", "tp")


def along(grid: Grid, dimension: str, name: str = "all_gather", nbytes: int = 800) -> Collective:
    ranks = {"shard": grid.shards, "replicate": grid.replicas, "tp": grid.tp}[dimension]
    return Collective(name, nbytes, ranks, dimension, grid.stride(dimension))


@pytest.mark.parametrize(
    ("grid", "spreads"),
    [
        (Grid(shards=8, replicas=16), [(8, 1, 1), (1, 16, 8), (1, 1, 8)]),  # each copy has a host
        (Grid(shards=16), [(8, 2, 1), (1, 1, 8), (1, 1, 8)]),  # a copy over two hosts
        (Grid(shards=4, replicas=4), [(4, 1, 2), (2, 2, 4), (1, 1, 8)]),  # two copies on a host
        (Grid(shards=4, replicas=2, tp=8), [(1, 4, 8), (1, 2, 8), (8, 1, 1)]),  # a host divides the parameters
        (Grid(shards=8, replicas=2, tp=2), [(4, 2, 2), (1, 2, 8), (2, 1, 4)]),
        (Grid(replicas=16), [(1, 1, 8), (8, 2, 1), (1, 1, 8)]),  # stage 0
    ],
)
def test_the_ranks_of_a_dimension_are_where_their_stride_puts_them(
    grid: Grid, spreads: list[tuple[int, int, int]]
) -> None:
    assert [spread_of(along(grid, dimension), 8) for dimension in DIMENSIONS] == [Spread(*each) for each in spreads]


def test_every_rank_of_a_host_is_in_one_ring_that_leaves_it() -> None:
    """However the ranks lie, those of a host and the rings of which they are make up the host."""
    for shards, replicas, tp, by_host in product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4), (1, 2, 4, 8)):
        grid = Grid(shards=shards, replicas=replicas, tp=tp)
        for dimension in DIMENSIONS:
            here, hosts, rings = spread_of(along(grid, dimension), by_host)
            assert here * rings == by_host
            assert here * hosts == along(grid, dimension).ranks


def test_copies_on_a_host_each_meet_over_links_and_over_the_network_where_they_are_apart() -> None:
    here = ring(along(Grid(shards=4, replicas=2), "replicate", "all_reduce"), MACHINE, 8)
    assert here.uses.keys() == {LINKS}
    assert here.seconds == pytest.approx(2 * 1 + 2 * 400 / 100)
    # Eight rings of two at once go through the host's network.
    apart = ring(along(Grid(shards=8, replicas=2), "replicate", "all_reduce"), MACHINE, 8)
    assert apart.uses.keys() == {NETWORK}
    assert apart.seconds == pytest.approx(2 * 3 + 8 * 2 * 400 / 10)
    both = ring(along(Grid(shards=16), "shard"), MACHINE, 8)
    assert both.uses.keys() == {LINKS, NETWORK}
    assert both.seconds == pytest.approx(1 + 3 + 750 / 10)


def test_a_dimension_needs_the_figures_of_where_it_lies_alone() -> None:
    links, network = (
        replace(MACHINE, figures={name: figure for name, figure in MACHINE.figures.items() if name.startswith(kind)})
        for kind in ("link", "net")
    )
    hybrid = Grid(shards=8, replicas=4)
    assert ring(along(hybrid, "shard"), links, 8).seconds > 0
    assert ring(along(hybrid, "replicate"), network, 8).seconds > 0
    with pytest.raises(ConfigError, match="net_bandwidth"):
        ring(along(hybrid, "replicate"), links, 8)
