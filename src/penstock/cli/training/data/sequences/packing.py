"""Rows to sequences, as arithmetic on their lengths.

A *segment* is a range of the tokens of one row. A *sequence* is what a model sees as one row of a batch: one segment,
or several that are packed and do not see each other.

1. Segments that are longer than a sequence are cut: divided, or one side is left out.
2. Segments in which no token would be predicted that is a label are left out.
3. Segments are arranged in sequences.

All of it is a function of the lengths and of which tokens are labels, the same in every process, and of no seed.
"""

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError

#: Which side of a row that is too long is left out; `"split"`: none; `"error"`: there may be no such row.
Truncation = Literal["left", "right", "split", "error"]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_CHUNK_TOKENS = 1 << 22


@dataclass(frozen=True)
class Segments:
    """Ranges of tokens inside rows.

    Attributes:
        rows: the row of each, int64 of shape (segments,).
        starts: its first token, counted from the beginning of the row; same shape.
        stops: one more than its last token; same shape.
    """

    rows: Ints
    starts: Ints
    stops: Ints

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> Ints:
        """How many tokens each has."""
        return self.stops - self.starts

    def take(self, chosen: Ints | Bools) -> "Segments":
        """Choose some of them, by number or by mask."""
        return Segments(self.rows[chosen], self.starts[chosen], self.stops[chosen])


@dataclass(frozen=True)
class Sequences:
    """Segments arranged in sequences.

    Attributes:
        segments: the segments of all sequences, one sequence after the other.
        bounds: sequence i has the segments `bounds[i]` to `bounds[i + 1]`: int64 of shape (sequences + 1,).
        label_counts: how many tokens of each sequence are predicted and are labels: int64 of shape (sequences,).
    """

    segments: Segments
    bounds: Ints
    label_counts: Ints

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def lengths(self) -> Ints:
        """How many tokens each sequence has, without padding."""
        totals = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.segments.lengths)])
        return np.diff(totals[self.bounds])


@dataclass(frozen=True)
class CutReport:
    """What became of the rows of a source.

    Attributes:
        row_count: rows that were given.
        token_count: tokens that they have.
        sequence_count: sequences that they are arranged in.
        label_count: tokens that are predicted and are labels, in all sequences.
        cut_row_count: rows that were too long, and are divided or lack one side.
        cut_token_count: tokens that are left out because of it.
        dropped_row_count: rows of which nothing is left, because no token that is left is a label.
        nothing_left: why there is no sequence, in sentences; empty where there is one.
    """

    row_count: int
    token_count: int
    sequence_count: int
    label_count: int
    cut_row_count: int
    cut_token_count: int
    dropped_row_count: int
    nothing_left: str

    def check(self, name: str) -> None:
        """Refuse a source of which nothing is left.

        Raises:
            ConfigError: there is no sequence. The message begins with `name`.
        """
        if self.nothing_left:
            raise ConfigError(f"{name}: {self.nothing_left}")


def whole_rows(lengths: Ints) -> Segments:
    """Take every row as one segment."""
    count = len(lengths)
    return Segments(np.arange(count), np.zeros(count, np.int64), np.asarray(lengths, np.int64))


def arrange(
    offsets: Ints,
    trained: Bools | None,
    chosen: Segments,
    *,
    seq_length: int,
    truncation: Truncation,
    packed: bool,
    where: Callable[[int], str],
) -> tuple[Sequences, CutReport]:
    """Arrange segments of prepared rows in sequences: cut those that are too long, drop those without a label, pack.

    Arguments:
        offsets: where each row begins among all tokens, int64 of shape (rows + 1,).
        trained: whether a token is a label, bool of shape (tokens,); `None` where all are.
        chosen: what to arrange: `whole_rows`, or one side of `held_out.hold_out`.
        seq_length: the most tokens of a sequence, 2 at least.
        truncation: what happens to a segment with more.
        packed: put several segments in a sequence where they fit; else each is a sequence.
        where: names a row for an error.

    Raises:
        ConfigError: a segment is too long and `truncation` is `"error"`. That nothing is left is no error here: see
            `CutReport.check`.
    """
    segments = cut(chosen, seq_length=seq_length, truncation=truncation, where=where)
    counts = label_counts(offsets, trained, segments)
    kept = counts > 0
    nothing_left = "" if kept.any() else _nothing_left(chosen, offsets, trained, seq_length, truncation)
    segments, counts = segments.take(kept), counts[kept]
    if packed:
        order, bounds = pack(segments.lengths, seq_length)
        segments, counts = segments.take(order), counts[order]
    else:
        bounds = np.arange(len(segments) + 1)
    sequences = Sequences(segments, bounds, np.add.reduceat(counts, bounds[:-1]))
    too_long = chosen.lengths > seq_length
    cut_tokens = 0 if truncation == "split" else int((chosen.lengths[too_long] - seq_length).sum())
    report = CutReport(
        row_count=len(chosen),
        token_count=int(chosen.lengths.sum()),
        sequence_count=len(sequences),
        label_count=int(counts.sum()),
        cut_row_count=int(too_long.sum()),
        cut_token_count=cut_tokens,
        dropped_row_count=_row_count(chosen.rows) - _row_count(segments.rows),
        nothing_left=nothing_left,
    )
    return sequences, report


