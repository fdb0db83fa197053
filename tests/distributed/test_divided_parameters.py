"""DTensors against plain torch on the same DTensors: of plans, of experts, and of all that a step can be."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock import Options, Placement
from penstock.errors import ConfigError
from tests.distributed.test_tensor_parallel import Model, batches, loss_of, make, parallelize, whole
from tests.support import run_ranks, thorough

STEPS = 3
CLIP = 0.3
NVME = {"params": "nvme", "grads": "nvme", "optimizer": "nvme"}


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


def mesh_of(*sizes: int, names: tuple[str, ...] = ("dp_shard", "tp")) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


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
    model = parallelize(make(13), mesh["tp"], "sequence")
    if kind == "again":
        for block in model.blocks:
            inner = block.forward
            block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
    return model


def data_of(mesh: Any) -> Any:
    return mesh[mesh.mesh_dim_names[0]]


def reference(kind: str, mesh: Any, micro: int) -> tuple[dict[str, Tensor], list[float]]:
    """Train by plain torch: AdamW over DTensors, gradients averaged over data ranks, and torch's clipping."""
    model, data, norms = made(kind, mesh), data_of(mesh), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for step in range(STEPS):
        for part in batches(step, data.get_local_rank(), data.size()).chunk(micro):
            (loss_of(model, part) / micro).backward()
        average(model, data.get_group(), data.size())
        norm = float(norm_of(model))
        norms.append(norm)
        if any(type(p.grad) is Tensor for p in model.parameters()):  # torch has no norm of both kinds
            for p in model.parameters():
                p.grad.mul_(min(1.0, CLIP / (norm + 1e-6)))
        else:
            of_torch = nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=False)
            torch.testing.assert_close(whole(of_torch), torch.tensor(norm), rtol=1e-5, atol=0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(p) for name, p in model.named_parameters()}, norms


def ours(
    kind: str, mesh: Any, micro: int, by_torch: bool, options: dict[str, Any], placed: dict[str, Any]
) -> tuple[dict[str, Tensor], list[float]]:
    model, data, norms = made(kind, mesh), data_of(mesh), []
    optimizer = penstock.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        mesh=mesh,
        precision="fp32",
        max_grad_norm=None if by_torch else CLIP,
        placement=Placement(**placed),
        options=Options(tile_bytes=4096, **options),
    )
    for step in range(STEPS):
        parts = batches(step, data.get_local_rank(), data.size()).chunk(micro)
        for number, part in enumerate(parts):
            with optimizer.no_sync() if number + 1 < micro else nullcontext():
                (loss_of(model, part) / micro).backward()
        if by_torch:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
        else:
            norms.append(float(optimizer.step().grad_norm))
        optimizer.zero_grad()
    full = {name: optimizer.full_param(p) for name, p in model.named_parameters()}
    optimizer.close()
    return full, norms


def _both(rank: int, sizes: tuple[int, ...], names: tuple[str, ...], kind: str, row: dict[str, Any], path: str) -> Any:
    mesh = mesh_of(*sizes, names=names)
    micro, by_torch = row.get("micro", 1), row.get("by_torch", False)
    expected, expected_norms = reference(kind, mesh, micro)
    for placed in [{}, {**NVME, "nvme_path": path}]:
        found, norms = ours(kind, mesh, micro, by_torch, {}, placed)
        torch.testing.assert_close(torch.tensor(norms), torch.tensor(expected_norms), rtol=1e-5, atol=0)
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name], value, rtol=1e-6, atol=1e-6, msg=lambda text, n=name, at=placed: f"{at} {n}: {text}"
            )
    return {name: float(value.abs().sum()) for name, value in expected.items()}


TP = ("dp_shard", "tp")


