"""Checkpoints of tensor-parallel runs: loaded by ranks that divide parameters otherwise, every value bit for bit."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import penstock
from tests.distributed.test_tensor_parallel import batches, loss_of, make, mesh_of, parallelize
from tests.lib.engines import prepared
from tests.lib.ranks import run_ranks
from tests.lib.refusals import said_by
from tests.lib.streams import inline

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
        return mesh_of(dist.get_world_size() // tp, tp)
    return mesh_of(replicas, tp, names=("dp_replicate", "tp"))


def values_of(optimizer: Any, model: Any, average: Any = None) -> dict[str, Any]:
    found = {}
    for name, p in model.named_parameters():
        found[name] = optimizer.full_param(p)
        found |= {f"{name} {kind}": optimizer.full_state(p, kind) for kind in KINDS}
    if average is not None:
        with average.applied():
            found |= {f"{name} average": optimizer.full_param(p) for name, p in model.named_parameters()}
    return found


def _rank(rank: int, tp: int, replicas: int, form: Form, source: str, out: str) -> tuple[dict[str, Any], str]:
    """Train or load, and save in the background: whole values, and what a load said that refused."""
    mesh = _mesh(tp, replicas)
    model = make(form.vocabulary)
    if tp > 1:
        parallelize(model, mesh["tp"], "rows")
    how = {"params": "nvme", "optimizer": "cpu", "precision": form.precision, "state_dtype": form.state_dtype}
    _, optimizer = prepared(model, inline, mesh=mesh, **how)
    average = penstock.EMA(optimizer, decay=0.5) if form.average else None
    said = ""
    if source:
        said = said_by(lambda: optimizer.load(source))
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
        found = values_of(optimizer, model, average)
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
    source, before = "", None
    for number, (world, tp, replicas) in enumerate(rows):
        out = str(tmp_path / f"step-{number}")
        refuses = bool(form.refused) and tp != rows[0][1]
        for found, said in run_ranks(_rank, world, tp, replicas, form, source, out):
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
