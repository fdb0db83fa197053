"""What `penstock data` shows: the first sequences of the data, as training would read them."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console

from penstock.cli.training.config import DataConfig
from penstock.cli.training.data import (
    Corpus,
    encode_corpus,
    find_files,
    read_pieces,
    sequence_count,
    standard_library_files,
)
from penstock.cli.training.recipe import seq_length_for
from penstock.cli.training.showing import show
from penstock.integrations.huggingface import find_model
from penstock.integrations.tokenizers import Tokenizer, tokenizer_for


@dataclass(frozen=True)
class _Run:
    text: str
    trained: bool


@dataclass(frozen=True)
class _Segment:
    where: str
    kind: str
    runs: list[_Run]


def look(config: DataConfig) -> None:
    """Print the first `config.show` sequences with their labels, and numbers of all of them.

    Raises:
        ConfigError: the data, or the model's tokenizer, cannot be read.
    """
    source = find_model(config.model, seq_length=config.seq_length or 2, trust_remote_code=config.trust_remote_code)
    seq_length = seq_length_for(config.model, config.seq_length, positions=source.max_seq_length)
    files = find_files(config.data) if config.data else standard_library_files()
    tokenizer = tokenizer_for(source.folder, vocab_size=source.vocab_size, trust_remote_code=config.trust_remote_code)
    pieces = (piece for path in files for piece in read_pieces(path, jsonl_field=config.text_field))
    corpus = encode_corpus(pieces, tokenizer, seq_length=seq_length)
    statistics = {
        "files": len(files),
        "rows": corpus.document_count,
        "tokens": len(corpus.train),
        "sequences": sequence_count(len(corpus.train), seq_length),
        "held-out tokens": len(corpus.held_out),
    }
    sequences = _sequences(corpus, tokenizer, seq_length)
    show(itertools.islice(sequences, config.show), statistics, Console(highlight=False))


def _sequences(corpus: Corpus, tokenizer: Tokenizer, seq_length: int) -> Iterator[list[_Segment]]:
    """Decode the sequences of a stream, each as one segment. Its first token is no label: nothing predicts it."""
    for number in range(sequence_count(len(corpus.train), seq_length)):
        start = number * (seq_length - 1)
        ids = [int(token) for token in corpus.train[start : start + seq_length]]
        runs = [_Run(tokenizer.decode(ids[:1]), False), _Run(tokenizer.decode(ids[1:]), True)]
        yield [_Segment(f"token {start + 1:,}", "text", runs)]
