"""What a run reads, as its loop sees it: micro-batches to train on, batches that are held out, and what they are of."""

from collections.abc import Generator
from typing import Any, Protocol

from penstock.cli.ranks import Ranks
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.data.dataset import Data
from penstock.cli.training.data.feeding import on_device
from penstock.cli.training.data.sequences.batches import Batch, Padding, eval_batches, train_batches
from penstock.cli.training.data.sequences.order import Dealer, Order
from penstock.cli.training.recipe import Course


class Feed(Protocol):
    """The batches of one rank, in an order that is a function of the settings alone."""

    def training(self, start: int) -> Generator[tuple[Batch, int], None, None]:
        """Yield micro-batches without end, each with the labels of its whole step: of all ranks and micro-batches.

        Arguments:
            start: sequences that all ranks together have trained on, which are passed over.
        """

    def held_out(self) -> Generator[tuple[Batch, bool], None, None]:
        """Yield held-out batches, as many on every rank; with `False`, one to run and not to count."""

    def identity(self) -> dict[str, Any]:
        """Say what is read in which order, as JSON: a run goes on from a checkpoint that says the same."""


class DataFeed:
    """The sequences of a run's data.

    Arguments:
        data: what is trained on and held out.
        config: the settings.
        course: what a step is.
        ranks: the place of this process.
        pad_id: the id that fills sequences up.
    """

    def __init__(self, data: Data, config: TrainConfig, course: Course, ranks: Ranks, *, pad_id: int) -> None:
        self._data = data
        self._config = config
        self._ranks = ranks
        self._order = Order(data.counts, data.weights, config.seed)
        self._dealer = Dealer(course.batch_size, course.accumulation, ranks.dp_rank, ranks.dp_world_size)
        # What is compiled is compiled for a shape.
        self._padding = Padding(course.seq_length, pad_id, "seq_length" if config.compile else "longest")

    def training(self, start: int) -> Generator[tuple[Batch, int], None, None]:
        """See `Feed`."""
        read = train_batches(self._data.train, self._order, self._dealer, self._padding, start=start)
        return on_device(read, self._ranks.device)

    def held_out(self) -> Generator[tuple[Batch, bool], None, None]:
        """See `Feed`."""
        read = eval_batches(self._data.held_out, self._config.eval_sequences, self._dealer, self._padding)
        return on_device(read, self._ranks.device)

    def identity(self) -> dict[str, Any]:
        """See `Feed`."""
        return {
            "seed": self._config.seed,
            "seq_length": self._padding.seq_length,
            "sequences": self._data.counts,
            "weights": None if self._data.weights is None else list(self._data.weights),
            "data": [corpus.prepared.digest for corpus in self._data.train],
        }
