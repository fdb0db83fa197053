"""The folders of the nvme tier: how fast records are read and written there, through the engine's own queue of I/O."""

import contextlib
import errno
import os
import random
import secrets
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from statistics import median

import torch

from penstock.config import Options
from penstock.errors import ConfigError, one_line
from penstock.probe.sampling import Deadline, Measurement, Turns, quartiles, seconds_of, take_turns
from penstock.runtime.aio import File, Queue, Transfer, check_space, existing_folder, free_disk_bytes
from penstock.runtime.host_memory import PAGE_BYTES, page_aligned
from penstock.runtime.system import core_quota

MOUNTS = Path("/proc/self/mountinfo")
MIB = 1 << 20
LEAST_FILE_BYTES, MOST_FILE_BYTES = 4 * MIB, 512 * MIB
LEAST_FREE_BYTES = 2 * LEAST_FILE_BYTES
IN_FLIGHT = 4  # records at once
LATENCIES = 32  # reads of a page, one after the other, in a run
#: Of file systems that are no disk.
IN_MEMORY = ("tmpfs", "ramfs")

_ADVICE = {
    errno.ENOENT: "Create it, or name another one.",
    errno.ENOTDIR: "Name a folder.",
    errno.ENOSPC: f"Free {LEAST_FREE_BYTES:,} bytes there, or name another one.",
}

Folder = str | PathLike[str]


def record_bytes() -> int:
    """Count the bytes of a record of AdamW's states and masters, of a bf16 tile of the default size."""
    return Options().tile_bytes // 2 * (2 + 4 + 4)


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
            advice = _ADVICE.get(number or 0, "Make it a folder that can be written, or name another one.")
            raise ConfigError(f"The folder {shown} cannot be probed: {why}. {advice}") from error
        if path in seen:
            raise ConfigError(f"The folder {shown} is named twice. Name each folder of the nvme tier once.")
        seen.add(path)


def measure_disks(folders: Sequence[Folder], deadline: Deadline) -> dict[str, Measurement]:
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
    if not folders:
        return {}
    found = []
    for number, folder in enumerate(folders):
        found.append(_measure_folder(folder, deadline.share(1 / (len(folders) - number))))
    disks = [os.stat(folder).st_dev for folder in folders]
    sharing = [disks.count(disk) for disk in disks]
    figures = {}
    for name in ("disk_read", "disk_write", "disk_mixed", "disk_seconds", "disk_cores"):
        # A record goes to the folder that is filled least, so folders are used alike, and the slowest one decides.
        latency, whole = name == "disk_seconds", name in ("disk_seconds", "disk_cores")
        each = [one[name] if whole else _divided(one[name], count) for one, count in zip(found, sharing, strict=True)]
        slowest = (max if latency else min)(each, key=lambda figure: figure.value)
        where = f"; of folder {each.index(slowest) + 1} of {len(folders)}, the slowest" if len(folders) > 1 else ""
        figures[name] = slowest._replace(how=slowest.how + where)
    return {**figures, **free_space(folders), "folders": Measurement(*(float(len(folders)),) * 3, "as stated")}


def free_space(folders: Sequence[Folder]) -> dict[str, Measurement]:
    """Say what is free in one folder now, `disk_free`: of several the least, since all are filled alike."""
    if not folders:
        return {}
    disks = [os.stat(folder).st_dev for folder in folders]
    free = [free_disk_bytes(folder) / disks.count(disk) for folder, disk in zip(folders, disks, strict=True)]
    value = max(1.0, min(free))
    return {"disk_free": Measurement(value, value, value, "free now" + (", the least" if len(folders) > 1 else ""))}


def _divided(figure: Measurement, count: int) -> Measurement:
    """Give one folder its part of a disk that several are on."""
    if count == 1:
        return figure
    value, low, high, how = figure
    return Measurement(value / count, low / count, high / count, f"{how}; shared by {count} folders of one disk")


def _measure_folder(folder: Folder, deadline: Deadline) -> dict[str, Measurement]:
    """Measure one folder."""
    path = existing_folder(folder) / f"penstock-{os.getpid()}-{secrets.token_hex(4)}-probe"
    with contextlib.ExitStack() as closing:
        queue = closing.enter_context(Queue(Options().io_queue_depth))
        record, nbytes = _sizes(queue, path, deadline)
        file = closing.enter_context(File(queue, path, nbytes, named=False))
        disk = _Disk(file, record)
        disk.move(writes=True, reads=False)  # blocks that were never written are faster to read, and slower to write
        cases: dict[str, Callable[[], float]] = {
            "disk_read": partial(disk.rate, reads=True, writes=False),
            "disk_write": partial(disk.rate, reads=False, writes=True),
            "disk_mixed": partial(disk.rate, reads=True, writes=True),
            "disk_seconds": disk.latency,
        }
        turns = take_turns(cases, deadline)
        where = _where(path.parent, direct=file.direct)
    return _figures(turns, record, nbytes, where) | {"disk_cores": disk.cores_rate()}


