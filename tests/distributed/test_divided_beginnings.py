"""How models whose parameters are DTensors begin: first values, parameters that come later, and what they need."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.footprint import footprint
from tests.distributed.test_divided_parameters import CLIP, norm_of
from tests.distributed.test_tensor_parallel import Model, batches, loss_of, make, mesh_of, parallelize, whole
from tests.lib.engines import ON_NVME, adamw, prepared
from tests.lib.ranks import run_ranks
from tests.lib.refusals import said_by
from tests.lib.streams import inline


def _loaded(rank: int, folder: str) -> None:
    """Inference, and meta DTensors that take their values from files, are the model."""
    from safetensors.torch import save_file

    mesh = mesh_of(1, 2)
    expected = make(13)
    if rank == 0:
        save_file(expected.state_dict(), f"{folder}/model.safetensors")
    dist.barrier()
    ids = batches(0, 0, 1)
    values = {name: p.detach() for name, p in expected.named_parameters()}
    for placed, stock in [({}, None), ({"params": "nvme"}, adamw)]:
        with torch.device("meta"):
            model = Model(13)
        parallelize(model, mesh["tp"], "sequence")
        assert all(p.is_meta for p in model.parameters())
        _, optimizer = prepared(model, inline, stock=stock, mesh=mesh, weights=folder, **placed)
        with torch.no_grad():
            torch.testing.assert_close(model(ids), expected(ids))
        for name, p in model.named_parameters():
            assert torch.equal(optimizer.full_param(p), values[name]), name
        if stock is not None:
            loss_of(model, ids).backward()
            optimizer.step()
        optimizer.close()
        given = parallelize(make(13), mesh["tp"], "plain")
        _, optimizer = prepared(given, inline, stock=None, mesh=mesh, **placed)
        with torch.no_grad():
            torch.testing.assert_close(given(ids), expected(ids))
        optimizer.close()


def test_inference_and_meta_parameters(tmp_path: Path) -> None:
    run_ranks(_loaded, 2, str(tmp_path))


class Halved(Model):
    """A model that changes what modules inside of it have drawn."""

    def reset_parameters(self) -> None:
        self.head.weight.mul_(0.5)


class Failing(Model):
    """A model that cannot be initialised, which shows once its embedding is."""

    def reset_parameters(self) -> None:
        raise ArithmeticError("by its last module")


def on_meta(kind: type[Model], mesh: Any, tied: bool) -> Model:
    with torch.device("meta"):
        model = kind(13)
    parallelize(model, mesh["tp"], "sequence")
    if tied:
        model.head.weight = model.embedding.weight
    return model


def _initialised(rank: int) -> None:
    """Each rank has its part of what one rank draws, and draws numbers of its own afterwards."""
    mesh = mesh_of(2, 2)
    for kind, tied, placed in [(Model, False, {}), (Model, True, {}), (Halved, False, ON_NVME)]:
        torch.manual_seed(7)
        expected = kind(13)
        if tied:
            expected.embedding.reset_parameters()
            torch.manual_seed(7)
            expected.head.weight = expected.embedding.weight
            for module in expected.modules():
                if module is not expected and hasattr(module, "reset_parameters"):
                    module.reset_parameters()
        elif kind is Halved:
            with torch.no_grad():
                expected.reset_parameters()
        drawn = torch.get_rng_state()
        torch.manual_seed(7 + rank)
        own = torch.get_rng_state()
        model = on_meta(kind, mesh, tied)
        _, optimizer = prepared(model, inline, mesh=mesh, weights="init", **placed)
        assert torch.equal(torch.get_rng_state(), own if rank else drawn)
        values = dict(expected.named_parameters())
        for name, p in model.named_parameters():
            assert torch.equal(optimizer.full_param(p), values[name]), (kind, tied, name)
        with torch.no_grad():
            torch.testing.assert_close(model(batches(0, 0, 1)), expected(batches(0, 0, 1)))
        loss_of(model, batches(0, 0, 1)).backward()
        optimizer.step()
        optimizer.close()


def test_divided_parameters_are_initialised_as_on_one_rank() -> None:
    run_ranks(_initialised, 4)


def _not_initialised(rank: int) -> str:
    mesh = mesh_of(1, 2)
    model = on_meta(Failing, mesh, tied=True)
    before = dict(model.named_parameters())
    said = said_by(lambda: prepared(model, inline, mesh=mesh, weights="init"))
    assert all(p is before[name] and p.is_meta for name, p in model.named_parameters())
    assert model.head.weight is model.embedding.weight
    return said


def test_a_model_that_is_not_initialised_has_its_dtensors_again() -> None:
    for said in run_ranks(_not_initialised, 2):
        assert "by its last module" in said
        assert "\n" not in said


def _joining(rank: int) -> None:
    """Layers that were frozen, and new ones, are trained as torch trains them."""
    from torch.distributed.tensor import DTensor, Partial

    mesh = mesh_of(1, 2)

    def begun(plan: str) -> Any:
        model = parallelize(make(13), mesh["tp"], plan)
        model.blocks[1].requires_grad_(False)
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False)

    def joined(model: Any, plan: str) -> list[nn.Parameter]:
        # All of what a frozen unit has, which is trained where it rests; or a part, which leaves it.
        thawed = model.blocks[1] if plan == "plain" else model.blocks[1].up
        thawed.requires_grad_(True)
        model.blocks.append(parallelize(make(13), mesh["tp"], plan).blocks[0])
        return [*thawed.parameters(), *model.blocks[2].parameters()]

    for plan in ("plain", "sequence"):
        (model, of_torch), (same, given) = begun(plan), begun(plan)
        _, optimizer = prepared(same, inline, stock=lambda _, given=given: given, mesh=mesh, max_grad_norm=CLIP)
        for step in range(3):
            if step == 1:
                of_torch.add_param_group({"params": joined(model, plan), "lr": 5e-3})
                same.partial = nn.Parameter(DTensor.from_local(torch.ones(2), mesh["tp"], [Partial()]))
                with pytest.raises(ConfigError, match=r"'partial'.*a partial sum is no value"):
                    optimizer.add_param_group({"params": [same.partial]})
                del same.partial
                optimizer.add_param_group({"params": joined(same, plan), "lr": 5e-3})
            loss_of(model, batches(step, 0, 1)).backward()
            loss_of(same, batches(step, 0, 1)).backward()
            of_all = [p for p in model.parameters() if p.requires_grad]
            norm = norm_of(nn.ParameterList(of_all))
            for p in of_all:
                p.grad.mul_(min(1.0, CLIP / (float(norm) + 1e-6)))
            torch.testing.assert_close(torch.tensor(optimizer.step().grad_norm), norm, rtol=1e-5, atol=0)
            of_torch.step()
            of_torch.zero_grad()
            optimizer.zero_grad()
        for (name, p), mine in zip(model.named_parameters(), same.parameters(), strict=True):
            torch.testing.assert_close(optimizer.full_param(mine), whole(p), rtol=1e-6, atol=1e-6, msg=f"{plan} {name}")
        optimizer.close()


def test_divided_parameters_join_later() -> None:
    run_ranks(_joining, 2)


class Twice(nn.Module):
    """A product with a matrix, of an odd number of rows, that two dimensions of a mesh divide."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(7, 6))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        full = getattr(self.weight, "full_tensor", None)
        return x @ (self.weight if full is None else full())


