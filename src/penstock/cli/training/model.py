"""The model of a run: built, and measured on text that it has not seen."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from penstock.cli.ranks import Ranks
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.data import Tokens, eval_batches, to_device
from penstock.cli.training.recipe import Recipe
from penstock.cli.training.settings.common import ON
from penstock.errors import ConfigError, MemoryBudgetError, PenstockError, one_line
from penstock.integrations.chunked import chunk_loss
from penstock.integrations.huggingface import ModelSource, build_empty, build_model, enable_activation_checkpointing


def build(source: ModelSource, config: TrainConfig) -> tuple[nn.Module, Path | None]:
    """Build the model that the settings ask for, its random weights drawn from `config.seed`.

    Returns:
        The model, and the folder that `penstock.prepare` reads its values from; `None` where it has them already.
    """
    torch.manual_seed(config.seed)
    empty = build_empty(source)
    model = build_model(source) if empty is None else empty
    if config.recompute == ON:
        enable_activation_checkpointing(model)
    if config.chunked_loss == ON:
        chunk_loss(model)
    return model, None if empty is None else source.folder


def held_out_loss(model: nn.Module, held_out: Tokens, config: TrainConfig, recipe: Recipe, ranks: Ranks) -> float:
    """Measure the mean loss over `config.eval_sequences` held-out sequences, in nats per token. Every rank calls it.

    For a byte-level tokenizer a token is a byte.
    """
    loss_sum, count = torch.zeros((), device=ranks.device), 0
    model.eval()
    with torch.no_grad():
        for sequences, counts in eval_batches(held_out, recipe, ranks, wanted_count=config.eval_sequences):
            ids = to_device(sequences, ranks.device)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            if counts:
                loss_sum += loss.float() * len(ids)
                count += len(ids)
    model.train()
    # Until here nothing has waited for the device. A number is filled in there: to copy it the host would wait too.
    total, number = ranks.sum(torch.stack([loss_sum, torch.full_like(loss_sum, count)])).tolist()
    return float(total / number)


@contextmanager
def computing(source: ModelSource) -> Iterator[None]:
    """Say in one line what goes wrong while a model computes: too little memory, or a folder that asks for nonsense.

    Raises:
        MemoryBudgetError: the device or the host has too little memory.
        ConfigError: a folder's model fails in its own code: its configuration asks for what cannot be computed.
    """
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise MemoryBudgetError(
                f"There is too little memory: {one_line(error)}. Use a smaller --batch-size with more --accumulation, "
                "shorter sequences, --recompute or --chunked-loss."
            ) from error
        if source.folder is None or not _is_of_model(error):
            raise
        raise ConfigError(
            f"The model in {source.folder} cannot compute: {one_line(error)}. Mend its configuration, or name another."
        ) from error


def _is_of_model(error: Exception) -> bool:
    """Tell whether an error was raised in the model's own code, or by what that has called, and not in ours."""
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = max(number for number, name in enumerate(modules) if name.startswith("penstock"))
    return any(name.startswith("transformers") for name in modules[own + 1 :])
