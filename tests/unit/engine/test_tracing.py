"""optimizer.trace: what is in the file, what binds, and how it ends. Times are those of a clock that tests move."""

import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.errors import ConfigError, EngineError
from penstock.ext.observe.timeline import COMPUTE, RESOURCES
from penstock.planner.simulation.program import OF_MODEL
from penstock.runtime.aio import File
from penstock.runtime.streams import (
    COLLECTIVE,
    DOWNLOAD,
    FETCH,
    READ,
    SAVE,
    STREAMS,
    UPDATE,
    UPLOAD,
    WRITE,
    Event,
    Streams,
    Work,
)
from tests.lib.accelerator import FakeTime
from tests.lib.engines import ON_CPU, ON_NVME, loss_of, prepared, train
from tests.lib.memory import shorten_rings
from tests.lib.models import Blocks
from tests.lib.ranks import run_ranks
from tests.lib.refusals import Refusal, refused, rows
from tests.lib.streams import LastingStreams, SeparateStreams, inline, separate, simulated

DEPTH = 3
BLOCKS = [f"blocks.{number}" for number in range(DEPTH)]
UNITS = {"root", *BLOCKS}
ROWS = {"compute", UPLOAD, DOWNLOAD, COLLECTIVE, UPDATE, READ, FETCH, WRITE}
VERBS = {"forward", "backward", "gather", "reduce", "save", "update", "publish", "wait"}


def traced(streams: Any = separate, **how: Any) -> tuple[Blocks, penstock.Optimizer]:
    how = {"precision": "bf16", "overlap": "forward", **(how or ON_CPU)}
    return prepared(lambda: Blocks(DEPTH, 32), streams, **how)


class Drawn:
    """A trace as a viewer reads it."""

    def __init__(self, path: Path) -> None:
        self.file = json.loads(path.read_text())
        events = self.file["traceEvents"]
        names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
        self.rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for event in events:
            if event["ph"] == "X":
                self.rows[names[event["tid"]]].append(event)

    def units(self, row: str, verb: str) -> set[str]:
        return {e["args"]["unit"] for e in self.rows[row] if e["name"].split()[0] == verb}

    def nbytes(self, *rows: str) -> int:
        return sum(event["args"].get("bytes", 0) for row in rows for event in self.rows[row])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


@pytest.mark.parametrize(
    ("streams", "where"), [(inline, ON_NVME), (separate, ON_CPU), (simulated, ON_NVME), (simulated, {"params": "cpu"})]
)
def test_a_viewer_can_read_it(streams: Callable[[], Streams], where: dict[str, str], path: Path) -> None:
    model, optimizer = traced(streams, **where)
    train(model, optimizer)
    with optimizer.trace(path) as report:
        assert str(report) == "The trace is not over yet."
        train(model, optimizer, 2)
    assert optimizer._engine.context.streams.observer is None
    text = path.read_text()
    train(model, optimizer)
    optimizer.close()
    assert path.read_text() == text, "nothing is recorded after it"
    drawn = Drawn(path)
    assert set(drawn.rows) <= {*ROWS, "waiting"}
    for row, events in drawn.rows.items():
        over = 0.0
        for event in events:
            assert event["pid"] == 0
            assert isinstance(event["tid"], int)
            assert event["name"].split()[0] in VERBS
            assert event["args"]["unit"] in UNITS
            assert event["ts"] >= over - 1e-3, f"spans of row {row} overlap"
            assert event["dur"] >= 0
            over = event["ts"] + event["dur"]
        assert over <= report.summary.seconds * 1e6 + 1e-3
    assert drawn.file["otherData"]["text"] == str(report)
    assert drawn.file["otherData"]["summary"] == json.loads(json.dumps(report.summary.to_dict()))


def test_every_unit_is_gathered_computed_reduced_and_updated_and_bytes_are_the_traffic(path: Path) -> None:
    model, optimizer = traced(simulated)
    train(model, optimizer)
    sizes = {unit.name: unit.nbytes for unit in optimizer._engine.context.units}
    with optimizer.trace(path):
        train(model, optimizer)
    optimizer.close()
    drawn = Drawn(path)
    assert drawn.units(UPLOAD, "gather") == UNITS
    assert drawn.units("compute", "forward") == UNITS
    assert drawn.units("compute", "backward") == UNITS
    assert drawn.units(COLLECTIVE, "reduce") == UNITS
    assert drawn.units(DOWNLOAD, "save") == UNITS
    assert drawn.units(UPDATE, "update") == UNITS
    tiles = {event["args"]["tile"] for event in drawn.rows[UPDATE] if event["args"]["unit"] == "blocks.0"}
    assert tiles == {0}, "its tiles are a stretch, called by the first one"
    blocks = sum(sizes.values()) - sizes["root"]
    assert drawn.nbytes(UPLOAD) == sizes["root"] + 2 * blocks, "blocks are gathered for forward and for backward"
    assert drawn.nbytes(DOWNLOAD) == sum(sizes.values()), "the gradient in bf16, once"
    assert drawn.nbytes(COLLECTIVE) == sum(sizes.values())
    assert drawn.nbytes(READ, FETCH, WRITE) == 0


