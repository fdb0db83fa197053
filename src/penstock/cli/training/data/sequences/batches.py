"""Sequences to tensors."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.cli.training.data.sequences.order import Dealer, Item, Order
from penstock.cli.training.data.sequences.packing import Ints, Sequences
from penstock.cli.training.data.sequences.prepared import Prepared

NOT_TRAINED = -100


@dataclass(frozen=True)
class Corpus:
    """What is read of one source: its rows, and the sequences that they are arranged in."""

    prepared: Prepared
    sequences: Sequences


@dataclass(frozen=True)
class Batch:
    """What a model is given, on the cpu.

    Attributes:
        input_ids: int64 of shape (sequences, tokens).
        labels: int64 of the same shape; `NOT_TRAINED` for padding, for what is not trained on, and for the first token
            of a segment, which nothing predicts.
        position_ids: int64 of the same shape: each segment's begin at 0, as does padding. Only where a sequence has
            several segments: with it and without a mask, transformers keeps them apart.
        attention_mask: int64 of the same shape, 0 for padding. Only where there is any and no sequence has several
            segments.
        label_count: labels that count, of all sequences.
        token_count: tokens that are not padding.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor | None
    attention_mask: Tensor | None
    label_count: int
    token_count: int

    def inputs(self) -> dict[str, Tensor]:
        """Return the tensors by the names of a model's arguments, but for the labels."""
        named = {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attention_mask": self.attention_mask,
        }
        return {name: value for name, value in named.items() if value is not None}

    def each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """Make a batch of what becomes of each tensor, such as its copy on a device."""
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in self.inputs().items()}
        return replace(self, labels=change(self.labels), **changed)


@dataclass(frozen=True)
class Padding:
    """How sequences are brought to one length, on the right.

    Attributes:
        seq_length: the most tokens of a sequence.
        pad_id: the id that fills up; any that the model has.
        pad_to: `"longest"` of the batch, or `"seq_length"`: every batch has the same shape.
    """

    seq_length: int
    pad_id: int
    pad_to: Literal["longest", "seq_length"] = "longest"


def collate(corpora: Sequence[Corpus], items: Sequence[Item], padding: Padding) -> Batch:
    """Make one batch of sequences, which may be of several sources.

    Arguments:
        corpora: all sources.
        items: the sequences, each as the number of its source and its number there; one at least.
        padding: how they are brought to one length.
    """
    pieces = [_segments(corpora[source].sequences, number) for source, number in items]
    lengths = np.array([int((stops - starts).sum()) for _, starts, stops in pieces])
    width = padding.seq_length if padding.pad_to == "seq_length" else int(lengths.max())
    input_ids = np.full((len(items), width), padding.pad_id, np.int64)
    labels = np.full((len(items), width), NOT_TRAINED, np.int64)
    columns = np.arange(width)
    position_ids = np.where(columns < lengths[:, None], columns, columns - lengths[:, None])
    for place, ((source, _), (rows, starts, stops)) in enumerate(zip(items, pieces, strict=True)):
        _fill(corpora[source].prepared, rows, starts, stops, (input_ids[place], labels[place], position_ids[place]))
    is_packed = any(len(rows) > 1 for rows, _, _ in pieces)
    is_padded = bool((lengths < width).any())
    mask = (columns < lengths[:, None]).astype(np.int64) if is_padded and not is_packed else None
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        position_ids=torch.from_numpy(position_ids) if is_packed else None,
        attention_mask=None if mask is None else torch.from_numpy(mask),
        label_count=int((labels != NOT_TRAINED).sum()),
        token_count=int(lengths.sum()),
    )


def _segments(sequences: Sequences, number: int) -> tuple[Ints, Ints, Ints]:
    """Look up the segments of a sequence: their rows, and where they start and stop in them."""
    own = slice(int(sequences.bounds[number]), int(sequences.bounds[number + 1]))
    return sequences.segments.rows[own], sequences.segments.starts[own], sequences.segments.stops[own]


def _fill(prepared: Prepared, rows: Ints, starts: Ints, stops: Ints, into: tuple[npt.NDArray[Any], ...]) -> None:
    """Write the segments of one sequence into its rows of ids, labels and positions."""
    input_ids, labels, position_ids = into
    begins = prepared.offsets[rows] + starts
    lengths = stops - starts
    ends = np.cumsum(lengths)
    firsts = ends - lengths  # where in the sequence each segment begins
    count = int(ends[-1])
    if len(rows) == 1:
        taken: Any = slice(int(begins[0]), int(begins[0]) + count)
    else:
        positions = np.arange(count) - np.repeat(firsts, lengths)
        position_ids[:count] = positions
        taken = np.repeat(begins, lengths) + positions
    input_ids[:count] = labels[:count] = prepared.ids[taken]
    if prepared.trained is not None:
        labels[:count][~prepared.trained[taken]] = NOT_TRAINED
    labels[firsts] = NOT_TRAINED


def count_labels(corpora: Sequence[Corpus], items: Sequence[Item]) -> int:
    """Count the labels of sequences without reading them."""
    return sum(int(corpora[source].sequences.label_counts[number]) for source, number in items)


def train_batches(
    corpora: Sequence[Corpus], order: Order, dealer: Dealer, padding: Padding, *, start: int = 0
) -> Iterator[tuple[Batch, int]]:
    """Yield a rank's micro-batches without end, each with the labels of its whole step, on all ranks.

    The loss of a step is the mean over all of its labels: what a model is given as `num_items_in_batch` is known to
    every rank, because the order is.

    Arguments:
        corpora: all sources.
        order: the order of their sequences.
        dealer: the place of this rank, and the sizes of a step.
        padding: how sequences are brought to one length.
        start: how many sequences of all ranks together are passed over.
    """
    for step in dealer.steps(order, start):
        label_count = count_labels(corpora, step)
        for items in dealer.deal(step):
            yield collate(corpora, items, padding), label_count


def eval_batches(
    corpora: Sequence[Corpus], wanted: int, dealer: Dealer, padding: Padding
) -> Iterator[tuple[Batch, bool]]:
    """Yield a rank's part of `wanted` sequences (or all there are), spread evenly over all, as `Dealer.deal_once`."""
    for items, counts in dealer.deal_once([len(corpus.sequences) for corpus in corpora], wanted):
        yield collate(corpora, items, padding), counts