def _row_count(rows: Ints) -> int:
    """Count the rows that segments are of."""
    return int(np.count_nonzero(np.bincount(rows)))


def _nothing_left(
    chosen: Segments, offsets: Ints, trained: Bools | None, seq_length: int, truncation: Truncation
) -> str:
    """Say why no row can be trained on."""
    if len(chosen) == 0:
        return "there are no rows. Name files with more in them."
    if label_counts(offsets, trained, chosen).any():
        side = "end" if truncation == "right" else "beginning"
        return (
            f"of all {len(chosen)} rows, what is trained on is cut away with the {side} of the row. Use a longer "
            f"--seq-length than {seq_length}, or --truncation {'left' if truncation == 'right' else 'right'} or split."
        )
    if trained is None:
        return f"none of the {len(chosen)} rows has two tokens: there is nothing to predict. Name files with more text."
    return f"none of the {len(chosen)} rows has a token to train on: an answer of the assistant, or a completion."


# 1.


def cut(
    segments: Segments, *, seq_length: int, truncation: Truncation, where: Callable[[int], str] = "row {}".format
) -> Segments:
    """Cut segments that are longer than a sequence.

    Divided by `"split"`, each piece begins with the last token of the one before: as a model predicts every token of a
    sequence but its first, each token is predicted exactly once. Piece k has the tokens from `k * (seq_length - 1)` on.

    Raises:
        ConfigError: one is longer, and `truncation` is `"error"`.
    """
    lengths = segments.lengths
    too_long = lengths > seq_length
    if not too_long.any():
        return segments
    if truncation == "error":
        first = int(np.flatnonzero(too_long)[0])
        name, count = where(int(segments.rows[first])), int(lengths[first])
        raise ConfigError(
            f"{name} has {count} tokens, more than --seq-length {seq_length}. Use a longer one, or --truncation right, "
            "left or split."
        )
    if truncation == "right":
        return Segments(segments.rows, segments.starts, np.minimum(segments.stops, segments.starts + seq_length))
    if truncation == "left":
        return Segments(segments.rows, np.maximum(segments.starts, segments.stops - seq_length), segments.stops)
    step = seq_length - 1
    # A last piece of one token would predict nothing: its token is the last one of the piece before.
    piece_counts = np.maximum(1, -(-(lengths - 1) // step))
    origin = np.repeat(np.arange(len(segments)), piece_counts)
    firsts = np.cumsum(piece_counts) - piece_counts
    starts = segments.starts[origin] + (np.arange(len(origin)) - firsts[origin]) * step
    return Segments(segments.rows[origin], starts, np.minimum(starts + seq_length, segments.stops[origin]))


# 2.


def label_counts(offsets: Ints, trained: Bools | None, segments: Segments) -> Ints:
    """Count the tokens of each segment that are predicted, which its first is not, and are labels.

    Reads `trained` once, in chunks.
    """
    if trained is None:
        return np.maximum(segments.lengths - 1, 0)
    begin = offsets[segments.rows]
    stops = begin + segments.stops
    firsts = np.minimum(begin + segments.starts + 1, stops)  # an empty segment stays empty
    both = _labels_before(trained, np.concatenate([firsts, stops]))
    return both[len(segments) :] - both[: len(segments)]


def _labels_before(trained: Bools, positions: Ints) -> Ints:
    """Count the labels before each position."""
    order = np.argsort(positions, kind="stable")
    asked = positions[order]
    found = np.empty(len(asked), np.int64)
    before = 0
    for start in range(0, len(trained) + 1, _CHUNK_TOKENS):
        stop = min(start + _CHUNK_TOKENS, len(trained))
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(trained[start:stop], dtype=np.int64)])
        first, last = np.searchsorted(asked, [start, start + _CHUNK_TOKENS])
        found[first:last] = before + sums[asked[first:last] - start]
        before += int(sums[-1])
    result = np.empty_like(found)
    result[order] = found
    return result