def test_compute_goes_through_the_units_in_order(path: Path) -> None:
    model, optimizer = traced()
    with optimizer.trace(path):
        train(model, optimizer)
    optimizer.close()
    names = [event["name"] for event in Drawn(path).rows["compute"]]
    order = [name for name, before in zip(names, ["", *names], strict=False) if name != before]
    between = [name for block in BLOCKS for name in (f"forward {block}", "forward root")]
    back = [f"backward {block}" for block in reversed(BLOCKS)]
    expected = ["forward root", *between, "backward root", *back]
    assert order[: len(expected)] == expected
    assert set(order[len(expected) :]) <= {"backward root"}


def test_an_update_on_the_device_is_compute(path: Path) -> None:
    model, optimizer = traced(simulated, params="cpu")
    with optimizer.trace(path):
        train(model, optimizer)
    optimizer.close()
    drawn = Drawn(path)
    assert drawn.units("compute", "update") == UNITS
    assert UPDATE not in drawn.rows


def test_every_stream_has_a_row() -> None:
    assert {COMPUTE, OF_MODEL, *STREAMS} == set(RESOURCES)  # the second is of planned steps alone


def test_a_save_is_drawn(path: Path, tmp_path: Path) -> None:
    model, optimizer = traced(simulated)
    with optimizer.trace(path) as report:
        train(model, optimizer)
        optimizer.save(tmp_path / "saved")
    optimizer.close()
    assert report.summary.rows[SAVE].nbytes > 0
    assert "copies for a checkpoint" in str(report)


def test_bytes_of_files_are_what_is_read_and_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_rings(monkeypatch)
    moved = {"read": 0, "write": 0}

    def counting(name: str) -> Callable[..., Any]:
        original = getattr(File, name)

        def count(file: File, offset: int, memory: torch.Tensor, **rest: Any) -> Any:
            moved[name] += memory.nbytes
            return original(file, offset, memory, **rest)

        return count

    for name in moved:
        monkeypatch.setattr(File, name, counting(name))
    model, optimizer = traced(simulated, params="cpu", grads="cpu", optimizer="nvme")
    train(model, optimizer)
    optimizer.synchronize()
    before = dict(moved)
    with optimizer.trace(path) as report:
        train(model, optimizer, 2)
    read, written = (moved[name] - before[name] for name in ("read", "write"))
    optimizer.close()
    assert (Drawn(path).nbytes(FETCH), Drawn(path).nbytes(WRITE)) == (read, written)
    assert report.summary.rows[FETCH].nbytes == read > 0
    assert report.summary.rows[WRITE].nbytes == written > 0


# What binds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    clock = FakeTime()
    monkeypatch.setattr(time, "monotonic", clock.monotonic)
    return clock


class Lasting(SeparateStreams):
    """Each piece of work on a stream lasts a second."""

    def __init__(self, clock: FakeTime, slow: str) -> None:
        super().__init__(torch.device("cpu"))
        self.clock, self.slow = clock, slow

    def submit(self, stream: str, work: Work, **rest: Any) -> Event:
        def timed() -> Any:
            self.clock.now += 1
            return work()

        return super().submit(stream, timed if stream == self.slow else work, **rest)


@pytest.mark.parametrize(
    ("slow", "name"),
    [
        (UPDATE, "host update"),
        (UPLOAD, "host-to-device link"),
        (DOWNLOAD, "device-to-host link"),
        (COLLECTIVE, "links between ranks"),
        (COMPUTE, "device compute"),
    ],
)
def test_the_slow_resource_binds(slow: str, name: str, clock: FakeTime, path: Path) -> None:
    model, optimizer = traced(Lasting(clock, slow))
    if slow == COMPUTE:
        model.blocks[1].register_forward_pre_hook(lambda *_: clock.sleep(1))
    with optimizer.trace(path) as report:
        train(model, optimizer)
    optimizer.close()
    assert report.summary.bound_by == name
    assert str(report).startswith(f"bound by: {name}\n")
    assert {row: use.busy_seconds for row, use in report.summary.rows.items() if use.busy_seconds} == {
        slow: report.summary.seconds
    }


def test_compute_is_idle_after_a_pass(clock: FakeTime, path: Path) -> None:
    model, optimizer = traced()
    model.blocks[1].register_forward_pre_hook(lambda *_: clock.sleep(1))
    with optimizer.trace(path) as report:
        loss = loss_of(model)
        clock.now += 10
        optimizer.backward(loss)
        clock.now += 20
    optimizer.close()
    assert report.summary.seconds == 31
    assert report.summary.rows["compute"].busy_seconds == 1


def test_a_wait_names_what_was_waited_for_and_what_took_so_long(clock: FakeTime, path: Path) -> None:
    """Nothing is gathered ahead: each gather is waited for, and takes as long as its upload."""
    model, optimizer = traced(LastingStreams(clock, UPLOAD), **ON_CPU, prefetch_bytes=0)
    train(model, optimizer)
    with optimizer.trace(path) as report:
        train(model, optimizer)
    optimizer.close()
    twice = {f"gather {block} (upload)": 2.0 for block in BLOCKS}  # for forward and for backward
    assert report.summary.waits == {"gather root (upload)": 1.0, **twice}
    assert report.summary.seconds == 7


