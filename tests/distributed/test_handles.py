"""Gradients in `.grad` on two ranks: torch's clipping over ranks, and what the ranks do to them must be the same."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

import penstock
from tests.lib import engines
from tests.lib.engines import loss_of, sgd
from tests.lib.models import mixture
from tests.lib.ranks import run_ranks
from tests.lib.refusals import said_by

stock = partial(sgd, weight_decay=0.1)


def prepared(stage: int = 3) -> tuple[nn.Module, penstock.Optimizer]:
    """Some experts get data of one rank alone."""
    return engines.prepared(mixture, stock=stock, stage=stage, params="cpu" if stage == 3 else "device")


CLIPS: dict[str, Callable[[nn.Module], Tensor]] = {
    "all": lambda net: clip_grad_norm_(net.parameters(), 0.3),
    "foreach": lambda net: clip_grad_norm_(net.parameters(), 0.3, foreach=True),
    "the greatest": lambda net: clip_grad_norm_(net.parameters(), 0.01, math.inf),
    "groups": lambda net: clip_grad_norm_(net.first.parameters(), 0.1) + clip_grad_norm_(net.blocks.parameters(), 0.1),
}


def clips(rank: int) -> list[str]:
    wrong = []
    for stage in (0, 3):
        for name, clip in CLIPS.items():
            model, optimizer = prepared(stage)
            reference = mixture()
            plain = stock(reference.parameters())
            for seed in range(2):
                loss_of(model, 2 * seed + rank).backward()
                for other in range(2):
                    (loss_of(reference, 2 * seed + other) / 2).backward()
                norms = clip(model), clip(reference)
                if not torch.allclose(*norms, rtol=1e-6, atol=0):
                    wrong.append(f"{stage}, {name}: norms {norms}")
                for each in (optimizer, plain):
                    each.step()
                    each.zero_grad()
            for (what, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
                if not torch.allclose(optimizer.full_param(p), q, rtol=1e-6, atol=1e-7):
                    wrong.append(f"{stage}, {name}: {what}")
            optimizer.close()
    return wrong


def test_torchs_clipping_is_that_of_averaged_gradients() -> None:
    assert run_ranks(clips, 2) == [[], []]


def count_meetings(rank: int) -> list[int]:
    model, optimizer = prepared()
    control_group = optimizer._engine.context.ranks.control_group
    meet, count = control_group._meet, []
    control_group._meet = lambda *values: count.append(1) or meet(*values)
    found = []
    for clip in (
        *list(CLIPS.values())[:2],
        lambda net: get_total_norm([p.grad for p in net.parameters() if p.grad is not None]),
    ):
        loss_of(model, rank).backward()
        del count[:]
        clip(model)
        [p.grad.norm() for p in model.parameters() if p.grad is not None]
        found.append(len(count))
        optimizer.zero_grad()
    optimizer.close()
    return found


def test_one_meeting_for_all_norms() -> None:
    assert run_ranks(count_meetings, 2) == [[1, 1, 1]] * 2


def assign(model: nn.Module, value: float) -> None:
    model.first.weight.grad = torch.full((16, 8), value)


def scale(model: nn.Module, factor: float) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(factor)


def drop(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None


def clip_later(model: nn.Module, optimizer: penstock.Optimizer, rank: int) -> None:
    with torch.no_grad():
        loss_of(model, rank)  # takes over what was set
    clip_grad_norm_(model.parameters(), 1.0)


def step(model: nn.Module, optimizer: penstock.Optimizer, rank: int) -> None:
    optimizer.step()
    optimizer.zero_grad()


def one_clips(model: nn.Module, optimizer: penstock.Optimizer, rank: int) -> None:
    optimizer.step() if rank else clip_grad_norm_(model.parameters(), 1.0)


SET = ["Ranks differ in the gradient that was set for 'first.weight'"]
#: What each rank does to gradients, what all call, and what all are told.
REFUSED: dict[str, tuple[Callable[..., object], Callable[..., object], list[str]]] = {
    "the same": (lambda net, rank: assign(net, 0.5), step, []),
    "its own": (lambda net, rank: assign(net, 0.5 + rank), step, SET),
    "its own, clipped": (lambda net, rank: assign(net, 0.5 + rank), clip_later, SET),
    "one alone": (lambda net, rank: rank or assign(net, 0.5), step, SET),
    "one drops": (
        lambda net, rank: rank or drop(net.first),
        step,
        ["Ranks differ in the gradient that was dropped of 'first."],
    ),
    "one drops all": (lambda net, rank: rank or drop(net), step, ["Ranks differ in gradients that were dropped"]),
    "scaled apart": (
        lambda net, rank: scale(net.first, 0.5 + rank),
        step,
        ["Ranks differ in the factor of the gradient of 'first."],
    ),
    "all scaled apart": (lambda net, rank: scale(net, 0.5 + rank), step, ["Ranks differ in the scale of gradients"]),
    "one clips": (
        lambda net, rank: None,
        one_clips,
        ["Ranks are out of step", "step()", "the norm of gradients (torch.nn.utils.clip_grad_norm_"],
    ),
}


def what_ranks_set(rank: int) -> None:
    for name, (change, verb, texts) in REFUSED.items():
        model, optimizer = prepared()
        loss_of(model, rank).backward()
        before = [optimizer.full_param(p) for p in model.parameters()]
        change(model, rank)
        said = said_by(partial(verb, model, optimizer, rank))
        assert bool(said) == bool(texts), (name, said)
        assert all(text in said for text in texts), (name, said)
        if said:
            assert all(torch.equal(optimizer.full_param(p), q) for p, q in zip(model.parameters(), before, strict=True))
            optimizer.zero_grad()
        loss_of(model, rank).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        assert not optimizer.step().skipped
        optimizer.close()


def test_what_ranks_do_to_gradients_must_be_the_same() -> None:
    run_ranks(what_ranks_set, 2)


def held_back_at(stage: int, rank: int) -> None:
    model, optimizer = prepared(stage)
    weight = model.first.weight
    with optimizer.no_sync():
        loss_of(model, rank).backward()
    for use in (
        lambda: clip_grad_norm_(model.parameters(), 1.0),
        lambda: weight.grad.mul_(0.5),
        optimizer.step,
        lambda: optimizer.full_grad(weight),
    ):
        assert "Gradients of no_sync micro-batches are not reduced yet" in said_by(use)
    loss_of(model, rank).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    assert not optimizer.step().skipped
    optimizer.zero_grad()
    with optimizer.no_sync():
        loss_of(model, rank).backward()
    optimizer.zero_grad()
    assert optimizer.step().grad_norm == 0
    said = said_by(lambda: nn.parallel.DistributedDataParallel(model))
    assert "DistributedDataParallel was put around a prepared Blocks" in said
    optimizer.close()


def held_back(rank: int) -> None:
    for stage in (0, 1):
        held_back_at(stage, rank)


def test_what_is_not_reduced_is_not_clipped_and_ddp_is_refused() -> None:
    run_ranks(held_back, 2)
