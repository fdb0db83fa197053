"""Checkpoints of tensor-parallel runs: loaded by ranks that divide parameters otherwise, every value bit for bit."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import penstock
from tests.distributed.test_tensor_parallel import batches, loss_of, make, meshes, parallelize
from tests.lib.ranks import run_ranks

KINDS = ("exp_avg", "exp_avg_sq")


class Form(NamedTuple):
    """What a run is made of, and what comes of its checkpoint at another mesh."""

    precision: str = "fp32"
    state_dtype: str = "fp32"
    average: bool = False
    vocabulary: int = 12
    refused: str = ""


def _mesh(tp: int, replicas: int) -> Any:
    if replicas == 1:
        return meshes(tp)
    names, shape = ["dp_replicate", "tp"], [replicas, tp]
    if (shards := dist.get_world_size() // tp // replicas) > 1:
        names, shape = ["dp_replicate", "dp_shard", "tp"], [replicas, shards, tp]
    return torch.distributed.device_mesh.init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(names))


def _whole(optimizer: Any, model: Any, average: Any) -> dict[str, Any]:
    found = {}
    for name, p in model.named_parameters():
        found[name] = optimizer.full_param(p)
        found |= {f"{name} {kind}": optimizer.full_state(p, kind) for kind in KINDS}
    if average is not None:
        with average.applied():
            found |= {f"{name} average": optimizer.full_param(p) for name, p in model.named_parameters()}
    return found


def _rank(
    rank: int, tp: int, replicas: int, form: Form, source: str, out: str, nvme: str
) -> tuple[dict[str, Any], str]:
    """Train or load, and save in the background: whole values, and what a load said that refused."""
    mesh = _mesh(tp, replicas)
    model = make(form.vocabulary)
    if tp > 1:
        parallelize(model, mesh["tp"], "rows")
    optimizer = penstock.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        mesh=mesh,
        precision=form.precision,  # type: ignore[arg-type]
        placement=penstock.Placement(params="nvme", optimizer="cpu", nvme_path=nvme),
        options=penstock.Options(tile_bytes=4096, state_dtype=form.state_dtype),  # type: ignore[arg-type]
    )
    average = penstock.EMA(optimizer, decay=0.5) if form.average else None
    said = ""
    if source:
        try:
            optimizer.load(source)
        except penstock.CheckpointError as error:
            said = str(error)
    else:
        for step in range(2):
            optimizer.backward(loss_of(model, batches(step, 0, 1)))
            optimizer.step()
            optimizer.zero_grad()
            if average is not None:
                average.update()
    found: dict[str, Any] = {}
    if not said:
        optimizer.save(out, blocking=False)
        optimizer.synchronize()
        found = _whole(optimizer, model, average)
    optimizer.close()
    return found, said


@pytest.mark.parametrize(
    ("form", "rows"),
    [
        (Form(precision="bf16", average=True, vocabulary=13), [(4, 2, 2), (4, 2, 1), (2, 2, 1), (1, 1, 1)]),
        (
            Form(state_dtype="int8", average=True, refused="has 8-bit states in blocks of 256"),
            [(4, 2, 2), (2, 2, 1), (2, 1, 1)],
        ),
    ],
    ids=["bf16", "int8"],
)
def test_values_are_the_same_at_every_mesh(form: Form, rows: list[tuple[int, int, int]], tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    source, before = "", None
    for number, (world, tp, replicas) in enumerate(rows):
        out = str(tmp_path / f"step-{number}")
        refuses = bool(form.refused) and tp != rows[0][1]
        for found, said in run_ranks(_rank, world, tp, replicas, form, source, out, str(tmp_path / "nvme")):
            if refuses:
                assert form.refused in said
                continue
            assert not said
            before = before or found
            assert found.keys() == before.keys()
            for name, value in before.items():
                assert torch.equal(found[name], value), (number, name)
        if not refuses:
            source = out
