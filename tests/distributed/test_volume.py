"""Collectives of a step: how many, and of how many bytes, are what a formula says, and what a simulation says.

With U units of F bytes each (padded: 256 elements per parameter, and per shard), S shards of R copies:

    stage    all-gathers    reduce-scatters    sums over copies, where there are some
    0        0              0                  U of U F
    1, 2     U of U F       U of U F           U of U F / S
    3        2 U of 2 U F   U of U F           U of U F / S

and over each dimension a sum of two numbers for each parameter, and three, which decides on the step.
"""

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from penstock.blueprint import request_for
from penstock.build import build
from penstock.planner.simulation.program import OF_MODEL, Program, WorkKind
from penstock.planner.simulation.simulate import Setup, simulate
from penstock.runtime.collectives import Collectives
from penstock.runtime.topology import Grid
from tests.lib.models import stack
from tests.lib.ranks import run_ranks
from tests.lib.streams import separate

UNITS, WIDTH = 3, 16
AGREED_BYTES = 8 * (2 * 2 * UNITS + 3)  # fp64: of each parameter its norm and whether it has one; three of the step
STAGES = (0, 1, 2, 3)

#: What is counted: how often and how many bytes, by name and dimension.
Volume = Mapping[str, Mapping[Any, int]]


net = partial(stack, layers=UNITS, width=WIDTH)


def batch() -> torch.Tensor:
    return torch.ones(2, WIDTH)


def request(model: nn.Module, stage: int) -> Any:
    return request_for(model, stage=stage, units=(nn.Linear,), max_grad_norm=0.5)


def formula(stage: int, grid: Grid) -> Volume:
    per_shard = 256 * grid.shards
    full_bytes = 2 * -(-(WIDTH * WIDTH + 256) // per_shard) * per_shard  # bf16: a weight, and a bias of 16 elements
    counts: Counter[str] = Counter()
    nbytes: Counter[tuple[str, str]] = Counter()
    if grid.shards > 1:
        gathers = UNITS * (2 if stage == 3 else 1)
        counts += Counter(all_gather=gathers, reduce_scatter=UNITS, all_reduce=1)
        nbytes["all_gather", "shard"] = gathers * full_bytes
        nbytes["reduce_scatter", "shard"] = UNITS * full_bytes
        nbytes["all_reduce", "shard"] = AGREED_BYTES
    if grid.replicas > 1:
        counts += Counter(all_reduce=UNITS + 1)
        nbytes["all_reduce", "replicate"] = UNITS * full_bytes // grid.shards + AGREED_BYTES
    return {"counts": dict(counts), "bytes": dict(nbytes)}


def of_program(program: Program, *, of_model: bool = False) -> Volume:
    """The same of the last step of a simulation; or of the collectives that are the model's own."""
    counts: Counter[str] = Counter()
    nbytes: Counter[tuple[str, str]] = Counter()
    for item in program.items[program.steps[-2] : program.steps[-1]]:
        job = program.jobs[item.index] if item.kind is WorkKind.SUBMIT else None
        found = list(job.collectives) if job is not None and (job.stream == OF_MODEL) is of_model else []
        if item.kind is WorkKind.MEET and not of_model:
            found.append(program.meetings[item.index])
        for each in found:
            counts[each.name] += 1
            nbytes[each.name, each.dimension] += each.nbytes
    return {"counts": dict(counts), "bytes": dict(nbytes)}


def volumes(rank: int, shapes: list[tuple[int, int] | None]) -> list[tuple[int, Grid, Volume, Volume]]:
    found = []
    for shape in shapes:
        mesh = None if shape is None else init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
        for stage in STAGES:
            model, ranks = net(), Collectives.from_mesh(mesh, sharded=stage != 0)
            optimizer = build(model, torch.optim.AdamW(model.parameters()), request(model, stage), ranks, separate())
            for _ in range(2):  # the first one learns the order
                ranks.counts.clear()
                optimizer.backward(model(batch()).float().mean())
                optimizer.step()
                optimizer.zero_grad()
            real = {"counts": dict(ranks.counts), "bytes": dict(ranks.counts.nbytes)}
            optimizer.close()
            meant = net()
            setup = Setup(meant, torch.optim.AdamW, batch, grid=ranks.grid, back_end="threads")
            found.append((stage, ranks.grid, real, of_program(simulate(setup, request(meant, stage)).program)))
    return found


@pytest.mark.parametrize(("world_size", "shapes"), [(2, [None, (2, 1), (1, 2)]), (4, [None, (2, 2)])])
def test_what_is_issued_is_what_the_formula_says_and_the_rehearsal(
    world_size: int, shapes: list[tuple[int, int] | None]
) -> None:
    for of_rank in run_ranks(volumes, world_size, shapes):
        assert len(of_rank) == len(shapes) * len(STAGES)
        for stage, grid, real, simulated in of_rank:
            assert grid.world_size == world_size
            assert real == formula(stage, grid), (stage, grid)
            assert simulated == real, (stage, grid)
