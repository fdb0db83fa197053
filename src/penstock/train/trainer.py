"""The trainer of `penstock train`: TRL's SFTTrainer on Penstock."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from trl import SFTTrainer

from penstock.integrations.transformers import trainer_class
from penstock.optim import Lion, MuonAdamW
from penstock.train.collator import CountedTokens, collator_for
from penstock.train.data import tokenize


def sft_class(rule: str | None, **prepare_arguments: Any) -> type[Any]:
    """Make the class of a run's trainer.

    Arguments:
        rule: `muon` or `lion`; `None` for the optimizer that `optim` names.
        prepare_arguments: those of `penstock.prepare`.
    """
    made = trainer_class(RunTrainer, **prepare_arguments)
    made.rule = rule  # type: ignore[attr-defined]
    return made


class RunTrainer(CountedTokens, SFTTrainer):
    """TRL's trainer with what is a run's own: how rows become ids, and optimizers of Penstock's own.

    Attributes:
        rule: `muon` or `lion`; `None` for the optimizer that `optim` names.
    """

    rule: str | None = None
    optimizer: Any
    data_collator: Any

    def __init__(self, args: Any, **kwargs: Any) -> None:
        # TRL would look for the marks of what an assistant says in the template, and knows few: ours knows any.
        self._learns_assistant = args.assistant_only_loss
        args.assistant_only_loss = False
        super().__init__(args=args, **kwargs)
        args.assistant_only_loss = self._learns_assistant
        # TRL takes none of another's beside packed rows, and asks its own for nothing.
        self.data_collator = collator_for(self.model.config, args, self._tokenizer) or self.data_collator

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, *rest: Any) -> Any:
        """Make ids and labels of rows, and have TRL cut and pack them."""
        args.assistant_only_loss = self._learns_assistant
        tokens = tokenize(
            dataset, self._tokenizer, args, completion_only_loss=self.completion_only_loss, name=str(rest[-1])
        )
        args.assistant_only_loss = False
        return super()._prepare_dataset(tokens, processing_class, args, *rest)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss as TRL does, and have the record of the run count its tokens."""
        before = self._total_train_tokens
        outcome = super().compute_loss(*args, **kwargs)
        self.state.num_input_tokens_seen += self._total_train_tokens - before
        return outcome

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the optimizer of a rule of Penstock's own, or go on as the class does."""
        if self.optimizer is None and self.rule is not None:
            decayed = set(self.get_decay_parameter_names(self.model))
            self.optimizer = RULES[self.rule](self.model, self.args, decayed)
        return super().create_optimizer(*args, **kwargs)


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
