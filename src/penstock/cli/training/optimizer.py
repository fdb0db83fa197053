"""The optimizer of a run: AdamW in two groups, prepared by penstock, and its learning rate from step to step."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

import penstock
from penstock.cli.ranks import Ranks
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.recipe import Recipe

#: The learning rate ends at this part of its peak.
FLOOR = 0.1
# bf16 products without one of these are emulated, many times slower than fp32.
_CPU_BF16 = ("avx512_bf16", "amx_bf16")


def prepare_model(
    model: nn.Module, config: TrainConfig, recipe: Recipe, ranks: Ranks, *, weights: Path | None = None
) -> penstock.Optimizer:
    """Hand the model and its AdamW to penstock. Every rank calls it.

    Arguments:
        model: what is trained; without values where `weights` has them.
        config: the settings.
        recipe: what a step is, and the peak learning rate.
        ranks: the place of this process.
        weights: the folder with the values of a model that has none.

    Raises:
        ConfigError: what the settings ask for cannot be done.
    """
    return penstock.prepare(
        model,
        torch.optim.AdamW(
            parameter_groups(model, config.weight_decay), lr=recipe.lr, betas=config.betas or (0.9, 0.95)
        ),
        stage=cast("Any", config.stage),  # the library checks the values that the types would
        placement=config.placement(),
        precision=resolve_precision(config.precision, ranks.device),
        max_grad_norm=config.max_grad_norm,
        overlap=cast("Any", config.overlap),
        options=config.options(),
        weights=weights,
    )


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Divide trainable parameters: those with weight decay (matrices, embeddings), those without (norms, biases)."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    decayed = {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay}
    others = {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0}
    return [group for group in (decayed, others) if group["params"]]


def resolve_precision(wanted: str, device: torch.device) -> Literal["fp32", "bf16"]:
    """Choose the precision asked for; for "auto", bf16 where the device multiplies matrices in it, else fp32."""
    if wanted != "auto":
        return "bf16" if wanted == "bf16" else "fp32"
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    # get_capabilities is newer than the oldest torch we support.
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return "bf16" if any(capabilities.get(name, False) for name in _CPU_BF16) else "fp32"


def warmup_cosine(*, warmup: int, steps: int) -> Callable[[int], float]:
    """Make the learning rate's factor at step s = 0 .. steps - 1, for `torch.optim.lr_scheduler.LambdaLR`.

    (s + 1) / warmup while s < warmup, then FLOOR + (1 - FLOOR) (1 + cos(pi (s - warmup) / (steps - warmup))) / 2.

    Source: SGDR (Loshchilov and Hutter, 2017), one period.
    """

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, steps - warmup))
        return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor
