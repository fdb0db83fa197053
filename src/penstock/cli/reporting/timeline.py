"""One step of a trace: what each resource did in it, and what compute waited for."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from penstock.ext.observe.timeline import RESOURCES, WAITING, Interval, busiest, length
from penstock.files import read_bytes

TRACE_NAME = "trace.json"
#: Pieces of a row that are drawn, at most.
MOST_PIECES = 400
_MOST_BYTES, _MOST_NUMBER = 1 << 28, 1e30


@dataclass(frozen=True)
class Piece:
    """What a row did, in seconds from the begin of the step.

    Attributes:
        name: what it was for.
        start: when it began.
        stop: when it was over.
        nbytes: how many bytes were moved.
        count: how many pieces of the trace it is.
    """

    name: str
    start: float
    stop: float
    nbytes: int = 0
    count: int = 1


@dataclass(frozen=True)
class Timeline:
    """One step.

    Attributes:
        seconds: how long it was.
        rows: what each row did, in the order of `RESOURCES`; at last what compute waited for.
        waits: seconds of waiting by the row that compute waited for, the longest first.
        steps: how many steps the trace has, of which this is the last.
    """

    seconds: float
    rows: Mapping[str, list[Piece]]
    waits: Mapping[str, float]
    steps: int = 1

    @property
    def busy_seconds(self) -> dict[str, float]:
        """How long each resource worked."""
        rows: defaultdict[str, list[Interval]] = defaultdict(list)
        for row, pieces in self.rows.items():
            if row != WAITING:
                rows[RESOURCES[row]] += map(_interval, pieces)
        return {name: length(intervals) for name, intervals in rows.items()}

    @property
    def bound_by(self) -> str:
        """The resource with the most busy time."""
        return busiest({row: [*map(_interval, pieces)] for row, pieces in self.rows.items()}, self.seconds)


def read_timeline(file: Path) -> Timeline | None:
    """Read the last step of a trace; `None` where it has none. What is wrong with a file raises whatever it does.

    It is a file of `Optimizer.trace`: its steps end at instants of the category `step`.
    """
    events = json.loads(read_bytes(file, _MOST_BYTES))["traceEvents"]
    return _timeline([event for event in events if isinstance(event, dict)])


def _timeline(events: Iterable[Mapping[str, Any]]) -> Timeline | None:
    ends: list[float] = []
    found: dict[str, list[tuple[float, float, str, int]]] = {}
    for event in events:
        row = event.get("cat")
        if row == "step" and event.get("ph") == "i":
            ends.append(_number(event["ts"]))
        elif event.get("ph") == "X" and (row in RESOURCES or row == WAITING):
            start, duration = _number(event["ts"]), _number(event["dur"])
            nbytes = event.get("args", {}).get("bytes", 0)
            found.setdefault(str(row), []).append((start, start + duration, str(event["name"]), int(_number(nbytes))))
    begin, end = _window(ends, found.values())
    if not begin < end:
        return None
    rows: dict[str, list[Piece]] = {}
    for row in (*RESOURCES, WAITING):
        inside = [
            Piece(name, (max(start, begin) - begin) / 1e6, (min(stop, end) - begin) / 1e6, nbytes)
            for start, stop, name, nbytes in sorted(found.get(row, ()))
            if start < end and stop > begin
        ]
        if inside:
            rows[row] = inside
    waits: defaultdict[str, float] = defaultdict(float)
    for piece in rows.get(WAITING, ()):
        waits[piece.name.rpartition("(")[2].removesuffix(")")] += piece.stop - piece.start
    longest = dict(sorted(waits.items(), key=lambda item: -item[1]))
    return Timeline((end - begin) / 1e6, rows, longest, max(1, len(ends))) if rows else None


def _number(value: Any) -> float:
    if not abs(number := float(value)) <= _MOST_NUMBER:
        raise ValueError("no time, and no size")
    return number


def _window(ends: list[float], rows: Iterable[list[tuple[float, float, str, int]]]) -> Interval:
    """Find when the last step began and ended; all of the trace where it says nothing of steps."""
    if ends:
        return max(pairwise([0.0, *sorted(ends)]), key=lambda step: step[1])
    spans = [span for row in rows for span in row]
    return min((span[0] for span in spans), default=0.0), max((span[1] for span in spans), default=0.0)


def joined(pieces: Sequence[Piece], seconds: float, most: int = MOST_PIECES) -> Sequence[Piece]:
    """Draw pieces that begin next to each other as one, so that at most `most` are left, in order.

    Arguments:
        pieces: of one row, in order.
        seconds: the length of the step.
        most: how many are left, at most.
    """
    if len(pieces) <= most:
        return pieces
    width = seconds / most
    groups = (list(group) for _, group in groupby(pieces, lambda piece: min(most - 1, int(piece.start / width))))
    return [
        Piece(g[0].name, g[0].start, max(piece.stop for piece in g), sum(p.nbytes for p in g), sum(p.count for p in g))
        for g in groups
    ]


def _interval(piece: Piece) -> Interval:
    return piece.start, piece.stop
