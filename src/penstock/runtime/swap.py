"""Folders in which the nvme tier makes its files, and the room there."""

import errno
import os
from pathlib import Path

from penstock.errors import NvmeError

ELSEWHERE = "choose another folder with Placement(nvme_path=...)"


def existing_folder(parent: str | os.PathLike[str]) -> Path:
    """Return the path of a folder without symlinks.

    Raises:
        NvmeError: there is no such folder.
    """
    try:
        folder = Path(os.path.realpath(parent, strict=True))
    except OSError as error:
        text = f"The nvme path {os.fspath(parent)!r} cannot be found ({error.strerror}). Create it, or {ELSEWHERE}."
        raise NvmeError(text, file=os.fspath(parent), errno=error.errno) from error
    if not folder.is_dir():
        text = f"The nvme path {str(folder)!r} is no folder. Remove that file and create a folder, or {ELSEWHERE}."
        raise NvmeError(text, file=str(folder), errno=errno.ENOTDIR)
    return folder


def free_disk_bytes(folder: str | os.PathLike[str]) -> int:
    """Return the bytes that this user can still write on a folder's file system.

    Raises:
        OSError: there is no such folder, or it cannot be looked at.
    """
    system = os.statvfs(folder)
    return system.f_bavail * system.f_frsize


def check_space(folder: Path, nbytes: int) -> None:
    """Check that a file system has room for files of some bytes together.

    Raises:
        NvmeError: it has too little free space (`errno.ENOSPC`).
    """
    free_bytes = free_disk_bytes(folder)
    if nbytes > free_bytes:
        text = (
            f"The nvme tier needs {nbytes:,} bytes, and {str(folder)!r} has {free_bytes:,} bytes free. Free "
            f"{nbytes - free_bytes:,} bytes, keep less on the nvme tier, or {ELSEWHERE}."
        )
        raise NvmeError(text, file=str(folder), errno=errno.ENOSPC)
