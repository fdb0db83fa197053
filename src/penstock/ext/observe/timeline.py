"""Analysis of a trace: busy time of each resource, exposed waits, the binding resource; and the file for a viewer.

A **span** is one piece of work on a row: a stream, or compute. Transfers of one disk are in flight together; a row
draws each from the end of the one before it, so that busy time is counted once. Compute is busy while the forward
or backward of a unit is under way and neither waits nor does a stream's work itself (`inline`). A wait is **exposed**
where compute has no work meanwhile, and counts for the rows that caused it: from the end of the work that was waited
for, back over the work that it waited for in turn.
"""

import json
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import inf
from typing import Any

from penstock.trace import NO_LABEL, Label

COMPUTE = "compute"
WAITING = "waiting"
#: Resource of each row of a trace, in the order in which a viewer shows them.
RESOURCES: Mapping[str, str] = {
    COMPUTE: "device compute",
    "upload": "host-to-device link",
    "download": "device-to-host link",
    "collective": "links between ranks",
    "model collective": "links within the model",
    "update": "host update",
    "device update": "device update",
    "read": "NVMe reads",
    "fetch": "NVMe reads",
    "write": "NVMe writes",
    "save": "copies for a checkpoint",
}
DISK = ("read", "fetch", "write")  # rows that share a disk
OUTSIDE = "what is not traced (data, loss, Python)"
CAUSES_SHOWN = 10

Interval = tuple[float, float]


@dataclass(frozen=True)
class TraceSpan:
    """A piece of work on a row, in seconds of one clock.

    Attributes:
        row: the stream that did the work, a key of `RESOURCES`.
        label: the purpose of the work.
        start: when the work began.
        stop: when the work was over.
        nbytes: the bytes that were moved.
        inline: True if the work ran in the thread that otherwise computes.
        after: indices of the spans that the work had to wait for.
    """

    row: str
    label: Label
    start: float
    stop: float
    nbytes: int = 0
    inline: bool = False
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Wait:
    """Compute, or the host, stood still until a span was over.

    Attributes:
        span: the index of that span.
        start: when it began to wait.
        stop: when it went on.
        by_host: True if the host waited, and not compute.
    """

    span: int
    start: float
    stop: float
    by_host: bool = False


@dataclass(frozen=True)
class Recording:
    """Notes of a trace between `start` and `stop`.

    Attributes:
        start: when the trace began.
        stop: when the trace ended.
        spans: the work of all streams.
        waits: the waits of compute and of the host.
        compute: labels of compute, and their begin; an empty label is no work in particular.
        complete: False if the limit of spans was reached.
        sizes: the bytes on each tier, and since when: as the host allocates and frees memory, ahead of a device.
        steps: when each step of the optimizer returned.
    """

    start: float
    stop: float
    spans: Sequence[TraceSpan]
    waits: Sequence[Wait] = ()
    compute: Sequence[tuple[float, Label]] = ()
    complete: bool = True
    sizes: Sequence[tuple[float, Mapping[str, int]]] = ()
    steps: Sequence[float] = ()


@dataclass(frozen=True)
class Use:
    """Use of one row.

    Attributes:
        spans: the number of its pieces of work.
        busy_seconds: the time in which it worked.
        waited_seconds: the time in which compute or the host waited for it.
        nbytes: the bytes that it moved.
    """

    spans: int
    busy_seconds: float
    waited_seconds: float
    nbytes: int

    @property
    def bytes_per_second(self) -> float:
        """Bytes per second of busy time."""
        return self.nbytes / self.busy_seconds if self.busy_seconds else 0.0


