"""Looks at state and changes of it by hand: the same values wherever the state is, of frozen parameters too."""

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import ConfigError
from penstock.runtime.streams import Streams
from tests.lib.engines import prepare_on
from tests.lib.streams import inline, separate, simulated
from tests.parity.rows import STATE_NAMES, Arithmetic, Movement, Net, batches, changed, loss_of, make_model, shares
from tests.support import run_ranks, thorough

SMALL = {"tile_bytes": 4 << 10}
HOMES = (
    Movement(),
    Movement(params="cpu", grads="cpu", optimizer="cpu"),
    Movement(optimizer="cpu"),
    Movement(params="cpu", grads="cpu"),
    Movement(params="nvme", grads="nvme", optimizer="nvme"),
    Movement(optimizer="nvme"),
    Movement(params="nvme", grads="cpu"),
    Movement(params=shares(0.4, 0.6), grads=shares(0.5, 0.5), optimizer=shares(0.3, 0.4, 0.3)),
    Movement(params=shares(0.3, 0.4, 0.3), grads=shares(0.2, 0.5, 0.3)),
)
#: What is offloaded, to where; what is in files has a folder.
MOVES = ((), (None, "cpu"), ({"param", "grad"}, "cpu"), ({"optimizer", "master"}, "cpu"))
MOVES_TO_FILES = ((None, "nvme"), ({"param"}, "nvme"))


def late() -> Streams:
    return simulated(most_seconds=0.0005)


def rows(stage: int = 3) -> Iterator[tuple[Callable[[], Streams], Movement, Any]]:
    """Every home as it is and after some moves, on the kinds of streams in turn."""
    streams = cycle((inline, separate, late))
    for how in HOMES:
        in_files = "nvme" in str(how.params) + str(how.optimizer)
        for move in (*MOVES, *(MOVES_TO_FILES if in_files else ())):
            yield next(streams), how.but(stage, **SMALL), move


def prepared(make: Callable[[], Streams], how: Movement, precision: str) -> tuple[Net, penstock.Optimizer]:
    """The second block is frozen."""
    model = make_model()
    model.blocks[1].requires_grad_(False)
    stock = Arithmetic().make_optimizer(list(model.parameters()))
    options = penstock.Options(**dict(how.options))
    return model, prepare_on(
        make(), model, stock, stage=how.stage, placement=how.placement, precision=precision, options=options
    )


def values(model: Net, seed: int) -> list[Tensor]:
    """One for each parameter, that bf16 holds in full."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator).bfloat16().float() for p in model.parameters()]


def trained_of(model: Net) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def look(model: Net, optimizer: penstock.Optimizer) -> list[Tensor]:
    """Everything that is to be seen."""
    seen = [optimizer.full_param(p) for p in model.parameters()]
    for p in trained_of(model):
        seen += [optimizer.full_grad(p), *(optimizer.full_state(p, name) for name in (*STATE_NAMES, "step"))]
    return seen


def use(make: Callable[[], Streams], how: Movement, move: Any, precision: str, rank: int = 0) -> list[Tensor]:
    """Everything that there was to be seen, after each change."""
    model, optimizer = prepared(make, how, precision)
    (first, second), trained = batches(1, 2)[0], trained_of(model)
    optimizer.backward(loss_of(model, first[0]))
    if move:
        optimizer.offload_states(*move, non_blocking=how.stage > 1)
    seen = look(model, optimizer)
    for p, value in zip(model.parameters(), values(model, 0), strict=True):
        optimizer.set_full_param(p, value)
        assert torch.equal(optimizer.full_param(p), value)
    with torch.no_grad():
        seen.append(loss_of(model, second[0]))
    for number, p in enumerate(trained):
        new = [torch.full(p.shape, float(number + offset)) for offset in range(3)]
        optimizer.set_full_grad(p, new[0])
        for name, value in zip(STATE_NAMES, new[1:], strict=True):
            optimizer.set_full_state(p, name, value)
            assert torch.equal(optimizer.full_state(p, name), value)
        optimizer.set_full_state(p, "step", torch.tensor(7.0))
        assert torch.equal(optimizer.full_grad(p), new[0])
    before = look(model, optimizer)
    seen += before
    check_what_is_refused(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(look(model, optimizer), before, strict=True))
    with optimizer.gathered(modify=True), torch.no_grad():
        for p in model.parameters():  # of the first rank
            p.view(-1)[::2].mul_(0.5 if rank == 0 else 3.0)
    seen += look(model, optimizer)
    optimizer.step()
    seen += look(model, optimizer)
    with optimizer.gathered():
        seen += [p.detach().float().clone() for p in model.parameters()]
    optimizer.close()
    return [*seen, *(p.detach().clone() for p in model.parameters())]


def check_what_is_refused(model: Net, optimizer: penstock.Optimizer) -> None:
    wrong, frozen = torch.ones(3, 5), model.blocks[1].mix.weight
    for name, p in (("blocks.0.mix.weight", model.blocks[0].mix.weight), ("first.bias", model.first.bias)):
        shapes = rf"'{name}' has shape \(3, 5\); the parameter has \({p.shape[0]},"
        for change in (
            lambda p=p: optimizer.set_full_param(p, wrong),
            lambda p=p: optimizer.set_full_grad(p, wrong),
            lambda p=p: optimizer.set_full_state(p, "exp_avg", wrong),
        ):
            with pytest.raises(ConfigError, match=shapes):
                change()
    with pytest.raises(ConfigError, match=r"'blocks.1.mix.weight' has shape \(3, 5\)"):
        optimizer.set_full_param(frozen, wrong)
    for look_or_change in (
        lambda: optimizer.full_grad(frozen),
        lambda: optimizer.set_full_grad(frozen, torch.ones_like(frozen)),
        lambda: optimizer.full_state(frozen, "exp_avg"),
        lambda: optimizer.set_full_state(frozen, "exp_avg", torch.ones_like(frozen)),
    ):
        with pytest.raises(ConfigError, match=r"'blocks.1.mix.weight' is frozen"):
            look_or_change()
    with pytest.raises(ConfigError, match="no optimizer state 'momentum'"):
        optimizer.full_state(model.first.bias, "momentum")


def otherwise(stage: int, precision: str, rank: int = 0, every: int = 1) -> list[str]:
    """The rows of a stage in which anything is to be seen that the device at stage 3 does not show."""
    expected = use(inline, Movement(), (), precision, rank)
    failures = []
    for make, how, move in list(rows(stage))[stage % every :: every]:
        found = use(make, how, move, precision, rank)
        if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
            failures.append(f"{make.__name__} {changed(how)} {move}")
    return failures


@pytest.mark.parametrize(
    ("stage", "every"), [thorough(0, 4), thorough(1, 4), thorough(2, 4), (3, 4), thorough(3, 1)], ids=str
)
@pytest.mark.parametrize("precision", [thorough("fp32"), "bf16"])
def test_what_is_seen_and_set_is_the_same_everywhere(stage: int, every: int, precision: str) -> None:
    assert otherwise(stage, precision, every=every) == []


def of_rank(rank: int, stage: int, precision: str) -> list[str]:
    return otherwise(stage, precision, rank, every=6)


@pytest.mark.parametrize(
    ("stage", "precision"), [thorough(3, "bf16"), thorough(2, "fp32"), thorough(1, "bf16"), thorough(0, "fp32")]
)
def test_what_is_seen_and_set_is_the_same_everywhere_on_two_ranks(stage: int, precision: str) -> None:
    assert run_ranks(of_rank, 2, stage, precision) == [[], []]
