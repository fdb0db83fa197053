"""From spans and waits to rows, causes, the binding resource and the file; in whole seconds."""

import json
from typing import Any

import pytest

from penstock.ext.observe import timeline as trace
from penstock.ext.observe.timeline import (
    Recording,
    TraceTimeline,
    Use,
    Wait,
    blame,
    in_turn,
    to_chrome,
)
from penstock.trace import Label


def labelled(text: str) -> Label:
    """A label as it is shown."""
    words, _, tile = text.partition(" tile ")
    return Label(*words.split(), tile=int(tile) if tile else None)


def Span(row: str, text: str, *times: float, **rest: Any) -> trace.TraceSpan:  # noqa: N802 - stands for it
    return trace.TraceSpan(row, labelled(text), *times, **rest)  # type: ignore[arg-type]


def intervals(spans: list[trace.TraceSpan]) -> list[tuple[float, float]]:
    return [(span.start, span.stop) for span in spans]


def words(line: str) -> str:
    return " ".join(line.split())


def recording(spans: list[trace.TraceSpan], *, stop: float = 10, compute: Any = (), **rest: Any) -> Recording:
    turns = [(when, labelled(text)) for when, text in compute]
    return Recording(0, stop, spans, compute=turns, **rest)


class TestInTurn:
    def test_transfers_in_flight_together_are_drawn_one_after_the_other(self) -> None:
        spans = [Span("read", "a", 0, 3), Span("read", "b", 0, 5), Span("read", "c", 1, 4), Span("write", "d", 0, 2)]
        drawn, before = in_turn(spans)
        assert intervals(drawn) == [(0, 3), (4, 5), (3, 4), (0, 2)]
        assert before == [None, 2, 0, None]


class TestBlame:
    """A gather waits for its upload, which waits for a read: 0 to 4, 4 to 5."""

    spans = (Span("read", "gather x", 0, 4), Span("upload", "gather x", 4, 5, after=(0,)))

    @pytest.mark.parametrize(
        ("wait", "causes"),
        [
            ((1, 5), [("read", 1, 4), ("upload", 4, 5)]),  # what the work waited for in turn
            ((4.5, 5), [("upload", 4.5, 5)]),  # the work alone once that was over
            ((3, 6), [("read", 3, 4), ("upload", 4, 6)]),  # the time until the waiter wakes is the work's
            ((-1, 5), [("read", -1, 4), ("upload", 4, 5)]),  # what nothing explains is the first one's
        ],
    )
    def test_a_wait_is_put_down_to(self, wait: tuple[float, float], causes: list[Any]) -> None:
        drawn, before = in_turn(self.spans)
        assert [(s.row, s.start, s.stop) for s in blame(drawn, before, Wait(1, *wait))] == causes

    def test_work_that_came_before_on_the_row_is_a_cause(self) -> None:
        spans = [Span("upload", "a", 0, 3), Span("read", "b", 0, 1), Span("upload", "b", 3, 4, after=(1,))]
        drawn, before = in_turn(spans)
        pieces = blame(drawn, before, Wait(2, 0, 4))
        assert [(s.row, str(s.label), s.start, s.stop) for s in pieces] == [
            ("upload", "b", 0, 3),
            ("upload", "b", 3, 4),
        ]

    def test_the_last_of_several_is_the_cause(self) -> None:
        spans = [Span("read", "a", 0, 1), Span("update", "a", 0, 2), Span("upload", "a", 2, 3, after=(0, 1))]
        drawn, before = in_turn(spans)
        assert [(s.row, s.start) for s in blame(drawn, before, Wait(2, 0, 3))] == [("update", 0), ("upload", 2)]


class TestCompute:
    turns = ((0, "forward a"), (4, ""), (6, "backward a"))

    def test_turns_last_until_the_next(self) -> None:
        timeline = TraceTimeline(recording([], compute=self.turns))
        assert [(str(s.label), s.start, s.stop) for s in timeline.rows["compute"]] == [
            ("forward a", 0, 4),
            ("backward a", 6, 10),
        ]

    def test_waits_and_inline_work_are_cut_out(self) -> None:
        spans = [Span("upload", "gather b", 1, 2, inline=True), Span("download", "save a grad", 5, 8)]
        timeline = TraceTimeline(recording(spans, compute=self.turns, waits=[Wait(1, 7, 8)]))
        assert intervals(timeline.rows["compute"]) == [(0, 1), (2, 4), (6, 7), (8, 10)]
        assert [(s.row, str(s.label), s.start, s.stop) for s in timeline.waits] == [("download", "save a grad", 7, 8)]

    def test_the_host_waits_only_where_compute_has_nothing_to_do(self) -> None:
        spans = [Span("download", "save a grad", 0, 9)]
        timeline = TraceTimeline(recording(spans, compute=self.turns, waits=[Wait(0, 3, 7, by_host=True)]))
        assert intervals(timeline.rows["compute"]) == [(0, 4), (6, 10)], "the device goes on"
        assert intervals(timeline.waits) == [(4, 6)]


