"""The folders of the nvme tier: how fast records are read and written there, through the engine's own queue of I/O."""

import contextlib
import os
import random
import secrets
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from penstock.config import Options
from penstock.errors import ConfigError, one_line
from penstock.planner.rates import Rate
from penstock.probe.sampling import Case, Deadline, Figures, seconds_of, take_turns
from penstock.runtime.aio import File, Queue, Transfer, check_space, existing_folder, free_disk_bytes
from penstock.runtime.host_memory import PAGE_BYTES, page_aligned
from penstock.runtime.system import core_quota

MOUNTS = Path("/proc/self/mountinfo")
MIB = 1 << 20
LEAST_FILE_BYTES, MOST_FILE_BYTES = 4 * MIB, 512 * MIB
LEAST_FREE_BYTES = 2 * LEAST_FILE_BYTES
#: Of AdamW's states and masters, of a bf16 tile of the default size.
RECORD_BYTES = Options().tile_bytes // 2 * (2 + 4 + 4)
IN_FLIGHT = 4  # records at once
LATENCIES = 32  # reads of a page, one after the other, in a run
_READ, _WRITTEN, _BOTH = "all read", "all written", "half read, half written, both together"
_RATES = {"disk_read": _READ, "disk_write": _WRITTEN, "disk_mixed": _BOTH}
#: Of file systems that are no disk.
IN_MEMORY = ("tmpfs", "ramfs")

Folder = str | PathLike[str]


def check_folders(folders: Sequence[Folder]) -> None:
    """Refuse folders that cannot be measured. Nothing is left there.

    Raises:
        ConfigError: a folder is missing, is none, cannot be written, or is full; or two are the same one. The message
            names it.
    """
    seen: set[Path] = set()
    for folder in folders:
        shown = f"'{one_line(os.fsdecode(os.fspath(folder)))}'"
        try:
            path = existing_folder(folder)
            check_space(path, LEAST_FREE_BYTES)
            tempfile.TemporaryFile(dir=path).close()
        except (OSError, ValueError) as error:  # an `NvmeError` is an `OSError`; a path may have a null byte
            number = error.errno if isinstance(error, OSError) else None
            why = os.strerror(number) if number else one_line(error)
            advice = f"Name a folder that is there, can be written, and has {LEAST_FREE_BYTES:,} bytes free."
            raise ConfigError(f"The folder {shown} cannot be probed: {why}. {advice}") from error
        if path in seen:
            raise ConfigError(f"The folder {shown} is named twice. Name each folder of the nvme tier once.")
        seen.add(path)


def measure_disks(folders: Sequence[Folder], deadline: Deadline) -> Figures:
    """Measure folders, one after the other.

    Arguments:
        folders: what `check_folders` has let pass; several on one disk share what it gives.
        deadline: when to be done.

    Returns:
        `disk_read`, `disk_write`, `disk_mixed`, `disk_seconds`, `disk_cores` and `disk_free` of the slowest one, and
        `folders`; nothing without folders.

    Raises:
        NvmeError: a file cannot be made, or the disk fails.
    """
    slowest: Figures = {}
    for number, folder in enumerate(folders):
        count, of = _sharing(folders, folder), f"; of folder {number + 1}, the slowest" if len(folders) > 1 else ""
        for name, figure in _measure_folder(folder, deadline.share(1 / (len(folders) - number))).items():
            if name in _RATES and count > 1:
                figure = figure.scaled(1 / count, f"; shared by {count} folders of one disk")
            # A record goes to the folder that is filled least, so folders are used alike, and the slowest one decides.
            slower = max if name == "disk_seconds" else min
            slowest[name] = slower(figure.scaled(1, of), slowest.get(name, figure), key=lambda each: each.value)
    if folders:
        slowest["folders"] = Rate.stated(len(folders), "as stated")
    return slowest | free_space(folders)


def free_space(folders: Sequence[Folder]) -> Figures:
    """Return what is free in one folder now, `disk_free`: of several the least, since all are filled alike."""
    if not folders:
        return {}
    free = min(free_disk_bytes(folder) / _sharing(folders, folder) for folder in folders)
    return {"disk_free": Rate.stated(max(1.0, free), "free now" + (", the least" if len(folders) > 1 else ""))}


def _sharing(folders: Sequence[Folder], folder: Folder) -> int:
    """Count the folders that are on the disk of one of them."""
    return [os.stat(each).st_dev for each in folders].count(os.stat(folder).st_dev)


