"""Characters to tokens: which tokens of a text belong to spans of it."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.integrations.chat import Span
from penstock.integrations.tokenizers import Encoded, Ids

#: Whether each token is one to learn, of shape (n,).
Mask = npt.NDArray[np.bool_]


def mask_of(text: str, encoded: Encoded, spans: Sequence[Span], encode: Callable[[str], Ids]) -> Mask:
    """Mark the tokens that stand for a character of a span.

    A token on the border of a span belongs to it, as in transformers.

    Arguments:
        text: the whole text.
        encoded: its tokens.
        spans: characters of the text.
        encode: makes ids of a text, for a tokenizer that does not say which characters its tokens stand for.

    Returns:
        The mask, of shape (n,).

    Raises:
        ConfigError: the tokenizer says nothing of its tokens, and they do not show where a span begins or ends.
    """
    if encoded.offsets is None:
        return _mask_by_prefixes(text, encoded.ids, spans, encode)
    is_inside = np.zeros(len(text) + 1, dtype=np.int64)
    for start, end in spans:
        is_inside[start:end] = 1
    counts = np.concatenate(([0], np.cumsum(is_inside)))
    starts, stops = encoded.offsets.T
    # Some tokenizers leave white space out of their tokens' characters. A token of white space alone has none then: it
    # stands for what lies between the token before and itself.
    reached = np.concatenate(([0], np.maximum.accumulate(stops)[:-1])) if len(stops) else stops
    starts = np.where(starts == stops, np.minimum(reached, starts), starts)
    # What stands for nothing at all goes with the character that follows.
    stops = np.where(starts == stops, starts + 1, stops)
    marked: Mask = counts[np.minimum(stops, len(text) + 1)] > counts[np.minimum(starts, len(text) + 1)]
    return marked


def _mask_by_prefixes(text: str, ids: Ids, spans: Sequence[Span], encode: Callable[[str], Ids]) -> Mask:
    mask = np.zeros(len(ids), dtype=np.bool_)
    for start, end in spans:
        mask[_count_before(text, ids, start, encode) : _count_before(text, ids, end, encode)] = True
    return mask


def _count_before(text: str, ids: Ids, end: int, encode: Callable[[str], Ids]) -> int:
    before = encode(text[:end])
    if not np.array_equal(ids[: len(before)], before):
        raise ConfigError(
            "what the assistant writes cannot be told: the tokenizer, one in Python alone, does not say which "
            "characters its tokens stand for. Use a model with a tokenizer.json"
        )
    return len(before)
