"""Looking at state and changing it, on two ranks."""

from itertools import product

import pytest
import torch

import penstock
from tests.lib.streams import inline, separate
from tests.parity.rows import Arithmetic, Movement, batches, loss_of, make_model, prepared
from tests.support import run_ranks

TIERS = ("device", "cpu")


def step_with_gradients_held_back(rank: int) -> list[str]:
    messages = []
    for stage in (0, 1):
        model, optimizer = prepared(Arithmetic(), Movement(stage=stage))
        before = optimizer.full_param(model.first.weight)
        with optimizer.no_sync():
            optimizer.backward(loss_of(model, batches(2, 1)[0][0][rank]))
        for call in (optimizer.step, lambda p=model.first.weight, o=optimizer: o.full_grad(p)):
            with pytest.raises(penstock.EngineError) as caught:
                call()
            messages.append(str(caught.value))
        assert torch.equal(optimizer.full_param(model.first.weight), before)
        optimizer.zero_grad()
        assert optimizer.step().grad_norm == 0
        optimizer.close()
    return messages


def test_a_step_whose_every_micro_batch_was_under_no_sync_is_refused_not_lost() -> None:
    for messages in run_ranks(step_with_gradients_held_back, 2):
        assert all("no_sync" in message and "not reduced yet" in message for message in messages)


def zeroed_gradients(rank: int) -> list[str]:
    failures = []
    for stage in (0, 1, 2, 3):
        model, optimizer = prepared(Arithmetic(), Movement(stage=stage))
        optimizer.backward(loss_of(model, batches(2, 1)[0][0][rank]))
        assert optimizer.full_grad(model.first.weight).any()
        optimizer.zero_grad()
        if any(optimizer.full_grad(p).any() for p in model.parameters()):
            failures.append(f"stage {stage}")
        optimizer.close()
    return failures


def test_full_grad_is_zero_after_zero_grad() -> None:
    assert run_ranks(zeroed_gradients, 2) == [[], []]


def changes_by_hand(rank: int) -> list[str]:
    """Rank 0 writes under `gathered`; every rank computes with it, and updates start from it."""
    failures = []
    first, second = (step[0][rank] for step in batches(2, 1)[:2])
    for stage, (params, optimizer_tier), make in product((0, 1, 3), product(TIERS, TIERS), (inline, separate)):
        how = Movement(stage, params, "cpu", optimizer_tier)
        model, optimizer = prepared(Arithmetic(), how, make())
        plain = make_model()
        with optimizer.gathered(modify=True), torch.no_grad():
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                p[-1:].mul_(0.5 if rank == 0 else 77.0)
                q[-1:].mul_(0.5)
        if not torch.equal(loss_of(model, first), loss_of(plain, first)):
            failures.append(f"{how}, {make.__name__}: gathered")
        value = torch.full_like(plain.blocks[0].down.weight, 0.25)
        optimizer.set_full_param(model.blocks[0].down.weight, value)
        plain.blocks[0].down.weight.data.copy_(value)
        if not torch.equal(loss_of(model, second), loss_of(plain, second)):
            failures.append(f"{how}, {make.__name__}: set_full_param")
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            if not torch.equal(optimizer.full_param(p), q):
                failures.append(f"{how}, {make.__name__}: full_param {tuple(p.shape)}")
        optimizer.close()
    return failures


def test_changes_by_hand_reach_every_rank() -> None:
    assert run_ranks(changes_by_hand, 2) == [[], []]