@pytest.mark.parametrize(
    ("sizes", "names", "kind", "row"),
    [
        ((1, 2), TP, "sequence", {}),
        ((1, 2), ("dp_shard", "ep"), "experts 4", {"by_torch": True}),
        ((2, 2), TP, "again", {"micro": 2}),
        thorough((1, 2), TP, "sequence", {"by_torch": True}),
        thorough((2, 2), TP, "sequence", {"by_torch": True, "micro": 2}),
        thorough((1, 2), TP, "experts 3", {}),
        thorough((2, 2), TP, "experts 4", {"micro": 2}),
        thorough((1, 2), ("dp_shard", "ep"), "experts 1", {}),  # the second rank has none
        thorough((2, 2), ("dp_replicate", "ep"), "experts 4", {}),
        thorough((2, 1, 2), ("dp_shard", "cp", "ep"), "experts 4", {"by_torch": True}),
        thorough((2, 2, 2), ("dp_shard", "tp", "ep"), "experts 4", {}),
    ],
)
def test_training_is_that_of_torch_on_the_same_dtensors(
    sizes: tuple[int, ...], names: tuple[str, ...], kind: str, row: dict[str, Any], tmp_path: Path
) -> None:
    ranks = int(torch.tensor(sizes).prod())
    one, *others = run_ranks(_both, ranks, sizes, names, kind, row, str(tmp_path))
    assert all(other == one for other in others)


def _overflow(rank: int, path: str) -> list[Any]:
    """One rank's gradient is not finite in the second step."""
    mesh = mesh_of(1, 2)
    found: list[Any] = []
    for placed in [{}, {**NVME, "nvme_path": path}]:
        model = parallelize(make(13), mesh["tp"], "plain")
        optimizer = penstock.prepare(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            mesh=mesh,
            precision="fp16",
            placement=Placement(**placed),
            options=Options(initial_loss_scale=256.0),
        )
        for step in range(3):
            optimizer.backward(loss_of(model, batches(step, 0, 1)))
            if step == 1:
                weight = model.blocks[0].up.weight  # rows 0 to 11 are the first rank's
                grad = optimizer.full_grad(weight)
                grad[20, 0] = float("inf")
                optimizer.set_full_grad(weight, grad)
            before = optimizer.full_param(model.head.weight)
            result = optimizer.step()
            after = optimizer.full_param(model.head.weight)
            found.append((bool(result.skipped), torch.equal(before, after)))
            optimizer.zero_grad()
        optimizer.close()
    return found


def test_ranks_skip_together_where_one_overflows(tmp_path: Path) -> None:
    for found in run_ranks(_overflow, 2, str(tmp_path)):
        assert found == 2 * [(False, False), (True, True), (False, False)]


def _loaded(rank: int, folder: str, path: str) -> None:
    """Inference, and meta DTensors that take their values from files, are the model."""
    from safetensors.torch import save_file

    mesh = mesh_of(1, 2)
    expected = make(13)
    if rank == 0:
        save_file(expected.state_dict(), f"{folder}/model.safetensors")
    dist.barrier()
    ids = batches(0, 0, 1)
    values = {name: p.detach() for name, p in expected.named_parameters()}
    for placed in [{}, {"params": "nvme", "nvme_path": path}]:
        for optimize in (False, True):
            with torch.device("meta"):
                model = Model(13)
            parallelize(model, mesh["tp"], "sequence")
            assert all(p.is_meta for p in model.parameters())
            of_torch = torch.optim.AdamW(model.parameters(), lr=1e-2) if optimize else None
            optimizer = penstock.prepare(
                model, of_torch, mesh=mesh, precision="fp32", weights=folder, placement=Placement(**placed)
            )
            with torch.no_grad():
                torch.testing.assert_close(model(ids), expected(ids))
            for name, p in model.named_parameters():
                assert torch.equal(optimizer.full_param(p), values[name]), name
            if optimize:
                loss_of(model, ids).backward()
                optimizer.step()
            optimizer.close()
        given = parallelize(make(13), mesh["tp"], "plain")
        optimizer = penstock.prepare(given, None, mesh=mesh, precision="fp32", placement=Placement(**placed))
        with torch.no_grad():
            torch.testing.assert_close(given(ids), expected(ids))
        optimizer.close()


def test_inference_and_meta_parameters(tmp_path: Path) -> None:
    files, tier = tmp_path / "files", tmp_path / "tier"
    files.mkdir()
    tier.mkdir()
    run_ranks(_loaded, 2, str(files), str(tier))