# 3.


def pack(lengths: Ints, seq_length: int) -> tuple[Ints, Ints]:
    """Pack segments into as few sequences as best-fit-decreasing finds.

    The longest segment first, each goes where the least room is that it fits in. Segments keep their order within a
    sequence, and sequences stand in the order of their first segments.

    Arguments:
        lengths: tokens of each segment, int64 of shape (segments,), 1 to `seq_length` each.
        seq_length: the most tokens of a sequence.

    Returns:
        The numbers of the segments, sequence by sequence, of shape (segments,); and where each sequence begins among
        them, of shape (sequences + 1,).
    """
    if len(lengths) == 0:
        return np.empty(0, np.int64), np.zeros(1, np.int64)
    bins = _best_fit(np.asarray(lengths), seq_length)
    first_segments = np.empty(int(bins.max()) + 1, np.int64)
    first_segments[bins[::-1]] = np.arange(len(bins))[::-1]  # of what is written twice, the last stays
    ranks = np.empty(len(first_segments), np.int64)
    ranks[np.argsort(first_segments)] = np.arange(len(first_segments))
    sequence_of = ranks[bins]
    counts = np.bincount(sequence_of)
    return np.argsort(sequence_of, kind="stable"), np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def _best_fit(lengths: Ints, seq_length: int) -> Ints:
    """Give each segment a bin, all segments of one length at a time.

    All bins with the same room are filled alike: of the smallest room that fits, each takes as many segments as it can,
    for what room is left then is smaller still and fits best. So there is one turn for each pair of a length and a room
    that meet, not for each segment.
    """
    bins = np.empty(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    firsts = np.flatnonzero(np.diff(lengths[order], prepend=seq_length + 1))
    by_room: defaultdict[int, deque[Ints]] = defaultdict(deque)  # the bins with that much room, oldest first
    rooms: list[int] = []  # its keys that hold any, sorted
    bin_count = 0

    def leave(room: int, numbers: Ints) -> None:
        if room and len(numbers):
            if not by_room[room]:
                insort(rooms, room)
            by_room[room].append(numbers)

    for first, last in zip(firsts, [*firsts[1:], len(order)], strict=True):
        length = int(lengths[order[first]])
        place = bisect_left(rooms, length)
        while first < last:
            if place < len(rooms):
                room = rooms[place]
                numbers = by_room[room].popleft()
                if not by_room[room]:
                    del rooms[place]
            else:  # as many new ones as all that are left need
                room = seq_length
                needed = -(-(last - first) // (seq_length // length))
                numbers = np.arange(bin_count, bin_count + needed)
                bin_count += needed
            each = room // length
            taken = min(len(numbers) * each, int(last - first))
            full, rest = divmod(taken, each)
            used = full + (rest > 0)
            bins[order[first : first + taken]] = np.repeat(numbers[:used], each)[:taken]
            first += taken
            # What has less room than the length comes before `place`, which moves on with it.
            before = len(rooms)
            leave(room - each * length, numbers[:full])
            place += len(rooms) - before
            if rest:
                leave(room - rest * length, numbers[full:used])
            if used < len(numbers):  # the segments are at an end; these bins are as they were, and the oldest
                if not by_room[room]:
                    insort(rooms, room)
                by_room[room].appendleft(numbers[used:])
    return bins


# How much of it is padding


def padding_share_packed(sequences: Sequences, seq_length: int) -> float:
    """Return the share of padding where every sequence is padded to `seq_length`, from 0 to 1."""
    return 1 - int(sequences.lengths.sum()) / (len(sequences) * seq_length)


def padding_share_expected(sequences: Sequences, batch_size: int) -> float:
    """Return the share of padding to expect where a batch is padded to its longest sequence, from 0 to 1.

    Of sequences that are drawn independently: the share of padding in their mean batch.
    """
    lengths = np.sort(sequences.lengths)
    below = (np.arange(len(lengths) + 1) / len(lengths)) ** batch_size
    longest = float((lengths * np.diff(below)).sum())
    return max(0.0, 1 - float(lengths.mean()) / longest)
