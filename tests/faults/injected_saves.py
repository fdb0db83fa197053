"""Run by test_checkpoint_crash.py in a process of its own, with crashes.c loaded before the C library."""

import ctypes
import errno
import mmap
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import penstock
from penstock import construct
from penstock.checkpoint.format import MARKER, files_of
from penstock.checkpoint.reader import checkpoints_in
from penstock.runtime import host_memory
from tests.lib import ranks
from tests.lib.engines import prepared, state, train
from tests.lib.models import stack
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline

# The child of a fork stands for the process here, which is made thousands of times: it has what a child has not else.
PROCESS = os.getpid()
host_memory.MADV_WIPEONFORK = mmap.MADV_NORMAL  # type: ignore[misc]
construct.in_child = lambda owner, do: None  # type: ignore[assignment]
# Ranks are children of this process, too: it has all that they would import.
ranks._context = lambda backend="gloo": multiprocessing.get_context("fork")

shim = ctypes.CDLL(None)
shim.crash_name.restype = ctypes.c_char_p
NEVER = 0


def at_call(number: int, error: int = 0) -> None:
    """From here on the n-th call that changes a file system ends the process, or fails."""
    shim.crash_set(ctypes.c_long(number), error)


def calls() -> list[str]:
    """Those since then, by name."""
    return [shim.crash_name(ctypes.c_long(n)).decode() for n in range(1, 1 + shim.crash_calls())]


Values = list[Tensor]


class Engine:
    """A small model and its optimizer."""

    def __init__(self) -> None:
        small = partial(stack, 16, 32, 16)
        self.model, self.optimizer = prepared(small, inline, precision="bf16", optimizer="cpu")

    def iterate(self) -> None:
        train(self.model, self.optimizer)
        self.optimizer.synchronize()

    def values(self) -> Values:
        return list(state(self.model, self.optimizer).values())


class Training:
    """A model on which two steps were made, with a checkpoint of the first, and another engine that loads."""

    def __init__(self, folder: Path) -> None:
        self.engine, self.reader = Engine(), Engine()
        self.before = folder / "before"
        self.engine.iterate()
        self.save(self.before / "a")
        self.old = self.engine.values()
        self.engine.iterate()
        self.new = self.engine.values()

    def save(self, folder: Path, keep: int | None = None) -> None:
        self.engine.optimizer.save(folder, keep=keep, extra={"tensor": torch.ones(3)})

    def loaded(self, path: Path) -> Values:
        extra = self.reader.optimizer.load(path)
        assert torch.equal(extra["tensor"], torch.ones(3))
        return self.reader.values()

    def close(self) -> None:
        self.engine.optimizer.close()
        self.reader.optimizer.close()


def same(ours: Values, theirs: Values) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    training = Training(tmp_path_factory.mktemp("training"))
    yield training
    training.close()


def fails_beside_training(engine: Engine, folder: Path, number: int, keep: int | None = None) -> tuple[str, list[str]]:
    """Save beside a step, and let the n-th call fail: what is said, once, and which calls there were."""
    said = []
    at_call(number, (errno.ENOSPC, errno.EIO)[number % 2])
    for do in (
        lambda: engine.optimizer.save(folder, keep=keep, extra={"tensor": torch.ones(3)}, blocking=False),
        engine.iterate,  # which waits for the save: `synchronize` is a part of it
        engine.iterate,
    ):
        try:
            do()
        except penstock.CheckpointError as caught:
            said.append(str(caught))
    made = calls()
    at_call(NEVER)
    assert len(said) < 2, said
    return "".join(said), made


