"""Which sequence comes when, and to which rank: pure arithmetic, the same in every process.

The order is one stream without an end, for all ranks together. A run that goes on, at any number of ranks, knows its
place in it by how many sequences were consumed.
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError

#: A sequence: the number of its source, and its number there.
Item = tuple[int, int]

#: Weights are held to this fine a part of their sum; those of few digits exactly.
MOST_TURNS = 100_000


class Order:
    """The order of the sequences of all sources.

    Without weights, every epoch has every sequence of every source once, shuffled together. With weights, each source's
    share of every beginning of the stream is its weight's, to less than one sequence; each is shuffled by itself, its
    epochs one after the other.

    Arguments:
        counts: how many sequences each source has.
        weights: the share of each, in any unit; `None` for none.
        seed: what the order is drawn from.

    Raises:
        ConfigError: there is no sequence; with weights, a source has none.

    Example:
        >>> list(itertools.islice(Order([2, 1], weights=[3, 1], seed=0).at(0), 4))
        [(0, 0), (0, 1), (0, 1), (1, 0)]
    """

    def __init__(self, counts: Sequence[int], weights: Sequence[float] | None, seed: int) -> None:
        self._counts = list(counts)
        self._seed = seed
        #: Sequences of one epoch.
        self.epoch_count = sum(counts)
        if self.epoch_count == 0:
            raise ConfigError("The files of --data hold no sequence to train on. Name files with more in them.")
        if weights is not None and min(counts) == 0:
            empty = self._counts.index(0) + 1
            raise ConfigError(f"Source {empty} of --data has a weight and no sequences. Name one with more, or none.")
        self._turns = None if weights is None else _turns(_shares(weights))

    def at(self, start: int) -> Iterator[Item]:
        """Yield the stream from a place on, in time that does not grow with the place."""
        return self._mixed(start) if self._turns is None else self._weighted(self._turns, start)

    def _mixed(self, start: int) -> Iterator[Item]:
        ends = np.cumsum(self._counts)
        for number in shuffled(self.epoch_count, (self._seed,), start):
            source = int(np.searchsorted(ends, number, side="right"))
            yield source, number - int(ends[source]) + self._counts[source]

    def _weighted(self, turns: npt.NDArray[np.int64], start: int) -> Iterator[Item]:
        rounds, inside = divmod(start, len(turns))
        sources = range(len(self._counts))
        in_round = np.bincount(turns, minlength=len(sources))
        drawn = rounds * in_round + np.bincount(turns[:inside], minlength=len(sources))
        streams = [shuffled(self._counts[s], (self._seed, 1 + s), int(drawn[s])) for s in sources]
        for source in itertools.chain(turns[inside:].tolist(), itertools.cycle(turns.tolist())):
            yield source, next(streams[source])


def shuffled(count: int, seed: tuple[int, ...], start: int = 0) -> Iterator[int]:
    """Yield the numbers 0 to count - 1 without end, each epoch in another order, fixed by `seed` and its number.

    The first `start` of them are passed over.
    """
    first, inside = divmod(start, count)
    for epoch in itertools.count(first):
        order = np.random.default_rng((*seed, epoch)).permutation(count)
        yield from map(int, order[inside if epoch == first else 0 :])


def _shares(weights: Sequence[float]) -> list[int]:
    """Make whole numbers of weights, in proportion; exactly where their sum is then at most `MOST_TURNS`."""
    exact = [Fraction(str(weight)) for weight in weights]
    unit = lcm(*(part.denominator for part in exact))
    parts = [int(part * unit) for part in exact]
    common = np.gcd.reduce(np.array(parts, dtype=object))
    parts = [part // int(common) for part in parts]
    total = sum(parts)
    if total <= MOST_TURNS:
        return parts
    # The largest remainders get what rounding leaves; nobody gets nothing.
    lower = [max(1, part * MOST_TURNS // total) for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda i: (-(parts[i] * MOST_TURNS % total), i))
    for source in by_remainder[: max(0, MOST_TURNS - sum(lower))]:
        lower[source] += 1
    return lower


def _turns(shares: list[int]) -> npt.NDArray[np.int64]:
    """Say whose turn it is in a round of `sum(shares)` turns, after which it begins again.

    The m-th turn of a source with a share of s is taken between `m / s` and `(m + 1) / s` of the round, whole turns
    around that: then it has, after every turn, its share to less than one. Of those whose time has begun the one whose
    time ends first is chosen, which meets all these times whenever any choice does, and one does (Liu and Layland's
    earliest deadline first; Baruah et al., "Proportionate progress", 1996). The largest deficit first would not:
    with weights of 27, 1, 4, 27 and 17 a source falls behind by more than one.
    """
    total = sum(shares)
    turns = np.empty(total, np.int64)
    waiting = [(0, source, 0) for source in range(len(shares))]  # (its time begins, source, how often it was taken)
    heapq.heapify(waiting)
    ready: list[tuple[int, int, int]] = []  # (its time ends, source, how often it was taken)
    for turn in range(total):
        while waiting and waiting[0][0] <= turn:
            _, source, taken = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(taken + 1) * total // shares[source]), source, taken))
        _, source, taken = heapq.heappop(ready)
        turns[turn] = source
        if taken + 1 < shares[source]:
            heapq.heappush(waiting, ((taken + 1) * total // shares[source], source, taken + 1))
    return turns


@dataclass(frozen=True)
class Dealer:
    """Deals the sequences of a step to ranks and micro-batches.

    Micro-batch m of all ranks together is the m-th part of the step, so that one rank with a batch of 8 makes the same
    steps as two with batches of 4.

    Attributes:
        batch_size: sequences of a rank's micro-batch.
        accumulation: micro-batches of a step.
        rank: this rank.
        world_size: how many ranks there are.
    """

    batch_size: int
    accumulation: int
    rank: int
    world_size: int

    @property
    def step_count(self) -> int:
        """How many sequences a step takes on all ranks."""
        return self.batch_size * self.accumulation * self.world_size

    def deal(self, step: Sequence[Item]) -> list[list[Item]]:
        """Take this rank's micro-batches from the sequences of a step."""
        first = self.rank * self.batch_size
        every = self.batch_size * self.world_size
        return [list(step[m + first : m + first + self.batch_size]) for m in range(0, self.step_count, every)]

    def steps(self, order: Order, start: int = 0) -> Iterator[list[Item]]:
        """Yield the sequences of one step of all ranks after the other; `start` sequences are passed over."""
        stream = order.at(start)
        while True:
            yield list(itertools.islice(stream, self.step_count))

    def deal_once(self, counts: Sequence[int], wanted: int) -> Iterator[tuple[list[Item], bool]]:
        """Deal `wanted` of the sequences of all sources (or all there are), spread evenly over them, once.

        Every rank gets the same number of batches, because a forward pass may be a collective call. A rank for which
        nothing is left gets a sequence with `False`: run it, and do not count it.
        """
        ends = np.cumsum(counts)
        total = sum(counts)
        wanted = min(wanted, total)
        numbers = np.arange(wanted) * total // max(1, wanted)
        sources = np.searchsorted(ends, numbers, side="right")
        chosen = list(zip(sources.tolist(), (numbers - (ends - counts)[sources]).tolist(), strict=True))
        for start in range(0, wanted, self.batch_size * self.world_size):
            first = start + self.rank * self.batch_size
            mine = chosen[first : first + self.batch_size]
            yield mine or chosen[:1], bool(mine)
