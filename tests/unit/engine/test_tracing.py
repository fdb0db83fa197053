"""optimizer.trace: what is in the file, what binds, and how it ends."""

import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import ConfigError, EngineError
from penstock.ext.observe.timeline import COMPUTE, RESOURCES
from penstock.planner.simulation.program import OF_MODEL
from penstock.runtime.aio import File
from penstock.runtime.simulated import SimulatedStreams
from penstock.runtime.streams import COLLECTIVE, DOWNLOAD, FETCH, READ, SAVE, STREAMS, UPDATE, UPLOAD, WRITE, Streams
from tests.lib.engines import prepare_on
from tests.lib.memory import disks, shorten_rings
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline, separate, simulated

WIDTH, DEPTH = 32, 3
ROWS = ("compute", UPLOAD, DOWNLOAD, COLLECTIVE, UPDATE, READ, FETCH, WRITE)
ON_CPU = penstock.Placement(params="cpu", grads="cpu", optimizer="cpu")
TILES = penstock.Options(tile_bytes=4 << 10)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.think: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.think()
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


UNITS = {"root", *(f"blocks.{number}" for number in range(DEPTH))}


def on_nvme() -> penstock.Placement:
    return penstock.Placement(params="nvme", grads="nvme", optimizer="nvme", nvme_path=disks())


def prepared(streams: Streams, placement: penstock.Placement = ON_CPU, **rest: Any) -> tuple[Model, Any]:
    torch.manual_seed(0)
    model = Model()
    rest = {"options": TILES, "overlap": "forward", **rest}
    return model, prepare_on(streams, model, torch.optim.AdamW(model.parameters()), placement=placement, **rest)


