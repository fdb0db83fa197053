"""Folders of the nvme tier: which are refused, what is read and written there, and what is said of them."""

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, NvmeError
from penstock.probe.disks import _BOTH, _READ, _WRITTEN, _Disk, check_folders, file_system, measure_disks
from penstock.probe.sampling import Deadline
from penstock.runtime import aio
from penstock.runtime.aio import File, Queue
from tests.lib.memory import disks as folders_of_tests

MIB = 1 << 20


def refused(*folders: Path | str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_folders(folders)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_folders_that_are_none_are_refused_by_name_and_nothing_is_left_in_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "Name a folder that is there, can be written, and has 8,388,608 bytes free."
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    check_folders([tmp_path])
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}
    said = f"The folder '{tmp_path / 'none'}' cannot be probed: No such file or directory. {name}"
    assert refused(tmp_path / "none") == said
    assert f"'{tmp_path / 'file'}' cannot be probed: Not a directory" in refused(tmp_path / "file")
    assert "cannot be probed: " in refused("a\0b")
    assert "is named twice" in refused(tmp_path, tmp_path / "link")
    with monkeypatch.context() as patch:
        patch.setattr(aio, "free_disk_bytes", lambda folder: 4096)
        assert f"No space left on device. {name}" in refused(tmp_path)

    def make(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "TemporaryFile", make)
    assert "Read-only file system. Name a folder that is there, can be written" in refused(tmp_path)


#: Files of this process. Others train beside it, in the same folders.
OWN = f"*penstock-*-{os.getpid()}-*"


@pytest.fixture
def disk(tmp_path: Path) -> Any:
    with Queue(4) as queue, File(queue, tmp_path / "file", 6 * MIB) as file:
        yield _Disk(file, MIB)


def test_every_record_is_moved_once(disk: _Disk) -> None:
    file = disk._file
    for order, moved in ((_WRITTEN, (6, 0)), (_READ, (6, 6)), (_BOTH, (9, 9))):
        assert disk.rate(order) > 0
        assert (file._native.bytes_written, file._native.bytes_read) == (moved[0] * MIB, moved[1] * MIB)
    assert len(disk.core_rates) == 3


def test_what_is_read_is_checked(disk: _Disk) -> None:
    disk.rate(_WRITTEN)
    disk._checksums[3] = 1
    with pytest.raises(NvmeError, match="checksum"):
        disk.rate(_READ)
    disk._file.close()
    assert not disk._file._queue._pending  # nothing writes to memory that is let go of


def test_two_folders_of_one_disk_share_it() -> None:
    folders = folders_of_tests(2)
    figures = measure_disks(folders, Deadline(0.2))
    assert figures["folders"].value == 2
    assert "shared by 2 folders of one disk" in figures["disk_read"].how
    assert "of folder" in figures["disk_write"].how
    free = os.statvfs(folders[0])
    assert figures["disk_free"].value == pytest.approx(free.f_bavail * free.f_frsize / 2, rel=0.05)
    assert not any(list(folder.glob(OWN)) for folder in folders)


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no file system in memory")
def test_a_file_system_in_memory_is_told() -> None:
    assert "; a tmpfs: the host's memory, no disk" in measure_disks(["/dev/shm"], Deadline(0.1))["disk_read"].how
    assert not list(Path("/dev/shm").glob(OWN))


def test_the_kind_of_a_file_system_is_read_from_the_kernels_list(tmp_path: Path) -> None:
    device = os.stat(tmp_path).st_dev
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"junk\n22 1 {os.major(device)}:{os.minor(device)} / / rw,relatime shared:1 - xfs /dev/x rw\n")
    assert file_system(tmp_path, mounts) == ""  # what is not understood is not believed
    mounts.write_text(mounts.read_text().removeprefix("junk\n"))
    assert file_system(tmp_path, mounts) == "xfs"
    assert file_system(tmp_path, tmp_path / "none") == ""