def fresh(training: Training, folder: Path) -> Path:
    """A folder that has the checkpoint of the first step."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(training.before, folder)
    return folder


def strangers(parent: Path) -> set[Path]:
    """What belongs to no whole checkpoint."""
    everything = {path for path in parent.rglob("*") if path.is_file()}
    for folder, manifest in checkpoints_in(parent):
        everything -= {folder / MARKER, *(folder / entry.name for entry in files_of(manifest))}
    return everything


def killed(work: Callable[[], None]) -> bool:
    """Run it in a forked child; whether that was killed."""
    child = os.fork()
    if child == 0:
        os.getpid = lambda: PROCESS
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the child has failed"
    return False


SAVES = pytest.mark.parametrize(("name", "keep"), [("a", None), ("b", 1)], ids=["over", "keep one"])


@SAVES
def test_a_process_killed_at_any_call(training: Training, name: str, keep: int | None, tmp_path: Path) -> None:
    """The newest checkpoint is the one before or the new one, whole; and the next save leaves nothing of a dead one."""
    outcomes = []
    for number in range(1, 1000):
        parent = fresh(training, tmp_path / "runs")

        def save(number: int = number, parent: Path = parent) -> None:
            at_call(number)
            training.save(parent / name, keep)

        alive = not killed(save)
        found = training.loaded(parent)
        outcomes.append(same(found, training.new))
        assert outcomes[-1] or same(found, training.old), number
        training.save(parent / name, keep=1)
        assert same(training.loaded(parent / "latest"), training.new)
        assert strangers(parent) == set(), number
        assert [folder.name for folder in parent.iterdir() if any(folder.iterdir())] == [name]
        if alive:
            break
    assert outcomes == sorted(outcomes), "from one call on it is the new one"
    assert len(outcomes) > 15
    assert not outcomes[0]
    assert outcomes[-1]


@SAVES
def test_any_call_that_fails(training: Training, name: str, keep: int | None, tmp_path: Path) -> None:
    refused = []
    for number in range(1, 1000):
        error = (errno.ENOSPC, errno.EIO)[number % 2]
        parent = fresh(training, tmp_path / "runs")
        at_call(number, error)
        said = ""
        try:
            training.save(parent / name, keep)
        except penstock.CheckpointError as caught:
            said = str(caught)
        made = calls()
        at_call(NEVER)
        found = training.loaded(parent)
        if said:
            refused.append(made[number - 1])
            assert str(parent) in said
            assert os.strerror(error) in said
            assert same(found, training.new if "is whole, but" in said else training.old), said
            assert strangers(parent) == set() or "is whole, but" in said, said
        else:
            assert same(found, training.new), made[number - 1]
        training.save(parent / name, keep=1)
        assert same(training.loaded(parent), training.new)
        assert strangers(parent) == set(), made[number - 1]
        if number > len(made):
            break
    assert {"fsync", "write"} <= set(refused)
    assert any(call.startswith("rename") for call in refused)
    assert any(call.startswith("posix_fallocate") for call in refused)


def test_any_call_of_a_save_beside_training_that_fails(tmp_path: Path) -> None:
    """The error is said once, training goes on as if nothing had been saved, and the next save works."""
    training, plain = Training(tmp_path), Engine()
    for _ in range(2):
        plain.iterate()
    refused: list[str] = []
    for number in range(1, 1000):
        parent = fresh(training, tmp_path / "runs")
        said, made = fails_beside_training(training.engine, parent / "b", number, keep=1)
        if said:
            refused.append(made[number - 1])
            assert str(parent) in said
        for _ in range(2):
            plain.iterate()
        assert same(training.engine.values(), plain.values()), made[number - 1]
        training.save(parent / "b", keep=1)
        assert same(training.loaded(parent), plain.values())
        if number > len(made):
            break
    assert {"fsync", "write", "pwrite"} <= set(refused)
    assert any(call.startswith("rename") for call in refused)
    assert any(call.startswith("open") for call in refused)
    assert any(call.startswith("posix_fallocate") for call in refused)
    training.close()
    plain.optimizer.close()


def one_rank_fails_beside_training(rank: int, folder: Path, failing: int) -> int:
    """The same on one rank of two: both say it, both train on, and nobody waits for the other."""
    engine, plain = Engine(), Engine()
    for number in range(1, 1000):
        parent = folder / str(number)
        said, made = fails_beside_training(engine, parent / "a", number if rank == failing else NEVER)
        everywhere: list[Any] = [None, None]
        dist.all_gather_object(everywhere, (said, made))
        assert bool(everywhere[0][0]) == bool(everywhere[1][0]), everywhere
        assert str(folder) in said or not said
        for _ in range(2):
            plain.iterate()
        assert same(engine.values(), plain.values())
        engine.optimizer.save(parent / "a")
        if number > len(everywhere[failing][1]):
            break
    engine.optimizer.close()
    plain.optimizer.close()
    return number


def test_any_call_of_one_rank_that_fails_beside_training(tmp_path: Path) -> None:
    assert min(run_ranks(one_rank_fails_beside_training, 2, tmp_path, 1)) > 5
