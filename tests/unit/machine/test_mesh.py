"""A mesh that need not be there: what sizes by name mean, and where its ranks lie."""

from typing import Any

import pytest
import torch

from penstock.errors import ConfigError
from penstock.runtime.collectives import Collectives
from penstock.runtime.topology import Grid, grid_of


@pytest.mark.parametrize(
    ("sizes", "sharded", "grid"),
    [
        ({"dp_replicate": 16, "dp_shard": 8}, True, Grid(shards=8, replicas=16)),
        ({"dp_replicate": 16, "dp_shard": 8}, False, Grid(replicas=128)),
        ({"dp_shard": 4, "cp": 2, "tp": 8}, True, Grid(shards=8, tp=8)),
        ({"tp": 2, "ep": 3}, True, Grid(tp=6)),
    ],
)
def test_names_say_what_ranks_do(sizes: dict[str, int], sharded: bool, grid: Grid) -> None:
    assert grid_of(sizes, sharded=sharded) == grid
    assert grid_of(grid.sizes, sharded=sharded) == grid


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({}, "mesh is empty. Give the sizes"),
        ({"pp": 2}, "mesh has a dimension 'pp'. Use dp_replicate,"),
        ({"x\ny" * 99: 2}, "mesh has a dimension 'x"),
        ({"dp_shard": 10**99}, "mesh has dp_shard=1000"),
    ],
)
def test_what_is_no_mesh_is_refused_in_one_line(sizes: Any, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        grid_of(sizes, sharded=True)
    assert str(refused.value).startswith(words)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


def test_ranks_of_tp_are_neighbours_and_copies_are_furthest_apart() -> None:
    grid = Grid(shards=4, replicas=3, tp=2)
    assert [grid.stride(dimension) for dimension in ("tp", "shard", "replicate")] == [1, 2, 8]


@pytest.mark.parametrize("sharded", [False, True])
def test_a_single_process_is_a_grid_of_one_and_says_nothing_to_anybody(sharded: bool) -> None:
    ranks = Collectives.from_mesh(None, sharded=sharded)
    assert (ranks.shards, ranks.shard_rank, ranks.replicas, ranks.world_size) == (1, 0, 1, 1)
    values = torch.ones(3)
    ranks.all_reduce(values)
    ranks.broadcast(values)
    ranks.broadcast_part(values, 0)
    assert values.eq(1).all()
    assert not ranks.counts