def _twice(rank: int) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = mesh_of(1, 2, 2, names=("dp_shard", "tp", "ep"))
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(1))
    for number, placements in enumerate([[Shard(0), Shard(0)], [Shard(1), Shard(0)], [Replicate(), Shard(1)]]):
        torch.manual_seed(3)
        expected = Twice()
        of_torch = torch.optim.AdamW(expected.parameters(), lr=1e-2)
        with torch.device("meta"):
            model = Twice()
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["tp", "ep"], placements))
        torch.manual_seed(3 + rank)
        placed = ON_NVME if number % 2 else {}
        _, optimizer = prepared(model, inline, mesh=mesh, weights="init", max_grad_norm=CLIP, **placed)
        for _ in range(2):
            torch.testing.assert_close(optimizer.full_param(model.weight), expected.weight.detach())
            expected(x).square().mean().backward()
            model(x).square().mean().backward()
            norm = nn.utils.clip_grad_norm_(expected.parameters(), CLIP)
            of_torch.step()
            torch.testing.assert_close(torch.tensor(optimizer.step().grad_norm), norm, msg=f"{placements}")
            of_torch.zero_grad()
            optimizer.zero_grad()
        torch.testing.assert_close(optimizer.full_param(model.weight), expected.weight.detach(), msg=f"{placements}")
        optimizer.close()
        torch.testing.assert_close(whole(model.weight), expected.weight.detach())


def test_two_dimensions_divide_one_parameter() -> None:
    run_ranks(_twice, 4)


def _counted(rank: int) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = mesh_of(1, 2)
    model = nn.Sequential(nn.Linear(512, 512, bias=False))
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh["tp"], [Shard(0)]))
    divided, plain = (
        footprint(each, torch.optim.AdamW(each.parameters()), mesh=mesh, precision="fp32")
        for each in (model, nn.Sequential(nn.Linear(512, 256, bias=False)))
    )
    assert divided.at_rest.bytes() == plain.at_rest.bytes()
    assert divided.device.parts == plain.device.parts


def test_footprint_counts_own_elements() -> None:
    run_ranks(_counted, 2)
