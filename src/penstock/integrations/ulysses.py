"""Models of transformers on a sequence that several ranks share."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import ConfigError
from penstock.integrations.families import Feature, classes_with, other_layers
from penstock.parallel import check_heads, ulysses_attention


@contextmanager
def sequence_parallel(model: Any, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Share the sequences of a causal language model of transformers among the ranks of a group, for a `with` block.

    Inside, call the model with the result of `penstock.parallel.cut`, without its shifted labels, and
    `use_cache=False`. Backward belongs inside too if activations are recomputed. The model's attention, "sdpa" or
    "eager", is called with all tokens of some heads. Afterwards the model and transformers are as they were.

    Arguments:
        model: a `PreTrainedModel` of a class in `families.FAMILIES` with `SHARED`, whose layers attend to the whole
            sequence or to a window.
        group: the ranks that share the sequence, chunks in their order; `None` for all there are.

    Raises:
        ConfigError: the model or its attention is of another kind, or the ranks do not divide its heads.

    Example:
        >>> with sequence_parallel(model, group):  # doctest: +SKIP
        ...     logits = model(**chunk, use_cache=False).logits
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config = model.config
    before = config._attn_implementation
    check_shareable(model, dist.get_world_size(group))
    name = f"penstock_ulysses_{id(model):x}"  # its own, so that models of several groups live side by side
    if name in ALL_ATTENTION_FUNCTIONS:
        raise ConfigError("sequence_parallel is already around this model: leave it before entering it again")
    ALL_ATTENTION_FUNCTIONS[name] = _attention(before, group)
    ALL_MASK_ATTENTION_FUNCTIONS[name] = _no_mask
    try:
        config._attn_implementation = name
        yield
    finally:
        config._attn_implementation = before
        del ALL_ATTENTION_FUNCTIONS[name]
        del ALL_MASK_ATTENTION_FUNCTIONS[name]


def check_shareable(model: Any, ranks: int) -> None:
    """Refuse a model whose attention ranks cannot share, once it is built.

    Arguments:
        model: a `PreTrainedModel`, or one around it that has its attributes.
        ranks: how many share a sequence.

    Raises:
        ConfigError: the attention is the model's own, or not "sdpa" or "eager"; the model is of a class that is not
            known; or the ranks do not divide its heads.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if not (getattr(model, "_supports_attention_backend", False) or _has_known_layers(model)):
        # Its layers would go on as if a chunk were all.
        raise ConfigError(
            f"the model's attention is its own, that of {type(model).__name__}, not one of transformers', and cannot "
            "be shared over ranks"
        )
    config = model.config
    if config._attn_implementation not in ("sdpa", "eager"):
        raise ConfigError(
            f"attention {config._attn_implementation!r} cannot be shared over ranks: load the model with "
            'attn_implementation="sdpa" or "eager"'
        )
    # By its configuration: the model may be one of peft around it.
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, type(model).__name__)
    known = classes_with(Feature.SHARED)
    if name not in known:
        raise ConfigError(f"{name} is not known to share a sequence over ranks: {', '.join(known)} are")
    others = other_layers(config)
    if others:
        raise ConfigError(
            f"layers with {', '.join(others)} cannot share a sequence over ranks: full and sliding attention can"
        )
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        raise ConfigError("the model's config has no num_attention_heads: its attention cannot be shared over ranks")
    check_heads(heads, getattr(config, "num_key_value_heads", None) or heads, ranks)


def _has_known_layers(model: Any) -> bool:
    """Return True if all attention layers are transformers' own. Some models call its interface without the flag."""
    layers = [type(module) for module in model.modules() if type(module).__name__.endswith("Attention")]
    return bool(layers) and all(layer.__module__.startswith("transformers.models.") for layer in layers)


def _no_mask(*_: Any, **__: Any) -> None:
    """Return no mask: the model sees a chunk, and the mask is of the whole sequence."""


def _attention(kind: str, group: dist.ProcessGroup | None) -> Callable[..., tuple[Tensor, None]]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # By window, with the mask that it was made of: one for all layers, each of which keeps it for backward.
    windows: dict[int, tuple[Tensor | None, Tensor]] = {}

    def forward(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **rest: Any
    ) -> tuple[Tensor, None]:
        eager = sys.modules[type(module).__module__].eager_attention_forward if kind == "eager" else None
        function: Any = eager or ALL_ATTENTION_FUNCTIONS["sdpa"]

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            # The attributes of a layer that the functions read. With copied keys the groups are smaller than its own.
            layer = SimpleNamespace(
                num_key_value_groups=query.shape[1] // key.shape[1],
                is_causal=getattr(module, "is_causal", True),
                training=module.training,
            )
            mask = _within(windows, attention_mask, rest.get("sliding_window"), query)
            mask = _additive(mask, query) if kind == "eager" else mask
            result: Tensor = function(layer, query, key, value, mask, **rest)[0]
            return result.transpose(1, 2)

        return ulysses_attention(attend, query, key, value, group).transpose(1, 2).contiguous(), None

    return forward


def _within(
    made: dict[int, tuple[Tensor | None, Tensor]], mask: Tensor | None, window: int | None, query: Tensor
) -> Tensor | None:
    """Return a mask cut to a window of tokens.

    Arguments:
        made: the masks so far, by window, each with the mask that it was made of.
        mask: the mask of the whole sequence, bool, (batch, 1, length, length); `None` for plain causal.
        window: a token sees itself and the `window - 1` before it; `None` for all of them.
        query: (batch, some heads, length, width).
    """
    length = query.shape[2]
    if window is None or window >= length:
        return mask
    of, cut = made.get(window, (None, None))
    if cut is None or of is not mask or cut.shape[-1] != length or cut.device != query.device:
        near = _causal(query).triu(1 - window)
        cut = near if mask is None else mask & near
        made[window] = mask, cut
    return cut


def _additive(mask: Tensor | None, query: Tensor) -> Tensor:
    """Return the mask that eager attention adds to its scores. It has no causal mask of its own."""
    mask = _causal(query) if mask is None else mask
    return torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(
        ~mask, torch.finfo(query.dtype).min
    )


def _causal(query: Tensor) -> Tensor:
    """Return the causal mask of a sequence, bool, (1, 1, length, length)."""
    length = query.shape[2]
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=query.device).tril()
