"""The trainer of `penstock train`: TRL's SFTTrainer on Penstock."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from trl import SFTTrainer

from penstock.integrations.transformers import trainer_class
from penstock.optim import Lion, MuonAdamW


def sft_class(rule: str | None, **prepare_arguments: Any) -> type[Any]:
    """Make the class of a run's trainer.

    Arguments:
        rule: `muon` or `lion`; `None` for the optimizer that `optim` names.
        prepare_arguments: those of `penstock.prepare`.
    """
    made = trainer_class(SFTTrainer, **prepare_arguments)
    if rule is None:
        return made

    class Trainer(made):  # type: ignore[misc, valid-type]
        """One whose optimizer is Penstock's own."""

        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            """Make the optimizer, and go on as the class does."""
            if self.optimizer is None:
                self.optimizer = RULES[rule](self.model, self.args, set(self.get_decay_parameter_names(self.model)))
            return super().create_optimizer(*args, **kwargs)

    return Trainer


def _muon(model: nn.Module, args: Any, decayed: set[str]) -> torch.optim.Optimizer:
    """Make Muon for the matrices of the layers and AdamW for the rest; both learn with the same rate."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups: list[dict[str, Any]] = []
    for group in MuonAdamW(model).param_groups:
        for weight_decay, has_decay in ((args.weight_decay, True), (0.0, False)):
            params = [p for p in group["params"] if (names[p] in decayed) is has_decay]
            if params:
                groups.append({"params": params, "rule": group["rule"], "weight_decay": weight_decay})
    betas = (args.adam_beta1, args.adam_beta2)
    return MuonAdamW(groups, args.learning_rate, adamw_betas=betas, adamw_eps=args.adam_epsilon)


def _lion(model: nn.Module, args: Any, decayed: set[str]) -> torch.optim.Optimizer:
    """Make Lion, with its own decay rates of the moment."""
    of: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            of[name in decayed].append(parameter)
    groups = [
        {"params": params, "weight_decay": args.weight_decay if has_decay else 0.0}
        for has_decay, params in of.items()
        if params
    ]
    return Lion(groups, lr=args.learning_rate)


#: Optimizers of Penstock's own, by the names that `rule` has for them.
RULES: Mapping[str, Callable[[nn.Module, Any, set[str]], torch.optim.Optimizer]] = {"muon": _muon, "lion": _lion}
