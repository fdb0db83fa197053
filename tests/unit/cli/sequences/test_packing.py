import itertools
import time
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cli.training.data.sequences import packing
from penstock.cli.training.data.sequences.packing import (
    Segments,
    Sequences,
    Truncation,
    arrange,
    cut,
    label_counts,
    pack,
    padding_share_expected,
    padding_share_packed,
    whole_rows,
)
from penstock.errors import ConfigError

LENGTHS = st.lists(st.integers(1, 24), min_size=1, max_size=60)


def rows_of(*lengths: int) -> Segments:
    return whole_rows(np.array(lengths, np.int64))


def listed(segments: Segments) -> list[tuple[int, int, int]]:
    return list(zip(segments.rows.tolist(), segments.starts.tolist(), segments.stops.tolist(), strict=True))


def offsets_of(*lengths: int) -> packing.Ints:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


# Cutting


def test_split_pieces_overlap_by_one_token() -> None:
    found = cut(rows_of(10, 3, 4, 7, 5), seq_length=4, truncation="split")
    assert listed(found) == [
        (0, 0, 4), (0, 3, 7), (0, 6, 10),
        (1, 0, 3),
        (2, 0, 4),
        (3, 0, 4), (3, 3, 7),
        (4, 0, 4), (4, 3, 5),
    ]  # fmt: skip


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(2, 12))
@settings(max_examples=60, deadline=None)
def test_split_predicts_every_token_once(lengths: list[int], seq_length: int) -> None:
    found = listed(cut(rows_of(*lengths), seq_length=seq_length, truncation="split"))
    predicted = [(row, token) for row, start, stop in found for token in range(start + 1, stop)]
    assert predicted == [(row, token) for row, length in enumerate(lengths) for token in range(1, length)]
    assert all(stop - start <= seq_length for _, start, stop in found)
    assert all(stop - start >= 2 or lengths[row] < 2 for row, start, stop in found)


def test_split_of_a_part_of_a_row_stays_inside_it() -> None:
    part = Segments(np.array([7]), np.array([100]), np.array([106]))
    assert listed(cut(part, seq_length=4, truncation="split")) == [(7, 100, 104), (7, 103, 106)]


@pytest.mark.parametrize(("truncation", "expected"), [("left", (0, 6, 10)), ("right", (0, 0, 4))])
def test_one_side_is_cut_away(truncation: Truncation, expected: tuple[int, int, int]) -> None:
    found = cut(rows_of(10, 4, 3), seq_length=4, truncation=truncation)
    assert listed(found) == [expected, (1, 0, 4), (2, 0, 3)]


def test_error_names_the_row() -> None:
    message = "^chat.jsonl:2 has 5 tokens, more than --seq-length 4. Use a longer one, or --truncation right, left or "
    with pytest.raises(ConfigError, match=message):
        cut(rows_of(4, 5, 6), seq_length=4, truncation="error", where=lambda row: f"chat.jsonl:{row + 1}")
    assert listed(cut(rows_of(4, 3), seq_length=4, truncation="error")) == [(0, 0, 4), (1, 0, 3)]


# Labels


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_labels_are_counted_without_the_first_token(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=9))
    offsets = offsets_of(*lengths)
    marks = data.draw(st.lists(st.booleans(), min_size=int(offsets[-1]), max_size=int(offsets[-1])))
    trained = np.array(marks, np.bool_)
    chosen = []
    for row in data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=9)):
        start = data.draw(st.integers(0, lengths[row]))
        chosen.append((row, start, data.draw(st.integers(start, lengths[row]))))
    segments = Segments(*(np.array(column, np.int64) for column in zip(*chosen, strict=True)))
    expected = [sum(marks[offsets[row] + start + 1 : offsets[row] + stop]) for row, start, stop in chosen]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_CHUNK_TOKENS", data.draw(st.integers(1, 20)))
        assert label_counts(offsets, trained, segments).tolist() == expected
    without = [max(stop - start - 1, 0) for _, start, stop in chosen]
    assert label_counts(offsets, None, segments).tolist() == without


# Packing


def naive_pack(lengths: list[int], seq_length: int) -> list[list[int]]:
    """Best fit decreasing, one segment at a time; of sequences with the same room the one that has had it longest."""
    by_room: defaultdict[int, list[list[int]]] = defaultdict(list)
    made: list[list[int]] = []
    for segment in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        room = next((r for r in range(lengths[segment], seq_length) if by_room[r]), seq_length)
        if room == seq_length:
            chosen: list[int] = []
            made.append(chosen)
        else:
            chosen = by_room[room].pop(0)
        chosen.append(segment)
        by_room[room - lengths[segment]].append(chosen)
    return sorted(sorted(sequence) for sequence in made)


@given(LENGTHS, st.integers(24, 40))
@settings(max_examples=150, deadline=None)
def test_packing_is_best_fit_decreasing(lengths: list[int], seq_length: int) -> None:
    order, bounds = pack(np.array(lengths, np.int64), seq_length)
    found = [order[start:stop].tolist() for start, stop in itertools.pairwise(bounds)]
    assert found == naive_pack(lengths, seq_length)


def test_packing_of_many_short_segments_is_best_fit_decreasing() -> None:
    """Many have the same length and the same room, where those that have it longest come first."""
    lengths = np.random.default_rng(3).integers(2, 14, 1500)
    order, bounds = pack(lengths, 31)
    found = [order[start:stop].tolist() for start, stop in itertools.pairwise(bounds)]
    assert found == naive_pack(lengths.tolist(), 31)


