"""Nodes of the shard ranks: which ranks are in one, and what that costs."""

from collections.abc import Sequence
from typing import Any

import pytest

from penstock.planner.cost import ring
from penstock.planner.simulation.program import Collective
from penstock.runtime.system import neighbours_of_host
from penstock.runtime.topology import Grid, node_size, nodes_of
from tests.lib.paper import Machine


@pytest.mark.parametrize(
    ("line", "by_host", "expected"),
    [
        (range(8), 4, 4),
        (range(8), 8, 8),
        (range(8), 0, 8),
        (range(6), 4, 6),  # two hosts, of four ranks and of two
        ((0, 2, 4, 6), 4, 2),  # each other rank is of another part of the parameters
        ((0, 4, 1, 5), 4, 4),  # neighbours are not of one host
        ((4, 5, 6, 7), 2, 2),
        ((0, 4), 4, 1),
    ],
)
def test_neighbours_of_a_host(line: Sequence[int], by_host: int, expected: int) -> None:
    assert neighbours_of_host(line, by_host) == expected
    assert node_size(line, "host", by_host) == expected
    assert node_size(line, 3, by_host) == 3
    assert node_size(line, None, by_host) == 0


def test_grids_in_nodes() -> None:
    grid = Grid(shards=8, shard_rank=5)
    assert (grid.inside, grid.across) == (8, 1)
    assert (grid.in_nodes(2).inside, grid.in_nodes(2).across) == (2, 4)
    assert nodes_of(range(10, 18), grid.in_nodes(2)) == (range(14, 16), range(11, 18, 2))
    for size in (0, 1, 3, 8, 16):
        assert grid.in_nodes(size) == grid, "all of them are one node"
        assert nodes_of(range(8), grid.in_nodes(size)) == ((), ())


def test_what_stays_inside_a_node_takes_no_network() -> None:
    """Two hosts of four ranks: links of 100 bytes a second, a network of 10."""
    machine: Any = Machine(link_bandwidth=100.0, link_seconds=0.0, net_bandwidth=10.0, net_seconds=0.0)
    inside = Collective("all_to_all", 400, 4, "inside")
    across = Collective("all_to_all", 400, 2, "across", 4)
    for collective, seconds in ((inside, 3.0), (across, 80.0), (Collective("all_gather", 400, 4, "inside"), 3.0)):
        assert ring(collective, machine, 4).seconds == pytest.approx(seconds)
