"""Saves: beside training, their errors, what they take and give back, and what they keep."""

import gc
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.checkpoint import save as saves
from penstock.checkpoint import tiles
from penstock.checkpoint.format import MARKER
from penstock.checkpoint.reader import read_manifest
from penstock.checkpoint.save import Save
from penstock.checkpoint.tiles import TileWriter
from penstock.runtime import aio
from penstock.runtime.events import HostEvent
from penstock.runtime.host_memory import Arena
from penstock.runtime.workers import HostWorker
from tests.lib.engines import ON_CPU, ON_NVME, assert_same_state, prepared, state, train
from tests.lib.models import Blocks
from tests.lib.ranks import run_ranks
from tests.lib.refusals import Refusal, refused_unchanged, rows
from tests.lib.streams import late, separate, until_waited_for

KIB = 1 << 10


class Gate:
    """Tiles are written when it is open; a save fails on the way if it is told to."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        self.failure: Exception | None = None
        write = TileWriter._write_tile

        def gated(writer: TileWriter, *arguments: Any) -> Any:
            self.reached.set()
            assert self.opened.wait(60)
            if self.failure is not None:
                raise self.failure
            return write(writer, *arguments)

        patch.setattr(TileWriter, "_write_tile", gated)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


Prepared = tuple[Any, penstock.Optimizer]


def after_steps(count: int = 1, streams: Any = separate, seed: int = 0, **how: Any) -> Prepared:
    """On the cpu, unless it is told where."""
    model, optimizer = prepared(lambda: Blocks(seed=seed), streams, precision="bf16", **(how or ON_CPU))
    train(model, optimizer, count)
    return model, optimizer


def loaded(folder: Path, **how: Any) -> dict[str, Tensor]:
    """What a checkpoint holds."""
    model, optimizer = after_steps(0, seed=9, **how)
    optimizer.load(folder)
    found = state(model, optimizer)
    optimizer.close()
    return found


def test_an_update_waits_until_its_tiles_are_copied(gate: Gate, tmp_path: Path) -> None:
    how = {"optimizer": "cpu", "overlap": "forward"}
    model, optimizer = after_steps(1, late, **how)
    before = state(model, optimizer)
    optimizer.save(tmp_path / "a", blocking=False)
    train(model, optimizer, first=1)
    assert gate.reached.wait(60)
    assert not any(unit.trained.optimizer.memory.written.done() for unit in optimizer._engine.context.units)
    gate.opened.set()
    optimizer.synchronize()
    assert_same_state(loaded(tmp_path / "a", **how), before)


def write_gathered(model: Blocks, optimizer: penstock.Optimizer) -> None:
    with optimizer.gathered(modify=True), torch.no_grad():
        model.last.weight.zero_()


def offload(model: Blocks, optimizer: penstock.Optimizer) -> None:
    optimizer.offload_states({"optimizer", "master"}, to="cpu", pin_memory=False)
    optimizer.reload_states()


#: What is done with a model and its handle; each in a folder that has an earlier checkpoint.
CHANGES: dict[str, Callable[[Blocks, penstock.Optimizer], Any]] = {
    "parameter": lambda m, o: o.set_full_param(m.first.weight, torch.zeros(m.first.weight.shape)),
    "state": lambda m, o: o.set_full_state(m.first.weight, "exp_avg", torch.zeros(m.first.weight.shape)),
    "gathered": write_gathered,
    "offload": offload,
    "load": lambda m, o: o.load(Path.cwd() / "earlier"),
    "load_state_dict": lambda m, o: o.load_state_dict({**o.state_dict(), "state": {}}),
    "close": lambda m, o: o.close(),
}


@pytest.mark.parametrize(
    ("change", "where"), [*((change, "cpu") for change in CHANGES), ("offload", "device"), ("gathered", "device")]
)
def test_a_change_waits_until_everything_is_copied(
    change: str, where: str, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, optimizer = after_steps(params=where, grads=where, optimizer=where)
    gate.opened.set()
    optimizer.save(tmp_path / "earlier")
    gate.opened.clear()
    gate.reached.clear()
    train(model, optimizer, first=1)
    before = state(model, optimizer)
    optimizer.save(tmp_path / "a", blocking=False)
    assert gate.reached.wait(60)
    threading.Thread(target=lambda: (until_waited_for(), gate.opened.set()), daemon=True).start()
    CHANGES[change](model, optimizer)
    optimizer.close()
    assert_same_state(loaded(tmp_path / "a"), before)


def test_another_save_waits_or_refuses(gate: Gate, tmp_path: Path) -> None:
    model, optimizer = after_steps()
    before = state(model, optimizer)
    optimizer.save(tmp_path / "a", blocking=False)
    assert gate.reached.wait(60)
    with pytest.raises(penstock.EngineError, match="still being saved"):
        optimizer.save(tmp_path / "b", if_busy="raise")
    assert not (tmp_path / "b").exists()
    gate.opened.set()
    train(model, optimizer, first=1)
    optimizer.save(tmp_path / "b", blocking=False)
    after = state(model, optimizer)
    optimizer.synchronize()
    optimizer.save(tmp_path / "c", if_busy="raise")  # nothing is busy
    optimizer.close()
    for name, expected in (("a", before), ("b", after), ("c", after)):
        assert_same_state(loaded(tmp_path / name), expected)


def busy_on_two_ranks(rank: int, parent: Path) -> str:
    """The first rank is still at it when the other one is done, and asks."""
    _, optimizer = after_steps()
    opened = threading.Event()
    run = Save.run

    def last(save: Save) -> None:
        run(save)
        if rank == 0:
            assert opened.wait(60)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Save, "run", last)
        optimizer.save(parent / "a", blocking=False)
        if rank == 1:
            optimizer._engine.saver._job.synchronize()
        with pytest.raises(penstock.EngineError) as caught:
            optimizer.save(parent / "b", if_busy="raise")
        opened.set()
        optimizer.save(parent / "b")
    optimizer.close()
    return str(caught.value)


def test_two_ranks_refuse_together(tmp_path: Path) -> None:
    assert all("still being saved" in said for said in run_ranks(busy_on_two_ranks, 2, tmp_path))
    assert_same_state(loaded(tmp_path / "a"), loaded(tmp_path / "b"))


@pytest.mark.parametrize("verb", ["synchronize", "save", "close"])
def test_the_error_of_a_save_beside_training_is_raised_once(verb: str, gate: Gate, tmp_path: Path) -> None:
    model, optimizer = after_steps()
    gate.opened.set()
    gate.failure = OSError(28, "No space left on device")
    optimizer.save(tmp_path / "a", blocking=False)
    train(model, optimizer, first=1)  # training does not mind
    again = tmp_path / "again"
    with pytest.raises(penstock.CheckpointError, match=r"Writing .*/a/.*: No space left on device"):
        optimizer.save(again) if verb == "save" else getattr(optimizer, verb)()
    assert not (tmp_path / "a").exists()
    gate.failure = None
    if verb != "close":
        optimizer.synchronize()
        optimizer.save(again)
        assert_same_state(loaded(again), state(model, optimizer))


def given_up(patch: pytest.MonkeyPatch, error: BaseException) -> None:
    """The thread takes the save from its queue, and another error in its place."""
    run = HostEvent.run_from

    def fail() -> None:
        raise error

    patch.setattr(HostEvent, "run_from", lambda self, box: run(self, [fail] if box[0].__name__ == "run" else box))


def at(owner: Any, name: str) -> Any:
    """Let a call fail, on whichever thread."""

    def fail(patch: pytest.MonkeyPatch, error: BaseException) -> None:
        def raising(*_: Any, **__: Any) -> None:
            raise error

        patch.setattr(owner, name, raising)

    return fail


ENDS = {
    "given up": given_up,
    "making the file": at(aio, "_create"),
    "making the queue": at(tiles, "Queue"),
    "a tile": at(TileWriter, "_write_tile"),
    "the table": at(saves, "write_file"),
    "queueing": at(HostWorker, "submit"),
    "the thread": at(threading.Thread, "start"),
}


ERRORS = (RuntimeError("no"), MemoryError(), KeyboardInterrupt())


@pytest.mark.parametrize(
    ("where", "error"),
    [(where, ERRORS[number % 3]) for number, where in enumerate(ENDS)] + [("a tile", ERRORS[2])],
    ids=repr,
)
def test_however_a_save_beside_training_ends_nobody_waits_for_it(
    where: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it never begins, and where what ends it is no error of a disk."""
    model, optimizer = after_steps()
    with monkeypatch.context() as patch:
        ENDS[where](patch, error)
        with pytest.raises((type(error), penstock.PenstockError)):
            save_and_wait(optimizer, tmp_path / "a", blocking=False)
    assert all(unit.params.memory.free.done() for unit in optimizer._engine.context.units)
    optimizer.synchronize()
    train(model, optimizer, first=1)
    optimizer.save(tmp_path / "a", blocking=False)
    optimizer.synchronize()
    assert_same_state(loaded(tmp_path / "a"), state(model, optimizer))


