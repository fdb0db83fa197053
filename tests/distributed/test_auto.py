"""`prepare(placement="auto")` on two ranks: all take the first one's plan, and stop where that one fails."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

import penstock
from penstock.config import Options, Placement
from penstock.planner.machine import Machine
from penstock.planner.plans import Plan
from penstock.planner.rates import Rate
from penstock.planner.this_machine import remember
from penstock.probe.fingerprint import fingerprint
from tests.lib.plans import small
from tests.lib.ranks import run_ranks
from tests.lib.refusals import said_by

OTHER = Placement(optimizer="cpu")
TILES = Options(tile_bytes=1 << 14)


def plan(placement: Placement) -> Plan:
    return small(placement=placement, world_size=2)


def prepare(**arguments: Any) -> tuple[torch.nn.Module, penstock.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, penstock.prepare(model, optimizer, precision="fp32", **arguments)


def trained(**arguments: Any) -> tuple[str | None, list[torch.Tensor]]:
    """The plan, and the parameters after two steps."""
    model, optimizer = prepare(**arguments)
    for _ in range(2):
        optimizer.backward(model(torch.ones(2, 32)).square().mean())
        optimizer.step()
    values = [optimizer.full_param(parameter) for parameter in model.parameters()]
    optimizer.close()
    return None if optimizer.plan is None else optimizer.plan.to_json(), values


def probe_before(rank: int, folder: Path) -> None:
    """Leave what this machine would be found to do in the cache, links and all."""
    os.environ["XDG_CACHE_HOME"] = str(folder / f"cache of {rank}")
    if rank == 0:  # the other one is not asked
        known = Machine.read("cpu-laptop")
        links = {name: Rate(value, value, value, "made up") for name, value in LINKS.items()}
        figures = {name: figure for name, figure in known.figures.items() if not name.startswith(("disk", "folders"))}
        found = replace(known, figures={**figures, **links}, fingerprint=fingerprint(torch.device("cpu")), probed=True)
        remember(found)


LINKS = {"link_bandwidth": 1e9, "link_seconds": 1e-4}


def work(rank: int, folder: Path) -> dict[str, Any]:
    probe_before(rank, folder)
    mine, broken = folder / f"{rank}.json", folder / f"broken {rank}.json"
    mine.write_text(plan(OTHER if rank == 0 else Placement()).to_json())
    broken.write_text("{" if rank == 0 else plan(OTHER).to_json())
    batches: list[int] = []

    def batch() -> torch.Tensor:
        batches.append(rank)
        if len(batches) > 1 and rank == 0 and fails:
            raise ValueError("no data")
        return torch.randn(2, 32)

    fails = False
    found: dict[str, Any] = {
        "by hand": trained(placement=OTHER, overlap="forward", options=TILES),
        "files": trained(placement="auto", plan=mine),
        "batch": trained(placement="auto", batch=batch),
        "batches": list(batches),
        "broken": said_by(partial(prepare, placement="auto", plan=broken)),
        "one rank alone": said_by(
            partial(prepare, placement="auto" if rank == 0 else None, plan=mine if rank == 0 else None)
        ),
        "one has a batch": said_by(
            partial(prepare, placement="auto", **({"plan": mine} if rank == 0 else {"batch": batch}))
        ),
    }
    fails = True
    batches[:] = [rank]
    found["failing batch"] = said_by(partial(prepare, placement="auto", batch=batch))
    found["after all"] = trained(placement="auto", plan=mine)[0]
    return found


def test_all_take_the_first_ranks_plan_and_stop_where_it_fails(tmp_path: Path) -> None:
    found = one, other = run_ranks(work, 2, tmp_path)
    for of_rank in found:  # where files differ, the first rank's; and what comes of it is what arguments give
        assert of_rank["by hand"][0] is None
        assert of_rank["files"][0] == plan(OTHER).to_json()
        assert all(map(torch.equal, of_rank["files"][1], of_rank["by hand"][1]))
        assert "Ranks are out of step" in of_rank["one rank alone"]
        assert 'Ranks differ in plan or batch: rank 0: "plan"; rank 1: "batch".' in of_rank["one has a batch"]
        assert "no data" in of_rank["failing batch"]
        assert "broken 0.json is not read: it is no JSON" in of_rank["broken"]
        assert of_rank["after all"] == plan(OTHER).to_json(), "a refusal leaves nothing behind"
    assert one["broken"].startswith("ConfigError: ")
    assert other["broken"].startswith("EngineError: Rank 0 of 2 failed in prepare(placement='auto'), and this one")
    # Where there is a batch, the first rank plans for all.
    assert one["batch"][0] == other["batch"][0]
    assert '"world_size": 2' in one["batch"][0]
    assert set(one["batches"]) == {0}
    assert other["batches"] == []


def on_a_mesh(rank: int, folder: Path) -> dict[str, Any]:
    probe_before(rank, folder)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    flat, mine = folder / f"flat {rank}.json", folder / f"hybrid {rank}.json"
    flat.write_text(small(placement=OTHER, world_size=4).to_json())
    hybrid = small(placement=OTHER, world_size=4, mesh={"dp_replicate": 2, "dp_shard": 2})
    mine.write_text(hybrid.to_json())
    return {
        "by hand": trained(mesh=mesh, placement=OTHER, overlap="forward", options=TILES)[1],
        "file": trained(mesh=mesh, placement="auto", plan=mine)[1],
        "batch": trained(mesh=mesh, placement="auto", batch=lambda: torch.randn(2, 32))[0],
        "flat plan": said_by(partial(prepare, mesh=mesh, placement="auto", plan=flat)),
        "flat ranks": said_by(partial(prepare, placement="auto", plan=mine)),
        "tp": said_by(
            partial(prepare, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)), placement="auto", plan=mine)
        ),
    }


def test_copies_of_shards_are_planned_for_and_other_ranks_are_refused(tmp_path: Path) -> None:
    for found in run_ranks(on_a_mesh, 4, tmp_path):
        made = Plan.from_json(found["batch"])
        assert (made.world_size, made.mesh) == (4, {"dp_replicate": 2, "dp_shard": 2, "tp": 1})
        for value, by_hand in zip(found["file"], found["by hand"], strict=True):
            assert torch.equal(value, by_hand)
        assert "for a mesh of dp_shard 4, this run has dp_replicate 2 x dp_shard 2" in found["flat plan"]
        assert "for a mesh of dp_replicate 2 x dp_shard 2, this run has dp_shard 4" in found["flat ranks"]
        assert "for a mesh of dp_replicate 2 x dp_shard 2, this run has tp 4" in found["tp"]
