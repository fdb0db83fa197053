"""The optimizer of a run: a class of torch's with parameters in two groups, prepared by penstock."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import penstock
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.learning.model import Built
from penstock.cli.training.learning.muon import muon_groups
from penstock.cli.training.learning.optimizer_arguments import (
    CLASSES,
    optimizer_arguments,
    takes_weight_decay,
    weight_decay_of,
)
from penstock.cli.training.precision import Precision
from penstock.cli.training.recipe import Recipe
from penstock.errors import ConfigError
from penstock.footprint import Footprint, footprint
from penstock.planner import Plan


@dataclass(frozen=True)
class Preparation:
    """What `penstock.prepare` is given for a run, and `penstock.footprint` before it.

    Attributes:
        model: what is trained.
        optimizer: torch's, of its trained parameters.
        arguments: the others, by name.
        plan: what says where state lives, in place of the arguments; `None` where these do.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    arguments: Mapping[str, Any]
    plan: Plan | None = None

    def prepare(self, mesh: DeviceMesh | None = None) -> penstock.Optimizer:
        """Hand it to penstock, with the mesh of the ranks where there is one. Every rank calls it.

        Raises:
            ConfigError: what the settings ask for cannot be done.
            MemoryBudgetError, NvmeError: there is no room for it.
        """
        chosen = {} if self.plan is None else {"placement": "auto", "plan": self.plan}
        return penstock.prepare(self.model, self.optimizer, mesh=mesh, **{**self.arguments, **chosen})

    def footprint(self, *, mesh: Mapping[str, int]) -> Footprint:
        """Say what it will take of a rank, of so many along each dimension. Takes nothing."""
        return footprint(self.model, self.optimizer, mesh=mesh, **self.by_hand())

    def by_hand(self) -> dict[str, Any]:
        """List the arguments as they are without a plan: with what it says in them.

        Raises:
            ConfigError: the plan does not fit, or another argument contradicts it.
        """
        if self.plan is None:
            return dict(self.arguments)
        options, overlap = self.arguments["options"], self.arguments["overlap"]
        return {**self.arguments, **self.plan.prepare_arguments(options, overlap=overlap)}


def preparation(built: Built, config: TrainConfig, recipe: Recipe, precision: Precision) -> Preparation:
    """Say how a model is trained.

    Arguments:
        built: what is trained, and where its values are.
        config: the settings.
        recipe: what a step is, and the peak learning rate.
        precision: what is computed in.

    Raises:
        ConfigError: nothing of the model is trained.
    """
    optimizer = CLASSES[config.optimizer_name](
        parameter_groups(built.model, config), lr=recipe.lr, **optimizer_arguments(config)
    )
    arguments = {
        "stage": config.stage,
        "placement": config.placement(),
        "precision": precision,
        "max_grad_norm": config.max_grad_norm,
        "overlap": config.overlap,
        # Each rank's loss is its part of the mean over all labels.
        "options": replace(config.options(), reduce_op="sum"),
        "weights": built.weights,
    }
    return Preparation(built.model, optimizer, arguments)


def parameter_groups(model: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
    """Divide trainable parameters: those with weight decay (matrices, embeddings), those without (norms, biases).

    Raises:
        ConfigError: nothing of the model is trained.
    """
    decayed, others = _divided(model)
    if not decayed and not others:
        raise ConfigError("No parameter of the model is trained: all are frozen. Name another model.")
    if config.optimizer_name == "muon":
        return muon_groups(model, weight_decay_of(config))
    has_decay = takes_weight_decay(config.optimizer_name)
    groups = [(decayed, weight_decay_of(config)), (others, 0.0)]
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
        passed_over = ", and --weight-decay is passed over" if config.weight_decay else ""
        return f"no weight decay: {config.optimizer_name} has none{passed_over}"
    weight_decay = weight_decay_of(config)
    if not weight_decay:
        return "no weight decay"
    return f"weight decay {weight_decay:g} on {matrices}, none on {len(others):,} norms and biases"


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
