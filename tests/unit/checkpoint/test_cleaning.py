"""What a save removes is its own: no links, no files of users, nothing of other jobs, nothing that was just written."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.checkpoint import folder as folders
from penstock.checkpoint import save as saves
from penstock.checkpoint.format import MARKER, FileEntry
from penstock.checkpoint.reader import read_manifest
from tests.parity.resuming import Run, different, iterate, values

RUN = Run()


@pytest.fixture
def optimizer() -> Any:
    _, optimizer, _ = RUN.prepare()
    yield optimizer
    optimizer.close(keep_params=False)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_links_are_neither_followed_nor_removed(optimizer, tmp_path):
    archive, parent = tmp_path / "archive", tmp_path / "ck"
    optimizer.save(archive / "best")
    optimizer.save(parent / "step-1")
    (parent / "best").symlink_to(archive / "best")
    (parent / "latest").symlink_to("step-2")
    linked = parent / "linked"
    linked.mkdir()
    for file in (archive / "best").glob("*.tiles"):
        (linked / file.name).symlink_to(file)
    for step in (2, 3):
        optimizer.save(parent / f"step-{step}", keep=2)
    read_manifest(archive / "best")
    assert names(parent) == ["best", "latest", "linked", "step-2", "step-3"]
    assert len(names(linked)) == 1
    optimizer.save(parent / "step-4", keep=1)
    read_manifest(archive / "best")
    assert names(parent) == ["best", "latest", "linked", "step-4"]


def test_what_was_just_written_stays_whatever_leads_to_it(optimizer, tmp_path):
    """A link with a name before its own, and a save that is told a link's name."""
    parent = tmp_path / "ck"
    parent.mkdir()
    (parent / "best").symlink_to("model")
    for _ in range(2):
        optimizer.save(parent / "model", keep=1)
        read_manifest(parent / "model")
    optimizer.save(parent / "best", keep=1)
    read_manifest(parent / "model")
    optimizer.save(parent / "another")
    optimizer.save(parent / "best", keep=1)
    read_manifest(parent / "model")
    assert names(parent) == ["best", "model"]


def test_leftovers_of_a_save_that_was_killed_go(optimizer, tmp_path):
    """With the data file last: a cleaning that is killed can be gone on with."""
    dead = tmp_path / "dead"
    dead.mkdir()
    for name in (
        "0a1b2c3d-00000.tiles",
        "0a1b2c3d-00000.json",
        "0a1b2c3d-00001.safetensors",
        "checkpoint.json.99999999",
    ):
        (dead / name).write_bytes(b"x")
    gone: list[str] = []
    unlink = Path.unlink

    def noted(path: Path, missing_ok: bool = False) -> None:
        gone.append(path.name)
        unlink(path, missing_ok)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", noted)
        optimizer.save(tmp_path / "a", keep=1)
    assert not dead.exists()
    assert sorted(gone[:2]) == ["0a1b2c3d-00000.json", "0a1b2c3d-00001.safetensors"] or "99999999" in gone[0]
    assert gone.index("0a1b2c3d-00000.tiles") > gone.index("0a1b2c3d-00000.json")


def interrupted(patch: pytest.MonkeyPatch, module: Any, name: str, meanwhile: Any, *, before: bool = True) -> None:
    """Something else happens just before, or after, a function's first call."""
    function, calls = getattr(module, name), []

    def wrapped(*arguments: Any) -> Any:
        calls.append(name)
        if before and len(calls) == 1:
            meanwhile()
        found = function(*arguments)
        if not before and len(calls) == 1:
            meanwhile()
        return found

    patch.setattr(module, name, wrapped)


@pytest.mark.parametrize("locks", [True, False])
def test_two_jobs_that_save_into_one_folder(locks, tmp_path, monkeypatch):
    """The other one saves, as a whole, between the marker of the first and what that cleans."""
    if not locks:  # of folders
        monkeypatch.setattr(folders.FolderLock, "take_alone", lambda _: True)
    folder = tmp_path / "a"
    (_, one, _), (model, other, scheduler) = RUN.prepare(), RUN.prepare(seed=6)
    iterate(RUN, model, other, scheduler, 0, 0, 1)
    interrupted(monkeypatch, saves, "settle", lambda: other.save(folder))
    one.save(folder)
    expected = values(model, other)
    one.load(folder)
    assert different(values(*after_load(folder)), expected) == []
    monkeypatch.undo()
    one.save(folder)
    assert len(names(folder)) == 3  # marker, tiles, table: what both left is gone
    one.close()
    other.close()


def after_load(folder: Path) -> tuple[Any, penstock.Optimizer]:
    model, optimizer, _ = RUN.prepare(seed=9)
    optimizer.load(folder)
    return model, optimizer


def test_a_checkpoint_that_another_job_has_just_replaced_is_not_pruned(tmp_path, monkeypatch):
    (_, one, _), (_, other, _) = RUN.prepare(), RUN.prepare(seed=6)
    one.save(tmp_path / "old")
    interrupted(monkeypatch, folders, "checkpoints_in", lambda: other.save(tmp_path / "old"), before=False)
    one.save(tmp_path / "new", keep=1)
    for name in ("old", "new"):
        read_manifest(tmp_path / name)
    one.save(tmp_path / "new", keep=1)
    assert names(tmp_path) == ["new"]
    one.close()
    other.close()


def test_a_folder_that_is_saved_into_is_left_alone(tmp_path, monkeypatch):
    """Another job prunes when the first has written its files, and no marker yet."""
    (_, one, _), (_, other, _) = RUN.prepare(), RUN.prepare(seed=6)
    interrupted(monkeypatch, saves, "commit", lambda: other.save(tmp_path / "b", keep=1))
    one.save(tmp_path / "a")
    for name in ("a", "b"):
        read_manifest(tmp_path / name)
    one.close()
    other.close()


# Folders and modes


def no_table(file: Path, data: bytes) -> FileEntry:
    raise penstock.CheckpointError(f"Writing {file} failed.", file=str(file))


def save_and_wait(optimizer: penstock.Optimizer, path: Path, blocking: bool) -> None:
    optimizer.save(path, blocking=blocking)
    optimizer.synchronize()


@pytest.mark.parametrize("blocking", [True, False])
def test_a_failed_save_leaves_no_folder_that_it_made(blocking, optimizer, tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    monkeypatch.setattr(saves, "write_file", no_table)
    for name in ("new/er/a", "there", "there/a"):
        with pytest.raises(penstock.CheckpointError, match="failed"):
            save_and_wait(optimizer, tmp_path / name, blocking)
    assert names(tmp_path) == ["there"]
    assert names(tmp_path / "there") == []


def test_a_folder_that_was_there_is_synced(optimizer, tmp_path, monkeypatch):
    """Whoever made it may not have waited for the disk."""
    (tmp_path / "parent" / "a").mkdir(parents=True)
    synced: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    optimizer.save(tmp_path / "parent" / "a")
    assert str(tmp_path / "parent") in synced


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_every_file_has_the_mode_that_umask_gives(mask, optimizer, tmp_path):
    before = os.umask(mask)
    try:
        optimizer.save(tmp_path / "a", extra={"tensor": torch.ones(2)})
    finally:
        os.umask(before)
    files = list((tmp_path / "a").iterdir())
    assert len(files) == 4
    assert {file.stat().st_mode & 0o777 for file in files} == {0o666 & ~mask}
    assert (tmp_path / "a" / MARKER).is_file()
