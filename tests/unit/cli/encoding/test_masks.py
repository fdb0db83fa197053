"""Which tokens stand for a character of a span."""

from collections.abc import Sequence

import numpy as np
import pytest

from penstock.cli.training.data.encoding.masks import mask_of
from penstock.errors import ConfigError
from penstock.integrations.tokenizers import Encoded, Ids

CASES = {
    "whole tokens": ("abcdef", [(0, 2), (2, 4), (4, 6)], [(2, 4)], [0, 1, 0]),
    "tokens on a border": ("abcdef", [(0, 3), (3, 5), (5, 6)], [(2, 4)], [1, 1, 0]),
    "several tokens of one character": ("aéb", [(0, 1), (1, 2), (1, 2), (2, 3)], [(1, 2)], [0, 1, 1, 0]),
    "white space in no token": ("a b", [(0, 1), (2, 3)], [(2, 3)], [0, 1]),
    "white space in no token, learned": ("a b c", [(0, 1), (2, 3), (4, 5)], [(2, 4)], [0, 1, 0]),
    "a token of white space that was trimmed away": ("a  b", [(0, 1), (3, 3), (3, 4)], [(1, 3)], [0, 1, 0]),
    "a token of nothing": ("ab", [(0, 0), (0, 1), (1, 1), (1, 2)], [(1, 2)], [0, 0, 1, 1]),
    "the end": ("ab", [(0, 1), (1, 2), (2, 2)], [(1, 2)], [0, 1, 0]),
    "several spans": ("abcd", [(0, 1), (1, 2), (2, 3), (3, 4)], [(0, 1), (2, 3)], [1, 0, 1, 0]),
    "no spans": ("ab", [(0, 1), (1, 2)], [], [0, 0]),
    "no tokens": ("", [], [], []),
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_of_spans(name: str) -> None:
    text, offsets, spans, expected = CASES[name]
    encoded = Encoded(np.arange(len(offsets)), np.array(offsets, dtype=np.int64).reshape(-1, 2))
    mask = mask_of(text, encoded, spans, lambda part: pytest.fail(part))
    assert mask.dtype == np.bool_
    assert mask.tolist() == [bool(bit) for bit in expected]


def words(text: str) -> Ids:
    return np.array([sum(map(ord, word)) for word in text.split()], dtype=np.int64)


@pytest.mark.parametrize(("spans", "expected"), [([(2, 6)], [0, 1, 1, 0]), ([(0, 2), (6, 7)], [1, 0, 0, 1])])
def test_a_tokenizer_that_knows_no_characters(spans: Sequence[tuple[int, int]], expected: list[int]) -> None:
    mask = mask_of("a b c d", Encoded(words("a b c d"), None), spans, words)
    assert mask.tolist() == [bool(bit) for bit in expected]


def test_a_tokenizer_that_knows_no_characters_and_cannot_be_asked() -> None:
    with pytest.raises(
        ConfigError, match=r"^what the assistant writes cannot be told: the tokenizer, one in Python alone"
    ):
        mask_of("ab cd", Encoded(words("ab cd"), None), [(1, 5)], words)
