"""Text from the trained model."""

import torch
from torch import nn

from penstock.cli.training.ranks import Ranks

TEMPERATURE = 0.8


def sample_ids(
    model: nn.Module, prompt_ids: list[int], *, token_count: int, context_length: int, seed: int, ranks: Ranks
) -> list[int]:
    """Continue the prompt by `token_count` ids, drawn from the model at `TEMPERATURE`; collective.

    Every rank runs every forward pass, because the parameters may be sharded; rank 0 draws. The number of passes is
    fixed, so no rank can stop before another. No cache is kept: it differs from one kind of model to the next.

    Arguments:
        model: a causal language model.
        prompt_ids: at least one id.
        token_count: ids to draw.
        context_length: the model sees this many ids at most.
        seed: of the draws.
        ranks: this process's place.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt_ids)
    model.eval()
    with torch.no_grad():
        for _ in range(token_count):
            context = torch.tensor([ids[-context_length:]], device=ranks.device)
            logits = model(input_ids=context, use_cache=False).logits[0, -1]
            probabilities = torch.softmax(logits.float().cpu() / TEMPERATURE, dim=-1)
            drawn = torch.multinomial(probabilities, 1, generator=generator)
            ids.append(int(ranks.from_first(drawn.to(ranks.device)).item()))
    model.train()
    return ids[len(prompt_ids) :]


def printable(text: str) -> str:
    """The text without control characters, which could steer a terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
