"""Looking at state and changing it, on two ranks."""

import pytest
import torch

import penstock
from tests.parity.rows import PLACEMENTS, Arithmetic, Movement, batches, loss_of, prepared
from tests.support import run_ranks

EVERYTHING_ON_CPU = PLACEMENTS[2]


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
