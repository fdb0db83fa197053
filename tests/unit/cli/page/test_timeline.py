"""One step of a trace's file."""

import json
from pathlib import Path
from typing import Any

from penstock.cli.reporting.timeline import Piece, joined, read_timeline


def span(row: str, start: float, stop: float, name: str = "gather u", nbytes: int = 0) -> dict[str, Any]:
    times = {"ts": start * 1e6, "dur": (stop - start) * 1e6}
    return {"ph": "X", "cat": row, "name": name, "args": {"bytes": nbytes}, **times}


def end(when: float) -> dict[str, Any]:
    return {"ph": "i", "cat": "step", "name": "step", "ts": when * 1e6}


def write(folder: Path, *events: Any) -> Path:
    (folder / "trace.json").write_text(json.dumps({"traceEvents": events}))
    return folder / "trace.json"


def test_the_last_step_is_taken_and_what_crosses_its_ends_is_cut(tmp_path: Path) -> None:
    events = [span("compute", 0, 3), span("write", 1, 5, nbytes=8), span("compute", 6, 9), end(2), end(8)]
    wait = span("waiting", 3, 5, "wait for update u (write)")
    found = read_timeline(write(tmp_path, *events, wait, span("read", 0, 1)))
    assert found is not None
    assert (found.seconds, found.steps) == (6, 2)
    assert [(p.start, p.stop) for p in found.rows["compute"]] == [(0, 1), (4, 6)]
    assert [(p.start, p.stop, p.nbytes) for p in found.rows["write"]] == [(0, 3, 8)]
    assert found.waits == {"write": 2}
    assert list(found.rows) == ["compute", "write", "waiting"]
    assert found.busy_seconds == {"device compute": 3, "NVMe writes": 3}


def test_reads_and_writes_share_a_disk(tmp_path: Path) -> None:
    rows = [span("compute", 0, 4), span("fetch", 0, 3), span("write", 3, 6), end(6)]
    found = read_timeline(write(tmp_path, *rows))
    assert found is not None
    assert found.bound_by == "NVMe reads"


def test_a_trace_without_steps_is_one(tmp_path: Path) -> None:
    found = read_timeline(write(tmp_path, span("compute", 1, 2), span("update", 2, 4)))
    assert found is not None
    assert (found.seconds, found.bound_by) == (3, "host update")


def test_many_pieces_are_drawn_as_few_and_no_time_is_lost() -> None:
    pieces = [Piece(f"tile {n}", n / 10_000, (n + 0.5) / 10_000, nbytes=2) for n in range(10_000)]
    drawn = joined(pieces, 1.0, most=300)
    assert len(drawn) <= 300
    assert (drawn[0].start, drawn[-1].stop) == (pieces[0].start, pieces[-1].stop)
    assert sum(piece.count for piece in drawn) == 10_000
    assert sum(piece.nbytes for piece in drawn) == 20_000
    assert joined(pieces[:5], 1.0) == pieces[:5]
