"""The loss of a Hugging Face causal language model without its logits."""

import functools
import inspect
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.errors import ConfigError
from penstock.integrations.families import Feature, classes_with, is_known
from penstock.losses import CHUNK_BYTES, linear_cross_entropy


def chunk_loss(model: nn.Module, *, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Make `model(input_ids=..., labels=...).loss` by `penstock.losses.linear_cross_entropy` from now on.

    The loss is that of the model, to rounding. Its logits never exist whole: `.logits` is None. Without labels, or
    without gradients, the model computes as before. Its class, its parameters and their names stay, tied weights stay
    tied, and a copy of the model has the same loss.

    As transformers' own losses do it takes `num_items_in_batch`, a number that the sum of the losses is divided by
    instead of the tokens that count, and `shift_labels`, labels that are shifted already, in the place of `labels`:
    with these two it is the loss of a chunk of a sequence that several ranks share (`penstock.parallel.cut`).

    Arguments:
        model: a model of a class in `families.FAMILIES` with `CHUNKED`, or a peft model around one. Before `prepare` or
            after it.
        chunk_bytes: how large a block of logits may be, in bytes of fp32, as in `linear_cross_entropy`.

    Raises:
        ConfigError: a model of another class, which may do something to its logits or to its loss; one whose head,
            loss or forward was replaced, by an adapter on the head, for example.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
        >>> chunk_loss(model)
        >>> ids = torch.arange(8)[None]
        >>> model(input_ids=ids, labels=ids).logits is None
        True
    """
    from transformers.loss.loss_utils import ForCausalLMLoss
    from transformers.utils import generic

    adapted: Any = model
    causal = adapted.get_base_model() if hasattr(model, "get_base_model") else adapted
    kind = type(causal)
    check_chunkable(kind)
    if "forward" in vars(causal):
        raise ConfigError(f"The forward of {kind.__name__} was replaced already. Call chunk_loss once, and first.")
    if causal.loss_function is not ForCausalLMLoss:
        raise ConfigError(
            f"{kind.__name__} has a loss function of its own. Call penstock.losses.linear_cross_entropy in it instead."
        )
    head: Any = causal.get_output_embeddings()
    head_kind = type(head)
    if head_kind is not nn.Linear:
        raise ConfigError(
            f"The head of {kind.__name__} is a {head_kind.__name__}, not a torch.nn.Linear. Leave it out of what "
            "adapters and quantisers replace, or train without chunk_loss."
        )
    head.__class__ = ChunkedHead  # the module stays the same one, with its hooks and its place
    head.chunk_bytes = chunk_bytes
    # A method, so that a copy of the model gets one of its own; wrapped, so that generate() finds the arguments.
    returning: Any = generic  # untyped
    causal.forward = MethodType(functools.wraps(kind.forward)(returning.can_return_tuple(_forward)), causal)


def check_chunkable(kind: type) -> None:
    """Refuse a class of models that `chunk_loss` does not know.

    Raises:
        ConfigError: it is none of the classes in `families.FAMILIES` with `CHUNKED`.
    """
    if not is_known(kind, Feature.CHUNKED):
        raise ConfigError(
            f"{kind.__name__} is not known to compute its logits as head(hidden), with nothing after. Call "
            "penstock.losses.linear_cross_entropy in a forward of your own, or train without chunk_loss. It knows "
            f"{', '.join(classes_with(Feature.CHUNKED))}."
        )


class ChunkedHead(nn.Linear):
    """A head that, given labels, makes their loss instead of logits: inside its forward, for which it is gathered."""

    chunk_bytes: int

    def forward(self, input: Tensor, labels: Tensor | None = None, **options: Any) -> Tensor:
        """Make logits of shape (..., vocabulary); the loss, 0-dim, where there are labels of shape (...)."""
        if labels is None:
            return super().forward(input)
        return linear_cross_entropy(input, self.weight, labels, bias=self.bias, chunk_bytes=self.chunk_bytes, **options)


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a model, with the loss of its head where there are labels and gradients."""
    from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

    original = type(self).forward
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    given = dict(bound.arguments)
    given |= given.pop("kwargs", {})
    labels, shifted = given.pop("labels", None), given.pop("shift_labels", None)
    if (labels is None and shifted is None) or not torch.is_grad_enabled():
        if labels is None and shifted is not None:
            bound.arguments["labels"] = shifted  # without labels the model has no loss, whatever else there is
        return original(*bound.args, **bound.kwargs)
    head = self.get_output_embeddings()
    if not isinstance(head, ChunkedHead):
        raise ConfigError(f"The head was replaced by a {type(head).__name__} after chunk_loss. Call chunk_loss last.")
    del given["self"]
    kept = given.pop("logits_to_keep", 0)  # how many of the last tokens, or which; all for 0
    count = given.pop("num_items_in_batch", None)
    ignore_index = given.pop("ignore_index", -100)
    if shifted is None:
        assert labels is not None
        shifted = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    outputs = self.base_model(**given)
    hidden = outputs.last_hidden_state[:, slice(-kept, None) if isinstance(kept, int) else kept]
    shifted = shifted.to(hidden.device).view(hidden.shape[:-1])
    loss = head(hidden, shifted, ignore_index=ignore_index, reduction="mean" if count is None else "sum")
    if count is not None:
        loss = loss / (count.to(loss.device) if isinstance(count, Tensor) else count)
    others = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
    return CausalLMOutputWithCrossAttentions(loss=loss, **others)
