"""What is spared in small steps, and that nothing else changes by it."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.engine.forward_backward.forward import Forward
from penstock.engine.forward_backward.order import ForwardCall
from penstock.engine.unit.unit import Unit
from penstock.rules.fused import FusedRule
from tests.lib.engines import ON_CPU, prepared, train
from tests.lib.models import seeded

WIDTH = 8


class Block(nn.Module):
    """`watch` is called between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.watch: Callable[[Tensor], None] = lambda x: None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        self.watch(x)
        return self.second(x) * self.scale


class Reader(nn.Module):
    """Reads the weight of a part that it does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.inner.weight) + self.bias


class Model(nn.Module):
    def __init__(self, blocks: int = 2, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.reader = Reader()
        self.checkpointed = checkpointed
        self.after_reader: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x))
        x = self.reader(x)
        self.after_reader()
        return x


def told_of(**how: Any) -> tuple[Model, penstock.Optimizer, Tensor]:
    units = lambda name, module: isinstance(module, Block) or name == "reader.inner"  # noqa: E731
    return *prepared(seeded(lambda: Model(**how)), units=units, **ON_CPU), torch.ones(4, WIDTH)


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
    model, optimizer, x = told_of()
    optimizer.backward(model(x).sum())
    assert told == ["Model", "Block", "Block", "Reader"]
    assert not any(holders(optimizer).values())


def test_nor_where_a_block_runs_again_in_backward(told: list[str]) -> None:
    model, optimizer, x = told_of(checkpointed=True)
    loss = model(x).sum()
    told.clear()
    optimizer.backward(loss)
    assert told == ["Block", "Block"]
    assert not any(holders(optimizer).values())


def test_a_layer_that_is_called_alone_is_told_of(told: list[str]) -> None:
    model, optimizer, x = told_of()
    with optimizer.gathered():
        layer = model.blocks[1].second
        expected = linear(x, layer.weight.clone(), layer.bias.clone())
    assert torch.equal(model.blocks[1].second(x), expected)
    assert told == ["Linear"]
    assert not any(holders(optimizer).values())


def test_a_layer_is_told_of_after_an_interrupt_left_the_forward_of_its_block(told: list[str]) -> None:
    model, optimizer, x = told_of()

    def interrupt(_: Tensor) -> None:
        raise KeyboardInterrupt

    def run() -> None:  # a frame of its own, which is over then
        with pytest.raises(KeyboardInterrupt):
            model(x)

    model.blocks[0].watch = interrupt
    run()
    assert holders(optimizer)["blocks.0"]
    told.clear()
    model.blocks[0].second(x)
    assert told == ["Linear"]
    assert not any(holders(optimizer).values())


def test_what_a_module_reads_of_its_parts_is_held_until_its_end_and_no_longer() -> None:
    model, optimizer, x = told_of()
    held: list[int] = []
    model.after_reader = lambda: held.append(holders(optimizer)["reader.inner"])
    with torch.no_grad():
        model(x)
    assert held == [0]


def test_a_group_is_read_once_a_step_whatever_the_number_of_units(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    step_scalars = FusedRule.step_scalars

    def noted(self: FusedRule, *given: Any, **named: Any) -> Any:
        read.append(1)
        return step_scalars(self, *given, **named)

    monkeypatch.setattr(FusedRule, "step_scalars", noted)
    counts = []
    for blocks in (1, 3):
        model, optimizer, x = told_of(blocks=blocks)
        optimizer.backward(model(x).sum())
        read.clear()
        optimizer.step()
        counts.append(len(read))
    assert counts[0] == counts[1]
