"""Models whose parameters are DTensors, against plain torch with the same plan and against one rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock
from penstock import Options, Placement
from tests.support import run_ranks, thorough

STEPS = 4


class Block(nn.Module):
    """A norm, and two products that ranks divide."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, vocabulary: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 8)
        self.blocks = nn.ModuleList(Block(8, 24) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make(vocabulary: int = 12) -> Model:
    torch.manual_seed(0)
    return Model(vocabulary)


def parallelize(model: Model, mesh: Any, plan: str) -> Model:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    if plan == "sequence":
        whole = {
            "embedding": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": tp.SequenceParallel(),
            "head": tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        block = {
            "norm": tp.SequenceParallel(),
            "up": tp.ColwiseParallel(input_layouts=Shard(1)),
            "down": tp.RowwiseParallel(output_layouts=Shard(1)),
        }
    else:
        whole = {"head": tp.ColwiseParallel(output_layouts=Replicate())}
        block = {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}
    tp.parallelize_module(model, mesh, whole)
    for each in model.blocks:
        tp.parallelize_module(each, mesh, block)
    return model


def meshes(tp: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp_shard", "tp"))


def batches(step: int, data: int, size: int) -> Tensor:
    """The rows of one data rank, of eight."""
    ids = torch.randint(0, 12, (8, 6), generator=torch.Generator().manual_seed(step))
    return ids.view(size, 8 // size, 6)[data]


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.roll(1, 1).flatten())


def whole(tensor: Tensor) -> Tensor:
    full = getattr(tensor, "full_tensor", None)
    return (tensor if full is None else full()).detach().clone()


def plainly(clip: float | None, vocabulary: int = 12) -> tuple[dict[str, Tensor], list[float]]:
    """Train on one rank with torch alone."""
    model = make(vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for step in range(STEPS):
        loss_of(model, batches(step, 0, 1)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip or 1e9)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, norms


def trained(
    tp: int, plan: str, vocabulary: int, clip: float | None, stage: int, precision: str, overlap: str, **placed: Any
) -> tuple[dict[str, Tensor], list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Train on all ranks; return parameters, norms, second moments and gradients, all whole."""
    mesh = meshes(tp)
    model = parallelize(make(vocabulary), mesh["tp"], plan)
    of_torch = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = penstock.prepare(
        model,
        of_torch,
        mesh=mesh,
        stage=stage,  # type: ignore[arg-type]
        precision=precision,  # type: ignore[arg-type]
        overlap=overlap,  # type: ignore[arg-type]
        max_grad_norm=clip,
        placement=Placement(**placed),
        options=Options(tile_bytes=4096),
    )
    data = mesh.get_local_rank("dp_shard")
    norms = []
    for step in range(STEPS):
        loss_of(model, batches(step, data, mesh.size(0))).backward()
        grads = {name: optimizer.full_grad(p) for name, p in model.named_parameters()}
        norms.append(optimizer.step().grad_norm)
        optimizer.zero_grad()
    full = {name: optimizer.full_param(p) for name, p in model.named_parameters()}
    moments = {name: optimizer.full_state(p, "exp_avg_sq") for name, p in model.named_parameters()}
    with optimizer.gathered():
        for name, p in model.named_parameters():
            torch.testing.assert_close(whole(p).float(), full[name], rtol=1e-2, atol=1e-2)
    optimizer.close()
    for name, p in model.named_parameters():
        torch.testing.assert_close(whole(p), full[name], rtol=0, atol=0)  # as it was given: fp32, a proper DTensor
    return full, norms, moments, grads


def _rank(rank: int, *row: Any) -> Any:
    *row, placed = row
    return trained(*row, **placed)


def everywhere(world: int, tp: int, plan: str, **changed: Any) -> list[Any]:
    row = {"vocabulary": 12, "clip": None, "stage": 3, "precision": "fp32", "overlap": "auto"} | changed
    names = ("vocabulary", "clip", "stage", "precision", "overlap")
    placed = {name: value for name, value in row.items() if name not in names}
    return run_ranks(_rank, world, tp, plan, *(row[name] for name in names), placed)


@pytest.mark.parametrize(
    ("world", "tp", "plan", "changed"),
    [
        (2, 2, "plain", {}),
        (2, 2, "sequence", {"clip": 0.5}),
        (2, 2, "plain", {"vocabulary": 13, "clip": 0.5}),
        (4, 2, "sequence", {"clip": 0.5, "vocabulary": 13}),
        thorough(4, 2, "plain", {"stage": 2}),
        thorough(4, 2, "plain", {"stage": 1, "clip": 0.5}),
        thorough(4, 2, "plain", {"stage": 0}),
        thorough(4, 2, "sequence", {"overlap": "backward"}),
        thorough(8, 4, "sequence", {"clip": 0.5}),
        thorough(8, 2, "plain", {"clip": 0.5, "overlap": "forward"}),
    ],
)
def test_training_is_that_of_one_rank(world: int, tp: int, plan: str, changed: dict[str, Any]) -> None:
    expected, norms = plainly(changed.get("clip"), changed.get("vocabulary", 12))
    for found, found_norms, _, _ in everywhere(world, tp, plan, **changed):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name], value, rtol=1e-4, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}"
            )
        torch.testing.assert_close(torch.tensor(found_norms), torch.tensor(norms), rtol=1e-5, atol=0)


PLACED = [
    {"params": "cpu", "grads": "cpu", "optimizer": "cpu"},
    {"params": "nvme", "grads": "nvme", "optimizer": "nvme"},
    {"params": "cpu", "optimizer": {"device": 0.5, "cpu": 0.25, "nvme": 0.25}},
]


@pytest.mark.parametrize("precision", ["fp32", thorough("bf16")])
def test_placement_never_changes_the_result(precision: str, tmp_path: Path) -> None:
    (expected, norms, moments, grads), *_ = everywhere(2, 2, "sequence", clip=0.5, vocabulary=13, precision=precision)
    for placed in PLACED:
        row = {"clip": 0.5, "vocabulary": 13, "precision": precision, "nvme_path": str(tmp_path), **placed}
        found = everywhere(2, 2, "sequence", **row)[0]
        assert found[1] == norms
        for ours, theirs in zip((found[0], *found[2:]), (expected, moments, grads), strict=True):
            for name, value in theirs.items():
                assert torch.equal(ours[name], value), (placed, name)
