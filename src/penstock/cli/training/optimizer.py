"""The optimizer of a run: a class of torch's with parameters in two groups, prepared by penstock."""

from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

import penstock
from penstock.cli.ranks import Ranks
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.optimizer_arguments import CLASSES, optimizer_arguments, takes_weight_decay
from penstock.cli.training.recipe import Recipe
from penstock.errors import ConfigError

Precision = Literal["fp32", "bf16", "fp16"]

# bf16 products without one of these are emulated, many times slower than fp32.
_CPU_BF16 = ("avx512_bf16", "amx_bf16")


def prepare_model(
    model: nn.Module, config: TrainConfig, recipe: Recipe, ranks: Ranks, *, weights: Path | None = None
) -> penstock.Optimizer:
    """Hand the model and its optimizer to penstock. Every rank calls it.

    Arguments:
        model: what is trained; without values where `weights` has them.
        config: the settings.
        recipe: what a step is, and the peak learning rate.
        ranks: the place of this process.
        weights: the folder with the values of a model that has none.

    Raises:
        ConfigError: what the settings ask for cannot be done.
    """
    maker: Any = CLASSES[config.optimizer_name]
    return penstock.prepare(
        model,
        maker(parameter_groups(model, config), lr=recipe.lr, **optimizer_arguments(config)),
        stage=cast("Any", config.stage),  # the library checks the values that the types would
        placement=config.placement(),
        precision=resolve_precision(config.precision, ranks.device),
        max_grad_norm=config.max_grad_norm,
        overlap=cast("Any", config.overlap),
        options=config.options(),
        weights=weights,
    )


def parameter_groups(model: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
    """Divide trainable parameters: those with weight decay (matrices, embeddings), those without (norms, biases).

    Raises:
        ConfigError: nothing of the model is trained.
    """
    decayed, others = _divided(model)
    if not decayed and not others:
        raise ConfigError("No parameter of the model is trained: all are frozen. Name another model.")
    has_decay = takes_weight_decay(config.optimizer_name)
    groups = [(decayed, config.weight_decay), (others, 0.0)]
    return [
        {"params": params} | ({"weight_decay": weight_decay} if has_decay else {})
        for params, weight_decay in groups
        if params
    ]


def about_decay(model: nn.Module, config: TrainConfig) -> str:
    """Say in a line which parameters have weight decay. Before the model is prepared, which changes their shapes."""
    decayed, others = _divided(model)
    matrices = f"{len(decayed):,} matrices ({_shortened(sum(p.numel() for p in decayed))})"
    if not takes_weight_decay(config.optimizer_name):
        return f"no weight decay: {config.optimizer_name} has none, and --weight-decay is passed over"
    if not config.weight_decay:
        return "no weight decay"
    return f"weight decay {config.weight_decay:g} on {matrices}, none on {len(others):,} norms and biases"


def _divided(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Divide trainable parameters: matrices, which adapters are too, and vectors."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [p for p in trainable if p.dim() >= 2], [p for p in trainable if p.dim() < 2]


def _shortened(count: int) -> str:
    """Write a count for people: `1.3M`."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return str(count)


def resolve_precision(wanted: str, device: torch.device) -> Precision:
    """Choose the precision asked for; for "auto", bf16 where the device multiplies matrices in it, else fp32."""
    if wanted != "auto":
        return cast("Precision", wanted)
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    # get_capabilities is newer than the oldest torch we support.
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return "bf16" if any(capabilities.get(name, False) for name in _CPU_BF16) else "fp32"
