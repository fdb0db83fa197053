"""The drives below a folder, and what an NVMe drive counts itself.

A drive counts what was written in all its life, and how much of its rated endurance that is: its SMART log (NVM Express
Base Specification, Get Log Page, log page 02h), which root alone may read.
"""

import ctypes
import fcntl
import os
import struct
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import NamedTuple

#: The kernel's folder of each block device, by its numbers.
BLOCK_DEVICES = Path("/sys/dev/block")
#: The bits of a critical warning, the lowest first.
WARNINGS = ("spare blocks run out", "it is too hot", "it is unreliable", "it is read-only", "its power backup failed")

_DATA_UNIT_BYTES, _LOG_BYTES = 512_000, 512
_NVME_IOCTL_ADMIN_CMD, _GET_LOG_PAGE, _ALL_NAMESPACES, _SMART_LOG = 0xC0484E41, 0x02, 0xFFFFFFFF, 0x02
#: struct nvme_passthru_cmd: opcode, namespace, address and bytes of the data, and the first of six words.
_COMMAND = struct.Struct("=B3xI16xQ4xII28x")
#: From the log's begin: warnings, spare blocks and their threshold, life used, data units written; all others left out.
_LOG = struct.Struct("<B2xBBB42xQ")


class Wear(NamedTuple):
    """Counters of an NVMe drive.

    Attributes:
        warnings: its critical warnings, in words.
        used: percent of its rated endurance that is used; it may be above 100.
        written_bytes: bytes that were written to it in its life.
    """

    warnings: tuple[str, ...]
    used: int
    written_bytes: int


def drives(folder: str | PathLike[str], block_devices: Path = BLOCK_DEVICES) -> Iterator[Path]:
    """Find the drives below a folder, through partitions, the device mapper and software RAID.

    Arguments:
        folder: the folder.
        block_devices: the kernel's folder of each block device, by its numbers.

    Yields:
        The kernel's folder of each drive. None for a file system that is not on one block device: of a network, of
        memory, overlays, btrfs, ZFS.
    """
    number = os.stat(folder).st_dev
    yield from _below(block_devices / f"{os.major(number)}:{os.minor(number)}")


def _below(block: Path) -> Iterator[Path]:
    block = block.resolve()
    whole = block.parent if (block / "partition").exists() else block
    parts = sorted((whole / "slaves").glob("*"))
    for part in parts:
        yield from _below(part)
    if not parts and whole.exists():
        yield whole


def read_wear(device: str | PathLike[str]) -> Wear | None:
    """Read the counters of an NVMe drive.

    Arguments:
        device: its file, such as "/dev/nvme0n1".

    Returns:
        The counters; `None` where there are none, or this process may not read them.
    """
    page = ctypes.create_string_buffer(_LOG_BYTES)
    what = _SMART_LOG | (_LOG_BYTES // 4 - 1) << 16  # the page, and how many words of it less one
    command = _COMMAND.pack(_GET_LOG_PAGE, _ALL_NAMESPACES, ctypes.addressof(page), _LOG_BYTES, what)
    try:
        with open(device, "rb", buffering=0) as file:
            status = fcntl.ioctl(file, _NVME_IOCTL_ADMIN_CMD, bytearray(command))
    except OSError:
        return None
    warnings, spare, threshold, used, units = _LOG.unpack_from(page)
    warnings |= spare < threshold
    named = tuple(words for bit, words in enumerate(WARNINGS) if warnings >> bit & 1)
    return None if status else Wear(named, used, units * _DATA_UNIT_BYTES)
