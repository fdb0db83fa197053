"""What a run reads, as its loop sees it: micro-batches to train on, batches that are held out, and what they are of."""

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.cli.ranks import Ranks
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.data import Corpus, eval_batches, on_device, sequence_count, to_device, train_batches
from penstock.cli.training.recipe import Course

#: A label that is none.
IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """Sequences of one micro-batch, on the device.

    Attributes:
        input_ids: int64 [b, n].
        labels: int64 [b, n], not shifted: the model predicts each from the tokens before it. -100 is not trained.
        position_ids: int64 [b, n]; `None` where every sequence is one segment.
        attention_mask: [b, n], 0 for padding; `None` where there is none.
        label_count: labels that count, after the shift.
        token_count: tokens that are not padding.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor | None
    attention_mask: Tensor | None
    label_count: int
    token_count: int

    def inputs(self) -> dict[str, Tensor]:
        """List the model's arguments by name, without labels."""
        given = {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attention_mask": self.attention_mask,
        }
        return {name: value for name, value in given.items() if value is not None}


class Feed(Protocol):
    """The batches of one rank, in an order that is a function of the settings alone."""

    def training(self, start: int) -> Generator[tuple[Batch, int], None, None]:
        """Yield micro-batches without end, each with the labels of its whole step: of all ranks and micro-batches.

        Arguments:
            start: sequences that all ranks together have trained on, which are passed over; a multiple of a step's.
        """

    def held_out(self) -> Iterator[tuple[Batch, bool]]:
        """Yield held-out batches, as many on every rank; with `False`, one to run and not to count."""

    def identity(self) -> dict[str, Any]:
        """Say what is read in which order, as JSON: a run goes on from a checkpoint that says the same."""


class CorpusFeed:
    """Sequences of consecutive tokens of a corpus, every one of them trained on.

    Arguments:
        corpus: the text as tokens.
        config: the settings.
        course: what a step is.
        ranks: the place of this process.
    """

    def __init__(self, corpus: Corpus, config: TrainConfig, course: Course, ranks: Ranks) -> None:
        self._corpus = corpus
        self._config = config
        self._course = course
        self._ranks = ranks

    def training(self, start: int) -> Generator[tuple[Batch, int], None, None]:
        """See `Feed`."""
        course = self._course
        labels_of_step = course.per_step * (course.seq_length - 1)
        read = train_batches(self._corpus.train, course, self._ranks, seed=self._config.seed, start=start)
        with closing(on_device(read, self._ranks.device)) as batches:
            for ids in batches:
                yield _whole(ids), labels_of_step

    def held_out(self) -> Iterator[tuple[Batch, bool]]:
        """See `Feed`."""
        wanted = self._config.eval_sequences
        for sequences, counts in eval_batches(self._corpus.held_out, self._course, self._ranks, wanted_count=wanted):
            yield _whole(to_device(sequences, self._ranks.device)), counts

    def identity(self) -> dict[str, Any]:
        """See `Feed`."""
        return {
            "seed": self._config.seed,
            "seq_length": self._course.seq_length,
            "sequences": sequence_count(len(self._corpus.train), self._course.seq_length),
        }


def _whole(ids: torch.Tensor) -> Batch:
    """Make a batch of sequences that are whole, and all labels."""
    count, length = ids.shape
    return Batch(ids, ids, None, None, label_count=count * (length - 1), token_count=ids.numel())
