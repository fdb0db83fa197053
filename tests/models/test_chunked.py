"""A prepared model with a chunked loss, beside the same one without: equal to rounding, and no gather more."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.integrations.chunked import chunk_loss
from tests.lib.engines import prepare_on
from tests.lib.ranks import run_ranks
from tests.lib.streams import simulated
from tests.models.contract import HYPER, ON_CPU, ON_DEVICE
from tests.models.transformers_rows import llama

VOCABULARY = 300
WAYS: list[dict[str, Any]] = [
    {"placement": ON_DEVICE, "precision": "bf16"},
    {"placement": ON_CPU, "tied": True, "options": penstock.Options(prefetch_bytes=0)},
    {"placement": ON_CPU, "precision": "fp16"},
    {"placement": ON_CPU, "units": (nn.Linear,)},  # the head is released between forward and backward
]


def batch(step: int, rank: int) -> Tensor:
    return torch.randint(VOCABULARY, (4, 10), generator=torch.Generator().manual_seed(10 * rank + step))


def run(
    *, chunked: bool, rank: int, tied: bool = False, precision: str = "fp32", **rest: Any
) -> tuple[list[float], list[Tensor], dict[str, int]]:
    """Losses of two steps, gradients of the first, and the collectives of the second, which knows the order."""
    torch.manual_seed(0)
    model = llama(vocab_size=VOCABULARY, tie_word_embeddings=tied)
    if chunked:
        chunk_loss(model, chunk_bytes=1)
    stock = torch.optim.AdamW(model.parameters(), foreach=False, **HYPER)
    optimizer = prepare_on(simulated(), model, stock, stage=3, precision=precision, **rest)
    counts = optimizer._engine.context.ranks.counts
    losses, gradients = [], []
    for step in range(2):
        counts.clear()
        ids = batch(step, rank)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.backward(loss)
        losses.append(loss.item())
        if step == 0:
            gradients = [optimizer.full_grad(p) for p in model.parameters()]
        assert not optimizer.step().skipped
        optimizer.zero_grad()
    optimizer.synchronize()
    found = dict(counts)
    optimizer.close()
    return losses, gradients, found


def assert_alike(ours: Any, theirs: Any, precision: str) -> None:
    relative = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-3}[precision]
    assert ours[0] == pytest.approx(theirs[0], rel=relative)
    for a, b in zip(ours[1], theirs[1], strict=True):
        assert ((a - b).abs() <= relative * (b.abs() + b.abs().max())).all()
    assert ours[2] == theirs[2]


def compare(rank: int) -> list[dict[str, int]]:
    found = []
    for how in WAYS:
        ours, theirs = (run(chunked=chunked, rank=rank, **how) for chunked in (True, False))
        assert_alike(ours, theirs, how.get("precision", "fp32"))
        found.append(ours[2])
    return found


def test_two_ranks_gather_no_more_than_for_whole_logits() -> None:
    first, second = run_ranks(compare, 2)
    assert first == second
    blocks, roots = 2, 1
    assert first[0] == {"all_gather": 2 * blocks + roots, "reduce_scatter": blocks + roots, "all_reduce": 1}
