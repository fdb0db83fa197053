"""Batches of packed rows under attention that knows no flattened sequences (`sdpa`, `eager`).

TRL flattens the packed rows of a batch into one sequence, as flash attention wants it. Under other attention that needs
a mask of the square of all their tokens, and all scores of it are computed. Here N rows of L tokens stay N rows: masks
and scores are N times fewer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from penstock.errors import ConfigError
from penstock.integrations.families import why_not_isolated

#: The number of a row's tokens without padding: a key of a batch that no model gets.
TOKEN_COUNTS = "token_counts"
_ATTENTION = (None, "sdpa", "eager")


@dataclass(frozen=True)
class PackedCollator:
    """Makes batches whose position ids begin anew with each segment of a row. There is no attention mask.

    transformers finds the segments by the position ids and lets no token attend to another segment's.

    Arguments:
        pad_token_id: the id of padding.
        pad_to_multiple_of: lengths are multiples of it; `None`: of one.
    """

    pad_token_id: int
    pad_to_multiple_of: int | None = None

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Make a batch of rows, with `seq_lengths` where they have several segments.

        Returns:
            `input_ids`, `labels` and `position_ids`, of shape (N, L), and `TOKEN_COUNTS`, of shape (N,).
        """
        lengths = [example.get("seq_lengths") or [len(example["input_ids"])] for example in examples]
        positions = [torch.cat([torch.arange(length) for length in segments]) for segments in lengths]
        batch = {
            "input_ids": self._padded([example["input_ids"] for example in examples], self.pad_token_id),
            "labels": self._padded([example.get("labels", example["input_ids"]) for example in examples], -100),
            "position_ids": self._padded(positions, 0),
            TOKEN_COUNTS: torch.tensor([sum(segments) for segments in lengths]),
        }
        # The token before a segment is another one's, and predicts nothing of it.
        batch["labels"][batch["position_ids"] == 0] = -100
        return batch

    def _padded(self, rows: Sequence[Any], value: int) -> Tensor:
        padded = pad_sequence([torch.as_tensor(row) for row in rows], batch_first=True, padding_value=value)
        missing = -padded.shape[1] % (self.pad_to_multiple_of or 1)
        return torch.nn.functional.pad(padded, (0, missing), value=value)


class CountedTokens:
    """A mixin of SFTTrainers that counts the tokens of packed rows, of which TRL sees one row alone."""

    model: Any
    accelerator: Any
    _metrics: dict[str, Any]
    _total_train_tokens: int

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the loss as TRL does, and log the tokens of all rows without their padding."""
        counts, before = inputs.pop(TOKEN_COUNTS, None), self._total_train_tokens
        outcome = super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
        if counts is not None and self.model.training:
            self._total_train_tokens = before + int(self.accelerator.gather(counts.sum()).sum())
            self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return outcome


def collator_for(model_config: Any, training: Any, tokenizer: Any) -> Callable[..., dict[str, Tensor]] | None:
    """Choose the collator of packed rows.

    Arguments:
        model_config: the configuration of the model, with its attention.
        training: TRL's SFTConfig.
        tokenizer: its tokenizer, with the token that fills rows up.

    Returns:
        The collator; `None` for TRL's own.

    Raises:
        ConfigError: packed rows would see each other, which is no error in transformers or TRL.
    """
    is_packed = training.packing and training.packing_strategy != "wrapped"
    if (
        not (is_packed or training.padding_free)
        or getattr(model_config, "_attn_implementation", None) not in _ATTENTION
    ):
        return None
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING  # untyped
    why = why_not_isolated(model_config, mapping.get(type(model_config), type(model_config)))
    if why is not None:
        option = "--packing" if training.packing else "--padding_free"
        raise ConfigError(
            f"{option}: {why}, and would train on rows that it should not see. Leave it out, or use --packing_strategy "
            "wrapped, which keeps nothing apart."
        )
    pad = training.pad_token or tokenizer.pad_token or tokenizer.eos_token
    return PackedCollator(tokenizer.convert_tokens_to_ids(pad), training.pad_to_multiple_of)
