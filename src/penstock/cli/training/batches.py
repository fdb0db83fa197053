"""Which tokens go where: streams cut into sequences, shuffled, dealt to ranks. Pure functions.

Words: a sequence is `seq_length` consecutive ids of a stream. Sequence i starts at the last id of sequence i - 1, so
that, as a model predicts every id of a sequence but its first, each id of the stream is predicted exactly once.
"""

import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from penstock.cli.training.corpus import Tokens

Ids = npt.NDArray[np.int64]


def sequence_count(token_count: int, seq_length: int) -> int:
    """Sequences in a stream of that many ids. Ids that do not fill the last sequence are left out."""
    return max(0, (token_count - 1) // (seq_length - 1))


def sequences(tokens: Tokens, numbers: list[int], seq_length: int) -> Ids:
    """The sequences of these numbers, of shape (len(numbers), seq_length)."""
    starts = np.asarray(numbers, dtype=np.int64) * (seq_length - 1)
    return np.asarray(tokens[starts[:, None] + np.arange(seq_length)], dtype=np.int64)


def shuffled(count: int, seed: int, start: int = 0) -> Iterator[int]:
    """The numbers 0 to count - 1 without end, each epoch in another order, fixed by `seed` and the epoch's number.

    The first `start` of them are passed over.
    """
    first, inside = divmod(start, count)
    for epoch in itertools.count(first):
        order = np.random.default_rng((seed, epoch)).permutation(count)
        yield from map(int, order[inside if epoch == first else 0 :])


def train_batches(
    tokens: Tokens, *, seq_length: int, batch_size: int, seed: int, rank: int, world_size: int, start: int = 0
) -> Iterator[Ids]:
    """Micro-batches of a rank without end, each of shape (batch_size, seq_length).

    The first `start` sequences of all ranks together are passed over. The micro-batches of all ranks together are the
    same for any world size that gives the same `batch_size * world_size`.
    """
    order = shuffled(sequence_count(len(tokens), seq_length), seed, start)
    while True:
        all_ranks = list(itertools.islice(order, batch_size * world_size))
        yield sequences(tokens, all_ranks[rank * batch_size : (rank + 1) * batch_size], seq_length)


def eval_batches(
    tokens: Tokens, *, seq_length: int, batch_size: int, wanted_count: int, rank: int, world_size: int
) -> Iterator[tuple[Ids, bool]]:
    """A rank's part of `wanted_count` sequences (or all there are), spread evenly over the stream.

    Every rank gets the same number of batches, because a forward pass may be a collective call. A rank for which
    nothing is left gets a sequence with `False`: run it, and do not count it.
    """
    count = sequence_count(len(tokens), seq_length)
    wanted_count = min(wanted_count, count)
    chosen = [number * count // wanted_count for number in range(wanted_count)]
    for start in range(0, wanted_count, batch_size * world_size):
        first = start + rank * batch_size
        mine = chosen[first : first + batch_size]
        yield sequences(tokens, mine or chosen[:1], seq_length), bool(mine)