def test_packing_puts_every_segment_once_in_a_sequence_that_holds_it() -> None:
    lengths = np.random.default_rng(0).integers(1, 65, 3000)
    order, bounds = pack(lengths, 64)
    assert sorted(order.tolist()) == list(range(3000))
    totals = np.add.reduceat(lengths[order], bounds[:-1])
    assert totals.max() <= 64
    assert totals.sum() == lengths.sum()
    assert len(totals) <= -(-lengths.sum() // 64) * 1.02  # hardly more than any packing needs


def test_packing_nothing() -> None:
    order, bounds = pack(np.empty(0, np.int64), 8)
    assert (order.tolist(), bounds.tolist()) == ([], [0])


def test_packing_millions_takes_seconds() -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(5.5, 1.0, 300_000).astype(np.int64) + 2, 4096)
    began = time.process_time()
    order, bounds = pack(lengths, 4096)
    assert time.process_time() - began < 3.0  # two tenths of a second here
    assert np.add.reduceat(lengths[order], bounds[:-1]).max() <= 4096


# Together


def test_rows_without_a_label_are_dropped_and_counted() -> None:
    lengths = (6, 4, 4, 1)
    trained = np.array([*[0, 0, 0, 0, 1, 1], *[1, 0, 0, 0], *[0, 1, 1, 0], 1], np.bool_)
    sequences, report = arrange(
        offsets_of(*lengths),
        trained,
        rows_of(*lengths),
        seq_length=4,
        truncation="right",
        packed=True,
        where=str,
    )
    # The labels of the first row are cut away; that of the second is its first token, and of the last its only one.
    assert listed(sequences.segments) == [(2, 0, 4)]
    assert sequences.label_counts.tolist() == [2]
    assert (report.row_count, report.token_count, report.sequence_count, report.label_count) == (4, 15, 1, 2)
    assert (report.cut_row_count, report.cut_token_count, report.dropped_row_count) == (1, 2, 3)


def test_a_divided_row_loses_no_label() -> None:
    lengths = (11, 3)
    trained = np.array([0] * 8 + [1] * 3 + [0, 1, 1], np.bool_)
    sequences, report = arrange(
        offsets_of(*lengths), trained, rows_of(*lengths), seq_length=4, truncation="split", packed=False, where=str
    )
    assert listed(sequences.segments) == [(0, 6, 10), (0, 9, 11), (1, 0, 3)]  # pieces without a label are left out
    assert sequences.bounds.tolist() == [0, 1, 2, 3]
    assert sequences.label_counts.tolist() == [2, 1, 2]
    assert (report.cut_row_count, report.cut_token_count, report.dropped_row_count) == (1, 0, 0)


def test_packed_sequences_have_the_labels_of_their_segments() -> None:
    lengths = (3, 5, 2, 3)
    sequences, _ = arrange(
        offsets_of(*lengths), None, rows_of(*lengths), seq_length=5, truncation="right", packed=True, where=str
    )
    assert listed(sequences.segments) == [(0, 0, 3), (2, 0, 2), (1, 0, 5), (3, 0, 3)]
    assert sequences.bounds.tolist() == [0, 2, 3, 4]
    assert sequences.lengths.tolist() == [5, 5, 3]
    assert sequences.label_counts.tolist() == [3, 4, 2]
    assert padding_share_packed(sequences, 5) == pytest.approx(2 / 15)


@pytest.mark.parametrize(
    ("lengths", "marks", "truncation", "message"),
    [
        ((), [], "right", "there are no rows. Name files with more in them."),
        (
            (6, 6),
            [0, 0, 0, 0, 1, 1] * 2,
            "right",
            "of all 2 rows, what is trained on is cut away with the end of the row. Use a longer --seq-length than 4, "
            "or --truncation left or split.",
        ),
        (
            (3,),
            [0, 0, 0],
            "right",
            "none of the 1 rows has a token to train on: an answer of the assistant, or a completion.",
        ),
        (
            (1, 1),
            None,
            "split",
            "none of the 2 rows has two tokens: there is nothing to predict. Name files with more text.",
        ),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_nothing_left_says_why(
    lengths: tuple[int, ...], marks: list[int] | None, truncation: Truncation, message: str, packed: bool
) -> None:
    trained = None if marks is None else np.array(marks, np.bool_)
    sequences, report = arrange(
        offsets_of(*lengths),
        trained,
        rows_of(*lengths),
        seq_length=4,
        truncation=truncation,
        packed=packed,
        where=str,
    )
    assert (len(sequences), sequences.label_counts.tolist(), report.sequence_count) == (0, [], 0)
    with pytest.raises(ConfigError) as caught:
        report.check("chat.jsonl")
    assert str(caught.value) == f"chat.jsonl: {message}"


def test_padding_to_expect_is_that_of_drawn_batches() -> None:
    lengths = np.random.default_rng(0).integers(2, 200, 400)
    sequences = Sequences(whole_rows(lengths), np.arange(401), lengths - 1)
    drawn = lengths[np.random.default_rng(1).integers(0, 400, (20_000, 8))]
    padded = 1 - drawn.sum() / (drawn.max(axis=1).sum() * 8)
    assert padding_share_expected(sequences, 8) == pytest.approx(padded, abs=0.003)
    assert padding_share_expected(sequences, 1) == pytest.approx(0.0, abs=1e-12)
