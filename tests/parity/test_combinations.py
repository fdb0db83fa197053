"""Features together: any two values of two features meet in a cell, and every cell gives the bits of the device."""

import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.engine.forward_backward import saved_tensors
from penstock.runtime.streams import Streams
from tests.lib.engines import prepare_on
from tests.lib.memory import disks
from tests.lib.streams import inline, separate, simulated
from tests.parity.rows import BATCH, INPUTS, Block
from tests.support import run_ranks, sampled, thorough

STEPS, WIDTH = 5, 32


class Net(nn.Module):
    """A root unit and three blocks; `checkpointed` says how they are checkpointed, `moved` is called among them."""

    def __init__(self, checkpointed: str) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.checkpointed == "no" else checkpoint(block, x, use_reentrant=False)
        return x


def late() -> Streams:
    return simulated(most_seconds=0.0005)


# What is computed, and where and when: a feature and its values. The first ones are those of the device's row.

ARITHMETIC: dict[str, tuple[Any, ...]] = {
    "precision": ("fp32", "bf16", "fp16", "fp16, dynamic"),
    "clip": ("no", "prepare", "by hand"),
    "backwards": (1, 3),
    "stage": (3, 1),
    "checkpointed": ("no", "yes"),
}
MOVEMENT: dict[str, tuple[Any, ...]] = {
    "streams": (inline, separate, late),
    "homes": ("device", "cpu", "nvme", "split"),
    "activations": ("device", "cpu", "nvme"),
    "overlap": ("none", "forward", "backward", "auto"),
    "moves": ("no", "between steps", "before step", "in forward", "in backward"),
}
FEATURES = ARITHMETIC | MOVEMENT
Cell = Mapping[str, Any]
HOMES: dict[str, dict[str, Any]] = {
    "device": {},
    "cpu": {"params": "cpu", "grads": "cpu", "optimizer": "cpu"},
    "nvme": {"params": "nvme", "grads": "nvme", "optimizer": "nvme"},
    "split": {"params": {"device": 0.5, "cpu": 0.5}, "grads": "cpu", "optimizer": {"cpu": 0.6, "nvme": 0.4}},
}


def fits(cell: Cell) -> bool:
    """What updates in backward need."""
    begins = cell.get("overlap") == "backward"
    return not (begins and (cell.get("clip", "no") != "no" or cell.get("precision") == "fp16, dynamic"))


def pairwise(seed: int = 0) -> list[Cell]:
    """Cells in which every two values of different features meet that may: the best of some random ones each time."""
    chance = random.Random(seed)
    left = [
        {(one, a), (other, b)}
        for one, other in combinations(FEATURES, 2)
        for a, b in product(FEATURES[one], FEATURES[other])
        if fits({one: a, other: b})
    ]
    cells: list[Cell] = []
    while left:
        first = dict(left[0])
        drawn = [{name: chance.choice(of) for name, of in FEATURES.items()} | first for _ in range(200)]
        cells.append(max(filter(fits, drawn), key=lambda cell: sum(pair <= cell.items() for pair in left)))
        left = [pair for pair in left if not pair <= cells[-1].items()]
    return cells


def on_device(cell: Cell) -> Cell:
    """The same arithmetic, without movement."""
    return {**cell, **{name: values[0] for name, values in MOVEMENT.items()}}


def prepared(cell: Cell) -> tuple[Net, penstock.Optimizer]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net(cell["checkpointed"])
    options = {"tile_bytes": 4 << 10}
    if cell["precision"].startswith("fp16"):
        dynamic = cell["precision"] == "fp16, dynamic"
        options |= {"initial_loss_scale": 2.0**22 if dynamic else 2.0**8, "dynamic_loss_scale": dynamic}
    return model, prepare_on(
        cell["streams"](),
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        stage=cell["stage"],
        placement=penstock.Placement(**HOMES[cell["homes"]], activations=cell["activations"], nvme_path=disks()),
        precision=cell["precision"].split(",")[0],
        max_grad_norm=0.5 if cell["clip"] == "prepare" else None,
        overlap=cell["overlap"],
        options=penstock.Options(**options),
    )


