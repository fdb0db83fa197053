"""The loss of a causal language model over the labels of many batches, as transformers' Trainer takes it."""

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from penstock.cli.training.data.sequences.batches import NOT_TRAINED, Batch


class Loss:
    """Calls a model for its loss.

    A sum over a batch's labels, divided by a number of labels that may be of many batches: added up over those, it is
    the mean over all their labels, however unevenly they are dealt. transformers' models do that themselves, given
    `num_items_in_batch`; of those that do not, the logits are taken.

    Arguments:
        model: a causal language model, or a peft model around one; before it is prepared.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._takes_count = _takes_count(model)

    def __call__(self, batch: Batch, label_count: int) -> Tensor:
        """Run the model, and return the 0-dim sum of its losses over `label_count`, in nats.

        Without a single label it is 0, not 0 / 0, and its gradients are 0.
        """
        if self._takes_count:
            outputs: Any = self._model(**self.arguments(batch, label_count))
            loss: Tensor = outputs.loss
            return loss
        logits: Tensor = self._model(**batch.inputs(), use_cache=False).logits
        shifted = F.pad(batch.labels, (0, 1), value=NOT_TRAINED)[..., 1:]
        total = F.cross_entropy(
            logits.float().flatten(0, -2), shifted.flatten(), ignore_index=NOT_TRAINED, reduction="sum"
        )
        return total / max(1, label_count)

    def around(self) -> AbstractContextManager[None]:
        """Surround the calls of a step, and what goes backward from them."""
        return nullcontext()

    def arguments(self, batch: Batch, label_count: int) -> dict[str, Any]:
        """List what the model is called with where it returns its loss, by the names of its arguments."""
        count = {"num_items_in_batch": max(1, label_count)} if self._takes_count else {}
        return {**batch.inputs(), "labels": batch.labels, **count, "use_cache": False}


def _takes_count(model: nn.Module) -> bool:
    """Tell whether a model hands `num_items_in_batch` on to its loss, as transformers' Trainer tells it."""
    adapted: Any = model
    causal = adapted.get_base_model() if hasattr(model, "get_base_model") else model
    said = getattr(causal, "accepts_loss_kwargs", None)
    if said is not None:
        return bool(said)
    parameters = inspect.signature(causal.forward).parameters.values()
    return any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters)
