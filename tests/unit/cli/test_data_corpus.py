from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock.cli.training.data import Piece, encode_corpus
from penstock.errors import ConfigError
from penstock.integrations.tokenizers import ByteTokenizer

END = ByteTokenizer.end_of_document


class WideTokenizer:
    """Ids above 2**16, and no end of document."""

    vocab_size = 1 << 17
    end_of_document = None
    token_name = "token"

    def encode(self, text: str) -> npt.NDArray[Any]:
        return np.array([ord(char) + (1 << 16) for char in text])

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(chr(i - (1 << 16)) for i in ids)

    def save(self, out: Path) -> None:
        raise NotImplementedError


def documents(count: int, size: int = 10) -> Iterator[Piece]:
    for number in range(count):
        yield Piece(chr(ord("A") + number) * size, ends_document=True)


def test_every_twentieth_document_is_held_out() -> None:
    corpus = encode_corpus(documents(40), ByteTokenizer(), seq_length=8)
    held_out = [ord("A") + 19] * 10 + [END] + [ord("A") + 39] * 10 + [END]
    assert corpus.held_out.tolist() == held_out
    assert corpus.train.tolist() == [
        i for number in range(40) if number not in (19, 39) for i in [ord("A") + number] * 10 + [END]
    ]
    assert corpus.document_count == 40


def test_the_pieces_of_a_document_stay_together() -> None:
    pieces = [Piece("x" * 20, True)] * 19 + [Piece("ab", False), Piece("cd" * 10, True)]
    corpus = encode_corpus(pieces, ByteTokenizer(), seq_length=8)
    assert bytes(corpus.held_out[:-1].tolist()) == b"ab" + b"cd" * 10


def test_few_documents_hold_out_the_end_of_the_text() -> None:
    corpus = encode_corpus(documents(2, size=499), ByteTokenizer(), seq_length=8)
    assert (len(corpus.train), len(corpus.held_out)) == (950, 50)
    assert corpus.held_out.tolist() == [ord("B")] * 49 + [END]


def test_at_least_one_sequence_is_held_out() -> None:
    corpus = encode_corpus(documents(1, size=31), ByteTokenizer(), seq_length=16)
    assert (len(corpus.train), len(corpus.held_out)) == (16, 16)


def test_a_long_held_out_document_among_tiny_ones_gives_text_to_train_on() -> None:
    pieces = [Piece("", True)] * 19 + [Piece("long " * 200, True)]
    corpus = encode_corpus(pieces, ByteTokenizer(), seq_length=64)
    assert (len(corpus.train), len(corpus.held_out)) == (937, 64)


@pytest.mark.parametrize(("tokenizer", "item_bytes"), [(ByteTokenizer(), 2), (WideTokenizer(), 4)])
def test_ids_are_stored_small_and_mapped(tokenizer: Any, item_bytes: int) -> None:
    corpus = encode_corpus(documents(40), tokenizer, seq_length=8)
    assert corpus.train.itemsize == item_bytes
    assert isinstance(corpus.train, np.memmap)
    assert corpus.train[:10].tolist() == tokenizer.encode("A" * 10).tolist()


def test_no_text() -> None:
    with pytest.raises(ConfigError, match=r"^The files of --data hold no text. Name files with text in them.$"):
        encode_corpus([], ByteTokenizer(), seq_length=8)


def test_less_than_two_sequences() -> None:
    message = (
        "^The text of --data has 31 tokens, less than two sequences of --seq-length 16: one to train on and one held "
        "out. Name more text or use shorter sequences.$"
    )
    with pytest.raises(ConfigError, match=message):
        encode_corpus(documents(1, size=30), ByteTokenizer(), seq_length=16)
