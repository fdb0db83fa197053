"""DTensors against plain torch on the same DTensors: of plans, of experts, and of all that a step can be."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.test_tensor_parallel import batches, loss_of, make, mesh_of, parallelize, whole
from tests.lib.engines import ON_NVME, assert_same_state, prepared
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline

STEPS = 2
CLIP = 0.3


class _Sum(torch.autograd.Function):
    """The sum over a group, in forward or in backward; the other way nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, ahead: bool) -> Tensor:
        ctx.group, ctx.ahead = group, ahead
        return _summed(x, group) if ahead else x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.clone() if ctx.ahead else _summed(grad, ctx.group), None, None


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


class Experts(nn.Module):
    """Experts of which each rank has some, for the tokens of all: weights (experts, width, width)."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(8, experts, bias=False)
        self.weight = nn.Parameter(torch.randn(experts, 8, 8) / 4)
        self.mesh: Any = None

    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        router = self.router.weight
        router = router.to_local() if isinstance(router, DTensor) else router
        gates = nn.functional.linear(x, router).softmax(-1)
        if self.mesh is None:
            return x + torch.einsum("btn,nio,bti->bto", gates, self.weight, x).tanh()
        group, size, place = self.mesh.get_group(), self.mesh.size(), self.mesh.get_local_rank()
        own = self.weight.to_local()
        first = place * -(-gates.shape[-1] // size)
        gates, inputs = _Sum.apply(gates, group, False), _Sum.apply(x, group, False)
        part = torch.einsum("btn,nio,bti->bto", gates[..., first : first + len(own)], own, inputs)
        return x + _Sum.apply(part, group, True).tanh()


class Mixture(nn.Module):
    """Two layers of experts."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(Experts(experts) for _ in range(2))
        self.head = nn.Linear(8, 12)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mixture(experts: int, mesh: Any = None) -> Mixture:
    torch.manual_seed(0)
    model = Mixture(experts)
    if mesh is not None:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        for block in model.blocks:
            block.mesh = mesh
            block.weight = nn.Parameter(distribute_tensor(block.weight.detach(), mesh, [Shard(0)]))
            # Replicated, and read as it is here: torch's norms take DTensors alone, or none.
            router = distribute_tensor(block.router.weight.detach(), mesh, [Replicate()])
            block.router.weight = nn.Parameter(router)
    return model


def average(model: nn.Module, group: dist.ProcessGroup, ranks: int) -> None:
    """Make gradients those of all data ranks, as `DistributedDataParallel` does."""
    for p in model.parameters():
        local = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
        dist.all_reduce(local, group=group)
        local.div_(ranks)


def norm_of(model: nn.Module) -> Tensor:
    return torch.cat([whole(p.grad).flatten() for p in model.parameters()]).norm()


def made(kind: str, mesh: Any) -> nn.Module:
    if kind.startswith("experts"):
        name = "ep" if "ep" in mesh.mesh_dim_names else "tp"
        return mixture(int(kind.removeprefix("experts ")), mesh[name])
    model = parallelize(make(13), mesh["tp"], "plain" if kind == "plain" else "sequence")
    if kind == "tied":
        model.head.weight = model.embedding.weight  # each rank's rows of it are those of the other
    if kind == "again":
        for block in model.blocks:
            inner = block.forward
            block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
    return model


def data_of(mesh: Any) -> Any:
    return mesh[mesh.mesh_dim_names[0]]