# What it takes


def threads() -> Counter[str]:
    """Names of threads.

    But for threads of streams, which an engine has from the first work on that had to wait, and for the kernel's own
    workers of io_uring, which come and go with its load.
    """
    known = {thread.native_id: thread.name for thread in threading.enumerate()}
    names: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # it has just ended
            names[known.get(int(task.name)) or (task / "comm").read_text().strip()] += 1
    waits = {"penstock-update", "penstock-fetch", "penstock-write"}
    return Counter({name: count for name, count in names.items() if name not in waits and not name.startswith("iou-")})


def assert_given_back(before: Counter[str], files: int) -> None:
    """A thread that has ended is listed for a moment; one that stays ends the test by its guard against hanging."""
    while threads() - before:
        time.sleep(0.001)
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.parametrize("how", [ON_CPU, ON_NVME], ids=["cpu", "nvme"])
def test_what_it_takes_is_a_ring_and_is_given_back(
    how: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by what the model holds: that is many times the ring."""
    taken: list[int] = []

    class Counted(Arena):
        def __init__(self, capacity: int, device: torch.device, **rest: Any) -> None:
            taken.append(capacity)
            super().__init__(capacity, device, **rest)

    monkeypatch.setattr(tiles, "Arena", Counted)
    model, optimizer = prepared(lambda: Blocks(3, 32), separate, precision="bf16", **how)
    train(model, optimizer)
    optimizer.save(tmp_path / "a")
    taken_before = threads(), len(os.listdir("/proc/self/fd"))
    taken.clear()
    optimizer.save(tmp_path / "b", blocking=False)
    train(model, optimizer, first=1)
    optimizer.synchronize()
    gc.collect()
    assert_given_back(*taken_before)
    (entry,) = (rank.data for rank in read_manifest(tmp_path / "b").ranks)
    tile_numel = 2 * KIB
    record = sum(-(-tile_numel * width // 4096) * 4096 for width in (2, 2, 8))
    assert taken == [record * tiles.RING_TILES]
    assert entry.nbytes > 2 * sum(taken)
    optimizer.load(tmp_path / "a")
    assert_given_back(*taken_before)


def save_and_wait(optimizer: penstock.Optimizer, path: Path, **how: Any) -> None:
    optimizer.save(path, **how)
    optimizer.synchronize()


@pytest.mark.parametrize("blocking", [True, False])
def test_a_damaged_record_of_a_swap_file_is_no_checkpoint(blocking: bool, tmp_path: Path) -> None:
    """Found before the last good one goes; the error names the swap file."""
    model, optimizer = after_steps(**ON_NVME)
    optimizer.save(tmp_path / "good")
    good = state(model, optimizer)
    trained = next(unit.trained for unit in optimizer._engine.context.units if unit.trained)
    place = trained.optimizer.segments[0]._places[0]
    with open(f"/proc/self/fd/{place.file._descriptor}", "r+b") as opened:  # it has no name
        opened.seek(place.offset + 5)
        byte = opened.read(1)
        opened.seek(place.offset + 5)
        opened.write(bytes([byte[0] ^ 1]))
        os.fsync(opened.fileno())
    with pytest.raises(penstock.CheckpointError, match=r"was not written\..* checksum") as caught:
        save_and_wait(optimizer, tmp_path / "bad", keep=1, blocking=blocking)
    assert caught.value.file == place.file.path
    assert names(tmp_path) == ["good"]
    optimizer.close(keep_params=False)
    assert_same_state(loaded(tmp_path / "good", **ON_NVME), good)


def test_without_checksums_in_the_swap_files_tiles_have_some(tmp_path: Path) -> None:
    how = {**ON_NVME, "checksums": False}
    model, optimizer = after_steps(**how)
    optimizer.save(tmp_path / "a")
    assert_same_state(loaded(tmp_path / "a", **how), state(model, optimizer))
    tiles = next((tmp_path / "a").glob("*.tiles"))
    data = bytearray(tiles.read_bytes())
    data[5000] ^= 1
    tiles.write_bytes(data)
    _, other = after_steps(0, **how)
    with pytest.raises(penstock.CheckpointError, match="is damaged"):
        other.load(tmp_path / "a")
    with pytest.raises(penstock.CheckpointError, match="is damaged"):  # its state is in parts
        other.close()


# When, and where


def names(parent: Path) -> list[str]:
    return sorted(folder.name for folder in parent.iterdir())


def test_the_newest_few_are_kept_and_found(tmp_path: Path) -> None:
    model, optimizer = after_steps(0)
    seen = {}
    for step, keep in ((9, None), (1, None), (2, 2), (3, 2), (4, None)):  # by age, not by name
        train(model, optimizer, first=step)
        optimizer.save(tmp_path / f"step-{step}", keep=keep, extra={"step": step})
        seen[step] = state(model, optimizer)
        assert optimizer.load(tmp_path)["step"] == step
        assert optimizer.load(tmp_path / "latest")["step"] == step
    assert names(tmp_path) == ["step-2", "step-3", "step-4"]
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("of the user")
    (tmp_path / "step-3" / "mine.txt").write_text("of the user")
    optimizer.save(tmp_path / "step-5", keep=1)
    assert names(tmp_path) == ["notes", "step-3", "step-5"]
    assert names(tmp_path / "step-3") == ["mine.txt"]
    with pytest.raises(penstock.CheckpointError, match="is no whole checkpoint"):
        optimizer.load(tmp_path / "step-3")
    with pytest.raises(penstock.CheckpointError, match="does not exist"):
        optimizer.load(tmp_path / "step-9")
    (tmp_path / "step-5" / MARKER).write_text("{")
    with pytest.raises(penstock.CheckpointError, match="is no whole checkpoint"):
        optimizer.load(tmp_path)


@pytest.mark.parametrize("blocking", [True, False])
def test_the_same_folder_again(blocking: bool, tmp_path: Path) -> None:
    model, optimizer = after_steps(0)
    for step in range(3):
        train(model, optimizer, first=step)
        optimizer.save(tmp_path / "a", blocking=blocking, extra={"tensor": torch.ones(2)})
    expected = state(model, optimizer)
    optimizer.synchronize()
    assert len(names(tmp_path / "a")) == 4  # marker, tiles, table, tensors
    optimizer.close()
    assert_same_state(loaded(tmp_path / "a"), expected)


# What users add

EXTRA: dict[str, Any] = {
    "numbers": [0, -1, 1 << 70, 1.5, -0.0, float("inf"), True, False, None],
    "strings": ["", "text", "\u00e9 \U0001f600", "\ud800", "a\x00b"],
    "bytes": [b"", bytes(range(256))],
    "tuple": ((), (1, (2, [3]))),
    "dict": {1: "one", (2, 3): {"!": "not a tag"}, None: {}, "!": 4, 1.5: b"x"},
    "dtypes": [torch.arange(6).reshape(2, 3).to(d) for d in (torch.float64, torch.bfloat16, torch.int8, torch.bool)],
    "shapes": [torch.tensor(3.5), torch.empty(0, 4), torch.ones(2, 3).t(), torch.ones(1).expand(5)],
}


def test_extra_comes_back_as_it_was(tmp_path: Path) -> None:
    _, optimizer = after_steps(0)
    tensor = torch.zeros(3)
    more = {"tensor": tensor, "parameter": nn.Parameter(torch.ones(2)), "ordered": OrderedDict(b=1, a=2)}
    optimizer.save(tmp_path / "a", extra=EXTRA | more, blocking=False)
    tensor.fill_(1)  # it was copied
    optimizer.synchronize()
    found = optimizer.load(tmp_path / "a")
    optimizer.close()
    plain = [torch.zeros(3), torch.ones(2), {"b": 1, "a": 2}]
    assert repr([found.pop(name) for name in more]) == repr(plain)
    assert list(found) == list(EXTRA)
    for name, value in EXTRA.items():
        assert repr(found[name]) == repr(value), name


class Custom:
    pass


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def saving(folder: str = "a", **arguments: Any) -> Callable[..., None]:
    return lambda model, optimizer: optimizer.save(Path.cwd() / folder, **arguments)


def saving_extra(value: Any) -> Callable[..., None]:
    return saving(extra={"a": [0, value]})


NO_DATA = {
    "Custom": (Custom(), " is a Custom"),
    "function": (print, " is a builtin_function_or_method"),
    "set": ({1, 2}, " is a set"),
    "complex": (1j, " is a complex"),
    "key": ({"b": {Custom: 1}}, "['b'] is a type"),
    "complex tensor": (torch.ones(2, dtype=torch.complex64), " is a tensor that is sparse, complex"),
    "sparse tensor": (torch.ones(2).to_sparse(), " is a tensor that is sparse, complex"),
    "meta tensor": (torch.ones(2, device="meta"), " is a tensor that is sparse, complex"),
    "endless": (endless(), "[0] contains itself"),
    "long": (1 << 20000, " is a number of more than"),
}
REFUSED = {
    "keep": Refusal(saving(keep=0), "save(keep=0)"),
    "if_busy": Refusal(saving(if_busy="perhaps"), "save(if_busy='perhaps')"),
    "path": Refusal(saving("latest"), "stands for the newest one"),
    **{name: Refusal(saving_extra(value), f"extra['a'][1]{said}") for name, (value, said) in NO_DATA.items()},
}


@rows(REFUSED)
def test_what_cannot_be_saved_is_refused_by_name(row: Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused_unchanged(row)
    assert names(tmp_path) == []
