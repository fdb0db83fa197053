"""Text as token ids on disk: one stream to train on and one held out, however long, in little memory."""

import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO

import numpy as np
import numpy.typing as npt

from penstock.cli.training.files import Piece
from penstock.errors import ConfigError
from penstock.integrations.tokenizers import Tokenizer

HELD_OUT_EVERY = 20

Tokens = npt.NDArray[np.uint16 | np.uint32]


@dataclass(frozen=True)
class Corpus:
    """The token ids of all text, in two streams.

    Arguments:
        train: ids to train on, one stream of documents, each followed by the tokenizer's end-of-document id.
        held_out: ids of text that training never sees.
        document_count: documents in both.
    """

    train: Tokens
    held_out: Tokens
    document_count: int


def encode_corpus(pieces: Iterable[Piece], tokenizer: Tokenizer, *, seq_length: int) -> Corpus:
    """Encode documents one after the other into two temporary files, and map those.

    Every `HELD_OUT_EVERY`-th document is held out. Where that leaves less than one sequence on either side (few
    documents, or a single long one), the last part of the text is held out instead, one in `HELD_OUT_EVERY` of its
    tokens and at least one sequence. Neither depends on the run's seed: runs can be compared.

    Arguments:
        pieces: the documents in a fixed order.
        tokenizer: ids below 2**16 are stored in two bytes, in four otherwise.
        seq_length: tokens per sequence.

    Raises:
        ConfigError: no text, or less than two sequences of it.
    """
    dtype: type[np.uint16] | type[np.uint32] = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    with tempfile.TemporaryFile() as train_file, tempfile.TemporaryFile() as held_out_file:
        document_count = 0
        for piece in pieces:
            held_out = document_count % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
            file = held_out_file if held_out else train_file
            file.write(tokenizer.encode(piece.text).astype(dtype).tobytes())
            if piece.ends_document:
                document_count += 1
                if tokenizer.end_of_document is not None:
                    file.write(dtype(tokenizer.end_of_document).tobytes())
        streams = _map(train_file, dtype), _map(held_out_file, dtype)
    if document_count == 0:
        raise ConfigError("The files of --data hold no text. Name files with text in them.")
    if min(map(len, streams)) < seq_length:
        streams = _split_end(max(streams, key=len), seq_length)
    return Corpus(*streams, document_count)


def _map(file: IO[bytes], dtype: type[np.uint16] | type[np.uint32]) -> Tokens:
    """The file's ids, read as they are used. The mapping outlives the file's name and descriptor."""
    file.flush()
    if os.fstat(file.fileno()).st_size == 0:  # nothing to map
        return np.empty(0, dtype)
    return np.memmap(file, dtype, mode="r")


def _split_end(tokens: Tokens, seq_length: int) -> tuple[Tokens, Tokens]:
    if len(tokens) < 2 * seq_length:
        raise ConfigError(
            f"The text of --data has {len(tokens)} tokens, less than two sequences of --seq-length {seq_length}: one "
            "to train on and one held out. Name more text or use shorter sequences."
        )
    held_out_count = max(len(tokens) // HELD_OUT_EVERY, seq_length)
    return tokens[:-held_out_count], tokens[-held_out_count:]
