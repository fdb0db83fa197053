"""Sequences are packed as TRL packs them."""

import itertools

import numpy as np
import pytest

from penstock.cli.training.data.sequences.packing import arrange, whole_rows

pytestmark = pytest.mark.integrations


@pytest.mark.parametrize(("longest", "seq_length"), [(40, 64), (200, 64), (64, 64)])
def test_rows_are_cut_and_packed_as_by_trl(longest: int, seq_length: int) -> None:
    from datasets import Dataset
    from trl import pack_dataset

    lengths = np.random.default_rng(0).integers(2, longest + 1, 500)
    rows = Dataset.from_dict({"input_ids": [[row] * length for row, length in enumerate(lengths.tolist())]})
    theirs = pack_dataset(rows, seq_length, "bfd")
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ours, _ = arrange(
        offsets, None, whole_rows(lengths), seq_length=seq_length, truncation="right", packed=True, where=str
    )
    found = [ours.segments.rows[start:stop].tolist() for start, stop in itertools.pairwise(ours.bounds)]
    expected = [sorted(set(ids)) for ids in theirs["input_ids"]]
    assert found == sorted(expected)
    assert ours.lengths.sum() == sum(map(len, theirs["input_ids"]))