def _sizes(queue: Queue, path: Path, deadline: Deadline) -> tuple[int, int]:
    """Choose the bytes of a record and of the file, so that a few rounds are over in time."""
    free, nbytes = free_disk_bytes(path.parent), LEAST_FILE_BYTES
    with File(queue, path, nbytes, named=False) as file:
        disk = _Disk(file, MIB)
        disk.move(writes=True, reads=False)
        rate = nbytes / seconds_of(lambda: disk.move(writes=True, reads=False))
    # The file is written once before, and moved three times in a round, half of it each way in the last: five rounds.
    wanted = int(rate * max(deadline.left(), 0.0)) // 16
    nbytes = max(LEAST_FILE_BYTES, min(wanted, MOST_FILE_BYTES, free // 4))
    record = min(record_bytes(), nbytes // IN_FLIGHT) // PAGE_BYTES * PAGE_BYTES
    return record, nbytes // record * record


class _Disk:
    """Records of a file, moved as the engine moves them: a few at once, with checksums, past the page cache.

    Arguments:
        file: it has room for two records or more.
        record: the bytes of a record.
    """

    def __init__(self, file: File, record: int) -> None:
        self._file = file
        self._record = record
        self._count = file.size // record
        self._buffers = [page_aligned(record).random_(0, 256, generator=_generator()) for _ in range(IN_FLIGHT)]
        self._checksums: list[int | None] = [None] * self._count
        self._places = random.Random(0)
        self._core_seconds: list[float] = []  # of a core, for each time that every record was moved

    def rate(self, *, reads: bool, writes: bool) -> float:
        """Move every record once, and return the bytes/s."""
        before = time.process_time()  # of all threads, and of what the system does for them
        rate = self._count * self._record / seconds_of(partial(self.move, reads=reads, writes=writes))
        self._core_seconds.append(max(time.process_time() - before, 1e-9))
        return rate

    def cores_rate(self) -> Measurement:
        """Say how many bytes/s all cores could move if they did nothing else, of the runs until now."""
        cores = min(float(len(os.sched_getaffinity(0))), core_quota() or float("inf"))
        rates = [cores * self._count * self._record / seconds for seconds in self._core_seconds]
        how = f"what {cores:g} cores could move, by the time of a core that {len(rates)} runs of the above took"
        return Measurement(median(rates), *quartiles(rates), how)

    def move(self, *, reads: bool, writes: bool) -> None:
        """Read every record, or write it; where it is both, one half is read while the other is written."""
        under_way: deque[tuple[int, Transfer, bool]] = deque()
        for turn, (number, write) in enumerate(self._order(reads=reads, writes=writes)):
            if len(under_way) == IN_FLIGHT:
                self._end(*under_way.popleft())
            offset, buffer = number * self._record, self._buffers[turn % IN_FLIGHT]
            if write:
                transfer = self._file.write(offset, buffer)
            else:
                transfer = self._file.read(offset, buffer, checksum=self._checksums[number])
            under_way.append((number, transfer, write))
        while under_way:  # after an error they are waited for by whoever closes the file
            self._end(*under_way.popleft())

    def latency(self) -> float:
        """Read pages one after the other at places that nobody expects; seconds of each."""
        page = self._buffers[0][:PAGE_BYTES]
        pages = self._file.size // PAGE_BYTES
        samples = []
        for _ in range(LATENCIES):
            offset = self._places.randrange(pages) * PAGE_BYTES
            samples.append(seconds_of(lambda offset=offset: self._file.read(offset, page).wait()))  # type: ignore[misc]
        return median(samples)

    def _order(self, *, reads: bool, writes: bool) -> Iterator[tuple[int, bool]]:
        """Give the records in order, and whether each is written."""
        if not (reads and writes):
            yield from ((number, writes) for number in range(self._count))
            return
        half = self._count // 2
        for number in range(half):
            yield number, False
            yield half + number, True

    def _end(self, number: int, transfer: Transfer, write: bool) -> None:
        transfer.wait()
        if write:
            self._checksums[number] = transfer.checksum


def _figures(turns: Turns, record: int, nbytes: int, where: str) -> dict[str, Measurement]:
    """Make the figures of a folder."""
    told = f"{nbytes / MIB:,.0f} MiB in records of {record / MIB:,.1f} MiB, {IN_FLIGHT} at once, with checksums{where}"
    verbs = {
        "disk_read": "all read",
        "disk_write": "all written",
        "disk_mixed": "half read, half written, both together",
    }
    figures = {name: turns.measurement(name, f"{verb}, {told}") for name, verb in verbs.items()}
    pages = f"a page read, {LATENCIES} in a run, one after the other{where}"
    return figures | {"disk_seconds": turns.measurement("disk_seconds", pages)}


def _where(folder: Path, *, direct: bool) -> str:
    """Say what is no ordinary disk about a folder; nothing of one that is."""
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


def _generator() -> torch.Generator:
    return torch.Generator("cpu").manual_seed(0)