def reference(kind: str, mesh: Any, micro: int, clip: float | None) -> tuple[dict[str, Tensor], list[float]]:
    """Train by plain torch: AdamW over DTensors, gradients averaged over data ranks, and torch's clipping."""
    model, data, norms, gradients = made(kind, mesh), data_of(mesh), [], {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for step in range(STEPS):
        for part in batches(step, data.get_local_rank(), data.size()).chunk(micro):
            (loss_of(model, part) / micro).backward()
        average(model, data.get_group(), data.size())
        gradients = {f"{name}: gradient": whole(p.grad) for name, p in model.named_parameters()}
        norm = float(norm_of(model))
        norms.append(norm)
        if clip is None:
            pass
        elif any(type(p.grad) is Tensor for p in model.parameters()):  # torch has no norm of both kinds
            for p in model.parameters():
                p.grad.mul_(min(1.0, clip / (norm + 1e-6)))
        else:
            of_torch = nn.utils.clip_grad_norm_(model.parameters(), clip, foreach=False)
            torch.testing.assert_close(whole(of_torch), torch.tensor(norm), rtol=1e-5, atol=0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(p) for name, p in model.named_parameters()} | gradients, norms


def ours(kind: str, mesh: Any, row: dict[str, Any], **how: Any) -> tuple[dict[str, Tensor], list[float]]:
    data, norms, gradients = data_of(mesh), [], {}
    micro, by_torch = row.get("micro", 1), row.get("by_torch", False)
    model, optimizer = prepared(
        made(kind, mesh),
        inline,
        mesh=mesh,
        overlap=row.get("overlap", "auto"),
        stage=row.get("stage", 3),
        max_grad_norm=None if by_torch else row.get("clip", CLIP),
        **how,
    )
    for step in range(STEPS):
        parts = batches(step, data.get_local_rank(), data.size()).chunk(micro)
        for number, part in enumerate(parts):
            with optimizer.no_sync() if number + 1 < micro else nullcontext():
                (loss_of(model, part) / micro).backward()
        if row.get("overlap") != "backward":
            gradients = {f"{name}: gradient": optimizer.full_grad(p) for name, p in model.named_parameters()}
        if by_torch:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
        else:
            norms.append(float(optimizer.step().grad_norm))
        optimizer.zero_grad()
    full = {name: optimizer.full_param(p) for name, p in model.named_parameters()}
    optimizer.close()
    return full | gradients, norms


TP, EP = ("dp_shard", "tp"), ("dp_shard", "ep")
#: By the number of ranks: a mesh and its names, the model, and how it is trained.
ROWS: dict[int, list[tuple[tuple[int, ...], tuple[str, ...], str, dict[str, Any]]]] = {
    2: [
        ((1, 2), TP, "experts 3", {}),
        ((1, 2), EP, "experts 1", {}),  # the second rank has none
    ],
    4: [
        ((2, 2), TP, "sequence", {"micro": 2, "by_torch": True, "stage": 0}),
        ((2, 2), TP, "tied", {"micro": 2, "overlap": "forward", "stage": 2}),
        ((2, 2), TP, "again", {"micro": 2, "overlap": "backward", "clip": None}),
        ((2, 2), ("dp_replicate", "ep"), "experts 4", {}),
        ((2, 1, 2), ("dp_shard", "cp", "ep"), "experts 4", {"by_torch": True}),
    ],
}


def _training(rank: int, world_size: int) -> list[dict[str, float]]:
    sums, meshes = [], {at: mesh_of(*at[0], names=at[1]) for at in dict.fromkeys(row[:2] for row in ROWS[world_size])}
    for number, (sizes, names, kind, row) in enumerate(ROWS[world_size]):
        mesh = meshes[sizes, names]
        expected, expected_norms = reference(kind, mesh, row.get("micro", 1), row.get("clip", CLIP))
        placed = ON_NVME if number % 2 else {}
        found, norms = ours(kind, mesh, row, **placed)
        torch.testing.assert_close(torch.tensor(norms), torch.tensor(expected_norms), rtol=1e-5, atol=0)
        for name, value in found.items():
            at = f"{sizes} {kind} {row} {placed} {name}"
            assert torch.allclose(value, expected[name], rtol=1e-6, atol=1e-6), at
        sums.append({name: float(value.abs().sum()) for name, value in expected.items()})
    return sums


@pytest.mark.parametrize("world_size", ROWS)
def test_training_is_that_of_torch_on_the_same_dtensors(world_size: int) -> None:
    """Gradients as well that autograd leaves as partial sums, as those of the norms of `sequence`."""
    one, *others = run_ranks(_training, world_size, world_size)
    assert all(other == one for other in others)


def _overflow(rank: int) -> list[Any]:
    """One rank's gradient is not finite in the second step."""
    mesh = mesh_of(1, 2)
    found: list[Any] = []
    model = parallelize(make(13), mesh["tp"], "plain")
    _, optimizer = prepared(model, inline, mesh=mesh, precision="fp16", initial_loss_scale=256.0, **ON_NVME)
    for step in range(3):
        optimizer.backward(loss_of(model, batches(step, 0, 1)))
        if step == 1:
            weight = model.blocks[0].up.weight  # rows 0 to 7 are the first rank's
            grad = optimizer.full_grad(weight)
            grad[12, 0] = float("inf")
            optimizer.set_full_grad(weight, grad)
        before = optimizer.full_param(model.head.weight)
        result = optimizer.step()
        found.append((bool(result.skipped), torch.equal(before, optimizer.full_param(model.head.weight))))
        optimizer.zero_grad()
    optimizer.close()
    return found


def test_ranks_skip_together_where_one_overflows() -> None:
    for found in run_ranks(_overflow, 2):
        assert found == [(False, False), (True, True), (False, False)]


def _formats(rank: int) -> list[float]:
    mesh = mesh_of(2, 2)
    (expected, expected_norms), (found, norms) = (ours("sequence", mesh, {}, secondary_shard=n) for n in (None, 2))
    assert_same_state(found, expected)
    assert norms == expected_norms
    codes = {"reduce_format": "int8", "gather_format": "fp8", "secondary_shard": 2}
    (found, norms), (again, norms_again) = (ours("sequence", mesh, {}, **placed, **codes) for placed in ({}, ON_NVME))
    assert_same_state(found, again)
    assert norms == norms_again
    assert all(value.isfinite().all() for value in found.values())
    return [*norms, *(float(value.double().sum()) for value in found.values())]


def test_wire_formats_beside_tensor_parallelism() -> None:
    one, *others = run_ranks(_formats, 4)
    assert all(other == one for other in others)


def _uneven(rank: int, folder: str) -> None:
    """A rank that has no rows of a parameter trains, saves and loads."""
    mesh = mesh_of(1, 2, names=("dp_shard", "ep"))
    kept: list[Any] = []
    for load in (False, True):
        model = mixture(1, mesh["ep"])
        assert model.blocks[0].weight.to_local().shape[0] == 1 - rank
        _, optimizer = prepared(model, inline, mesh=mesh, **ON_NVME)
        if load:
            optimizer.load(folder)
        else:
            loss_of(model, batches(0, 0, 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.save(folder)
        loss_of(model, batches(1, 0, 1)).backward()
        optimizer.step()
        kept.append([optimizer.full_param(p) for p in model.parameters()])
        kept[-1] += [optimizer.full_state(p, "exp_avg") for p in model.parameters()]
        optimizer.close()
    for one, other in zip(*kept, strict=True):
        assert torch.equal(one, other)


def test_a_rank_without_rows_of_a_parameter(tmp_path: Path) -> None:
    run_ranks(_uneven, 2, str(tmp_path / "saved"))
