"""Folders of the nvme tier: whether a file of it can be made there, past the page cache, and how much room there is."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path

from penstock.doctor.finding import Finding, broken, fine, slow
from penstock.errors import ConfigError, one_line
from penstock.probe.disks import IN_MEMORY, check_folders, file_system
from penstock.runtime.host_memory import PAGE_BYTES

#: File systems of other machines: every byte crosses a network.
REMOTE = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "9p", "virtiofs", "fuse.sshfs")
#: States of a model of 1B parameters.
LEAST_FREE_BYTES = 16 << 30
_LOCAL = "Name a folder on a local NVMe disk."


def disks(folders: Sequence[str | PathLike[str]]) -> Iterator[Finding]:
    """Describe each folder, and tell whether the nvme tier is quick there.

    Arguments:
        folders: the folders. What is made in them to find out is gone afterwards.
    """
    for folder in folders:
        about = f"disk {one_line(os.fsdecode(os.fspath(folder)))}"
        try:
            check_folders([folder])
            yield _disk(about, Path(folder))
        except ConfigError as error:
            yield broken(about, one_line(str(error)), _LOCAL)
        except (OSError, ValueError) as error:
            yield broken(about, one_line(error), _LOCAL)


def _disk(about: str, folder: Path) -> Finding:
    """Look at a folder that files can be made in."""
    kind, (_, _, free) = file_system(folder), shutil.disk_usage(folder)
    found = f"{kind or 'a file system without a name'}, {free / 2**30:,.1f} GiB free"
    if kind in IN_MEMORY:
        return slow(about, f"{found}: the host's memory, no disk", _LOCAL)
    if kind in REMOTE:
        return slow(about, f"{found}: on another machine", _LOCAL)
    if not _takes_direct(folder):
        return slow(about, f"{found}: takes no direct I/O, so all goes through the page cache", _LOCAL)
    if free < LEAST_FREE_BYTES:
        return slow(about, found, "Free space, or name another folder: a model of 1B parameters keeps 16 GB there.")
    return fine(about, f"{found}, direct I/O")


def _takes_direct(folder: Path) -> bool:
    """Whether a file of a folder can be opened past the page cache."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.truncate(PAGE_BYTES)
        try:
            os.close(os.open(file.name, os.O_RDWR | os.O_DIRECT))
        except OSError:
            return False
        return True