def batch(number: int, rank: int) -> Tensor:
    return torch.randn(BATCH, INPUTS, generator=torch.Generator().manual_seed(1000 * rank + number))


def move_in(hook: Callable[..., Any], optimizer: penstock.Optimizer, step: int) -> None:
    """Once, where the model passes: out in even steps, back in odd ones."""

    def move(*_: Any) -> None:
        handle.remove()
        if step % 2:
            optimizer.reload_states(non_blocking=True)
        else:
            optimizer.offload_states(to="nvme" if step else "cpu")

    handle = hook(move)


def before_backward_of(module: nn.Module) -> Callable[..., Any]:
    """A place for a hook that is called when backward comes to a module."""

    def place(move: Callable[..., None]) -> Any:
        return module.register_forward_hook(lambda _m, _i, made: made.register_hook(move) and None)

    return place


def train(cell: Cell, rank: int = 0) -> list[Any]:
    """Losses, norms, what was skipped, and every state at the end."""
    model, optimizer = prepared(cell)
    seen: list[Any] = []
    moves = cell["moves"]
    for step in range(STEPS):
        for micro in range(cell["backwards"]):
            last = micro == cell["backwards"] - 1
            if moves == "in forward" and last:
                move_in(model.blocks[1].up.register_forward_pre_hook, optimizer, step)
            if moves == "in backward" and last:
                move_in(before_backward_of(model.first), optimizer, step)
            with nullcontext() if last else optimizer.no_sync():
                loss = model(batch(10 * step + micro, rank)).float().square().mean()
                optimizer.backward(loss)
            seen.append(loss.item())
        if moves == "before step":
            optimizer.offload_states({"optimizer", "grad"}, ("nvme", "cpu")[step % 2], non_blocking=True)
        if cell["clip"] == "by hand":
            seen.append(optimizer.clip_grad_norm_(0.5).item())
        result = optimizer.step()
        seen += [result.grad_norm, result.skipped, result.loss_scale]
        optimizer.zero_grad()
        if moves == "between steps" and step < 2:
            optimizer.reload_states() if step else optimizer.offload_states()
    for p in model.parameters():
        seen += [optimizer.full_param(p).tolist(), optimizer.full_state(p, "exp_avg_sq").tolist()]
    optimizer.close()
    return [repr(value) for value in seen]  # NaN is itself


CELLS = pairwise()


@pytest.fixture(autouse=True)
def _small_ones_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_tensors, "LEAST_BYTES", 512)


def named(cell: Cell) -> str:
    plain = [getattr(v, "__name__", v) for n, v in cell.items() if v != FEATURES[n][0] or n == "streams"]
    return " ".join(map(str, plain))


@pytest.mark.parametrize("cell", sampled(CELLS, every=8), ids=named)
def test_every_cell_gives_the_bits_of_the_device(cell: Cell) -> None:
    assert train(cell) == train(on_device(cell))


def otherwise_on_rank(rank: int, cells: list[Cell]) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_tensors, "LEAST_BYTES", 512)
        return [named(cell) for cell in cells if train(cell, rank) != train(on_device(cell), rank)]


@pytest.mark.parametrize("quarter", [thorough(0), thorough(1), thorough(2), thorough(3)])
def test_every_cell_gives_the_bits_of_the_device_on_two_ranks(quarter: int) -> None:
    assert run_ranks(otherwise_on_rank, 2, CELLS[quarter::4]) == [[], []]


def test_steps_are_skipped_in_cells_with_a_dynamic_scale() -> None:
    for cell in CELLS:
        if cell["precision"] == "fp16, dynamic":
            skipped = [value for value in train(on_device(cell)) if value in ("True", "False")]
            assert set(skipped) == {"True", "False"}, named(cell)
