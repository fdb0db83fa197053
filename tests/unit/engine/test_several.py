"""Several optimizers over parts of one model: each trains its own, as several torch optimizers do."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from tests.lib.engines import ON_CPU, prepared
from tests.lib.models import seeded
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline, separate, simulated
from tests.models.modules_rows import WIDTH, Block, Stack, squared

STEPS = 3


class Both(nn.Module):
    """Two parts, and a loss of both."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, WIDTH), Block(), Block())
        self.decoder = nn.Sequential(Block(), nn.Linear(WIDTH, 8))
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x) * self.scale)


def adam(part: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(part.parameters(), lr=lr, eps=1e-2, foreach=False)


def together(model: nn.Module, optimizers: Sequence[Any], rank: int, backward: Callable[[Tensor, Any], None]) -> None:
    """One loss of both parts; every other step moves the encoder alone."""
    for step in range(STEPS):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        backward(squared(model(x) - x), optimizers[step % 2])
        optimizers[0].step()
        optimizers[0].zero_grad()
        if step % 2 == 0:
            optimizers[1].step()
            optimizers[1].zero_grad()


def adversaries(
    model: nn.Module, optimizers: Sequence[Any], rank: int, backward: Callable[[Tensor, Any], None]
) -> None:
    """The second part judges what the first one makes; each has a turn."""
    maker, judge = optimizers
    for step in range(STEPS):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        made = model.encoder(x)
        judge.zero_grad()
        backward(squared(model.decoder(made.detach()) - 1), judge)
        judge.step()
        maker.zero_grad()
        backward(squared(model.decoder(model.encoder(x))), maker)  # leaves gradients in the judge
        maker.step()
    judge.zero_grad()


WAYS = {"together": together, "adversaries": adversaries}


def prepared_run(way: str, streams: Callable[[], Any], rank: int = 0, **how: Any) -> dict[str, Tensor]:
    model = seeded(Both)
    optimizers = [
        prepared(part, streams, stock=lambda _, part=part, lr=lr: adam(part, lr), **how)[1]
        for part, lr in ((model.encoder, 1e-2), (model.decoder, 3e-3))
    ]
    WAYS[way](model, optimizers, rank, lambda loss, optimizer: optimizer.backward(loss))
    found = {}
    for part, optimizer in zip(("encoder", "decoder"), optimizers, strict=True):
        for name, parameter in model.get_submodule(part).named_parameters():
            found[f"{part}.{name}"] = optimizer.full_param(parameter)
        optimizer.close()
    assert model.encoder[0].weight.shape == (WIDTH, 8)
    return found


class Averaged:
    """A torch optimizer whose gradients are averaged over ranks, before each step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.zero_grad = optimizer.zero_grad

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= 2
        self.optimizer.step()


def plain_run(way: str, rank: int = 0, *, ranks: bool = False) -> dict[str, Tensor]:
    model = seeded(Both)
    made: list[Any] = [adam(model.encoder, 1e-2), adam(model.decoder, 3e-3)]
    WAYS[way](model, [Averaged(o) for o in made] if ranks else made, rank, lambda loss, _: loss.backward())
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_close(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    assert ours.keys() == plain.keys()
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("way", WAYS)
def test_parts_of_one_model_train_as_with_two_torch_optimizers(way: str) -> None:
    first = prepared_run(way, inline)
    assert_close(first, plain_run(way))
    for streams, how in ((separate, ON_CPU), (simulated, {**ON_CPU, "overlap": "forward"})):
        other = prepared_run(way, streams, **how)
        assert all(torch.equal(other[name], value) for name, value in first.items())


def on_two_ranks(rank: int) -> None:
    for way in WAYS:
        first = prepared_run(way, inline, rank)
        assert_close(first, plain_run(way, rank, ranks=True))
        other = prepared_run(way, lambda: simulated(rank), rank, **ON_CPU, overlap="forward")
        assert all(torch.equal(other[name], value) for name, value in first.items())


def test_two_ranks() -> None:
    run_ranks(on_two_ranks, 2)


def test_what_two_would_own_is_named() -> None:
    model = Both()
    _, optimizer = prepared(model, **ON_CPU)
    names = {model: "encoder.0.weight", model.decoder: "0.norm.weight", nn.Sequential(model): "0.encoder.0.weight"}
    for part, name in names.items():
        with pytest.raises(penstock.ConfigError, match=rf"prepared already.*'{name}' \(.*has an optimizer.*each part"):
            penstock.prepare(part, adam(part, 1e-2))
    optimizer.close()
    _, first = prepared(model.encoder, inline)
    with pytest.raises(penstock.ConfigError, match=r"prepared already: parameter 'encoder.0.weight'"):
        penstock.prepare(model, adam(model, 1e-2))
    first.close()
    prepared(model, inline)[1].close()


@pytest.mark.parametrize("trained", [True, False])
def test_a_parameter_of_two_parts_is_named(trained: bool) -> None:
    one, other = Stack(), Stack()
    one.first.weight.requires_grad_(trained)
    other.first.weight = one.first.weight
    _, optimizer = prepared(one, **ON_CPU)
    with pytest.raises(penstock.ConfigError, match=r"prepared already.*parameter 'first.weight' \(16, 8\)"):
        penstock.prepare(other, adam(other, 1e-2))
    optimizer.close()
    prepared(other, inline)[1].close()
