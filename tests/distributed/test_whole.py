"""Rules over whole parameters on several ranks: each matrix is one rank's; only gradients and parameters travel.

With M matrices of F bytes in a unit, at stage 3: M F are reduced, each matrix to its owner, and M F broadcast twice, by
their owners, for forward and for backward. A rank that has none sends a gap of 256 elements. Where each rank has as
many, flat collectives do the same. Nothing else goes but what decides on the step.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from penstock.engine.unit.partition import OwnerAssignment
from penstock.layout import ALIGNMENT_NUMEL
from penstock.optim import MuonAdamW
from tests.lib import engines
from tests.lib.engines import ON_CPU, ON_NVME
from tests.lib.models import stack
from tests.lib.ranks import run_ranks
from tests.lib.streams import separate
from tests.parity.rows import Movement
from tests.parity.whole import different, furthest, plain, train

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon before 2.9")

STEPS = 2
CPU = Movement(params="cpu", grads="cpu", optimizer="cpu")
NVME = Movement(params="nvme", grads="nvme", optimizer="nvme")
BF16: dict[str, Any] = {"precision": "bf16", "accumulation": 2, "max_grad_norm": 0.05}

#: By the number of ranks: the shape of a mesh, what is computed, and where, by stage.
CASES: dict[int, list[tuple[tuple[int, int] | None, dict[str, Any], list[tuple[int, Movement]]]]] = {
    2: [
        (None, BF16, [(3, NVME), (3, CPU.but(whole_updates="home")), (2, Movement()), (1, CPU)]),
        (None, {"precision": "bf16"}, [(1, Movement(3, "cpu", "cpu", "nvme", "backward"))]),
        (None, {"precision": "fp32"}, [(3, CPU)]),
    ],
    4: [
        (None, BF16, [(3, Movement(3, "cpu", "cpu", "cpu", "forward"))]),
        ((2, 2), {"precision": "fp32"}, [(3, NVME)]),
    ],
}


def compare(rank: int, world_size: int) -> tuple[list[str], float]:
    """Names of what is not as with all state on the device; and how far the last case is from plain torch, in fp32."""
    found = []
    for shape, what, rows in CASES[world_size]:
        mesh = None if shape is None else init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
        given = {"rank": rank, "world_size": world_size, "mesh": mesh, "steps": STEPS, **what}
        expected = {stage: train(Movement(stage=stage), **given) for stage in {stage for stage, _ in rows}}
        for stage, how in rows:
            ours = train(how.but(stage), streams=separate(), **given)
            found += [f"{stage} {how}: {name}" for name in different(ours, expected[stage])]
    # Ranks sum in another order than one does: the last bit of a matrix before it is rounded to bf16.
    return found, furthest(expected[3], plain(world_size=world_size, steps=STEPS))


@pytest.mark.parametrize("world_size", CASES)
def test_placement_does_not_change_the_result_of_several_ranks(world_size: int) -> None:
    for found, distance in run_ranks(compare, world_size, world_size):
        assert not found
        assert distance < 2e-2


MATRIX = 256  # elements


def volumes(rank: int, counts: list[int]) -> list[dict[str, Any]]:
    found = []
    for count in counts:
        for where in (ON_CPU, ON_NVME):
            matrices = nn.Sequential(stack(layers=count, bias=False))  # one unit of matrices of one size
            muon = MuonAdamW(matrices, muon=["*"])
            how = {"units": lambda name, _: name == "0", "max_grad_norm": 1.0, "precision": "bf16", **where}
            model, optimizer = engines.prepared(matrices, stock=lambda _, muon=muon: muon, **how)
            counted = optimizer._engine.context.ranks.counts
            engines.train(model, optimizer)  # learns the order
            counted.clear()
            engines.train(model, optimizer)
            found.append({"counts": dict(counted), "bytes": dict(counted.nbytes)})
            optimizer.close()
    return found


def formula(world_size: int, count: int) -> dict[str, Any]:
    owned = OwnerAssignment(world_size).choose([(16, 16)] * count)
    shards = [max(matrices * MATRIX, ALIGNMENT_NUMEL) for matrices in owned]
    nbytes = 2 * sum(shards)  # bf16
    agreed = 8 * (2 * count + 3)  # fp64: of each parameter its norm and whether it has one; three of the step
    if len(set(shards)) == 1:
        named: Counter[str] = Counter(all_gather=2, reduce_scatter=1, all_reduce=1)
        gathered = {("all_gather", "shard"): 2 * nbytes, ("reduce_scatter", "shard"): nbytes}
    else:
        named = Counter(broadcast=2 * world_size, reduce=world_size, all_reduce=1)
        gathered = {("broadcast", "shard"): 2 * nbytes, ("reduce", "shard"): nbytes}
    return {"counts": dict(named), "bytes": {**gathered, ("all_reduce", "shard"): agreed}}


@pytest.mark.parametrize(("world_size", "counts"), [(2, [5, 4, 1]), (4, [5, 2])])
def test_each_matrix_is_reduced_to_its_owner_once_and_comes_from_it(world_size: int, counts: list[int]) -> None:
    for of_rank in run_ranks(volumes, world_size, counts):
        assert of_rank == [formula(world_size, count) for count in counts for _ in range(2)]


LLAMA = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]


@pytest.mark.parametrize("ranks", [2, 16])
def test_ranks_get_alike_work_and_bytes(ranks: int) -> None:
    """Of Llama 3 8B: no rank has more than the mean and the work of one matrix, nor a quarter more bytes than the mean.

    No rule can promise less work before it knows all units: matrices are not cut. Wide ones have more work for their
    bytes, hence the bytes.
    """
    owners = OwnerAssignment(ranks)
    work, nbytes = [0.0] * ranks, [0] * ranks
    for _ in range(32):  # layers
        for shape in sorted(set(LLAMA), reverse=True):
            shapes = [shape] * LLAMA.count(shape)
            for rank, count in enumerate(owners.choose(shapes)):
                work[rank] += count * shape[0] * shape[1] * min(shape)
                nbytes[rank] += count * shape[0] * shape[1]
    largest = max(shape[0] * shape[1] * min(shape) for shape in LLAMA)
    assert max(work) <= sum(work) / ranks + largest, work
    assert max(nbytes) <= 1.25 * sum(nbytes) / ranks, nbytes
