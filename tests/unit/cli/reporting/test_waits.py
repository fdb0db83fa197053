"""What steps wait for: which steps are traced, what is told of them, what it may cost."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import penstock
from penstock.cli.ranks import Ranks
from penstock.cli.training.reporting import waits as module
from penstock.cli.training.reporting.spread import Spread
from penstock.cli.training.reporting.waits import Waits, Watch
from penstock.errors import ConfigError
from penstock.ext.observe.timeline import Recording, TraceSpan, TraceTimeline, Wait, to_chrome
from penstock.trace import Label

ALONE = Ranks(0, 1, torch.device("cpu"))


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))


class Traced:
    """An optimizer whose trace takes a second to begin and two to end, and says what it is told."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.opened, self.closed = clock, 0, 0
        self.events: list[dict[str, Any]] = []
        self.opening: Exception | None = None
        self.writing: Exception | None = None
        self.complete = True

    @contextmanager
    def trace(self, path: Path) -> Iterator[SimpleNamespace]:
        if self.opening is not None:
            raise self.opening
        self.opened += 1
        self.clock.now += 1
        report = SimpleNamespace(summary=None)
        try:
            yield report
        finally:
            self.closed += 1
            rows = {"collective": SimpleNamespace(spans=0, busy_seconds=6.0)}
            report.summary = SimpleNamespace(rows=rows, seconds=20.0, complete=self.complete, bound_by="host update")
            path.write_text(json.dumps({"traceEvents": self.events}))
            self.clock.now += 2
        if self.writing is not None:
            raise self.writing


def waiting(row: str, start: float, stop: float) -> dict[str, Any]:
    return {"cat": "waiting", "name": f"wait for a (b) ({row})", "ts": start * 1e6, "dur": (stop - start) * 1e6}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def traced(clock: Clock) -> Traced:
    return Traced(clock)


def run(watch: Watch, clock: Clock, steps: int, *, log_every: int, seconds: float = 10.0) -> dict[int, Waits | None]:
    """Make steps, and list what was told by step."""
    told = {}
    for step in range(1, steps + 1):
        watch.begin(step, is_candidate=(step + 1) % log_every == 0)
        clock.now += seconds
        if step % log_every == 0:
            told[step] = watch.end(step)
    return told


def watch_of(traced: Traced, folder: Path, **options: Any) -> Watch:
    return Watch(traced, folder / "trace.json", ALONE, **options)  # type: ignore[arg-type]


def test_what_is_told_is_the_second_step_alone(traced: Traced, clock: Clock, tmp_path: Path) -> None:
    traced.events = [
        waiting("fetch", 2, 9),  # in the first step, that found nothing under way
        waiting("fetch", 9, 11),  # half of it
        waiting("collective", 15, 17),
        waiting("fetch", 17, 18),
        waiting("write", 19.5, 25),  # the trace's own, but for half a second
        {"cat": "write", "name": "write (x)", "ts": 12e6, "dur": 1e6},
        {"ph": "M", "name": "process_name"},
    ]
    told = run(watch_of(traced, tmp_path), clock, 4, log_every=4)[4]
    assert told is not None
    assert told.rows == pytest.approx({"fetch": 0.2, "collective": 0.2, "write": 0.05})
    assert told.waited == pytest.approx(0.45)
    assert told.bound_by == "host update"


def test_the_first_steps_are_not_traced(traced: Traced, clock: Clock, tmp_path: Path) -> None:
    told = run(watch_of(traced, tmp_path), clock, 6, log_every=2)
    assert [step for step, waits in told.items() if waits] == [4]


def test_nor_are_those_after_a_resume(traced: Traced, clock: Clock, tmp_path: Path) -> None:
    told = run(watch_of(traced, tmp_path, begin=10), clock, 14, log_every=2)
    assert [step for step, waits in told.items() if waits] == [14]


def test_traces_take_a_hundredth_of_the_time(traced: Traced, clock: Clock, tmp_path: Path) -> None:
    """Three seconds a trace: the next is not before 300 seconds have passed, which are 30 steps."""
    told = run(watch_of(traced, tmp_path), clock, 200, log_every=5)
    assert [step for step, waits in told.items() if waits] == [5, 40, 75, 110, 145, 180]


def test_a_report_of_every_step_is_traced_in_pairs(traced: Traced, clock: Clock, tmp_path: Path) -> None:
    told = run(watch_of(traced, tmp_path), clock, 40, log_every=1)
    assert [step for step, waits in told.items() if waits] == [4, 36]


