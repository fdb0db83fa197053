import itertools

import numpy as np
import pytest
import torch

from penstock.cli.ranks import Ranks
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.data import eval_batches, sequence_count, sequences, shuffled, train_batches

CPU = torch.device("cpu")
TOKENS = np.arange(1000, dtype=np.uint16)


def test_each_id_but_the_first_is_predicted_once() -> None:
    count = sequence_count(len(TOKENS), 10)
    assert count == 111
    cut = sequences(TOKENS, list(range(count)), 10)
    assert cut.shape == (111, 10)
    assert cut.dtype == np.int64
    assert cut[:, 1:].ravel().tolist() == list(range(1, 1000))
    assert cut[0].tolist() == list(range(10))


@pytest.mark.parametrize(("token_count", "count"), [(0, 0), (1, 0), (9, 0), (10, 1), (18, 1), (19, 2)])
def test_sequence_count(token_count: int, count: int) -> None:
    assert sequence_count(token_count, 10) == count


def test_every_epoch_has_every_sequence_in_another_order() -> None:
    order = list(itertools.islice(shuffled(50, seed=3), 100))
    assert sorted(order[:50]) == sorted(order[50:]) == list(range(50))
    assert order[:50] != order[50:]
    assert order == list(itertools.islice(shuffled(50, seed=3), 100))
    assert order != list(itertools.islice(shuffled(50, seed=4), 100))


def take(count: int, *, batch_size: int, rank: int, world_size: int) -> list[list[list[int]]]:
    config = TrainConfig(seq_length=10, batch_size=batch_size, seed=5)
    batches = train_batches(TOKENS, config, Ranks(rank, world_size, CPU))
    return [batch.tolist() for batch in itertools.islice(batches, count)]


@pytest.mark.parametrize("world_size", [2, 3, 6])
def test_any_world_size_sees_the_same_global_batches(world_size: int) -> None:
    alone = take(50, batch_size=6, rank=0, world_size=1)  # 50 x 6 sequences are more than two epochs
    each = [take(50, batch_size=6 // world_size, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert [list(itertools.chain(*parts)) for parts in zip(*each, strict=True)] == alone


def evaluate(wanted: int, *, batch_size: int, world_size: int) -> list[list[tuple[list[list[int]], bool]]]:
    config = TrainConfig(seq_length=10, batch_size=batch_size, eval_sequences=wanted)
    ranks = [Ranks(rank, world_size, CPU) for rank in range(world_size)]
    return [[(ids.tolist(), counts) for ids, counts in eval_batches(TOKENS, config, each)] for each in ranks]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("wanted", [1, 5, 16, 500])
def test_ranks_measure_the_same_sequences_in_as_many_batches(wanted: int, world_size: int) -> None:
    ranks = evaluate(wanted, batch_size=2, world_size=world_size)
    assert len({len(batches) for batches in ranks}) == 1
    counted = [ids for batches in ranks for sequences_, counts in batches if counts for ids in sequences_]
    alone = [ids for sequences_, _ in evaluate(wanted, batch_size=2, world_size=1)[0] for ids in sequences_]
    assert sorted(counted) == sorted(alone)
    assert len(counted) == min(wanted, 111)
    assert all(sequences_ for batches in ranks for sequences_, _ in batches)


def test_measured_sequences_are_spread_over_the_stream() -> None:
    (batches,) = evaluate(4, batch_size=4, world_size=1)
    assert [ids[0] for ids in batches[0][0]] == [0, 27 * 9, 55 * 9, 83 * 9]
