"""The model of a run, as files that `from_pretrained` reads."""

from torch import nn

import penstock
from penstock.cli.training.request import Request
from penstock.integrations.huggingface import save_pretrained
from penstock.integrations.merging import save_merged


def save_model(model: nn.Module, optimizer: penstock.Optimizer, request: Request) -> None:
    """Save model and tokenizer; of a model with adapters what they make of it, and they alone beside it.

    Every rank calls it.

    Raises:
        CheckpointError: a file cannot be written.
    """
    out, is_first_rank = request.config.out, request.ranks.is_first
    if request.lora is None:
        save_pretrained(model, optimizer, out, is_first_rank=is_first_rank)
    else:
        save_merged(model, optimizer, out, is_first_rank=is_first_rank)
    if is_first_rank:
        request.tokenizer.save(out)
