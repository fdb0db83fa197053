"""Saves that are cut short: processes killed between two calls, disks that fail, ranks that end."""

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import penstock
from penstock.checkpoint import save as saves
from penstock.checkpoint.folder import write_file
from penstock.checkpoint.format import FileEntry
from tests.faults.preload import run_preloaded
from tests.parity.resuming import SMALL, Run, different, iterate, values
from tests.parity.rows import Movement
from tests.support import run_ranks, thorough

RUN = Run(how=Movement(3, "cpu", "cpu", "cpu").but(**SMALL))


@pytest.fixture
def quick_disk(tmp_path: Path) -> Iterator[Path]:
    """Memory as a file system, where there is one: thousands of files are synced."""
    shared = Path("/dev/shm")
    if os.access(shared, os.W_OK):
        with TemporaryDirectory(dir=shared) as folder:
            yield Path(folder)
    else:
        yield tmp_path


@pytest.mark.parametrize("marked", ["not thorough", thorough("thorough")])
def test_saves_that_are_killed_or_fail_at_any_call(marked: str, quick_disk: Path, tmp_path: Path) -> None:
    """Run injected_saves.py."""
    run_preloaded("crashes.c", "injected_saves.py", quick_disk if marked == "not thorough" else tmp_path, marked)


def failing(name: str) -> Any:
    """`write_file` that fails for one file."""

    def write(file: Path, data: bytes) -> FileEntry:
        if file.name.endswith(name):
            raise penstock.CheckpointError(f"Writing {file} failed: {os.strerror(errno.EIO)}.", file=str(file))
        return write_file(file, data)

    return write


def save_and_wait(optimizer: penstock.Optimizer, path: Path, blocking: bool) -> None:
    optimizer.save(path, blocking=blocking)
    optimizer.synchronize()


def one_rank_fails(rank: int, parent: Path) -> list[str]:
    """Let the table of the other rank or of the first one fail; what the ranks say."""
    model, optimizer, scheduler = RUN.prepare()
    iterate(RUN, model, optimizer, scheduler, 0, rank, 2)
    optimizer.save(parent / "a")
    before = values(model, optimizer)
    said = []
    for name, blocking in (("-00001.json", True), ("-00000.json", False), ("-00001.json", False)):
        iterate(RUN, model, optimizer, scheduler, 1, rank, 2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(saves, "write_file", failing(name))
            with pytest.raises(penstock.CheckpointError) as caught:
                save_and_wait(optimizer, parent / "a", blocking)
        said.append(str(caught.value))
        optimizer.load(parent / "a")
        assert different(values(model, optimizer), before) == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saves, "write_file", failing("-00001.json"))
        with pytest.raises(penstock.CheckpointError):
            optimizer.save(parent / "new" / "b")
    optimizer.save(parent / "a")
    optimizer.close()
    return said


def test_a_file_of_one_rank_that_fails_is_every_ranks_error(tmp_path: Path) -> None:
    for rank, said in enumerate(run_ranks(one_rank_fails, 2, tmp_path)):
        for failed, text in zip((1, 0, 1), said, strict=True):
            assert f"-0000{failed}.json failed: Input/output error" in text
            assert text.startswith(f"Rank {failed} of 2 failed") == (rank != failed)
    assert not (tmp_path / "new").exists()
    assert len(list((tmp_path / "a").iterdir())) == 5  # marker, and tiles and a table of each rank


def what_is_saved_cannot_be(rank: int, parent: Path) -> str:
    """The first rank alone looks at `extra` and options; the others hear of it."""
    _, optimizer, _ = RUN.prepare()
    optimizer.param_groups[0]["lambda"] = print
    with pytest.raises(penstock.PenstockError) as caught:
        optimizer.save(parent / "a")
    del optimizer.param_groups[0]["lambda"]
    optimizer.save(parent / "a")
    optimizer.close()
    return str(caught.value)


def test_options_that_cannot_be_saved_are_every_ranks_error(tmp_path: Path) -> None:
    for said in run_ranks(what_is_saved_cannot_be, 2, tmp_path):
        assert "param_groups[0]['lambda'] is a builtin_function_or_method" in said


def one_rank_is_killed(rank: int, parent: Path) -> None:
    model, optimizer, scheduler = RUN.prepare()
    iterate(RUN, model, optimizer, scheduler, 0, rank, 2)
    optimizer.save(parent / "a")
    if rank == 1:
        saves.write_file = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    try:
        optimizer.save(parent / "a")
    except Exception as error:
        (parent / "said").write_text(f"{type(error).__name__}: {error}")


def test_a_rank_that_is_killed_is_the_others_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1 died with exit code -9"):
        run_ranks(one_rank_is_killed, 2, tmp_path, fresh=True)
    said = (tmp_path / "said").read_text()
    assert said.startswith("CheckpointError: Rank 0 of 2 hears nothing from another one"), said
    model, optimizer, _ = RUN.prepare()
    optimizer.load(tmp_path / "a")
    assert {float(v) for name, v in values(model, optimizer).items() if name.endswith(" step")} == {1.0}
    optimizer.close()
