import numpy as np
import pytest

from penstock.cli.training.data.sequences.held_out import hold_out
from penstock.cli.training.data.sequences.packing import Segments


def listed(segments: Segments) -> list[tuple[int, int, int]]:
    return list(zip(segments.rows.tolist(), segments.starts.tolist(), segments.stops.tolist(), strict=True))


def divide(*lengths: int, labels: tuple[int, ...] | None = None, divisible: bool, seq_length: int = 8):
    held = np.array(lengths, np.int64)
    counts = np.maximum(held - 1, 0) if labels is None else np.array(labels, np.int64)
    return tuple(map(listed, hold_out(held, counts, seq_length=seq_length, divisible=divisible)))


@pytest.mark.parametrize("divisible", [False, True])
def test_every_twentieth_row_is_held_out(divisible: bool) -> None:
    train, held_out = divide(*[10] * 45, divisible=divisible)
    assert held_out == [(19, 0, 10), (39, 0, 10)]
    assert train == [(row, 0, 10) for row in range(45) if row not in (19, 39)]


def test_few_texts_hold_out_the_end_of_the_last() -> None:
    assert divide(500, 500, divisible=True) == ([(0, 0, 500), (1, 0, 450)], [(1, 450, 500)])


def test_a_single_text_holds_out_a_sequence_at_least() -> None:
    assert divide(32, divisible=True, seq_length=16) == ([(0, 0, 16)], [(0, 16, 32)])


def test_the_end_may_be_several_texts() -> None:
    assert divide(100, 3, 0, 4, 2, divisible=True) == ([(0, 0, 100), (1, 0, 1)], [(1, 1, 3), (3, 0, 4), (4, 0, 2)])


@pytest.mark.parametrize("lengths", [(), (31,)])
def test_too_little_text_holds_out_nothing(lengths: tuple[int, ...]) -> None:
    train, held_out = divide(*lengths, divisible=True, seq_length=16)
    assert held_out == []
    assert train == [(row, 0, length) for row, length in enumerate(lengths)]


def test_few_conversations_hold_out_the_last() -> None:
    assert divide(9, 9, 9, divisible=False) == ([(0, 0, 9), (1, 0, 9)], [(2, 0, 9)])


def test_a_conversation_without_a_label_is_not_what_is_held_out() -> None:
    assert divide(9, 9, 9, labels=(2, 2, 0), divisible=False) == ([(0, 0, 9), (2, 0, 9)], [(1, 0, 9)])
    twenty = divide(*[9] * 20, labels=(*[2] * 19, 0), divisible=False)
    assert twenty[1] == [(18, 0, 9)]


def test_a_single_conversation_is_trained_on() -> None:
    assert divide(9, 9, labels=(2, 0), divisible=False) == ([(0, 0, 9), (1, 0, 9)], [])


def test_a_long_held_out_text_among_empty_ones_gives_text_to_train_on() -> None:
    train, held_out = divide(*[1] * 19, 1001, divisible=True, seq_length=64)
    assert held_out == [(19, 937, 1001)]
    assert train == [*((row, 0, 1) for row in range(19)), (19, 0, 937)]
