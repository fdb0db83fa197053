"""Looking at state and changing it, on two ranks."""

import pytest
import torch

import penstock
from tests.lib.engines import loss_of, prepared
from tests.lib.models import Blocks
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline, separate

HELD_BACK = r"no_sync.*not reduced yet"


def gradients(rank: int) -> None:
    """They are zero after `zero_grad`; what every micro-batch held back is refused, not lost."""
    for stage in (0, 1, 2, 3):
        model, optimizer = prepared(Blocks, stage=stage)
        weight = model.first.weight
        optimizer.backward(loss_of(model, rank))
        assert optimizer.full_grad(weight).any()
        optimizer.zero_grad()
        assert not any(optimizer.full_grad(p).any() for p in model.parameters())
        if stage < 2:
            before = optimizer.full_param(weight)
            with optimizer.no_sync():
                optimizer.backward(loss_of(model, rank))
            with pytest.raises(penstock.EngineError, match=HELD_BACK):
                optimizer.step()
            with pytest.raises(penstock.EngineError, match=HELD_BACK):
                optimizer.full_grad(weight)
            assert torch.equal(optimizer.full_param(weight), before)
            optimizer.zero_grad()
            assert optimizer.step().grad_norm == 0
        optimizer.close()


def test_gradients_are_zero_after_zero_grad_and_those_of_no_sync_alone_are_refused_not_lost() -> None:
    run_ranks(gradients, 2)


def changes_by_hand(rank: int) -> None:
    """Rank 0 writes under `gathered`; every rank computes with it, and updates start from it."""
    for stage, streams, params, home in [
        (0, inline, "device", "cpu"),
        (0, separate, "cpu", "device"),
        (1, inline, "cpu", "cpu"),
        (1, separate, "device", "device"),
        (3, inline, "cpu", "device"),
        (3, separate, "device", "cpu"),
        (3, separate, "cpu", "cpu"),
    ]:
        model, optimizer = prepared(Blocks, streams, stage=stage, params=params, grads="cpu", optimizer=home)
        plain = Blocks()
        with optimizer.gathered(modify=True), torch.no_grad():
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                p[-1:].mul_(0.5 if rank == 0 else 77.0)
                q[-1:].mul_(0.5)
        assert torch.equal(loss_of(model, rank), loss_of(plain, rank))
        value = torch.full_like(plain.blocks[0].down.weight, 0.25)
        optimizer.set_full_param(model.blocks[0].down.weight, value)
        plain.blocks[0].down.weight.data.copy_(value)
        assert torch.equal(loss_of(model, 2 + rank), loss_of(plain, 2 + rank))
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(optimizer.full_param(p), q)
        optimizer.close()


def test_changes_by_hand_reach_every_rank() -> None:
    run_ranks(changes_by_hand, 2)
