"""Files that somebody made to take a reader's time or memory: twice as much costs twice as much, or is refused."""

import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import penstock
from penstock.checkpoint.format import MARKER, MOST_SERIAL, decode, memory_bytes, parse
from penstock.checkpoint.reader import Checkpoint, damaged_tiles, read_manifest, summarize
from penstock.checkpoint.tables import TileKey
from penstock.checkpoint.tiles import Tile
from penstock.files import Field
from tests import hostile_checkpoints
from tests.hostile_checkpoints import GROWERS, Content, grown


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "step"
    hostile_checkpoints.save(folder)
    return folder


@pytest.fixture
def optimizer() -> Iterator[penstock.Optimizer]:
    model = torch.nn.Linear(16, 16, bias=False)
    optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters()))
    yield optimizer
    optimizer.close()


def opcodes(work: Callable[[], object]) -> int:
    """What Python does for some work: the same on every machine, however busy it is, and whatever ran before.

    Finalizers of what other tests left behind are Python too: they run before it, and not in the middle.
    """
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        count += event == "opcode"
        return trace

    gc.collect()
    gc.disable()
    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for such a frame when it begins to trace
    sys.settrace(trace)
    try:
        work()
    except penstock.PenstockError:
        pass
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def everything(folder: Path, out: Path) -> Callable[[], object]:
    def read() -> None:
        checkpoint = Checkpoint.open(folder)
        for unit in (unit for table in checkpoint.tables for unit in table.units):
            _ = unit.nbytes
        summarize(checkpoint)
        penstock.export(folder, out)

    return read


@pytest.mark.parametrize("grow", GROWERS, ids=lambda grow: grow.__name__)
def test_twice_as_much_takes_twice_the_work(whole, tmp_path, grow):
    few, many = (opcodes(everything(grown(whole, tmp_path / "grown", grow, n), tmp_path / "out")) for n in (30, 60))
    assert many < 2.2 * few


@pytest.mark.parametrize("grow", GROWERS, ids=lambda grow: grow.__name__)
def test_memory_follows_the_size_of_the_files(whole, tmp_path, grow):
    """What the values of JSON take, and little beside it; whatever keys lead to them."""
    folder = grown(whole, tmp_path / "grown", grow, 400)
    texts = [file.read_bytes() for file in folder.glob("*.json")]
    tracemalloc.start()
    try:
        summarize(Checkpoint.open(folder))
    except penstock.CheckpointError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 2 * sum(map(memory_bytes, texts)) + (1 << 20)


class NothingIsWhole:
    """Reads no tile."""

    def __enter__(self) -> "NothingIsWhole":
        return self

    def __exit__(self, *_: object) -> None: ...

    def read(self, keys: Iterable[TileKey]) -> Iterator[Tile]:
        for key in keys:
            raise penstock.CheckpointError(str(key.number))
        yield from ()


def test_damaged_tiles_are_told_in_one_pass(whole, tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.checkpoint.reader.TileReader", NothingIsWhole)
    counts = []
    for count in (200, 400):
        checkpoint = Checkpoint.open(grown(whole, tmp_path / "grown", hostile_checkpoints.tiles_and_slots, count))
        found: list[penstock.CheckpointError] = []
        counts.append(opcodes(lambda checkpoint=checkpoint, found=found: found.extend(damaged_tiles(checkpoint))))  # type: ignore[misc]
        assert [str(error) for error in found] == list(map(str, range(count)))
    assert counts[1] < 2.2 * counts[0]


@pytest.mark.parametrize(
    ("grow", "count", "said"),
    [
        (hostile_checkpoints.one_table_for_all_ranks, 1, "'ranks' names a file twice"),
        (hostile_checkpoints.keys_of_one_hash, 65, "'extra.x.items' has more than 64 keys of one hash"),
        (hostile_checkpoints.extents, 65, "larger than any tensor"),
        (hostile_checkpoints.extents, 1, "larger than any tensor"),
    ],
)
def test_what_would_take_long_inside_of_one_operation_is_refused(whole, tmp_path, grow, count, said):
    folder = grown(whole, tmp_path / "grown", grow, count)
    with pytest.raises(penstock.CheckpointError, match=r"^[^\n]*$") as refused:
        summarize(Checkpoint.open(folder))
    assert said in str(refused.value)
    assert len(str(refused.value)) < 1500


def test_values_that_would_take_more_memory_than_there_is_are_not_read():
    text = b"[" + b"{}," * 1000 + b"{}]"
    assert parse(Path("file"), text, most_bytes=memory_bytes(text)).value == [{}] * 1001
    with pytest.raises(penstock.CheckpointError, match=r"^file is damaged: its values would take [\d,]+ bytes"):
        parse(Path("file"), text, most_bytes=memory_bytes(text) - 1)


@pytest.mark.parametrize(
    "text",
    [
        b"[" + b"{}," * 999 + b"{}]",
        b"[" + b"[]," * 999 + b"[]]",
        b"[" + b'{"a":0},' * 999 + b'{"a":0}]',
        b"[" + b"0.5," * 999 + b"0.5]",
        b"[" + b'"",' * 999 + b'""]',
        b"[" + b'"\\ud800",' * 999 + b'""]',
        b"{" + b",".join(b'"%d":0' % number for number in range(1000)) + b"}",
        b"[" + b"123456789," * 999 + b"1]",
        '["{}"]'.format("\N{PILE OF POO}" * 1000).encode(),
    ],
)
def test_the_memory_that_json_takes_is_not_guessed_too_low(text):
    tracemalloc.start()
    value = parse(Path("file"), text, most_bytes=1 << 30)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert value is not None
    assert taken <= memory_bytes(text) + 4096
    assert memory_bytes(text) <= 110 * len(text)


@pytest.mark.parametrize("value", [MOST_SERIAL + 1, -1, 1 << 64])
def test_a_serial_that_no_save_counts_to(whole, optimizer, tmp_path, value):
    def grow(content: Content, table: Content, count: int) -> int:
        content["serial"] = value
        return 0

    folder = grown(whole, tmp_path / "step-1", grow, 0)
    with pytest.raises(penstock.CheckpointError, match="'serial' is "):
        read_manifest(folder)
    optimizer.save(tmp_path / "step-2", extra={"kept": 2})  # what cannot be read does not count
    assert optimizer.load(tmp_path / "latest") == {"kept": 2}


def test_the_last_serial_is_followed_by_none(whole, optimizer, tmp_path):
    def grow(content: Content, table: Content, count: int) -> int:
        content["serial"] = MOST_SERIAL
        return 0

    grown(whole, tmp_path / "step-1", grow, 0)
    with pytest.raises(
        penstock.CheckpointError, match=r"step-1 says that it is the last that can be counted\. Remove it"
    ):
        optimizer.save(tmp_path / "step-2", extra={"kept": 2})
    assert optimizer.load(tmp_path / "latest") == {"kept": 1}
    assert not (tmp_path / "step-2" / MARKER).exists()


def test_what_could_not_be_read_again_is_not_saved(optimizer, tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.checkpoint.format.MOST_MARKER_BYTES", 10_000)
    with pytest.raises(penstock.CheckpointError, match=r"extra makes a checkpoint.json of .* Save large values as "):
        optimizer.save(tmp_path / "step", extra={"log": list(range(10_000))})
    assert not (tmp_path / "step" / MARKER).exists()


def test_keys_that_people_have_are_kept():
    items: list[object] = [[number, number] for number in range(1000)]
    assert len(decode(Field(Path("file"), "x", {"!": "dict", "items": items}), {})) == 1000
