"""Changing state by hand, on two ranks."""

import torch

from tests.lib.engines import loss_of, prepared
from tests.lib.models import Blocks
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline, separate


def changes_by_hand(rank: int) -> None:
    """Rank 0 writes under `gathered`; every rank computes with it, and updates start from it."""
    for stage, streams, params, home in [
        (0, separate, "cpu", "device"),
        (1, inline, "cpu", "cpu"),
        (3, inline, "cpu", "device"),
        (3, separate, "device", "cpu"),
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