def test_other_ranks_trace_the_same_steps_and_are_told_nothing(
    traced: Traced, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([1.0, 0.0, 1.0])
    monkeypatch.setattr(Ranks, "from_first", lambda self, values: values.fill_(next(answers)))
    watch = Watch(traced, tmp_path / "trace.json", Ranks(1, 2, torch.device("cpu")))  # type: ignore[arg-type]
    # What its two steps took without the time in collectives, in its place among those of all ranks.
    given: list[list[float]] = []
    monkeypatch.setattr(Ranks, "sum", lambda self, values: given.append(values.tolist()) or values + 2)
    assert run(watch, clock, 15, log_every=5) == {5: None, 10: None, 15: None}
    assert given == [[0.0, 7.0], [0.0, 7.0]]
    assert watch.take_spread() == Spread((2.0, 9.0))
    assert watch.take_spread() is None
    assert (traced.opened, traced.closed) == (2, 2)  # as the first rank said, whatever this one's clock says


def test_a_disk_that_is_full_ends_the_traces_and_not_the_run(traced: Traced, clock: Clock, tmp_path: Path) -> None:
    traced.writing = ConfigError("The trace cannot be written: No space left on device.")
    told = run(watch_of(traced, tmp_path), clock, 100, log_every=5)
    assert set(told.values()) == {None}
    assert (traced.opened, traced.closed) == (1, 1)


def test_a_folder_that_is_gone_too(traced: Traced, clock: Clock, tmp_path: Path) -> None:
    traced.opening = ConfigError("The trace cannot be written: No such file or directory.")
    assert set(run(watch_of(traced, tmp_path), clock, 100, log_every=5).values()) == {None}


def test_an_update_that_failed_is_not_hidden(traced: Traced, clock: Clock, tmp_path: Path) -> None:
    traced.opening = penstock.NvmeError("Input/output error")
    with pytest.raises(penstock.NvmeError):
        run(watch_of(traced, tmp_path), clock, 5, log_every=5)


def test_a_trace_that_was_cut_says_nothing(traced: Traced, clock: Clock, tmp_path: Path) -> None:
    traced.complete = False
    assert run(watch_of(traced, tmp_path), clock, 5, log_every=5) == {5: None}


def test_a_trace_ends_where_the_steps_do(traced: Traced, clock: Clock, tmp_path: Path) -> None:
    with watch_of(traced, tmp_path) as watch:
        run(watch, clock, 4, log_every=5)
        assert (traced.opened, traced.closed) == (1, 0)
    assert traced.closed == 1
    watch = watch_of(traced, tmp_path)
    run(watch, clock, 4, log_every=5)
    traced.writing = ConfigError("The trace cannot be written: No space left on device.")
    watch.__exit__(None, None, None)  # which says less than what has ended the run
    assert (traced.opened, traced.closed) == (2, 2)


def test_the_file_of_a_trace_is_read(traced: Traced, clock: Clock, tmp_path: Path) -> None:
    """The file as traces write it: a wait of two seconds in the second step for an upload, that waits for a read."""
    spans = [
        TraceSpan("read", Label("gather", "layers.3"), 12.0, 14.5),
        TraceSpan("upload", Label("gather", "layers.3 (x)"), 14.5, 15.0, after=(0,)),
    ]
    recording = Recording(0.0, 22.0, spans, [Wait(1, 13.0, 15.0)], [(0.0, Label("forward", "layers.2"))])
    timeline = TraceTimeline(recording)
    traced.events = json.loads("".join(to_chrome(timeline, 0)))["traceEvents"]
    told = run(watch_of(traced, tmp_path), clock, 4, log_every=4)[4]
    assert told is not None
    assert told.rows == pytest.approx({"read": 0.15, "upload": 0.05})
    assert {row: use.waited_seconds for row, use in timeline.summary().rows.items() if use.waited_seconds} == {
        "read": pytest.approx(1.5),
        "upload": pytest.approx(0.5),
    }


def test_a_real_optimizer_is_traced(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    optimizer = penstock.prepare(
        model,
        torch.optim.AdamW(model.parameters()),
        precision="fp32",
        placement=penstock.Placement(params="nvme", optimizer="nvme", nvme_path=tmp_path),
    )
    watch = Watch(optimizer, tmp_path / "trace.json", ALONE)
    told: list[Waits | None] = []
    for step in range(1, 5):
        watch.begin(step, is_candidate=step == 3)
        optimizer.backward(model(torch.ones(2, 64)).sum())
        optimizer.step()
        optimizer.zero_grad()
        told.append(watch.end(step))
    assert told[:3] == [None] * 3
    waits = told[3]
    assert waits is not None
    assert 0 <= waits.waited <= 1
    assert waits.bound_by == json.loads((tmp_path / "trace.json").read_text())["otherData"]["summary"]["bound_by"]
    assert time.monotonic() < watch._next_time < time.monotonic() + 3600
    optimizer.close(keep_params=False)


def test_words_for_people() -> None:
    assert str(Waits(0.0, {}, "device compute")) == "0%, bound by device compute"
    told = Waits(0.5, {"read": 0.4, "device update": 0.1, "save": 0.001}, "NVMe reads")
    assert str(told) == "50% (read: NVMe reads 40%, device update 10%), bound by NVMe reads"


def test_seconds_in_which_resources_worked_are_those_of_the_second_step(
    clock: Clock, traced: Traced, tmp_path: Path
) -> None:
    def working(row: str, start: float, stop: float) -> dict[str, Any]:
        return {"cat": row, "name": f"something ({row})", "ts": start * 1e6, "dur": (stop - start) * 1e6}

    # The first of the two steps is from 0 to 10, the second one from 10 to 20.
    traced.events = [working("compute", 2, 13), working("compute", 15, 25), working("update", 0, 9)]
    traced.events += [working("read", 11, 12), working("fetch", 13, 15), working("nothing known", 11, 19)]
    watch = Watch(traced, tmp_path / "trace.json", ALONE)  # type: ignore[arg-type]
    told = [waits for waits in run(watch, clock, 8, log_every=4).values() if waits is not None]
    assert told[0].seconds == pytest.approx(10)
    assert told[0].busy_seconds == pytest.approx({"device compute": 8, "NVMe reads": 3})
