import itertools
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.cli.training.data.sequences.batches import (
    NOT_TRAINED,
    Batch,
    Corpus,
    Padding,
    collate,
    count_labels,
    eval_batches,
    train_batches,
)
from penstock.cli.training.data.sequences.order import Dealer, Order
from penstock.cli.training.data.sequences.packing import Truncation, arrange, whole_rows
from tests.unit.cli.sequences.samples import Sample, prepared_of, sample

PAD = 999


def corpus_of(
    folder: Path, *samples: Sample, seq_length: int = 6, packed: bool = True, truncation: Truncation = "split"
) -> Corpus:
    prepared = prepared_of(folder, *samples)
    sequences, _ = arrange(
        prepared.offsets,
        prepared.trained,
        whole_rows(prepared.lengths),
        seq_length=seq_length,
        truncation=truncation,
        packed=packed,
        where=prepared.where,
    )
    return Corpus(prepared, sequences)


def listed(batch: Batch) -> dict[str, list[list[int]]]:
    return {name: value.tolist() for name, value in {**batch.inputs(), "labels": batch.labels}.items()}


def test_segments_of_packed_sequences(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, sample([1, 2, 3]), sample([4, 5, 6, 7, 8]), sample([9, 10]))
    batch = collate([corpus], [(0, 0), (0, 1)], Padding(6, PAD))
    assert listed(batch) == {
        "input_ids": [[1, 2, 3, 9, 10], [4, 5, 6, 7, 8]],
        "labels": [[-100, 2, 3, -100, 10], [-100, 5, 6, 7, 8]],
        "position_ids": [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]],
    }
    assert (batch.label_count, batch.token_count) == (7, 10)
    assert {tensor.dtype for tensor in (batch.labels, *batch.inputs().values())} == {torch.int64}


def test_padding_of_packed_sequences_is_a_segment_of_its_own(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, sample([1, 2, 3]), sample([4, 5, 6, 7, 8]), sample([9]), sample([10, 11]))
    batch = collate([corpus], [(0, 0), (0, 1)], Padding(8, PAD, "seq_length"))
    assert listed(batch) == {
        "input_ids": [[1, 2, 3, 10, 11, PAD, PAD, PAD], [4, 5, 6, 7, 8, PAD, PAD, PAD]],
        "labels": [[-100, 2, 3, -100, 11, -100, -100, -100], [-100, 5, 6, 7, 8, -100, -100, -100]],
        "position_ids": [[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 0, 1, 2]],
    }
    assert (batch.label_count, batch.token_count) == (7, 10)


def test_padded_sequences_have_a_mask(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, sample([1, 2, 3]), sample([4, 5]), packed=False)
    assert listed(collate([corpus], [(0, 0), (0, 1)], Padding(6, PAD))) == {
        "input_ids": [[1, 2, 3], [4, 5, PAD]],
        "labels": [[-100, 2, 3], [-100, 5, -100]],
        "attention_mask": [[1, 1, 1], [1, 1, 0]],
    }


def test_sequences_of_one_length_have_neither_mask_nor_positions(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, sample([1, 2, 3]), sample([4, 5, 6]), packed=False)
    assert listed(collate([corpus], [(0, 1)], Padding(3, PAD))) == {
        "input_ids": [[4, 5, 6]],
        "labels": [[-100, 5, 6]],
    }


def test_only_what_is_trained_on_is_a_label(tmp_path: Path) -> None:
    corpus = corpus_of(
        tmp_path, sample([1, 2, 3], [1, 0, 1]), sample([4, 5, 6], None), sample([7, 8, 9], [0, 0, 1]), seq_length=9
    )
    batch = collate([corpus], [(0, 0)], Padding(9, PAD))
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9]]
    assert batch.labels.tolist() == [[-100, -100, 3, -100, 5, 6, -100, -100, 9]]
    assert batch.label_count == count_labels([corpus], [(0, 0)]) == 4


def test_pieces_of_a_long_row_predict_every_token_once(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, sample(range(100, 120)), seq_length=6)
    batch = collate([corpus], [(0, number) for number in range(len(corpus.sequences))], Padding(6, PAD))
    assert batch.labels[batch.labels != NOT_TRAINED].tolist() == list(range(101, 120))
    assert batch.input_ids[:, 0].tolist() == [100, 105, 110, 115]


def test_a_batch_of_several_sources(tmp_path: Path) -> None:
    first = corpus_of(tmp_path / "first", sample([1, 2, 3]), packed=False)
    second = corpus_of(tmp_path / "second", sample([4, 5, 6], [0, 1, 0]), sample([7, 8, 9], [0, 1, 1]), packed=False)
    batch = collate([first, second], [(1, 1), (0, 0), (1, 0)], Padding(6, PAD))
    assert listed(batch) == {
        "input_ids": [[7, 8, 9], [1, 2, 3], [4, 5, 6]],
        "labels": [[-100, 8, 9], [-100, 2, 3], [-100, 5, -100]],
    }


def many(folder: Path, name: str, packed: bool) -> Corpus:
    random = np.random.default_rng(len(name))
    rows = [sample(random.integers(0, 900, n), random.integers(0, 2, n)) for n in random.integers(3, 20, 60)]
    return corpus_of(folder / name, *rows, seq_length=24, packed=packed)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_labels_of_a_step_are_known_to_every_rank(tmp_path: Path, world_size: int, packed: bool) -> None:
    corpora = [many(tmp_path, "a", packed), many(tmp_path, "second", packed)]
    order = Order([len(corpus.sequences) for corpus in corpora], None, 0)
    padding = Padding(24, PAD)
    each = [train_batches(corpora, order, Dealer(2, 3, rank, world_size), padding) for rank in range(world_size)]
    for _ in range(20):  # more than an epoch
        step = [list(itertools.islice(batches, 3)) for batches in each]
        counts = {count for micro_batches in step for _, count in micro_batches}
        assert counts == {sum(batch.label_count for micro_batches in step for batch, _ in micro_batches)}


def test_batches_go_on_where_they_stopped(tmp_path: Path) -> None:
    corpora = [many(tmp_path, "a", True)]
    order, dealer, padding = Order([len(corpora[0].sequences)], None, 0), Dealer(2, 1, 0, 1), Padding(24, PAD)
    whole = [listed(batch) for batch, _ in itertools.islice(train_batches(corpora, order, dealer, padding), 12)]
    rest = itertools.islice(train_batches(corpora, order, dealer, padding, start=10), 7)
    assert [listed(batch) for batch, _ in rest] == whole[5:]


def test_evaluation_counts_every_sequence_once(tmp_path: Path) -> None:
    corpora = [many(tmp_path, "a", False), many(tmp_path, "second", False)]
    total = sum(len(corpus.sequences) for corpus in corpora)
    each = [list(eval_batches(corpora, 1000, Dealer(8, 1, rank, 2), Padding(24, PAD))) for rank in range(2)]
    assert len(each[0]) == len(each[1])
    counted = [batch for batches in each for batch, counts in batches if counts]
    assert sum(len(batch.input_ids) for batch in counted) == total
    assert sum(batch.label_count for batch in counted) == sum(int(c.sequences.label_counts.sum()) for c in corpora)


def test_a_large_batch_takes_milliseconds(tmp_path: Path) -> None:
    rows = [sample(np.arange(200) % 900, np.ones(200, np.int64)) for _ in range(400)]
    corpus = corpus_of(tmp_path, *rows, seq_length=4096)
    items = [(0, number) for number in range(16)]
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        collate([corpus], items, Padding(4096, PAD))
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.05  # two milliseconds where nothing else runs
