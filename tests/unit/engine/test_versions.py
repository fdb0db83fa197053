"""Graphs from before a change: an error in torch, and here; and graphs that nobody keeps are gone."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from tests.lib.engines import ON_CPU, assert_same_state, loss_of, prepared, state, train
from tests.lib.models import batch_of, stack
from tests.lib.streams import inline, separate, simulated

WIDTH = 160  # an activation of 160 x 160 is large enough to be taken off the device
SMALL = 16
PLACES: dict[str, tuple[Any, dict[str, str]]] = {
    "resident": (inline, {}),
    "gathered": (separate, ON_CPU),
    "simulated": (simulated, {"params": "nvme", "optimizer": "nvme"}),
    "activations": (separate, {"params": "cpu", "activations": "cpu"}),
}


def width_at(place: str) -> int:
    return WIDTH if place == "activations" else SMALL


def at(place: str, **how: Any) -> tuple[nn.Sequential, penstock.Optimizer]:
    streams, storages = PLACES[place]
    return prepared(nn.Sequential(*stack(width=width_at(place)), nn.Tanh()), streams, **storages, **how)


def step(model: nn.Sequential, optimizer: penstock.Optimizer, path: Path) -> None:
    train(model, optimizer)


def set_full_param(model: nn.Sequential, optimizer: penstock.Optimizer, path: Path) -> None:
    optimizer.set_full_param(model[1].weight, torch.zeros(model[1].weight.shape))


def load(model: nn.Sequential, optimizer: penstock.Optimizer, path: Path) -> None:
    optimizer.save(path / "one")
    optimizer.load(path / "one")


def write(model: nn.Sequential, optimizer: penstock.Optimizer, path: Path) -> None:
    with optimizer.gathered(modify=True):
        model[1].weight.data.zero_()


@pytest.mark.parametrize(
    ("place", "change"),
    [
        *((place, step) for place in PLACES),
        ("gathered", set_full_param),
        ("resident", set_full_param),
        ("simulated", load),
        ("resident", load),
        ("activations", write),
        ("resident", write),
    ],
)
def test_backward_through_a_graph_from_before_a_change_is_an_error(place: str, change: Any, tmp_path: Path) -> None:
    model, optimizer = at(place)
    step(model, optimizer, tmp_path)
    old = loss_of(model)
    change(model, optimizer, tmp_path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()
    optimizer.zero_grad()
    step(model, optimizer, tmp_path)


@pytest.mark.parametrize("overlap", ["none", "backward"])
@pytest.mark.parametrize("place", ["resident", "gathered"])
def test_in_every_mode_of_overlap(place: str, overlap: str, tmp_path: Path) -> None:
    model, optimizer = at(place, overlap=overlap, on_nonfinite="raise")
    old = loss_of(model)
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
    model, optimizer = at(place)
    expected_model, expected = at(place)
    loss_of(expected_model).backward()
    loss = loss_of(model)
    optimizer.save(tmp_path / "one")
    optimizer.offload_states()
    optimizer.reload_states()
    with optimizer.gathered(modify=True):
        pass
    optimizer.state_dict()
    assert optimizer.step().grad_norm == 0
    loss.backward()
    assert_same_state(state(model, optimizer), state(expected_model, expected))


@pytest.mark.parametrize(("place", "numel"), [("activations", 4), ("activations", WIDTH * WIDTH), ("gathered", 4)])
def test_activations_that_were_written_are_refused_as_torch_does(place: str, numel: int) -> None:
    """Torch compares versions of what autograd saved only where there are no hooks."""
    model, optimizer = at(place)

    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            kept = x * 2
            out = kept * kept
            kept.add_(1)
            return out

    model.forward = lambda x: Writes()(x * model[0].weight.sum()).sum()  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.ones(numel)).backward()
    optimizer.zero_grad()


@pytest.mark.parametrize(("place", "create_graph"), [*((place, False) for place in PLACES), ("gathered", True)])
def test_no_step_keeps_its_graph(place: str, create_graph: bool) -> None:
    model, optimizer = at(place, precision="bf16")
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
            loss = Marked.apply(model(batch_of(model, rows=width_at(place)))).float().square().mean()
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
