"""Checkpoints of tensor-parallel runs: loaded by ranks that divide parameters otherwise, every value bit for bit."""

from pathlib import Path
from typing import Any

import torch

import penstock
from tests.distributed.test_tensor_parallel import batches, loss_of, make, meshes, parallelize
from tests.support import run_ranks

KINDS = ("exp_avg", "exp_avg_sq")


def _whole(optimizer: Any, model: Any) -> dict[str, Any]:
    found = {}
    for name, p in model.named_parameters():
        found[name] = optimizer.full_param(p)
        found |= {f"{name} {kind}": optimizer.full_state(p, kind) for kind in KINDS}
    return found


def _rank(rank: int, tp: int, source: str, out: str, nvme: str) -> dict[str, Any]:
    mesh = meshes(tp)
    model = parallelize(make(), mesh["tp"], "rows") if tp > 1 else make()
    optimizer = penstock.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        mesh=mesh,
        precision="fp32",
        placement=penstock.Placement(params="nvme", optimizer="cpu", nvme_path=nvme),
    )
    if source:
        optimizer.load(source)
    else:
        for step in range(2):
            optimizer.backward(loss_of(model, batches(step, 0, 1)))
            optimizer.step()
            optimizer.zero_grad()
    optimizer.save(out, blocking=False)
    optimizer.synchronize()
    found = _whole(optimizer, model)
    optimizer.close()
    return found


def test_values_are_the_same_at_every_mesh(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    source, before = "", None
    for number, (world, tp) in enumerate([(2, 2), (2, 1), (4, 2), (2, 2)]):
        out = str(tmp_path / f"step-{number}")
        for found in run_ranks(_rank, world, tp, source, out, str(tmp_path / "nvme")):
            before = before or found
            for name, value in before.items():
                assert torch.equal(found[name], value), (number, name)
        source = out
