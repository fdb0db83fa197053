"""What is spared in small steps, and that nothing else changes by it."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import penstock
from penstock.engine.forward_backward.forward import Forward
from penstock.engine.forward_backward.order import ForwardCall
from penstock.engine.unit.unit import Unit
from tests.lib.engines import ON_CPU, loss_of, prepared, train
from tests.lib.models import WIDTH, Blocks


class Reader(nn.Module):
    """Reads the weight of a part that it does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.inner.weight) + self.bias


def told_of(count: int = 2, **how: Any) -> tuple[Blocks, penstock.Optimizer]:
    return prepared(Blocks(count, **how), **ON_CPU)


def test_a_model_with_a_part_that_is_a_script() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.ReLU(), nn.Tanh()))
    model, optimizer = prepared(nn.Sequential(nn.Linear(WIDTH, WIDTH), scripted), **ON_CPU)
    train(model, optimizer)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules whose forwards the engine is told of."""
    found: list[str] = []
    enter = Forward._enter

    def noted(self: Forward, call: ForwardCall, units: Sequence[Unit]) -> None:
        found.append(type(call.module).__name__)
        enter(self, call, units)

    monkeypatch.setattr(Forward, "_enter", noted)
    return found


def holders(optimizer: penstock.Optimizer) -> dict[str, int]:
    """How many forwards hold each unit."""
    assert optimizer._engine is not None
    return {unit.name: unit.holding.forwards for unit in optimizer._engine.context.units}


def test_the_engine_is_told_of_units_and_not_of_their_layers(told: list[str]) -> None:
    model, optimizer = told_of()
    optimizer.backward(loss_of(model))
    assert told == ["Blocks", "Block", "Block"]
    assert not any(holders(optimizer).values())


def test_a_layer_is_told_of_after_an_interrupt_left_the_forward_of_its_block(told: list[str]) -> None:
    model, optimizer = told_of()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def run() -> None:  # a frame of its own, which is over then
        with model.blocks[0].down.register_forward_pre_hook(interrupt), pytest.raises(KeyboardInterrupt):
            loss_of(model)

    run()
    assert holders(optimizer)["blocks.0"]
    told.clear()
    model.blocks[0].up(torch.ones(4, WIDTH))
    assert told == ["Linear"]
    assert not any(holders(optimizer).values())


def test_what_a_module_reads_of_its_parts_is_held_until_its_end_and_no_longer() -> None:
    model, optimizer = prepared(nn.Sequential(Reader(), nn.Identity()), units=(nn.Linear,), **ON_CPU)
    held: list[int] = []
    model[1].register_forward_pre_hook(lambda *_: held.append(holders(optimizer)["0.inner"]))
    with torch.no_grad():
        loss_of(model)
    assert held == [0]