@dataclass(frozen=True)
class TraceSummary:
    """Busy times and exposed waits of a trace. Print it for a table.

    Attributes:
        seconds: the length of the trace.
        rows: the use of each row that was used.
        waits: seconds of exposed wait by cause, such as "gather layers.3 (upload)"; the longest first.
        bound_by: the resource with the most busy time.
        complete: False if the limit of spans was reached, where the trace ends then.
    """

    seconds: float
    rows: Mapping[str, Use]
    waits: Mapping[str, float]
    bound_by: str
    complete: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as JSON-like values, as in the file of a trace."""
        rows = {
            row: {
                **asdict(use),
                "busy_share": use.busy_seconds / self.seconds,
                "bytes_per_second": use.bytes_per_second,
            }
            for row, use in self.rows.items()
        }
        return {
            "seconds": self.seconds,
            "bound_by": self.bound_by,
            "rows": rows,
            "exposed_waits": dict(self.waits),
            "complete": self.complete,
        }

    def __str__(self) -> str:
        """Write a table: the binding resource, a line for each row, and the longest waits."""
        cut = "" if self.complete else ", cut where the limit of spans was reached"
        lines = [f"bound by: {self.bound_by}", f"{self.seconds:.3f} s traced{cut}", ""]
        lines += [
            f"{'row':<12}{'resource':<22}{'busy':>6}{'seconds':>10}{'waited':>8}{'spans':>8}{'bytes':>18}{'GB/s':>8}"
        ]
        for row, use in self.rows.items():
            moved = f"{use.nbytes:>18,}{use.bytes_per_second / 1e9:>8.2f}" if use.nbytes else f"{'-':>18}{'-':>8}"
            busy, waited = use.busy_seconds / self.seconds, use.waited_seconds / self.seconds
            name = f"{row:<12}{RESOURCES[row]:<22}"
            lines.append(f"{name}{busy:>6.0%}{use.busy_seconds:>10.4f}{waited:>8.0%}{use.spans:>8}{moved}")
        total = sum(self.waits.values())
        lines += ["", f"{'exposed waits':<34}{total / self.seconds:>6.0%}{total:>10.4f}"]
        shown = list(self.waits.items())[:CAUSES_SHOWN]
        lines += [f"  {cause:<32}{seconds / self.seconds:>6.0%}{seconds:>10.4f}" for cause, seconds in shown]
        if len(self.waits) > len(shown):
            rest = total - sum(seconds for _, seconds in shown)
            others = f"{len(self.waits) - len(shown)} others"
            lines.append(f"  {others:<32}{rest / self.seconds:>6.0%}{rest:>10.4f}")
        return "\n".join(lines)


class TraceTimeline:
    """A recording as rows whose spans do not overlap.

    Attributes:
        recording: the recording that it was made of.
        rows: spans by row, in order, compute included.
        waits: exposed waits: `row` is the row that caused the wait, `label` the work that was waited for.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        spans, before = in_turn(recording.spans)
        stopped = [(wait.start, wait.stop) for wait in recording.waits if not wait.by_host]
        inline = [(span.start, span.stop) for span in spans if span.inline]
        computing = _pieces(recording, merged([*stopped, *inline]))
        self.rows: dict[str, list[TraceSpan]] = {}
        for row in RESOURCES:
            found = computing if row == COMPUTE else sorted((s for s in spans if s.row == row), key=_start)
            if found:
                self.rows[row] = found
        occupied = merged([*stopped, *map(_interval, computing)])
        self.waits: list[TraceSpan] = []
        for wait in sorted(recording.waits, key=_start):
            for start, stop in without((wait.start, wait.stop), occupied if wait.by_host else ()):
                self.waits += blame(spans, before, replace(wait, start=start, stop=stop))

    def summary(self) -> TraceSummary:
        """Sum up busy time and exposed waits, and find the binding resource."""
        seconds = max(self.recording.stop - self.recording.start, 1e-9)
        waits: defaultdict[str, float] = defaultdict(float)
        waited: defaultdict[str, float] = defaultdict(float)
        for span in self.waits:
            waits[f"{span.label.of_tile(None)} ({span.row})"] += span.stop - span.start
            waited[span.row] += span.stop - span.start
        rows = {
            row: Use(len(spans), length(map(_interval, spans)), waited[row], sum(span.nbytes for span in spans))
            for row, spans in self.rows.items()
        }
        longest = dict(sorted(waits.items(), key=lambda item: -item[1]))
        intervals = {row: [*map(_interval, spans)] for row, spans in (*self.rows.items(), (WAITING, self.waits))}
        return TraceSummary(seconds, rows, longest, busiest(intervals, seconds), self.recording.complete)


def busiest(rows: Mapping[str, Sequence[Interval]], seconds: float) -> str:
    """Find the resource with the most busy time. Reads and writes share a disk: they count together.

    Arguments:
        rows: intervals in which each row was busy, and in which compute waited.
        seconds: the length of the trace.
    """

    def busy(*names: str) -> float:
        return length(interval for row in names for interval in rows.get(row, ()))

    found = {RESOURCES[row]: busy(row) for row in rows if row not in (*DISK, WAITING)}
    found[RESOURCES["read" if busy("read", "fetch") >= busy("write") else "write"]] = busy(*DISK)
    found[OUTSIDE] = seconds - busy(*rows)
    return max(found, key=lambda name: found[name])


