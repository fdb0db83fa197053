"""The data of a run, from what its options name to sequences that are trained on and sequences that are held out.

1. Sources are found, and each is encoded, once, by one process for all (`reading`, `encoding`, `sequences.prepared`).
2. Rows are divided into those that are trained on and those that are held out.
3. Both are cut, and packed or padded (`sequences.packing`).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.cli.training.data.encoding.samples import Encoder, Sample
from penstock.cli.training.data.reading.rows import rows_of
from penstock.cli.training.data.reading.sources import Source, find_sources, standard_library
from penstock.cli.training.data.sequences.batches import Corpus
from penstock.cli.training.data.sequences.fingerprints import fingerprint, tokenizer_digest
from penstock.cli.training.data.sequences.held_out import hold_out
from penstock.cli.training.data.sequences.packing import (
    CutReport,
    Segments,
    arrange,
    label_counts,
    padding_share_expected,
    padding_share_packed,
    whole_rows,
)
from penstock.cli.training.data.sequences.prepared import Prepared, discard_old, prepare
from penstock.cli.training.settings.data import DataOptions
from penstock.errors import ConfigError, one_line
from penstock.integrations.chat import read_chat_template
from penstock.integrations.tokenizers import Tokenizer

#: Rows of this kind are conversations; `Encoder.kinds` names the others.
CHAT = "messages"
_PROMPT_TOKENS = 32

#: Is told in a line how far the data is read.
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the data is made for.

    Attributes:
        vocab_size: what all ids are below.
        seq_length: tokens of a sequence, at most.
        batch_size: sequences of a micro-batch, which are padded to one length.
        packed: whether several rows may be in a sequence.
        holds_out: whether a part is held out.
    """

    vocab_size: int
    seq_length: int
    batch_size: int
    packed: bool
    holds_out: bool


@dataclass(frozen=True, kw_only=True)
class Data:
    """What a run trains on and measures on.

    Attributes:
        train: the sources that are trained on.
        held_out: the sources that are measured on; empty where nothing is held out.
        weights: the share of each source of `train`; `None` where they are read as one.
        cuts: what became of the rows of each source of `train`, by its name.
        kinds: how many rows there are of each kind.
        notes: how many rows have something worth telling, by what that is.
        padding_share: how much of what is computed is padding.
    """

    train: Sequence[Corpus]
    held_out: Sequence[Corpus]
    weights: Sequence[float] | None
    cuts: dict[str, CutReport]
    kinds: Counter[str]
    notes: Counter[str]
    padding_share: float

    @property
    def counts(self) -> list[int]:
        """How many sequences each source of `train` has."""
        return [len(corpus.sequences) for corpus in self.train]

    @property
    def is_chat(self) -> bool:
        """Whether it is conversations that are trained on."""
        return self.kinds[CHAT] > 0

    def prompt(self) -> list[int]:
        """Give the beginning of the first row that is held out (or trained on, without any), for a sample.

        Of a text it is some tokens, of other rows all that comes before the first one that is learned.
        """
        corpus = next(corpus for corpus in (*self.held_out, *self.train) if len(corpus.sequences))
        segments = corpus.sequences.segments
        first = int(np.argmin(segments.rows))
        begin = int(corpus.prepared.offsets[segments.rows[first]] + segments.starts[first])
        stop = begin + int(segments.lengths[first])
        trained = corpus.prepared.trained
        count = _PROMPT_TOKENS
        if trained is not None:
            learned = np.flatnonzero(trained[begin + 1 : stop])
            count = int(learned[0]) + 1 if len(learned) else count
        return [int(i) for i in corpus.prepared.ids[begin : min(begin + count, stop)]]

    def about(self) -> dict[str, Any]:
        """List what there is, in numbers."""
        cuts = self.cuts.values()
        return {
            "rows": sum(self.kinds.values()),
            "kinds": dict(self.kinds),
            "train_rows": sum(cut.row_count for cut in cuts),
            "train_tokens": sum(cut.token_count - cut.cut_token_count for cut in cuts),
            "train_labels": sum(cut.label_count for cut in cuts),
            "train_sequences": sum(self.counts),
            "held_out_tokens": sum(int(corpus.sequences.lengths.sum()) for corpus in self.held_out),
            "held_out_sequences": sum(len(corpus.sequences) for corpus in self.held_out),
            "cut_rows": sum(cut.cut_row_count for cut in cuts),
            "cut_tokens": sum(cut.cut_token_count for cut in cuts),
            "dropped_rows": sum(cut.dropped_row_count for cut in cuts),
            "padding_share": round(self.padding_share, 4),
        }


def find_all(config: DataOptions, *, without: Sequence[Path] = ()) -> tuple[list[Source], list[Source]]:
    """Find the sources of `--data` and of `--eval-data`. Reads nothing of them.

    Arguments:
        config: what is named.
        without: the folders that a run writes, which are no data of it.

    Raises:
        ConfigError: one names nothing that can be read.
    """
    train = find_sources(config.data, split="train", without=without) if config.data else [standard_library()]
    return train, find_sources(config.eval_data, split="eval", without=without)


def encoder_for(config: DataOptions, tokenizer: Tokenizer) -> Encoder:
    """Make what encodes rows, with the chat template that is asked for.

    Raises:
        ConfigError: the template's file cannot be read.
    """
    template = read_chat_template(Path(config.chat_template)) if config.chat_template else None
    return Encoder(tokenizer, text_field=config.text_field, chat_template=template)


