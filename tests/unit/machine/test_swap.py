"""Folders of the nvme tier, and files without names that are made there."""

import errno
import os
from pathlib import Path

import pytest

from penstock.errors import NvmeError
from penstock.runtime.swap import check_space, existing_folder


def test_a_folder_is_found_through_links_and_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    monkeypatch.chdir(tmp_path)
    assert existing_folder("link") == tmp_path / "disk"


@pytest.mark.parametrize(
    ("name", "says", "number"),
    [
        ("missing", "cannot be found (No such file or directory). Create it, or choose another", errno.ENOENT),
        ("file", "is no folder. Remove that file and create a folder, or choose another", errno.ENOTDIR),
        ("file/below", "cannot be found (Not a directory). Create it, or choose another", errno.ENOTDIR),
        ("circle", "cannot be found (Too many levels of symbolic links). Create it, or choose", errno.ELOOP),
    ],
)
def test_what_is_no_folder(tmp_path: Path, name: str, says: str, number: int) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(NvmeError) as caught:
        existing_folder(tmp_path / name)
    assert f"The nvme path '{tmp_path / name}' {says}" in str(caught.value)
    assert "Placement(nvme_path=...)" in str(caught.value)
    assert caught.value.errno == number


def test_too_little_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = list(os.statvfs(tmp_path))
    fields[1], fields[3], fields[4] = 512, 9, 4  # fragments of 512 bytes: 9 free, 4 of them for users
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    check_space(tmp_path, 2048)
    with pytest.raises(NvmeError, match=r"needs 2,049 bytes, and .* 2,048 bytes free\. Free 1 bytes, keep") as caught:
        check_space(tmp_path, 2049)
    assert caught.value.errno == errno.ENOSPC
    assert str(tmp_path) in str(caught.value)