def _formats(rank: int, path: str, options: dict[str, Any], exact: bool) -> list[float]:
    mesh = mesh_of(2, 2)
    placed = {**NVME, "nvme_path": path}
    found, norms = ours("sequence", mesh, 1, False, options, {})
    again, norms_again = ours("sequence", mesh, 1, False, options, placed)
    expected, expected_norms = ours("sequence", mesh, 1, False, {}, {})
    for name, value in expected.items():
        assert found[name].isfinite().all(), name
        assert torch.equal(found[name], again[name]), name
        if exact:
            assert torch.equal(found[name], value), name
    assert norms == norms_again
    assert not exact or norms == expected_norms
    return [*norms, *(float(value.double().sum()) for value in found.values())]


@pytest.mark.parametrize(
    ("options", "exact"),
    [
        thorough({"secondary_shard": 2}, True),
        thorough({"gather_format": "int8"}, False),
        thorough({"gather_format": "fp8", "secondary_shard": 2}, False),
        thorough({"reduce_format": "int8"}, False),
        thorough({"reduce_format": "int4", "gather_format": "int8"}, False),
    ],
)
def test_wire_formats_beside_tensor_parallelism(options: dict[str, Any], exact: bool, tmp_path: Path) -> None:
    one, *others = run_ranks(_formats, 4, str(tmp_path), options, exact)
    assert all(other == one for other in others)


def _uneven(rank: int, folder: str, path: str) -> None:
    """A rank that has no rows of a parameter trains, saves and loads."""
    mesh = mesh_of(1, 2, names=("dp_shard", "ep"))
    for number, placed in enumerate([{}, {**NVME, "nvme_path": path}]):
        kept: list[Any] = []
        for load in (False, True):
            model = mixture(1, mesh["ep"])
            assert model.blocks[0].weight.to_local().shape[0] == 1 - rank
            optimizer = penstock.prepare(
                model,
                torch.optim.AdamW(model.parameters(), lr=1e-2),
                mesh=mesh,
                precision="fp32",
                placement=Placement(**placed),
            )
            if load:
                optimizer.load(f"{folder}/{number}")
            else:
                loss_of(model, batches(0, 0, 1)).backward()
                optimizer.step()
                optimizer.zero_grad()
                optimizer.save(f"{folder}/{number}")
            loss_of(model, batches(1, 0, 1)).backward()
            optimizer.step()
            kept.append([optimizer.full_param(p) for p in model.parameters()])
            kept[-1] += [optimizer.full_state(p, "exp_avg") for p in model.parameters()]
            optimizer.close()
        for one, other in zip(*kept, strict=True):
            assert torch.equal(one, other)


def test_a_rank_without_rows_of_a_parameter(tmp_path: Path) -> None:
    run_ranks(_uneven, 2, str(tmp_path / "saved"), str(tmp_path))


def _asked(rank: int) -> tuple[int, int, str, str]:
    from torch.distributed.tensor import Shard, distribute_tensor

    from penstock.footprint import footprint
    from penstock.planner import plan

    mesh = mesh_of(1, 2)
    model = nn.Sequential(nn.Linear(512, 512, bias=False))
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh["tp"], [Shard(0)]))
    plain = nn.Sequential(nn.Linear(512, 256, bias=False))
    needed = []
    for each in (model, plain):
        found = footprint(each, torch.optim.AdamW(each.parameters()), mesh=mesh, precision="fp32")
        needed.append(found.at_rest.bytes() + sum(found.device.parts.values()))
    said = []
    for ask in (
        lambda: plan(model, torch.optim.AdamW, lambda: torch.zeros(2, 512), machine="h100-node"),
        lambda: penstock.prepare(model, torch.optim.AdamW(model.parameters()), mesh=mesh, weights="init"),
    ):
        with pytest.raises(ConfigError) as caught:
            ask()
        said.append(str(caught.value))
    return needed[0], needed[1], said[0], said[1]


def test_footprint_counts_own_elements_and_the_planner_refuses_dtensors() -> None:
    for divided, plain, planned, initialised in run_ranks(_asked, 2):
        assert divided == plain
        assert "'0.weight'" in planned
        assert "\n" not in planned
        assert "DTensor" in planned
        assert "DTensor" in initialised
