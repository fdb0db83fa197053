"""The loss on held-out text."""

import torch
from torch import nn

from penstock.cli.training.batches import eval_batches
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.corpus import Tokens
from penstock.cli.training.feeding import to_device
from penstock.cli.training.ranks import Ranks


def held_out_loss(model: nn.Module, held_out: Tokens, config: TrainConfig, ranks: Ranks) -> float:
    """Mean loss over `config.eval_sequences` held-out sequences of all ranks, nats per token; collective.

    For a byte-level tokenizer a token is a byte.
    """
    batches = eval_batches(
        held_out,
        seq_length=config.seq_length,
        batch_size=config.batch_size,
        wanted_count=config.eval_sequences,
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
    loss_sum, count = torch.zeros((), device=ranks.device), 0
    model.eval()
    with torch.no_grad():
        for sequences, counts in batches:
            ids = to_device(sequences, ranks.device)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            if counts:
                loss_sum += loss.float() * len(ids)
                count += len(ids)
    model.train()
    # Until here nothing has waited for the device. A number is filled in there: to copy it the host would wait too.
    total, number = ranks.sum(torch.stack([loss_sum, torch.full_like(loss_sum, count)])).tolist()
    return float(total / number)
