import itertools
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cli.training.data.sequences import order as module
from penstock.cli.training.data.sequences.order import Dealer, Item, Order, shuffled
from penstock.errors import ConfigError

COUNTS = st.lists(st.integers(1, 12), min_size=1, max_size=5)
WEIGHTS = (1, 2, 2.5, 0.3, 7, 0.01, 40)


def take(order: Order, count: int, start: int = 0) -> list[Item]:
    return list(itertools.islice(order.at(start), count))


def everything(counts: list[int]) -> list[Item]:
    return [(source, number) for source, count in enumerate(counts) for number in range(count)]


@given(st.lists(st.integers(0, 12), min_size=1, max_size=5).filter(any), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_every_epoch_has_every_sequence_once(counts: list[int], seed: int) -> None:
    order = Order(counts, None, seed)
    assert order.epoch_count == sum(counts)
    stream = take(order, 3 * order.epoch_count)
    for epoch in range(3):
        assert sorted(stream[epoch * order.epoch_count : (epoch + 1) * order.epoch_count]) == everything(counts)


def test_epochs_and_seeds_differ_and_repeat() -> None:
    order = take(Order([30, 20], None, 3), 100)
    assert order[:50] != order[50:]
    assert order == take(Order([30, 20], None, 3), 100)
    assert order != take(Order([30, 20], None, 4), 100)
    assert {source for source, _ in order[:10]} == {0, 1}  # sources are shuffled together


@given(COUNTS, st.data())
@settings(max_examples=60, deadline=None)
def test_weighted_sources_are_shuffled_by_themselves(counts: list[int], data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.sampled_from(WEIGHTS), min_size=len(counts), max_size=len(counts)))
    stream = take(Order(counts, weights, 5), 300)
    for source, count in enumerate(counts):
        own = [number for s, number in stream if s == source]
        for start in range(0, len(own) - count, count):
            assert sorted(own[start : start + count]) == list(range(count))


def greatest_lag(weights: list[float], count: int) -> Fraction:
    """How far any source is from its share after any turn."""
    exact = np.array([int(Fraction(str(weight)) * 1000) for weight in weights])
    stream = np.array([source for source, _ in take(Order([3] * len(weights), weights, 0), count)])
    drawn = np.cumsum(stream[:, None] == np.arange(len(weights)), axis=0)
    shares = np.arange(1, count + 1)[:, None] * exact
    return Fraction(int(np.abs(drawn * exact.sum() - shares).max()), int(exact.sum()))


@given(st.lists(st.sampled_from(WEIGHTS), min_size=1, max_size=7))
@settings(max_examples=60, deadline=None)
def test_every_beginning_has_the_shares_of_the_weights(weights: list[float]) -> None:
    assert greatest_lag(weights, 2500) < 1


def largest_deficit_lag(weights: list[int]) -> float:
    drawn, total, greatest = [0] * len(weights), sum(weights), 0.0
    for turn in range(1, total + 1):
        lags = [weight * turn / total - had for weight, had in zip(weights, drawn, strict=True)]
        drawn[lags.index(max(lags))] += 1
        greatest = max(greatest, *(weight * turn / total - had for weight, had in zip(weights, drawn, strict=True)))
    return greatest


def test_the_largest_deficit_would_be_too_far_off() -> None:
    """Why turns are given by when they end: of these sources, some would fall behind by more than one."""
    weights = [27, 1, 4, 27, 17]
    assert largest_deficit_lag(weights) > 1
    assert greatest_lag(weights, 500) < 1


def test_weights_of_many_digits_are_held_to_a_part_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_TURNS", 1000)
    weights = [1 / 3, 0.123456789012345, 1e-12]
    stream = take(Order([3, 3, 3], weights, 0), 2000)
    total = sum(weights)
    for source, weight in enumerate(weights):
        drawn = sum(s == source for s, _ in stream)
        assert drawn == pytest.approx(weight / total * len(stream), abs=4)
        assert drawn >= 2  # nobody gets nothing


