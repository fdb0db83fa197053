"""Many engines in one process: side by side, one after the other, and what is left when they are gone."""

import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.runtime.streams import Streams
from tests.accounts import native_threads, what_engines_take
from tests.lib.engines import ON_CPU, prepared
from tests.lib.models import Block, seeded
from tests.lib.streams import inline, late, separate, simulated
from tests.models.modules_rows import WIDTH as PART_WIDTH
from tests.models.modules_rows import Block as Residual
from tests.models.modules_rows import squared
from tests.parity.rows import Arithmetic, Movement, changed, shares

WIDTH, STEPS = 24, 2
SMALL = {"tile_bytes": 4 << 10}


ON_DEVICE = Movement(overlap="none")
IN_FILES = inline, Movement(params="nvme", grads="nvme", optimizer="nvme", overlap="forward").but(**SMALL)
IN_PARTS = late, Movement(2, grads=shares(0.5, 0.5), optimizer=shares(0.3, 0.4, 0.3), overlap="none").but(**SMALL)
SIDES = (
    IN_FILES,
    (late, Movement(params="cpu", grads="cpu", optimizer="cpu", overlap="backward").but(**SMALL)),
    (separate, Movement(1, optimizer="cpu").but(**SMALL)),
    IN_PARTS,
)


def make_model(seed: int = 0) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block(WIDTH) for _ in range(2))), seed)


class Side:
    """A model and its optimizer."""

    def __init__(self, model: nn.Module, make: Callable[[], Streams], how: Movement) -> None:
        self.model, self.optimizer = prepared(
            model,
            make,
            stock=Arithmetic().make_optimizer,
            stage=how.stage,
            placement=how.placement,
            overlap=how.overlap,
            options=penstock.Options(**dict(how.options)),
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self.model(x).float()

    def values(self) -> list[Tensor]:
        return [self.optimizer.full_param(p) for p in self.model.parameters()]


def batch(step: int) -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step))


def accumulate(actor: Side, critic: Side, step: int) -> list[Tensor]:
    """A loss of each, and one of both: through the actor, then through the critic."""
    x = batch(step)
    with actor.optimizer.no_sync(), critic.optimizer.no_sync():
        own, judged = actor(x).square().mean(), critic(x).abs().mean()
        critic.optimizer.backward(judged)
        actor.optimizer.backward(own)
    both = (critic(torch.tanh(actor(x))) - x).square().mean()
    (critic.optimizer if step % 2 else actor.optimizer).backward(both)
    return [own.detach(), judged.detach(), both.detach()]


def play(actor: Side, critic: Side, first_to_close: str) -> list[Tensor]:
    """Steps of both; one is closed between backward and step of the other, which goes on alone."""
    seen: list[Tensor] = []
    for step in range(STEPS):
        seen += accumulate(actor, critic, step)
        for side in (actor, critic) if step % 2 else (critic, actor):
            seen.append(torch.tensor(side.optimizer.step().grad_norm))
            side.optimizer.zero_grad()
    seen += accumulate(actor, critic, STEPS)
    actor.optimizer.step()
    critic.optimizer.step()
    last, other = (critic, actor) if first_to_close == "actor" else (actor, critic)
    last.optimizer.zero_grad()
    last.optimizer.backward(last(batch(8)).square().mean())
    other.optimizer.close()
    seen += [p.detach().clone() for p in other.model.parameters()]
    for step in range(9, 12):
        seen.append(torch.tensor(last.optimizer.step().grad_norm))
        last.optimizer.zero_grad()
        loss = last(batch(step)).square().mean()
        last.optimizer.backward(loss)
        seen.append(loss.detach())
    last.optimizer.step()
    return [*seen, *last.values()]


@cache
def expected(first_to_close: str) -> list[Tensor]:
    """What both give on the device."""
    actor, critic = (Side(make_model(seed), inline, ON_DEVICE) for seed in range(2))
    seen = play(actor, critic, first_to_close)
    close(actor, critic)
    return seen


def close(*sides: Side) -> None:
    for side in sides:
        side.optimizer.close()


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(a, b), number


