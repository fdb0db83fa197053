"""Answers of different lengths on two ranks: gathered per token with ranks in step, once for all of them, or whole."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tests.lib.covering import covering
from tests.lib.engines import adamw, prepared
from tests.lib.ranks import run_ranks
from tests.models.family import Batch
from tests.models.transformers_rows import language_loss, llama, t5, t5_loss

MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {"llama": (llama, language_loss), "t5": (t5, t5_loss)}
BEAMS: dict[str, Any] = {"num_beams": 3, "do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True}
MOST = 6


def answers(model: nn.Module, rank: int, options: dict[str, Any], **how: Any) -> list[Tensor]:
    """Of two prompts at once, and of as many tokens as the rank likes; or until each prompt's answer ends."""
    ids = Batch(5, rank).ids(28, 2, 4) + 3
    found = []
    for stop in (
        {"max_new_tokens": MOST - 3 * rank, "eos_token_id": None},
        {"max_new_tokens": MOST, "eos_token_id": 7},
    ):
        torch.manual_seed(rank)
        kwargs = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, **stop, **options, **how}
        found.append(model.generate(ids, **kwargs))
    return found


def generate(rank: int, name: str, placement: str, trains: bool, how: str) -> list[list[tuple[int, ...]]]:
    """As the plain model does on this rank, before and after a step. Return the shapes of all answers."""
    build, loss_of = MODELS[name]
    torch.manual_seed(0)
    plain, model = build().eval(), build().eval()
    model.load_state_dict(plain.state_dict())
    stage = 2 if how == "whole" else 3
    _, optimizer = prepared(model, stock=adamw if trains else None, params=placement, stage=stage)
    around: Callable[[], AbstractContextManager[Any]] = optimizer.gathered if how == "gathered" else nullcontext
    counts, shapes = optimizer._engine.context.ranks.counts, []
    for step in range(2):
        options = BEAMS if step == 0 and how == "in step" else SAMPLED
        expected = answers(plain, rank, options)
        with around():
            counts.clear()
            found = answers(model, rank, options, synced_gpus=how == "in step")
            assert bool(counts) == (how == "in step")
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        shapes.append([tuple(each.shape) for each in found])
        assert optimizer._engine.gatherer.live_bytes == 0
        if trains:
            optimizer.backward(loss_of(model, Batch(step, rank)))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad(), optimizer.gathered():
                plain.load_state_dict(model.state_dict())
    optimizer.close()
    return shapes


ROWS = covering(
    {
        "name": tuple(MODELS),
        "how": ("in step", "gathered", "whole"),
        "placement": ("cpu", "nvme"),
        "trains": (True, False),
    },
    fits=lambda row: (row.get("how"), row.get("placement")) != ("whole", "nvme"),  # files hold shards
)


def generate_all(rank: int) -> list[list[list[tuple[int, ...]]]]:
    return [generate(rank, **row) for row in ROWS]


def test_ranks_generate_answers_of_different_lengths() -> None:
    """`generate(synced_gpus=True)` has those that are done run along; of what is gathered or whole nothing travels."""
    for first, second in zip(*run_ranks(generate_all, 2), strict=True):
        assert all(a[0] != b[0] for a, b in zip(first, second, strict=True))
