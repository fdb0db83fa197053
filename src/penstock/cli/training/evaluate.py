"""The loss on held-out text."""

import torch
from torch import nn

from penstock.cli.training.batches import eval_batches
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.corpus import Tokens
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
    sum_and_count = torch.zeros(2, device=ranks.device)
    model.eval()
    with torch.no_grad():
        for sequences, counts in batches:
            ids = torch.from_numpy(sequences).to(ranks.device)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            if counts:
                sum_and_count += torch.stack([loss.float() * len(ids), loss.new_tensor(len(ids), dtype=torch.float32)])
    model.train()
    loss_sum, count = ranks.sum(sum_and_count).tolist()
    return float(loss_sum / count)