class TestSummary:
    def test_busy_time_bytes_and_bandwidth_of_each_row(self) -> None:
        spans = [Span("read", "gather a", 0, 3, 100), Span("read", "gather b", 0, 4, 60)]
        summary = TraceTimeline(recording(spans)).summary()
        assert summary.rows == {"read": Use(2, 4, 0, 160)}
        assert summary.rows["read"].bytes_per_second == 40

    def test_waits_by_cause_with_the_tiles_together(self) -> None:
        spans = [Span("update", f"update a tile {n}", n, n + 1) for n in range(3)] + [Span("upload", "gather b", 4, 9)]
        waits = [*(Wait(n, n, n + 1) for n in range(3)), Wait(3, 5, 9)]
        summary = TraceTimeline(recording(spans, waits=waits)).summary()
        assert list(summary.waits.items()) == [("gather b (upload)", 4), ("update a (update)", 3)]
        assert {row: use.waited_seconds for row, use in summary.rows.items()} == {"upload": 4, "update": 3}

    def test_reads_and_writes_share_the_disk(self) -> None:
        """Neither is busier than compute; together they are."""
        spans = [Span("fetch", "update a", 0, 4), Span("write", "update a", 4, 9)]
        summary = TraceTimeline(recording(spans, compute=[(0, "forward a"), (6, "")])).summary()
        assert summary.bound_by == "NVMe writes"

    def test_it_reads_as_a_table(self) -> None:
        spans = [Span("upload", "gather a", 0, 4, 2 * 10**9)]
        spans += [Span("update", f"update {n}", n / 2, n / 2 + 0.5) for n in range(12)]
        waits = [Wait(0, 0, 4), *(Wait(n + 1, 4 + n / 2, 4.5 + n / 2) for n in range(12))]
        lines = str(TraceTimeline(recording(spans, waits=waits, complete=False)).summary()).splitlines()
        assert lines[0] == "bound by: host update"
        assert lines[1] == "10.000 s traced, cut where the limit of spans was reached"
        assert words(lines[3]) == "row resource busy seconds waited spans bytes GB/s"
        assert words(lines[4]) == "upload host-to-device link 40% 4.0000 40% 1 2,000,000,000 0.50"
        assert words(lines[5]) == "update host update 60% 6.0000 60% 12 - -"
        assert words(lines[7]) == "exposed waits 100% 10.0000"
        assert words(lines[8]) == "gather a (upload) 40% 4.0000"
        assert words(lines[-1]) == "3 others 15% 1.5000"
        assert len(lines) == 8 + 10 + 1


class TestChrome:
    def test_the_file(self) -> None:
        spans = [
            Span("fetch", "update layers.3 optimizer tile 2", 101, 103, 4096),
            Span("update", "update layers.3 tile 2", 103, 104, after=(0,)),
            Span("upload", "", 100, 101),
        ]
        seen = Recording(100, 105, spans, [Wait(1, 102, 104)], [(100, labelled("forward layers.3")), (101, Label())])
        chrome = json.loads("".join(to_chrome(TraceTimeline(seen), rank=3)))
        assert all(event["pid"] == 3 for event in chrome["traceEvents"])
        names = {e["tid"]: e["args"]["name"] for e in chrome["traceEvents"] if e["name"] == "thread_name"}
        assert list(names.values()) == ["compute", "upload", "update", "fetch", "waiting"]
        sorting = {e["tid"]: e["args"]["sort_index"] for e in chrome["traceEvents"] if e["name"] == "thread_sort_index"}
        assert sorting == {tid: tid for tid in names}
        assert [e["args"] for e in chrome["traceEvents"] if e["name"] == "process_name"] == [{"name": "rank 3"}]
        drawn = [
            (names[e["tid"]], e["name"], e["ts"], e["dur"], e["args"]) for e in chrome["traceEvents"] if e["ph"] == "X"
        ]
        read = {"unit": "layers.3", "kind": "optimizer", "tile": 2, "bytes": 4096}
        tile = {"unit": "layers.3", "tile": 2}
        assert drawn == [
            ("compute", "forward layers.3", 0, 1e6, {"unit": "layers.3"}),
            ("upload", "upload", 0, 1e6, {}),
            ("update", "update layers.3 tile 2", 3e6, 1e6, tile),
            ("fetch", "update layers.3 optimizer tile 2", 1e6, 2e6, read),
            ("waiting", "wait for update layers.3 tile 2 (fetch)", 2e6, 1e6, tile),
            ("waiting", "wait for update layers.3 tile 2 (update)", 3e6, 1e6, tile),
        ]
        other = chrome["otherData"]
        assert other["rank"] == 3
        assert other["text"].startswith("bound by: NVMe reads\n")
        assert other["summary"]["exposed_waits"] == {"update layers.3 (fetch)": 1, "update layers.3 (update)": 1}
        assert other["summary"]["rows"]["fetch"] == {
            "spans": 1,
            "busy_seconds": 2,
            "waited_seconds": 1,
            "nbytes": 4096,
            "busy_share": 0.4,
            "bytes_per_second": 2048,
        }