def _measure_folder(folder: Folder, deadline: Deadline) -> Figures:
    """Measure one folder."""
    path = existing_folder(folder) / f"penstock-{os.getpid()}-{secrets.token_hex(4)}-probe"
    with Queue(Options().io_queue_depth) as queue:
        record, nbytes = _sizes(queue, path, deadline)
        with File(queue, path, nbytes, named=False) as file:
            disk = _Disk(file, record)
            disk.rate(_WRITTEN)  # blocks that were never written are faster to read, and slower to write
            where = _where(path.parent, direct=file.direct)
            size = f"{nbytes / MIB:,.0f} MiB in records of {record / MIB:,.1f} MiB"
            told = f"{size}, {IN_FLIGHT} at once, with checksums{where}"
            pages = f"a page read, {LATENCIES} in a run, one after the other{where}"
            cases: dict[str, Case] = {"disk_seconds": (disk.latency, pages)}
            for name, words in _RATES.items():
                cases[name] = partial(disk.rate, words), f"{words}, {told}"
            figures = take_turns(cases, deadline)
    cores = min(float(len(os.sched_getaffinity(0))), core_quota() or float("inf"))
    how = f"what {cores:g} cores could move, by the time of a core that {len(disk.core_rates)} runs took"
    return figures | {"disk_cores": Rate.of(disk.core_rates, how).scaled(cores)}


def _sizes(queue: Queue, path: Path, deadline: Deadline) -> tuple[int, int]:
    """Choose the bytes of a record and of the file, so that a few rounds are over in time."""
    with File(queue, path, LEAST_FILE_BYTES, named=False) as file:
        disk = _Disk(file, MIB)
        _, rate = disk.rate(_WRITTEN), disk.rate(_WRITTEN)  # the first one of blocks that are new
    # The file is written once before, and moved three times in a round, half of it each way in the last: five rounds.
    wanted = int(rate * max(deadline.left(), 0.0)) // 16
    nbytes = max(LEAST_FILE_BYTES, min(wanted, MOST_FILE_BYTES, free_disk_bytes(path.parent) // 4))
    record = min(RECORD_BYTES, nbytes // IN_FLIGHT) // PAGE_BYTES * PAGE_BYTES
    return record, nbytes // record * record


class _Disk:
    """Records of a file, moved as the engine moves them: a few at once, with checksums, past the page cache.

    Arguments:
        file: it has room for two records or more.
        record: the bytes of a record.

    Attributes:
        core_rates: bytes for each second of a core, of every `rate`.
    """

    def __init__(self, file: File, record: int) -> None:
        self._file, self._record = file, record
        generator = torch.Generator("cpu").manual_seed(0)
        self._buffers = [page_aligned(record).random_(0, 256, generator=generator) for _ in range(IN_FLIGHT)]
        self._checksums: dict[int, int] = {}
        self._places = random.Random(0)
        self.core_rates: list[float] = []

    def rate(self, words: str) -> float:
        """Move every record once, as a value of `_RATES` says, and return the bytes/s."""
        count = self._file.size // self._record
        order = [(number, words == _WRITTEN) for number in range(count)]
        if words == _BOTH:  # turn about, the first half read and the second written
            half = count // 2
            order = [(number + half * writes, writes) for number in range(half) for writes in (False, True)]
        before = time.process_time()
        seconds = seconds_of(lambda: self.move(order))
        # Of all threads, and of what the system does for them.
        self.core_rates.append(count * self._record / max(time.process_time() - before, 1e-9))
        return count * self._record / seconds

    def move(self, order: Sequence[tuple[int, bool]]) -> None:
        """Read or write records.

        Arguments:
            order: the number of each, and True if it is written.
        """
        under_way: deque[tuple[int, Transfer]] = deque()
        for turn, (number, writes) in enumerate(order):
            if len(under_way) == IN_FLIGHT:
                self._end(*under_way.popleft())
            offset, buffer = number * self._record, self._buffers[turn % IN_FLIGHT]
            if writes:
                transfer = self._file.write(offset, buffer)
            else:
                transfer = self._file.read(offset, buffer, checksum=self._checksums[number])
            under_way.append((number, transfer))
        while under_way:  # after an error they are waited for by whoever closes the file
            self._end(*under_way.popleft())

    def _end(self, number: int, transfer: Transfer) -> None:
        transfer.wait()
        self._checksums[number] = transfer.checksum  # of a read the same, which was compared

    def latency(self) -> float:
        """Read pages one after the other at places that nobody expects; seconds of each."""
        page, pages = self._buffers[0][:PAGE_BYTES], range(0, self._file.size, PAGE_BYTES)
        offsets = self._places.choices(pages, k=LATENCIES)
        return median(seconds_of(partial(self._read, offset, page)) for offset in offsets)

    def _read(self, offset: int, page: Tensor) -> None:
        self._file.read(offset, page).wait()


def _where(folder: Path, *, direct: bool) -> str:
    """Describe in what a folder differs from one on an ordinary disk; empty where it does not."""
    kind = file_system(folder)
    if kind in IN_MEMORY:
        return f"; a {kind}: the host's memory, no disk"
    return "" if direct else f"; {kind or 'its file system'} takes no direct I/O: through the page cache"


def file_system(folder: Folder, mounts: Path = MOUNTS) -> str:
    """Return the kind of file system that a folder is on, such as "ext4"; empty where the kernel does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        device = os.stat(folder).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        for line in mounts.read_text(errors="replace").splitlines():
            own, _, rest = line.partition(" - ")
            if own.split()[2] == number:
                return rest.split()[0]
    return ""
