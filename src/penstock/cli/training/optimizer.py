"""The model's optimizer: AdamW in two groups, prepared by penstock as the settings say."""

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

import penstock
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.precision import resolve_precision
from penstock.cli.training.ranks import Ranks


def prepare_model(
    model: nn.Module, config: TrainConfig, ranks: Ranks, *, weights: Path | None = None
) -> penstock.Optimizer:
    """Hand the model and its AdamW to penstock; collective. `weights`: where the values of a model without are.

    Raises:
        ConfigError: what the settings ask for cannot be done.
    """
    return penstock.prepare(
        model,
        torch.optim.AdamW(parameter_groups(model, config.weight_decay), lr=config.lr, betas=config.betas),
        stage=cast("Any", config.stage),  # the library checks the values that the types would
        placement=config.placement(),
        precision=resolve_precision(config.precision, ranks.device),
        max_grad_norm=config.max_grad_norm,
        overlap=cast("Any", config.overlap),
        options=config.options(),
        weights=weights,
    )


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters with weight decay (matrices and embeddings) and without (norms and biases)."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    decayed = {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay}
    others = {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0}
    return [group for group in (decayed, others) if group["params"]]
