"""What `penstock data` shows: the first sequences of the data, as training would read them."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from penstock.cli.training.config import DataConfig
from penstock.cli.training.data.dataset import Data, Shape, find_all, read_data
from penstock.cli.training.data.sequences.batches import Corpus
from penstock.cli.training.data.showing import Statistics, show
from penstock.cli.training.recipe import FOLDER_BATCH_SIZE, seq_length_for
from penstock.cli.training.reporting.display import Display
from penstock.cli.training.request import packing_of
from penstock.integrations.huggingface import find_model
from penstock.integrations.tokenizers import Tokenizer, tokenizer_for
from penstock.integrations.vocabulary import vocabulary_for


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
    tokenizer = tokenizer_for(source.folder, vocab_size=source.vocab_size, trust_remote_code=config.trust_remote_code)
    packed, why_padded = packing_of(config.packing, source)
    shape = Shape(
        vocab_size=vocabulary_for(tokenizer, source.vocab_size),
        seq_length=seq_length_for(config.model, config.seq_length, positions=source.max_seq_length),
        batch_size=FOLDER_BATCH_SIZE,
        packed=packed,
        holds_out=True,
    )
    sources = find_all(config, without=[config.cache_folder])
    for named in (*sources[0], *sources[1]):
        if named.note:
            print(named.note)
    with Display() as display:
        data = read_data(config, sources, tokenizer, shape, config.cache_folder, display.passing)
    segments = itertools.chain.from_iterable(_sequences(corpus, tokenizer) for corpus in data.train)
    show(itertools.islice(segments, config.show), _statistics(data, why_padded), Console(highlight=False))


def _statistics(data: Data, why_padded: str) -> Statistics:
    """List what became of all rows."""
    numbers = data.about()
    kinds = numbers.pop("kinds")
    tokens = numbers["train_tokens"]
    shown: dict[str, int | float | str] = {f"rows of {kind}": count for kind, count in kinds.items()}
    numbers["rows_longer_than_a_sequence"], numbers["tokens_lost"] = numbers.pop("cut_rows"), numbers.pop("cut_tokens")
    shown |= {name.replace("_", " "): value for name, value in numbers.items()}
    shown["learned share"] = numbers["train_labels"] / tokens if tokens else 0.0
    shown |= {note: count for note, count in data.notes.items()}
    return shown | ({"padded, not packed": why_padded} if why_padded else {})


def _sequences(corpus: Corpus, tokenizer: Tokenizer) -> Iterator[list[_Segment]]:
    """Decode the sequences of a source, each as its segments. Nothing predicts the first token of one."""
    prepared, sequences = corpus.prepared, corpus.sequences
    kind = "text" if prepared.trained is None else ", ".join(prepared.counts["kinds"])
    for number in range(len(sequences)):
        own = slice(int(sequences.bounds[number]), int(sequences.bounds[number + 1]))
        held = sequences.segments.take(np.arange(own.start, own.stop))
        segments = []
        for row, start, stop in zip(held.rows.tolist(), held.starts.tolist(), held.stops.tolist(), strict=True):
            begin = int(prepared.offsets[row])
            ids = prepared.ids[begin + start : begin + stop]
            trained = np.ones(len(ids), np.bool_)
            if prepared.trained is not None:
                trained = np.array(prepared.trained[begin + start : begin + stop])
            trained[0] = False
            bounds = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(ids)]
            runs = [
                _Run(tokenizer.decode(ids[first:last].tolist()), bool(trained[first]))
                for first, last in itertools.pairwise(bounds)
            ]
            segments.append(_Segment(prepared.where(row), kind, runs))
        yield segments
