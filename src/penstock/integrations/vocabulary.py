"""Models that get rows for new tokens: embeddings and heads that grow, with values or without."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, one_line
from penstock.integrations.tokenizers import Tokenizer

Read = Callable[[str], Tensor]


def vocabulary_for(tokenizer: Tokenizer, vocab_size: int, *, multiple: int = 1) -> int:
    """Say how many rows a model's embedding is to have for a tokenizer.

    Arguments:
        tokenizer: what makes ids.
        vocab_size: how many rows the model has; it never loses one.
        multiple: what the number is rounded up to a multiple of, where it grows or this is more than 1.
    """
    return -(-max(vocab_size, tokenizer.vocab_size) // multiple) * multiple


def grow_vocabulary(model: nn.Module, vocab_size: int) -> dict[str, int]:
    """Give a transformers model rows for more tokens; its configuration says so too.

    New rows of values are the mean of the others: a token that was never seen is none of them more than another
    (Hewitt, "Initializing New Word Embeddings for Pretrained Language Models", 2021).

    Arguments:
        model: one with values, or on the meta device.
        vocab_size: how many rows it is to have.

    Returns:
        Which parameters have grown, by every name, with the rows that they had before.

    Raises:
        ConfigError: the model's class cannot.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
        >>> grow_vocabulary(model, 80)
        {'model.embed_tokens.weight': 64, 'lm_head.weight': 64}
    """
    before = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    resizing: Any = model
    try:
        resizing.resize_token_embeddings(vocab_size, mean_resizing=False)
    except Exception as error:
        raise ConfigError(f"{type(model).__name__} cannot get rows for new tokens: {one_line(error)}.") from error
    grown = {
        name: before[name][0]
        for name, p in model.named_parameters(remove_duplicate=False)
        if before.get(name, tuple(p.shape)) != tuple(p.shape)
    }
    for name, rows in grown.items():
        parameter = model.get_parameter(name)
        if not parameter.is_meta:
            with torch.no_grad():
                parameter[rows:] = _mean(parameter[:rows])
    return grown


def grown(read: Read, rows: dict[str, int], vocab_size: int) -> Read:
    """Make a function that reads parameters which have grown, from one that reads them as they were.

    Arguments:
        read: gives a parameter's values by its name, as `penstock.prepare(weights=)` asks for them.
        rows: what `grow_vocabulary` returned.
        vocab_size: how many rows there are now.
    """

    def read_grown(name: str) -> Tensor:
        value = read(name)
        before = rows.get(name)
        if before is None or value.shape[:1] != (before,):  # a value of another shape is refused by its name later
            return value
        new = _mean(value).expand(vocab_size - before, *value.shape[1:])
        return torch.cat([value, new])

    return read_grown


def _mean(rows: Tensor) -> Tensor:
    """Average over rows in fp32, whatever they are in."""
    return rows.mean(dim=0, dtype=torch.float32).to(rows.dtype)
