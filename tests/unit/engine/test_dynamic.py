"""Models that are another one at every step, on one rank, wherever state rests: plain torch step by step."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from tests.lib.engines import ON_CPU, ON_NVME, prepared
from tests.lib.models import Block, seeded
from tests.lib.streams import separate, simulated

LAYERS, WIDTH, STEPS = 4, 16, 4
HYPER = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-2, "foreach": False}


class Net(nn.Module):
    """Runs its layers in the order that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(Block(WIDTH) for _ in range(LAYERS))
        self.branch = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, path: Sequence[int], branch: bool = False) -> Tensor:
        x = self.first(x)
        for number in path:
            x = self.layers[number](x)
        return self.branch(x) if branch else x


@dataclass
class Run:
    """One model, its optimizer, and how it runs backward."""

    model: Net
    optimizer: torch.optim.Optimizer
    losses: list[Tensor] = field(default_factory=list)

    def train(self, seed: int, *paths: Sequence[int], branch: bool = False) -> None:
        """Forward along each path, and one backward."""
        inputs = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))
        loss = torch.stack([self.model(inputs, path, branch).square().mean() for path in paths]).sum()
        self.losses.append(loss.detach())
        if isinstance(self.optimizer, penstock.Optimizer):
            self.optimizer.backward(loss)
        else:
            loss.backward()

    def freeze(self, *parts: nn.Module | nn.Parameter, frozen: bool = True) -> None:
        for part in parts:
            part.requires_grad_(not frozen)


def straight(run: Run, step: int) -> None:
    run.train(step, range(LAYERS))


def skipped(run: Run, step: int) -> None:
    run.train(step, [n for n in range(LAYERS) if random.Random(10 * step + n).random() < 0.5])


def shuffled(run: Run, step: int) -> None:
    run.train(step, random.Random(step).sample(range(LAYERS), LAYERS))


def every_other(run: Run, step: int) -> None:
    run.train(step, range(LAYERS), branch=step % 2 == 1)


def twice(run: Run, step: int) -> None:
    run.train(step, [0, 1, 1, 2, 1, 3, 0][: 4 + step])


def two_forwards(run: Run, step: int) -> None:
    run.train(step, [0, 1, 2], [2, 3] if step % 2 else [3])


def two_backwards(run: Run, step: int) -> None:
    run.train(step, [0, 2])
    run.train(step + 7, [2, 1] if step % 2 else [3])


def frozen_layer(run: Run, step: int) -> None:
    """The last step trains it again, from the state that it had."""
    run.freeze(run.model.layers[1], frozen=step in (1, 2))
    straight(run, step)


def frozen_parts(run: Run, step: int) -> None:
    layers = run.model.layers
    run.freeze(layers[0].up.weight, layers[2].norm, run.model.first, frozen=step in (1, 2))
    straight(run, step)


def unfrozen_later(run: Run, step: int) -> None:
    """Frozen before the first step, after `prepare`: one layer more is trained in each step."""
    run.freeze(run.model.first, *run.model.layers[: LAYERS - 1 - step])
    run.freeze(*run.model.layers[LAYERS - 1 - step :], frozen=False)
    straight(run, step)


ROWS: dict[str, Callable[[Run, int], None]] = {
    "layers skipped at random": skipped,
    "another order in every step": shuffled,
    "a branch every other step": every_other,
    "layers used several times": twice,
    "two forwards along other ways": two_forwards,
    "two micro-batches along other ways": two_backwards,
    "a layer frozen for a while": frozen_layer,
    "parts of layers frozen for a while": frozen_parts,
    "one layer more unfrozen in every step": unfrozen_later,
}
SPLIT = ON_CPU | {"optimizer": {"device": 0.5, "cpu": 0.3, "nvme": 0.2}}
MOVEMENTS: list[dict[str, Any]] = [
    {"streams": separate, "overlap": "none", **ON_CPU},
    {"streams": separate, "overlap": "auto"},
    {"streams": separate, "overlap": "backward", **ON_CPU},
    {"streams": separate, "overlap": "forward", **ON_NVME},
    {"streams": simulated, "overlap": "forward", **ON_CPU},
    {"streams": simulated, "overlap": "backward", **SPLIT},
]


def make_net() -> Net:
    return seeded(Net)


def stock(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, **HYPER)


@pytest.mark.parametrize("number", range(len(ROWS)), ids=list(ROWS))
def test_every_step_is_the_one_of_plain_torch(number: int) -> None:
    """From the same values and state in each step, so that losses and gradients are the same bits."""
    row, plain_model = list(ROWS.values())[number], make_net()
    plain = Run(plain_model, stock(plain_model.parameters()))
    fitting = [m for m in MOVEMENTS if m["overlap"] != "backward" or row is not two_backwards]  # which that refuses
    run = Run(*prepared(make_net, stock=stock, **fitting[(number + 1) % len(fitting)]))
    pairs = list(zip(plain_model.named_parameters(), run.model.parameters(), strict=True))
    for step in range(STEPS):
        row(plain, step)
        row(run, step)
        for (parameter, p), q in pairs:
            assert torch.equal(run.optimizer.full_grad(q), torch.zeros_like(p) if p.grad is None else p.grad), parameter
        without = {parameter: p.detach().clone() for (parameter, p), _ in pairs if p.grad is None}
        for optimizer in (plain.optimizer, run.optimizer):
            optimizer.step()
            optimizer.zero_grad()
        for (parameter, p), q in pairs:
            values = [(p, run.optimizer.full_param(q))]
            values += [(value, run.optimizer.full_state(q, state)) for state, value in plain.optimizer.state[p].items()]
            for expected, value in values:
                torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)
                expected.data.copy_(value)
            assert parameter not in without or torch.equal(p, without[parameter]), parameter
            assert run.optimizer.full_state(q, "step") == plain.optimizer.state[p].get("step", 0), parameter
    assert all(torch.equal(a, b) for a, b in zip(run.losses, plain.losses, strict=True))
