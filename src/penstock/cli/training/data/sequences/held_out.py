"""Which rows of a source are trained on, and which are held out to measure the loss on."""

import numpy as np

from penstock.cli.training.data.sequences.packing import Ints, Segments, whole_rows

HELD_OUT_EVERY = 20


def hold_out(lengths: Ints, label_counts: Ints, *, seq_length: int, divisible: bool) -> tuple[Segments, Segments]:
    """Divide the rows of a source: what is trained on, and what is held out. No seed has a part in it.

    Every `HELD_OUT_EVERY`-th row is held out. Where that leaves no label on one of the sides (few rows, or a single
    long one), it is

    - of rows that may be divided: the end of the last rows, one in `HELD_OUT_EVERY` of all tokens and at least
      `seq_length` of them, as long as that leaves as many to train on;
    - of others: the last row with a label, as long as there is another one.

    Arguments:
        lengths: tokens of each row, int64 of shape (rows,).
        label_counts: tokens of each row that are predicted and are labels; same shape.
        seq_length: how many tokens a sequence has.
        divisible: whether a row may be divided, as a text may.

    Returns:
        What is trained on and what is held out, which is empty where the source is too small.
    """
    rows = whole_rows(lengths)
    held_out = np.arange(len(lengths)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    if label_counts[held_out].any() and label_counts[~held_out].any():
        return rows.take(~held_out), rows.take(held_out)
    if divisible:
        return _divide_end(rows, seq_length)
    held_out[:] = False
    usable = np.flatnonzero(label_counts)
    if len(usable) >= 2:
        held_out[usable[-1]] = True
    return rows.take(~held_out), rows.take(held_out)


def _divide_end(rows: Segments, seq_length: int) -> tuple[Segments, Segments]:
    """Hold out the last tokens of all rows together, dividing the row in which they begin."""
    ends = np.cumsum(rows.stops)
    total = int(ends[-1]) if len(ends) else 0
    count = max(total // HELD_OUT_EVERY, seq_length)
    if total < seq_length + count:
        return rows, rows.take(np.empty(0, np.int64))
    # Where in each row the held-out tokens begin: at its end, inside of it, or at its beginning.
    begin = np.clip(total - count - (ends - rows.stops), 0, rows.stops)
    train = Segments(rows.rows, rows.starts, begin)
    held_out = Segments(rows.rows, begin, rows.stops)
    return train.take(train.lengths > 0), held_out.take(held_out.lengths > 0)
