"""Graphs from before a change: an error in torch, and here; and graphs that nobody keeps are gone."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from tests.lib.engines import prepare_on
from tests.lib.memory import disks
from tests.lib.streams import inline, separate, simulated

WIDTH = 160  # an activation of 160 x 160 is large enough to be taken off the device


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


PLACES = {
    "resident": (inline, penstock.Placement()),
    "gathered": (separate, penstock.Placement(params="cpu", grads="cpu", optimizer="cpu")),
    "simulated": (simulated, penstock.Placement(params="nvme", optimizer="nvme", nvme_path=disks())),
    "activations": (separate, penstock.Placement(params="cpu", activations="cpu")),
}


def prepared(place: str, **rest: Any) -> tuple[Model, penstock.Optimizer, Tensor]:
    torch.manual_seed(0)
    model = Model()
    make, placement = PLACES[place]
    stock = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rest = {"units": (nn.Sequential,), "precision": "fp32", **rest}
    optimizer = prepare_on(make(), model, stock, placement=placement, **rest)
    return model, optimizer, torch.randn(WIDTH, WIDTH)


def loss_of(model: Model, x: Tensor) -> Tensor:
    return model(x).square().mean()


def step(model: Model, optimizer: penstock.Optimizer, path: Path) -> None:
    loss_of(model, torch.ones(2, WIDTH)).backward()
    optimizer.step()
    optimizer.zero_grad()


def set_full_param(model: Model, optimizer: penstock.Optimizer, path: Path) -> None:
    optimizer.set_full_param(model.blocks[1][0].weight, torch.zeros(WIDTH, WIDTH))


def load(model: Model, optimizer: penstock.Optimizer, path: Path) -> None:
    optimizer.save(path / "one")
    optimizer.load(path / "one")


def write(model: Model, optimizer: penstock.Optimizer, path: Path) -> None:
    with optimizer.gathered(modify=True):
        model.blocks[1][0].weight.data.zero_()


def close(model: Model, optimizer: penstock.Optimizer, path: Path) -> None:
    optimizer.close()


CHANGES = (step, set_full_param, load, write)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", PLACES)
def test_backward_through_a_graph_from_before_a_change_is_an_error(place: str, change: Any, tmp_path: Path) -> None:
    model, optimizer, x = prepared(place)
    step(model, optimizer, tmp_path)
    old = loss_of(model, x)
    change(model, optimizer, tmp_path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()
    optimizer.zero_grad()
    step(model, optimizer, tmp_path)
    optimizer.close()


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
@pytest.mark.parametrize("place", ["resident", "gathered"])
def test_in_every_mode_of_overlap(place: str, overlap: str, tmp_path: Path) -> None:
    model, optimizer, x = prepared(place, overlap=overlap, options=penstock.Options(on_nonfinite="raise"))
    old = loss_of(model, x)
    step(model, optimizer, tmp_path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()
    if overlap != "backward":  # where a backward that fails may end the optimizer
        optimizer.zero_grad()
        step(model, optimizer, tmp_path)
    optimizer.close(keep_params=overlap != "backward")


@pytest.mark.parametrize("place", PLACES)
def test_what_changes_nothing_leaves_graphs_good(place: str, tmp_path: Path) -> None:
    """Looks, moves, saves, a step without gradient, and one that updates other parameters."""
    model, optimizer, x = prepared(place)
    expected_model, expected, _ = prepared(place)
    loss_of(expected_model, x).backward()
    loss = loss_of(model, x)
    optimizer.save(tmp_path / "one")
    optimizer.offload_states()
    optimizer.reload_states()
    with optimizer.gathered(modify=True):
        pass
    optimizer.state_dict()
    assert optimizer.step().grad_norm == 0
    loss.backward()
    for p, q in zip(model.parameters(), expected_model.parameters(), strict=True):
        torch.testing.assert_close(optimizer.full_grad(p), expected.full_grad(q), rtol=0, atol=0)
    optimizer.close()
    expected.close()


@pytest.mark.parametrize("numel", [4, WIDTH * WIDTH])
def test_activations_that_were_written_are_refused_as_torch_does(numel: int) -> None:
    model, optimizer, _ = prepared("activations")

    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            kept = x * 2
            out = kept * kept
            kept.add_(1)
            return out

    model.forward = lambda x: Writes()(x * model.head.weight.sum()).sum()  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.ones(numel)).backward()
    optimizer.zero_grad()
    optimizer.close()


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_no_step_keeps_its_graph(place: str, create_graph: bool) -> None:
    model, optimizer, x = prepared(place, precision="bf16")
    graphs: list[weakref.ref[Any]] = []
    tensors = []

    class Marked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            mark = Mark()
            ctx.mark = mark
            graphs.append(weakref.ref(mark))
            return value.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return Marked.apply(grad)

    class Mark:
        pass

    for number in range(4):
        for _ in range(2):
            loss = Marked.apply(model(x)).float().square().mean()
            loss.backward(create_graph=create_graph)
        optimizer.step()
        optimizer.zero_grad()
        del loss
        if number % 2:
            optimizer.synchronize()
            gc.collect()
            tensors.append(sum(type(o) is Tensor for o in gc.get_objects()))
    assert [graph for graph in graphs if graph() is not None] == []
    assert tensors[1] <= tensors[0] + 2  # of other tests
    optimizer.close()
