"""Models whose parameters are DTensors: wherever state is, by hand, and with a plan of transformers."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock
from tests.lib.engines import ON_NVME, assert_same_state, prepared, state
from tests.lib.models import Block, llama
from tests.lib.ranks import run_ranks
from tests.lib.refusals import said_by
from tests.lib.streams import inline

STEPS = 3


class Model(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, vocabulary: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
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


def mesh_of(*sizes: int, names: tuple[str, ...] = ("dp_shard", "tp")) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def batches(step: int, data: int, size: int) -> Tensor:
    """The rows of one data rank, of eight."""
    ids = torch.randint(0, 12, (8, 6), generator=torch.Generator().manual_seed(step))
    return ids.view(size, 8 // size, 6)[data]


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.roll(1, 1).flatten())


def whole(tensor: Tensor) -> Tensor:
    full = getattr(tensor, "full_tensor", None)
    return (tensor if full is None else full()).detach().clone()


def trained(precision: str, **placed: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Train on all ranks; return norms, and all that is trained with the last gradients."""
    mesh = mesh_of(1, 2)
    model = parallelize(make(13), mesh["tp"], "sequence")
    model, optimizer = prepared(model, inline, mesh=mesh, precision=precision, max_grad_norm=0.5, **placed)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batches(step, 0, 1)).backward()
        norms.append(optimizer.step().grad_norm)
    found = state(model, optimizer)
    with optimizer.gathered():
        for name, p in model.named_parameters():
            torch.testing.assert_close(whole(p).float(), found[name], rtol=1e-2, atol=1e-2)
    optimizer.close()
    for name, p in model.named_parameters():
        torch.testing.assert_close(whole(p), found[name], rtol=0, atol=0)  # as it was given: fp32, a proper DTensor
    return norms, found


def _placed(rank: int) -> None:
    split = {"params": "cpu", "optimizer": {"device": 0.5, "cpu": 0.25, "nvme": 0.25}}
    for precision, placed in (("fp32", ON_NVME), ("bf16", split)):
        norms, expected = trained(precision)
        found_norms, found = trained(precision, **placed)
        assert found_norms == norms
        assert_same_state(found, expected)


def test_placement_never_changes_the_result() -> None:
    run_ranks(_placed, 2)


def _refusals(rank: int) -> None:
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    both, tp_alone, shared = mesh_of(1, 2), mesh_of(2, names=("any",)), mesh_of(2, names=("dp_shard",))

    def divided(mesh: Any) -> Any:
        return distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])

    uneven = {"run_check": False, "shape": (4, 4), "stride": (4, 1)}
    cases: list[tuple[Any, Any, list[str]]] = [
        (divided(tp_alone), None, ["'weight'", "no mesh"]),
        (divided(shared), shared, ["before fully_shard()", "mesh (dp_shard 2; ranks [0, 1])"]),
        (DTensor.from_local(torch.ones(4, 4), both["tp"], [Partial()]), both, ["partial sum"]),
        (divided(both["tp"]), mesh_of(2, 1), ["before fully_shard()"]),
        (DTensor.from_local(torch.zeros(1 + 2 * rank, 4), both["tp"], [Shard(0)], **uneven), both, ["torch.chunk()"]),
    ]
    for value, mesh, texts in cases:
        model = nn.Linear(4, 4)
        model.weight = nn.Parameter(value)
        stock = torch.optim.SGD(model.parameters(), lr=0.1)
        said = said_by(partial(penstock.prepare, model, stock, mesh=mesh))
        assert said.startswith("ConfigError: ")
        assert all(text in said for text in texts), said


def test_what_cannot_be_trained_is_refused_with_both_meshes() -> None:
    run_ranks(_refusals, 2)