def test_a_gather_from_a_slow_disk_waits_for_the_disk(
    clock: FakeTime, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit is one read, and none is read ahead."""
    shorten_rings(monkeypatch)
    model, optimizer = traced(LastingStreams(clock, READ), **ON_NVME, prefetch_bytes=0, tile_bytes=1 << 20)
    with optimizer.trace(path) as report:
        train(model, optimizer)
    optimizer.close()
    summary = report.summary
    waits = {cause: seconds for cause, seconds in summary.waits.items() if "gather block" in cause and seconds}
    assert waits.keys() == {f"gather {block} (read)" for block in BLOCKS}
    assert min(waits.values()) >= 1, "some are still in the ring for backward"
    assert summary.rows[UPLOAD].waited_seconds == 0
    assert summary.bound_by == "NVMe reads"


def test_work_of_before_is_not_in_it(clock: FakeTime, path: Path) -> None:
    """The update of the step before was still running, and the first gather waited for it."""
    model, optimizer = traced(LastingStreams(clock, UPDATE))
    train(model, optimizer)
    with optimizer.trace(path) as report, torch.no_grad():
        loss_of(model)
    optimizer.close()
    assert clock.now > 1000
    assert UPDATE not in report.summary.rows
    assert report.summary.waits == {}
    assert report.summary.seconds < 1


# How it ends


def test_an_exception_inside_leaves_the_trace(path: Path) -> None:
    model, optimizer = traced(simulated)
    with contextlib.suppress(ZeroDivisionError), optimizer.trace(path) as report:
        train(model, optimizer)
        with model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0):
            train(model, optimizer)
        pytest.fail("the exception of the block was lost")
    assert Drawn(path).units(UPDATE, "update") == UNITS
    assert report.summary is not None
    train(model, optimizer)
    with optimizer.trace(path):
        train(model, optimizer)
        optimizer.close()
    assert Drawn(path).units(UPDATE, "update") == UNITS, "closing inside ends the work"


def trace(path: str) -> Callable[[penstock.Optimizer, Path], None]:
    def do(optimizer: penstock.Optimizer, folder: Path) -> None:
        with optimizer.trace(folder / path):
            pytest.fail("the block was entered")

    return do


def trace_inside(optimizer: penstock.Optimizer, folder: Path) -> None:
    with optimizer.trace(folder / "outer.json"):
        trace("inner.json")(optimizer, folder)


REFUSED = {
    "missing folder": Refusal(
        trace("missing/trace.json"),
        "missing/trace.json': No such file or directory. Give a file on a disk with space, in a folder that exists and "
        "that you can write.",
    ),
    "a folder": Refusal(trace(""), "Is a directory"),
    "inside another": Refusal(trace_inside, "trace() was called inside another trace", EngineError),
}


@rows(REFUSED)
def test_what_cannot_be_traced_is_refused_before_the_block(row: Refusal, tmp_path: Path) -> None:
    _, optimizer = traced(inline)
    streams = optimizer._engine.context.streams
    refused(row, optimizer, tmp_path)
    assert streams.observer is None
    assert {file.name for file in tmp_path.iterdir()} <= {"outer.json"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_disk_that_is_full_at_the_end() -> None:
    model, optimizer = traced(inline)
    with pytest.raises(ConfigError, match="'/dev/full': No space left on device"), optimizer.trace("/dev/full"):
        train(model, optimizer)
    train(model, optimizer)


def trace_on_a_rank(rank: int, folder: str) -> tuple[str, set[str]]:
    model, optimizer = traced(simulated)
    with optimizer.trace(Path(folder, "all.json")) as report:
        train(model, optimizer)
    with optimizer.trace(Path(folder, "rank-{rank}.json")):
        train(model, optimizer)
    with pytest.raises(penstock.PenstockError) as caught, optimizer.trace(Path(folder, "missing", "all.json")):
        train(model, optimizer)
    optimizer.close()
    return str(caught.value), set(report.summary.rows)


def test_of_two_ranks_one_writes_or_each(tmp_path: Path) -> None:
    (first, rows), (second, other_rows) = run_ranks(trace_on_a_rank, 2, str(tmp_path))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["all.json", "rank-0.json", "rank-1.json"]
    assert rows == other_rows, "each has its own report"
    for rank in range(2):
        drawn = Drawn(tmp_path / f"rank-{rank}.json")
        assert {event["pid"] for event in drawn.file["traceEvents"]} == {rank}
        assert drawn.units(COLLECTIVE, "gather") == UNITS
        assert drawn.units(COLLECTIVE, "reduce") == UNITS
    assert {event["pid"] for event in Drawn(tmp_path / "all.json").file["traceEvents"]} == {0}
    assert "cannot be written" in first
    assert second == f"Rank 0 of 2 failed, and this one stops with it. ConfigError: {first}"
