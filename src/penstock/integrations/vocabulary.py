"""Embeddings and heads that get rows for new tokens, with values or on the meta device."""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, one_line
from penstock.integrations.engine_internals import Forms, StoredTensors, WeightFiles
from penstock.integrations.folders import reading

_BLOCK_NUMEL = 1 << 24
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


def rows_for(folder: Path | None, vocab_size: int, *, multiple: int = 1, trust_remote_code: bool = False) -> int:
    """Return the rows that a model's embedding needs for the tokenizer in its folder.

    Arguments:
        folder: the model's folder; `None`, or one without a tokenizer, needs no more rows than the model has.
        vocab_size: the rows that the model has. It never loses one.
        multiple: the result is rounded up to a multiple of it.
        trust_remote_code: run the folder's code if the tokenizer is none of transformers' own.

    Raises:
        ConfigError: the tokenizer cannot be read.
    """
    if folder is None or not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return -(-vocab_size // multiple) * multiple
    from transformers import AutoTokenizer

    with reading("tokenizer", folder):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
        return vocabulary_for(tokenizer, vocab_size, multiple=multiple)


def vocabulary_for(tokenizer: Any, vocab_size: int, *, multiple: int = 1) -> int:
    """Return the rows that a model's embedding needs for a tokenizer.

    Arguments:
        tokenizer: a tokenizer of transformers.
        vocab_size: the rows that the model has. It never loses one.
        multiple: the result is rounded up to a multiple of it.
    """
    # Its own `vocab_size` leaves out added tokens, and holes put ids beyond its length.
    wanted = max(vocab_size, len(tokenizer), *(int(number) + 1 for number in tokenizer.get_vocab().values()))
    return -(-wanted // multiple) * multiple


def grow_vocabulary(model: nn.Module, vocab_size: int) -> dict[str, int]:
    """Add rows for new tokens to the embedding and the head of a transformers model, and to its configuration.

    A new row is the mean of the old ones (Hewitt, "Initializing New Word Embeddings for Pretrained Language Models",
    2021).

    Arguments:
        model: a model with values, or on the meta device.
        vocab_size: the rows that it gets.

    Returns:
        The rows that each parameter had that has grown, by all of its names.

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


class GrownTensors(StoredTensors):
    """The first values of a model that has grown, for `prepare(weights=)`, from files with fewer rows.

    Arguments:
        files: the tensors before.
        rows: the result of `grow_vocabulary`.
        vocab_size: the rows after.
    """

    def __init__(self, files: StoredTensors, rows: Mapping[str, int], vocab_size: int) -> None:
        self._files = files
        self._rows = rows
        self._held = files.forms()
        self._forms = {
            name: ((vocab_size, *shape[1:]), dtype) if shape[:1] == (rows.get(name),) else (shape, dtype)
            for name, (shape, dtype) in self._held.items()
        }
        self._means: dict[str, Tensor] = {}

    def forms(self) -> Forms:
        """Return shape and dtype of each tensor, by its name in the files."""
        return self._forms

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Read elements of a tensor. Those of new rows are the mean of the others."""
        if name not in self._rows:
            return self._files.read(name, start, stop)
        shape, _ = self._held[name]
        width, held = prod(shape[1:]), prod(shape)
        parts = [self._files.read(name, start, min(stop, held))] if start < held else []
        if stop > held:
            places = torch.arange(max(start, held), stop) % width
            parts.append(self._mean(name, width, held)[places])
        return torch.cat(parts)

    def origin(self, name: str) -> tuple[WeightFiles, str] | None:
        """Return the files and the name of a tensor that has not grown."""
        return None if name in self._rows else self._files.origin(name)

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _mean(self, name: str, width: int, held: int) -> Tensor:
        """Average over the rows in the files, once, some of them at a time."""
        if name not in self._means:
            total, step = torch.zeros(width, dtype=torch.float64), max(1, _BLOCK_NUMEL // width) * width
            for start in range(0, held, step):
                block = self._files.read(name, start, min(start + step, held))
                total += block.view(-1, width).sum(dim=0, dtype=torch.float64)
            self._means[name] = (total / (held // width)).to(block.dtype)
        return self._means[name]


def _mean(rows: Tensor) -> Tensor:
    """Average over rows, in fp64."""
    return rows.mean(dim=0, dtype=torch.float64).to(rows.dtype)