def to_chrome(timeline: TraceTimeline, rank: int, marks: Iterable[Mapping[str, Any]] = ()) -> Iterator[str]:
    """Write the JSON that Perfetto and chrome://tracing read, an event a line: a process for the rank, a thread a row.

    `otherData` holds the summary, as numbers and as text; `marks` are events beside the rows.
    """
    summary = timeline.summary()
    other = {"rank": rank, "summary": summary.to_dict(), "text": str(summary)}
    yield f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(other)}, "traceEvents": [\n'
    yield json.dumps(_metadata("process_name", rank, 0, name=f"rank {rank}"))
    numbers = {row: number for number, row in enumerate((*RESOURCES, WAITING))}
    for row, spans in {**timeline.rows, **({WAITING: timeline.waits} if timeline.waits else {})}.items():
        yield ",\n" + json.dumps(_metadata("thread_name", rank, numbers[row], name=row))
        yield ",\n" + json.dumps(_metadata("thread_sort_index", rank, numbers[row], sort_index=numbers[row]))
        for span in spans:
            event = {
                "ph": "X",
                "pid": rank,
                "tid": numbers[row],
                "name": f"wait for {span.label} ({span.row})" if row == WAITING else str(span.label) or row,
                "cat": row,
                "ts": (span.start - timeline.recording.start) * 1e6,
                "dur": (span.stop - span.start) * 1e6,
                "args": _arguments(span),
            }
            yield ",\n" + json.dumps(event)
    for mark in marks:
        yield ",\n" + json.dumps(mark)
    yield "\n]}\n"


def in_turn(spans: Sequence[TraceSpan]) -> tuple[list[TraceSpan], list[int | None]]:
    """Let each span begin when the one before it on its row is over; return also the index of that one."""
    drawn = list(spans)
    before: list[int | None] = [None] * len(spans)
    last: dict[str, int] = {}
    for index in sorted(range(len(spans)), key=lambda index: (spans[index].stop, spans[index].start)):
        span = spans[index]
        before[index] = previous = last.get(span.row)
        if previous is not None and spans[previous].stop > span.start:
            drawn[index] = replace(span, start=spans[previous].stop)
        last[span.row] = index
    return drawn, before


def blame(spans: Sequence[TraceSpan], before: Sequence[int | None], wait: Wait) -> list[TraceSpan]:
    """Divide a wait among the rows that caused it, in order.

    From its end backwards: the time since the span began, or since the end of the spans that it followed, counts for
    the span's row; earlier time for the row of the span that ended last of those; and so on.
    """
    pieces: list[TraceSpan] = []
    label, index, stop = spans[wait.span].label, wait.span, wait.stop
    while stop > wait.start:
        span = spans[index]
        previous = [number for number in (before[index], *span.after) if number is not None]
        cause = max(previous, key=lambda number: spans[number].stop, default=None)
        ended = wait.start if cause is None else min(spans[cause].stop, span.start)
        start = max(wait.start, ended)
        if start < stop:
            pieces.append(TraceSpan(span.row, label, start, stop))
            stop = start
        if cause is None:
            break
        index = cause
    return pieces[::-1]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals that overlap. The result is in order, and disjoint."""
    union: list[Interval] = []
    for start, stop in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(stop, union[-1][1]))
        else:
            union.append((start, stop))
    return union


def length(intervals: Iterable[Interval]) -> float:
    """Add up the length of intervals, and count nothing twice."""
    return sum(stop - start for start, stop in merged(intervals))


def without(interval: Interval, holes: Sequence[Interval]) -> list[Interval]:
    """Cut holes, which are in order and disjoint, out of an interval."""
    start, end = interval
    left = []
    for hole in holes[max(0, bisect(holes, (start, inf)) - 1) :]:
        if hole[0] >= end:
            break
        if hole[0] > start:
            left.append((start, hole[0]))
        start = max(start, hole[1])
    return [*left, (start, end)] if start < end else left


def _pieces(recording: Recording, holes: Sequence[Interval]) -> list[TraceSpan]:
    """List the spans of compute, without the holes."""
    turns = [*recording.compute, (recording.stop, NO_LABEL)]
    return [
        TraceSpan(COMPUTE, label, *left)
        for (start, label), (end, _) in pairwise(turns)
        if label != NO_LABEL
        for left in without((start, end), holes)
    ]


def _start(timed: TraceSpan | Wait) -> float:
    return timed.start


def _interval(span: TraceSpan) -> Interval:
    return span.start, span.stop


def _metadata(what: str, rank: int, thread: int, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": args}


def _arguments(span: TraceSpan) -> dict[str, Any]:
    """Return a span's label for the viewer: unit, kind and tile by name, and the bytes."""
    named = span.label._asdict() | {"bytes": span.nbytes}
    del named["verb"]
    return {name: value for name, value in named.items() if value not in ("", None) and (name == "tile" or value)}