def samples_of(source: Source, encoder: Encoder, text_field: str) -> Iterator[Sample]:
    """Encode the rows of a source one after the other."""
    return (encoder.encode(row) for row in rows_of(source, text_field=text_field))


def read_data(
    config: DataOptions,
    sources: tuple[list[Source], list[Source]],
    tokenizer: Tokenizer,
    shape: Shape,
    cache: Path,
    progress: Progress | None = None,
) -> Data:
    """Read everything. Of all processes with the same cache, one encodes and the others wait.

    Arguments:
        config: how it is read.
        sources: what `find_all` found.
        tokenizer: what makes ids.
        shape: what it is made for.
        cache: the folder of prepared data.
        progress: is told, now and then, in a line: how many rows and tokens of a source are encoded, or that this
            process waits for another one that does that.

    Raises:
        ConfigError: rows that cannot be read, encoded or cut as asked; nothing to train on, or to hold out.
    """
    train, apart = sources
    # 1.
    encoder = encoder_for(config, tokenizer)
    digest = tokenizer_digest(tokenizer)
    names, everything = [], []
    for source in (*train, *apart):
        name = _name(source, digest, config.text_field)
        names.append(name)
        everything.append(_prepared(cache, name, source, config.text_field, encoder, shape.vocab_size, progress))
    discard_old(cache, names)
    # 2. and 3.
    cuts: dict[str, CutReport] = {}
    corpora, held_out = [], []
    for source, prepared in zip(train, everything, strict=False):
        rows = whole_rows(prepared.lengths)
        if shape.holds_out and not apart:
            rows, beside = _divided(prepared, rows, shape.seq_length)
            held_out += [_arranged(prepared, beside, config, shape)[0]]
        corpus, cut = _arranged(prepared, rows, config, shape)
        cut.check(f"--data {source.name}")
        cuts[source.name] = cut
        corpora.append(corpus)
    for source, prepared in zip(apart, everything[len(train) :], strict=True) if shape.holds_out else ():
        corpus, cut = _arranged(prepared, whole_rows(prepared.lengths), config, shape)
        cut.check(f"--eval-data {source.name}")
        held_out.append(corpus)
    held_out = [corpus for corpus in held_out if len(corpus.sequences)]
    if shape.holds_out and not held_out:
        raise ConfigError(
            f"--data has too few rows, or too little text for two sequences of --seq-length {shape.seq_length}, to "
            "hold out a part. Name more data, or --eval-data, or measure nothing: --eval-sequences 0."
        )
    weights = [source.weight for source in train if source.weight is not None]
    return Data(
        train=corpora,
        held_out=held_out,
        weights=weights or None,
        cuts=cuts,
        kinds=sum((Counter(prepared.counts["kinds"]) for prepared in everything), Counter()),
        notes=sum((Counter(prepared.counts["notes"]) for prepared in everything), Counter()),
        padding_share=_padding_share(corpora, shape),
    )


def _name(source: Source, tokenizer_digest: str, text_field: str) -> str:
    """Name what is prepared of a source."""
    files: Sequence[Path] = source.files
    if source.dataset is not None and Path(source.dataset).is_dir():
        files = sorted(file for file in Path(source.dataset).rglob("*") if file.is_file())
    settings = {
        "tokenizer": tokenizer_digest,
        "text_field": text_field,
        "dataset": source.dataset,
        "split": source.split,
    }
    return fingerprint(files, settings)


def _prepared(
    cache: Path,
    name: str,
    source: Source,
    text_field: str,
    encoder: Encoder,
    vocab_size: int,
    progress: Progress | None,
) -> Prepared:
    """Encode a source, or find it encoded."""
    encoder.kinds.clear()
    encoder.notes.clear()

    def tell(what: str) -> None:
        if progress is not None:
            progress(f"{one_line(source.name)}: {what}")

    return prepare(
        cache,
        name,
        lambda: samples_of(source, encoder, text_field),
        vocab_size=vocab_size,
        counts=lambda: {"kinds": dict(encoder.kinds), "notes": dict(encoder.notes)},
        progress=lambda rows, tokens: tell(f"{rows:,} rows are read, {tokens:,} tokens"),
        waiting=lambda: tell("waits for another process that reads the data"),
    )


def _divided(prepared: Prepared, rows: Segments, seq_length: int) -> tuple[Segments, Segments]:
    """Divide rows into what is trained on and what is held out."""
    labels = label_counts(prepared.offsets, prepared.trained, rows)
    return hold_out(prepared.lengths, labels, seq_length=seq_length, divisible=prepared.trained is None)


def _arranged(prepared: Prepared, rows: Segments, config: DataOptions, shape: Shape) -> tuple[Corpus, CutReport]:
    """Arrange rows in sequences."""
    sequences, cut = arrange(
        prepared.offsets,
        prepared.trained,
        rows,
        seq_length=shape.seq_length,
        truncation=config.truncation_of(is_text=prepared.trained is None),
        packed=shape.packed,
        where=prepared.where,
    )
    return Corpus(prepared, sequences), cut


def _padding_share(corpora: Sequence[Corpus], shape: Shape) -> float:
    """Say how much of what is computed is padding: of whole sequences where they are packed, else of micro-batches."""
    shares: npt.NDArray[np.float64] = np.array(
        [
            padding_share_packed(corpus.sequences, shape.seq_length)
            if shape.packed
            else padding_share_expected(corpus.sequences, shape.batch_size)
            for corpus in corpora
        ]
    )
    counts = np.array([len(corpus.sequences) for corpus in corpora])
    return float((shares * counts).sum() / counts.sum())