@pytest.mark.parametrize(
    ("both", "first_to_close"),
    list(zip(zip(SIDES, SIDES[1:] + SIDES[:1], strict=True), ("actor", "critic") * 2, strict=True)),
    ids=["files, cpu", "cpu, stage 1", "stage 1, parts", "parts, files"],
)
def test_engines_side_by_side_train_as_on_the_device(both: Any, first_to_close: str) -> None:
    actor, critic = (Side(make_model(seed), *side) for seed, side in enumerate(both))
    found = play(actor, critic, first_to_close)
    close(actor, critic)
    assert_equal(found, expected(first_to_close))


# What is left


def traces_of(model: nn.Module) -> list[Any]:
    """What an engine puts on a model."""
    modules = [
        sorted((name, len(value) if "hooks" in name else 0) for name, value in vars(module).items())
        for module in model.modules()
    ]
    hooks = [(p._backward_hooks, getattr(p, "_post_accumulate_grad_hooks", None)) for p in model.parameters()]
    return [modules, [[len(each or ()) for each in both] for both in hooks]]


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one folder of the nvme tier."""
    monkeypatch.setattr("tests.parity.rows.disks", lambda count: [tmp_path])
    return tmp_path


@pytest.mark.parametrize("side", SIDES, ids=lambda side: changed(side[1]))
def test_a_model_that_is_prepared_and_closed_again_and_again_takes_no_more_each_time(side: Any, disk: Path) -> None:
    model = make_model()
    clean, seen, threads = traces_of(model), [], 0
    for step in range(3):
        trained = Side(model, *side)
        trained.optimizer.backward(trained(batch(step)).square().mean())
        trained.optimizer.step()
        close(trained)
        del trained
        assert traces_of(model) == clean
        assert list(disk.iterdir()) == []
        gc.collect()
        made = Counter(kind for kind in map(type, gc.get_objects()) if str(kind.__module__).startswith("penstock."))
        taken = what_engines_take()
        while step == 2 and native_threads() > threads:
            time.sleep(0.001)
        threads = taken.pop("threads")
        seen.append((taken, made))
    assert seen[2] == seen[1]


# Several optimizers over parts of one model: each trains its own

TURNS = 3


class Both(nn.Module):
    """Two parts, and a loss of both."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, PART_WIDTH), Residual(), Residual())
        self.decoder = nn.Sequential(Residual(), nn.Linear(PART_WIDTH, 8))
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x) * self.scale)


def adam(part: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(part.parameters(), lr=lr, eps=1e-2, foreach=False)


def together(model: nn.Module, optimizers: Sequence[Any], backward: Callable[[Tensor, Any], None]) -> None:
    """One loss of both parts; every other step moves the encoder alone."""
    for step in range(TURNS):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        backward(squared(model(x) - x), optimizers[step % 2])
        optimizers[0].step()
        optimizers[0].zero_grad()
        if step % 2 == 0:
            optimizers[1].step()
            optimizers[1].zero_grad()


def prepared_run(streams: Callable[[], Any], **how: Any) -> dict[str, Tensor]:
    model = seeded(Both)
    optimizers = [
        prepared(part, streams, stock=lambda _, part=part, lr=lr: adam(part, lr), **how)[1]
        for part, lr in ((model.encoder, 1e-2), (model.decoder, 3e-3))
    ]
    together(model, optimizers, lambda loss, optimizer: optimizer.backward(loss))
    found = {}
    for part, optimizer in zip(("encoder", "decoder"), optimizers, strict=True):
        for name, parameter in model.get_submodule(part).named_parameters():
            found[f"{part}.{name}"] = optimizer.full_param(parameter)
        optimizer.close()
    assert model.encoder[0].weight.shape == (PART_WIDTH, 8)
    return found


def plain_run() -> dict[str, Tensor]:
    model = seeded(Both)
    together(model, [adam(model.encoder, 1e-2), adam(model.decoder, 3e-3)], lambda loss, _: loss.backward())
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_parts_of_one_model_train_as_with_two_torch_optimizers() -> None:
    first = prepared_run(inline)
    torch.testing.assert_close(first, plain_run(), rtol=1e-5, atol=1e-6)
    other = prepared_run(simulated, **ON_CPU, overlap="forward")
    assert all(torch.equal(other[name], value) for name, value in first.items())