def _by_hand(rank: int) -> dict[str, Any]:
    """Look at, set and average what ranks divide; first values by name; an optimizer that has made a step."""
    mesh = mesh_of(1, 2)
    model = parallelize(make(13), mesh["tp"], "sequence")
    of_torch = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, batches(0, 0, 1)).backward()
    of_torch.step()
    of_torch.zero_grad()
    weight = model.head.weight
    moment = whole(of_torch.state[weight]["exp_avg"])
    values = {name: whole(p) for name, p in model.named_parameters()}
    _, optimizer = prepared(model, inline, stock=lambda _: of_torch, mesh=mesh, params="cpu", weights=values)
    assert torch.equal(optimizer.full_state(weight, "exp_avg"), moment)
    for name, p in model.named_parameters():
        assert torch.equal(optimizer.full_param(p), values[name]), name
    new = torch.arange(weight.numel(), dtype=torch.float32).view(13, 8)
    optimizer.set_full_param(weight, new)
    assert torch.equal(optimizer.full_param(weight), new)
    with optimizer.gathered(modify=True), torch.no_grad():
        assert torch.equal(whole(weight), new)
        weight.mul_(2)
        model.norm.weight.fill_(float(dist.get_rank()))
    assert torch.equal(optimizer.full_param(weight), 2 * new)
    assert torch.equal(optimizer.full_param(model.norm.weight), torch.zeros(8))  # the first rank's on every rank
    optimizer.set_full_param(model.norm.weight, torch.ones(8))

    average = penstock.EMA(optimizer, decay=0.5)
    loss_of(model, batches(1, 0, 1)).backward()
    grads = {name: optimizer.full_grad(p) for name, p in model.named_parameters()}
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    assert norm == pytest.approx(float(torch.cat([g.flatten() for g in grads.values()]).norm()), rel=1e-5)
    assert repr(weight.grad).startswith("<gradient of 'head.weight' (13, 8)")
    optimizer.set_full_grad(weight, new)
    torch.testing.assert_close(optimizer.full_grad(weight), new)  # with the clip in it, which rounds
    optimizer.step()
    average.update()
    optimizer.zero_grad()
    optimizer.offload_states()
    optimizer.reload_states()
    with average.applied():
        shown = optimizer.full_param(weight)
    now = optimizer.full_param(weight)
    torch.testing.assert_close(shown, (2 * new + now) / 2)
    optimizer.close()
    assert torch.equal(whole(weight), now)
    return {"shown": shown, "now": now}


def test_whole_values_go_in_and_out() -> None:
    assert_same_state(*run_ranks(_by_hand, 2))


def _of_transformers(rank: int, size: int, folders: list[Path]) -> list[tuple[list[float], dict[str, Tensor]]]:
    from transformers import AutoModelForCausalLM

    found = []
    for folder in folders:
        if size == 1:
            model, mesh = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), None
        else:
            mesh = mesh_of(size, names=("tp",))
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, tp_plan="auto", device_mesh=mesh)
            assert any(hasattr(p, "full_tensor") for p in model.parameters())
        _, optimizer = prepared(model, inline, mesh=mesh, max_grad_norm=1.0)
        norms = []
        for step in range(3):
            ids = batches(step, 0, 1)
            optimizer.backward(model(input_ids=ids, labels=ids).loss)
            norms.append(optimizer.step().grad_norm)
            optimizer.zero_grad()
        found.append((norms, {name: optimizer.full_param(p) for name, p in model.named_parameters()}))
        optimizer.close()
    return found


def test_models_of_transformers_with_their_own_plan(tmp_path: Path) -> None:
    """Tied and not."""
    pytest.importorskip("transformers")
    folders = [tmp_path / "tied", tmp_path / "untied"]
    for folder in folders:
        sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": folder.name == "tied"}
        llama(width=16, **sizes).save_pretrained(folder)
    expected = _of_transformers(0, 1, folders)
    for of_rank in run_ranks(_of_transformers, 2, 2, folders):
        for (norms, values), (found_norms, found) in zip(expected, of_rank, strict=True):
            assert found_norms == pytest.approx(norms, rel=1e-5)
            for name, value in values.items():
                torch.testing.assert_close(found[name], value, rtol=1e-4, atol=2e-4)
