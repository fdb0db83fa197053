"""Ranks form a grid of shards and replicas; one rank says nothing to anybody."""

import torch
from torch.distributed.device_mesh import init_device_mesh

from penstock.runtime.collectives import Collectives
from penstock.runtime.topology import Grid
from tests.lib.ranks import run_ranks


def test_a_single_process_is_a_grid_of_one() -> None:
    for sharded in (False, True):
        ranks = Collectives.from_mesh(None, sharded=sharded)
        assert (ranks.shards, ranks.shard_rank, ranks.replicas, ranks.world_size) == (1, 0, 1, 1)
        values = torch.ones(3)
        ranks.all_reduce(values)
        ranks.broadcast(values)
        ranks.broadcast_part(values, 0)
        assert values.eq(1).all()
        assert not ranks.counts


def named_grids(rank: int) -> dict[str, Grid]:
    meshes = {
        "hybrid": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")),
        "context": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp")),
        "tensor": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp")),
        "three": init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp_replicate", "cp", "tp")),
    }
    found = {}
    for name, mesh in meshes.items():
        ranks = Collectives.from_mesh(mesh, sharded=True)
        total = torch.ones(1)
        ranks.all_reduce(total)
        assert total.item() == 4, "of all ranks, whatever they do"
        value = torch.tensor([float(rank)])
        ranks.broadcast(value)
        assert value.item() == (rank % 2 if "tp" in (mesh.mesh_dim_names or ()) else 0), "of the same parts"
        found[name] = ranks.grid
        ranks.close()
    return found


def test_names_say_what_the_dimensions_of_a_mesh_do() -> None:
    for rank, found in enumerate(run_ranks(named_grids, 4)):
        major, minor = divmod(rank, 2)
        assert found == {
            "hybrid": Grid(shards=2, shard_rank=minor, replicas=2, replica_rank=major),
            "context": Grid(shards=4, shard_rank=rank),
            "tensor": Grid(shards=2, shard_rank=major, tp=2, tp_rank=minor),
            "three": Grid(shards=2, shard_rank=major, tp=2, tp_rank=minor),
        }