@given(COUNTS, st.booleans(), st.integers(0, 400), st.data())
@settings(max_examples=80, deadline=None)
def test_the_stream_goes_on_from_anywhere(counts: list[int], weighted: bool, start: int, data: st.DataObject) -> None:
    drawn = st.lists(st.sampled_from(WEIGHTS), min_size=len(counts), max_size=len(counts))
    order = Order(counts, data.draw(drawn) if weighted else None, 7)
    assert take(order, 40, start) == take(order, start + 40)[start:]


@pytest.mark.parametrize("weights", [None, [0.7, 0.2, 0.1], [1 / 3, 0.5, 1e-3]])
def test_a_late_place_is_found_at_once(weights: list[float] | None) -> None:
    order = Order([1000, 2000, 50], weights, 0)
    began = time.process_time()
    take(order, 10, 10**8)
    assert time.process_time() - began < 0.5


def test_no_sequences() -> None:
    with pytest.raises(ConfigError, match=r"^The files of --data hold no sequence to train on"):
        Order([0, 0], None, 0)
    with pytest.raises(ConfigError, match=r"^Source 2 of --data has a weight and no sequences"):
        Order([4, 0], [1, 1], 0)


def test_shuffled_passes_over_a_beginning() -> None:
    order = list(itertools.islice(shuffled(50, (3,)), 150))
    assert sorted(order[:50]) == sorted(order[50:100]) == list(range(50))
    assert list(itertools.islice(shuffled(50, (3,), 70), 80)) == order[70:]


# Ranks


def dealt(order: Order, dealers: list[Dealer], start: int, steps: int) -> list[list[Item]]:
    """The sequences of each micro-batch of all ranks together, in their order."""
    found = []
    for step in itertools.islice(dealers[0].steps(order, start), steps):
        parts = [dealer.deal(step) for dealer in dealers]
        found += [list(itertools.chain(*micro_batches)) for micro_batches in zip(*parts, strict=True)]
    return found


def ranks(world_size: int, batch_size: int, accumulation: int) -> list[Dealer]:
    return [Dealer(batch_size, accumulation, rank, world_size) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [2, 3, 6])
@pytest.mark.parametrize("weights", [None, [3, 1]])
def test_any_world_size_sees_the_same_global_batches(world_size: int, weights: list[float] | None) -> None:
    order = Order([20, 11], weights, 5)
    alone = dealt(order, ranks(1, 6, 2), 0, 10)
    assert dealt(order, ranks(world_size, 6 // world_size, 2), 0, 10) == alone
    assert list(itertools.chain(*alone)) == take(order, 120)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 100))
@settings(max_examples=40, deadline=None)
def test_a_run_goes_on_at_another_world_size(world_size: int, batch_size: int, accumulation: int, start: int) -> None:
    order = Order([20, 11], None, 5)
    rest = dealt(order, ranks(world_size, batch_size, accumulation), start, 3)
    assert list(itertools.chain(*rest)) == take(order, 3 * world_size * batch_size * accumulation, start)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("wanted", [0, 1, 5, 16, 500])
def test_ranks_measure_the_same_sequences_in_as_many_batches(wanted: int, world_size: int) -> None:
    counts = [30, 0, 11]
    each = [list(dealer.deal_once(counts, wanted)) for dealer in ranks(world_size, 2, 1)]
    assert len({len(batches) for batches in each}) == 1
    counted = [item for batches in each for items, counts_ in batches if counts_ for item in items]
    alone = [item for items, _ in Dealer(2, 1, 0, 1).deal_once(counts, wanted) for item in items]
    assert sorted(counted) == sorted(alone)
    assert len(set(counted)) == len(counted) == min(wanted, 41)
    assert all(items for batches in each for items, _ in batches)


def test_measured_sequences_are_spread_over_all_sources() -> None:
    ((items, counts),) = Dealer(4, 1, 0, 1).deal_once([111, 0, 9], 4)
    assert (items, counts) == ([(0, 0), (0, 30), (0, 60), (0, 90)], True)
    ((items, _),) = Dealer(4, 1, 0, 1).deal_once([2, 0, 2], 4)
    assert items == [(0, 0), (0, 1), (2, 0), (2, 1)]
