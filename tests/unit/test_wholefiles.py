"""Text files that are whole or not there, and what is no file keeps its place."""

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock.files import check_own, open_own, write_whole
from penstock.planner import Machine


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "kept"
    write_whole(path, "one, of some length\n")
    write_whole(path, "zwei: ü\n")
    assert path.read_text(encoding="utf-8") == "zwei: ü\n"
    assert os.listdir(tmp_path) == ["kept"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_what_fails_leaves_what_was_there_and_nothing_else(error, tmp_path, monkeypatch):
    path = tmp_path / "kept"
    path.write_text("before")

    def fail(_: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(type(error)):
        write_whole(path, "after")
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["kept"]


def test_a_link_is_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "file", tmp_path / "link"
    target.write_text("before")
    link.symlink_to(target)
    write_whole(link, "after")
    assert link.is_symlink()
    assert target.read_text() == "after"


def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    Machine.read("h100-node").write(pipe)  # replaced by a file, as /dev/null was by the first of these writers
    reader.join(timeout=60)
    assert found
    assert found[0].startswith("{")
    assert stat.S_ISFIFO(pipe.lstat().st_mode)


def test_a_pipe_without_a_name_is_written_to():
    read, write = os.pipe()  # as `--out /dev/stdout | less` and `--out >(less)` have it
    with os.fdopen(read) as reader:
        with os.fdopen(write, "w"):
            write_whole(Path(f"/dev/fd/{write}"), "text")
        assert reader.read() == "text"


@pytest.mark.parametrize("path", ["folder", "missing/file"])
def test_what_cannot_be_written_is_an_error(path, tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match=r"folder|missing"):
        write_whole(tmp_path / path, "text")


def test_standard_output_in_a_file_stays_that_file(tmp_path):
    """`--out /dev/stdout > file` put another file in its place, and what was printed went nowhere."""
    code = (
        "from pathlib import Path; from penstock.files import write_whole\n"
        "print('before'); write_whole(Path('/dev/stdout'), 'text\\n'); print('after')"
    )
    with open(tmp_path / "file", "w") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, check=True, timeout=120)
        assert os.fstat(file.fileno()).st_ino == (tmp_path / "file").stat().st_ino
    assert (tmp_path / "file").read_text() == "before\ntext\nafter\n"
    assert os.listdir(tmp_path) == ["file"]


def test_nothing_planted_beside_a_file_is_written_to(tmp_path):
    """The name beside its place could be told beforehand: it ended in the number of the process."""
    theirs = tmp_path / "theirs"
    theirs.write_text("before")
    (tmp_path / f".kept.{os.getpid()}").symlink_to(theirs)
    write_whole(tmp_path / "kept", "text")
    assert theirs.read_text() == "before"


@pytest.mark.parametrize("mode", ["w", "a"])
def test_a_file_of_ours_is_no_link_no_pipe_and_no_folder(mode, tmp_path):
    (tmp_path / "theirs").write_text("before")
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    (tmp_path / "dangling").symlink_to(tmp_path / "new")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)  # so that opening it would not wait
    for name in ("link", "dangling", "folder", "pipe"):
        with pytest.raises(OSError, match=r"it is (a link, which is not followed|no file)|Is a directory"):
            open_own(tmp_path / name, mode)
        with pytest.raises(OSError, match=r"it is (a link, which is not followed|no file)"):
            check_own(tmp_path / name)
    os.close(reader)
    assert (tmp_path / "theirs").read_text() == "before"
    assert not (tmp_path / "new").exists()
    with open_own(check_own(tmp_path / "ours"), mode) as file:
        file.write("text")
    with open_own("/dev/null", mode) as file:
        file.write("text")
    assert (tmp_path / "ours").read_text() == "text"