def train(model: Model, optimizer: penstock.Optimizer, steps: int = 1) -> list[float]:
    losses = []
    for number in range(steps):
        loss = model(torch.full((4, 8), 1.0 + number)).square().mean()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def slow(*streams: str, seconds: float) -> SimulatedStreams:
    """Each piece of work on these takes so long; nothing on the others."""
    return SimulatedStreams(lambda stream, nbytes: seconds if stream in streams else 0.0)


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


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Bytes that are read and written."""
    moved = {"read": 0, "write": 0}

    def counting(name: str) -> Callable[..., Any]:
        original = getattr(File, name)

        def count(file: File, offset: int, memory: torch.Tensor, **rest: Any) -> Any:
            moved[name] += memory.nbytes
            return original(file, offset, memory, **rest)

        return count

    for name in moved:
        monkeypatch.setattr(File, name, counting(name))
    return moved


class TestFile:
    @pytest.mark.parametrize("make_streams", [inline, separate, simulated])
    @pytest.mark.parametrize("placement", [penstock.Placement, lambda: ON_CPU, on_nvme])
    def test_a_viewer_can_read_it(
        self, make_streams: Callable[[], Streams], placement: Callable[[], penstock.Placement], path: Path
    ) -> None:
        model, optimizer = prepared(make_streams(), placement())
        train(model, optimizer)
        with optimizer.trace(path) as report:
            train(model, optimizer, steps=2)
        optimizer.close()
        drawn = Drawn(path)
        assert set(drawn.rows) <= {*ROWS, "waiting"}
        for row, events in drawn.rows.items():
            over = 0.0
            for event in events:
                assert event["pid"] == 0
                assert isinstance(event["tid"], int)
                assert event["name"].split()[0] in {
                    "forward", "backward", "gather", "reduce", "save", "update", "publish", "wait"
                }  # fmt: skip
                assert event["args"]["unit"] in UNITS
                assert event["ts"] >= over - 1e-3, f"spans of row {row} overlap"
                assert event["dur"] >= 0
                over = event["ts"] + event["dur"]
            assert over <= report.summary.seconds * 1e6 + 1e-3
        assert drawn.file["otherData"]["text"] == str(report)
        assert drawn.file["otherData"]["summary"] == json.loads(json.dumps(report.summary.to_dict()))

    def test_every_unit_is_gathered_computed_reduced_and_updated(self, path: Path) -> None:
        model, optimizer = prepared(simulated())
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
        tiles = {(e["args"]["unit"], e["args"]["tile"]) for e in drawn.rows[UPDATE]}
        numbers = {tile for unit, tile in tiles if unit == "blocks.0"}
        assert numbers == {0}, "its five tiles are a stretch, called by the first one"

    def test_compute_goes_through_the_units_in_order(self, path: Path) -> None:
        model, optimizer = prepared(separate())
        with optimizer.trace(path):
            train(model, optimizer)
        optimizer.close()
        names = [event["name"] for event in Drawn(path).rows["compute"]]
        order = [name for name, before in zip(names, ["", *names], strict=False) if name != before]
        inside = [f"forward blocks.{number}" for number in range(DEPTH)]
        back = [f"backward blocks.{number}" for number in reversed(range(DEPTH))]
        between = [name for block in inside for name in (block, "forward root")]
        assert order == ["forward root", *between, "backward root", *back, *order[len(between) + 2 + DEPTH :]]
        assert set(order[len(between) + 2 + DEPTH :]) <= {"backward root"}

    def test_compute_is_idle_after_a_pass(self, path: Path) -> None:
        model, optimizer = prepared(simulated())
        with optimizer.trace(path) as report:
            loss = model(torch.ones(4, 8)).sum()
            time.sleep(0.2)
            optimizer.backward(loss)
            time.sleep(0.2)
        optimizer.close()
        events = Drawn(path).rows["compute"]
        assert events[-1]["ts"] + events[-1]["dur"] < report.summary.seconds * 1e6 - 0.2e6
        assert report.summary.rows["compute"].busy_seconds < report.summary.seconds - 0.4

    def test_an_update_on_the_device_is_compute(self, path: Path) -> None:
        model, optimizer = prepared(simulated(), penstock.Placement(params="cpu"))
        with optimizer.trace(path):
            train(model, optimizer)
        optimizer.close()
        drawn = Drawn(path)
        assert drawn.units("compute", "update") == UNITS
        assert UPDATE not in drawn.rows

    def test_bytes_of_a_step_are_its_traffic(self, path: Path) -> None:
        model, optimizer = prepared(simulated())
        train(model, optimizer)
        sizes = {unit.name: unit.nbytes for unit in optimizer._engine.context.units}
        with optimizer.trace(path):
            train(model, optimizer)
        optimizer.close()
        drawn = Drawn(path)
        blocks = sum(sizes.values()) - sizes["root"]
        assert drawn.nbytes(UPLOAD) == sizes["root"] + 2 * blocks, "blocks are gathered for forward and for backward"
        assert drawn.nbytes(DOWNLOAD) == sum(sizes.values()), "the gradient in bf16, once"
        assert drawn.nbytes(COLLECTIVE) == sum(sizes.values())
        assert drawn.nbytes(READ, FETCH, WRITE) == 0

    def test_every_stream_has_a_row(self) -> None:
        assert {COMPUTE, OF_MODEL, *STREAMS} == set(RESOURCES)  # the second is of planned steps alone

    def test_a_save_is_drawn(self, path: Path, tmp_path: Path) -> None:
        model, optimizer = prepared(simulated())
        with optimizer.trace(path) as report:
            train(model, optimizer)
            optimizer.save(tmp_path / "saved")
        optimizer.close()
        assert report.summary.rows[SAVE].nbytes > 0
        assert "copies for a checkpoint" in str(report)

    def test_bytes_of_files_are_what_is_read_and_written(
        self, path: Path, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shorten_rings(monkeypatch)
        placement = penstock.Placement(params="cpu", grads="cpu", optimizer="nvme", nvme_path=disks())
        model, optimizer = prepared(simulated(), placement)
        train(model, optimizer)
        optimizer.synchronize()
        before = dict(counted)
        with optimizer.trace(path) as report:
            train(model, optimizer, steps=2)
        read, written = counted["read"] - before["read"], counted["write"] - before["write"]
        optimizer.close()
        assert (Drawn(path).nbytes(FETCH), Drawn(path).nbytes(WRITE)) == (read, written)
        assert report.summary.rows[FETCH].nbytes == read > 0
        assert report.summary.rows[WRITE].nbytes == written > 0

    @pytest.mark.parametrize("make_streams", [inline, simulated])
    def test_training_is_the_same_under_a_trace(self, make_streams: Callable[[], Streams], path: Path) -> None:
        def losses(traced: bool) -> list[float]:
            model, optimizer = prepared(make_streams(), on_nvme())
            found = train(model, optimizer, 2)
            if traced:
                with optimizer.trace(path):
                    found += train(model, optimizer, 2)
            else:
                found += train(model, optimizer, 2)
            found += train(model, optimizer, 2)
            optimizer.close()
            return found

        assert losses(traced=True) == losses(traced=False)


class TestWhatBinds:
    """The slow resource is busy for some tenths of a second, whatever else the machine is doing."""

    @pytest.mark.parametrize(
        ("streams", "seconds", "placement", "name"),
        [
            ((READ, FETCH), 0.01, on_nvme, "NVMe reads"),
            ((WRITE,), 0.01, on_nvme, "NVMe writes"),
            ((UPDATE,), 0.02, lambda: ON_CPU, "host update"),
            ((UPLOAD,), 0.05, lambda: ON_CPU, "host-to-device link"),
            ((DOWNLOAD,), 0.1, lambda: ON_CPU, "device-to-host link"),
            ((COLLECTIVE,), 0.1, lambda: ON_CPU, "links between ranks"),
        ],
    )
    def test_the_slow_resource(
        self,
        streams: tuple[str, ...],
        seconds: float,
        placement: Callable[[], penstock.Placement],
        name: str,
        path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        shorten_rings(monkeypatch)
        model, optimizer = prepared(slow(*streams, seconds=seconds), placement())
        with optimizer.trace(path) as report:
            train(model, optimizer)
        optimizer.close()
        assert report.summary.bound_by == name
        assert str(report).startswith(f"bound by: {name}\n")
        waited = {row: use.waited_seconds for row, use in report.summary.rows.items()}
        assert max(waited, key=waited.__getitem__) in streams

    def test_compute_where_everything_else_is_fast(self, path: Path) -> None:
        model, optimizer = prepared(slow(seconds=0))
        for block in model.blocks:
            block.think = lambda: time.sleep(0.25)
        with optimizer.trace(path) as report:
            train(model, optimizer)
        optimizer.close()
        assert report.summary.bound_by == "device compute"

    def test_a_wait_names_what_was_waited_for_and_what_took_so_long(self, path: Path) -> None:
        """Nothing is gathered ahead: each gather is waited for, and takes as long as its upload."""
        options = penstock.Options(prefetch_bytes=0)
        model, optimizer = prepared(slow(UPLOAD, seconds=0.02), options=options)
        train(model, optimizer)
        with optimizer.trace(path) as report:
            train(model, optimizer)
        optimizer.close()
        waits = report.summary.waits
        for number in range(DEPTH):
            assert waits[f"gather blocks.{number} (upload)"] > 0.035, "once for forward, once for backward"
        assert waits["gather root (upload)"] > 0.015
        assert sum(waits.values()) < report.summary.seconds

    def test_a_gather_from_a_slow_disk_waits_for_the_disk(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        shorten_rings(monkeypatch)
        model, optimizer = prepared(slow(READ, seconds=0.02), on_nvme())
        with optimizer.trace(path) as report:
            train(model, optimizer)
        optimizer.close()
        waits = report.summary.waits
        assert all(waits[f"gather blocks.{number} (read)"] > 0.05 for number in range(DEPTH))
        waited = {row: use.waited_seconds for row, use in report.summary.rows.items()}
        assert waited[READ] > 3 * waited[UPLOAD]

    def test_work_of_before_is_not_in_it(self, path: Path) -> None:
        """The update of the step before was still running, and the first gather waited for it."""
        model, optimizer = prepared(slow(UPDATE, seconds=0.01))
        train(model, optimizer)
        with optimizer.trace(path) as report, torch.no_grad():
            model(torch.ones(4, 8))
        optimizer.close()
        assert UPDATE not in report.summary.rows
        assert sum(report.summary.waits.values()) < 0.05, "the update takes 0.16 s"


class TestEnd:
    def test_the_report_says_nothing_before(self, path: Path) -> None:
        model, optimizer = prepared(inline())
        with optimizer.trace(path) as report:
            assert str(report) == "The trace is not over yet."
            assert report.summary is None
            train(model, optimizer)
        assert str(report).startswith("bound by: ")
        optimizer.close()

    def test_an_exception_inside_leaves_the_trace(self, path: Path) -> None:
        model, optimizer = prepared(simulated())
        with contextlib.suppress(ZeroDivisionError), optimizer.trace(path) as report:
            train(model, optimizer)
            model.blocks[1].think = lambda: 1 / 0  # type: ignore[assignment]
            train(model, optimizer)
            pytest.fail("the exception of the block was lost")
        assert Drawn(path).units(UPDATE, "update") == UNITS
        assert report.summary is not None
        model.blocks[1].think = lambda: None
        train(model, optimizer)
        with optimizer.trace(path):
            train(model, optimizer)
        optimizer.close()

    def test_after_it_nothing_is_recorded(self, path: Path) -> None:
        model, optimizer = prepared(simulated())
        with optimizer.trace(path):
            train(model, optimizer)
        assert optimizer._engine.context.streams.observer is None
        size = path.stat().st_size
        train(model, optimizer)
        optimizer.close()
        assert path.stat().st_size == size

    def test_closing_inside_ends_the_work(self, path: Path) -> None:
        model, optimizer = prepared(simulated())
        with optimizer.trace(path):
            train(model, optimizer)
            optimizer.close()
        assert Drawn(path).units(UPDATE, "update") == UNITS

    def test_nothing_happened(self, path: Path) -> None:
        _, optimizer = prepared(inline())
        with optimizer.trace(path) as report:
            pass
        assert report.summary.rows == {}
        assert not Drawn(path).rows
        optimizer.close()


class TestErrors:
    def test_a_path_that_cannot_be_written_is_refused_before_the_block(self, tmp_path: Path) -> None:
        _, optimizer = prepared(inline())
        ran = []
        missing = tmp_path / "missing" / "trace.json"
        with pytest.raises(ConfigError) as caught, optimizer.trace(missing):
            ran.append(1)
        assert str(caught.value) == (
            f"The trace cannot be written to '{missing}': No such file or directory. Give a file on a disk with space, "
            "in a folder that exists and that you can write."
        )
        with pytest.raises(ConfigError, match="Is a directory"), optimizer.trace(tmp_path):
            ran.append(1)
        assert ran == []
        assert optimizer._engine.context.streams.observer is None
        optimizer.close()

    def test_a_disk_that_is_full_at_the_end(self) -> None:
        full = Path("/dev/full")
        if not full.exists():
            pytest.skip("this system has no /dev/full")
        model, optimizer = prepared(inline())
        with pytest.raises(ConfigError, match="'/dev/full': No space left on device"), optimizer.trace(full):
            train(model, optimizer)
        train(model, optimizer)
        optimizer.close()

    def test_traces_do_not_nest(self, path: Path) -> None:
        model, optimizer = prepared(inline())
        with optimizer.trace(path) as report:
            with (
                pytest.raises(EngineError, match=r"trace\(\) was called inside another trace"),
                optimizer.trace(path.with_name("inner.json")),
            ):
                pass
            train(model, optimizer)
        assert report.summary.rows["compute"].spans > 0
        assert not path.with_name("inner.json").exists()
        optimizer.close()

    def test_closed(self, path: Path) -> None:
        _, optimizer = prepared(inline())
        optimizer.close()
        with pytest.raises(EngineError, match=r"trace\(\) was called after close\(\)"):
            optimizer.trace(path)


def trace_on_a_rank(rank: int, folder: str) -> tuple[str, set[str]]:
    model, optimizer = prepared(simulated())
    with optimizer.trace(Path(folder, "all.json")) as report:
        train(model, optimizer)
    with optimizer.trace(Path(folder, "rank-{rank}.json")):
        train(model, optimizer)
    error = ""
    try:
        with optimizer.trace(Path(folder, "missing", "all.json")):
            train(model, optimizer)
    except penstock.PenstockError as refused:
        error = str(refused)
    optimizer.close()
    return error, set(report.summary.rows)


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
