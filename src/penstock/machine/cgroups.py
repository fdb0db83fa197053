"""What the control groups of a process leave it. A container or a job has less memory and fewer cores than its machine.

A process is in a group of each hierarchy (`/proc/self/cgroup`), and what is set for a group holds for all below it. In
version 2 one hierarchy has every controller, in version 1 each controller has a folder; a hybrid machine has both, and
a controller is in one of them. In a container the path may be that of the machine, of which it sees the last part
alone, or nothing but its own group, at the root.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")

_PAGE_CACHE = ("inactive_file", "active_file")  # what the kernel gives up before it refuses memory to the group

Value = TypeVar("Value")


@dataclass(frozen=True)
class MemoryLimit:
    """The memory that a control group still gives.

    Attributes:
        nbytes: how many bytes.
        name: the file that says so.
    """

    nbytes: int
    name: str


def memory_left(folder: Path = CGROUPS, own: Path = OWN) -> MemoryLimit | None:
    """Return the memory that the groups of this process still give, by the tightest of them.

    Arguments:
        folder: where the groups are mounted.
        own: the file in which the kernel lists the groups of the process.

    Returns:
        `None` where no group limits it.
    """
    found = []
    for group in _groups("memory", folder, own):
        # Above `high` the kernel takes pages back from the group until next to nothing runs: as good as a limit.
        for name, used, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.high", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            limit, usage = _read(group / name, int), _read(group / used, int)
            if limit is not None and limit >= 0 and usage is not None:
                # The usage counts the page cache too, which the kernel would give up first: it is not taken.
                taken = max(0, usage - _page_cache(group / "memory.stat", prefix))
                found.append(MemoryLimit(max(0, limit - taken), str(group / name)))
    return min(found, key=lambda limit: limit.nbytes, default=None)


def core_quota(folder: Path = CGROUPS, own: Path = OWN) -> float | None:
    """Return how many cores' worth of time the groups of this process give.

    Arguments:
        folder: where the groups are mounted.
        own: the file in which the kernel lists the groups of the process.

    Returns:
        `None` where no group limits it.
    """
    found = []
    for group in _groups("cpu", folder, own):
        quota, period = _read(group / "cpu.cfs_quota_us", int), _read(group / "cpu.cfs_period_us", int)
        both = _read(group / "cpu.max", lambda text: [int(word) for word in text.split()])
        if both is not None and len(both) == 2:
            quota, period = both
        if quota is not None and period is not None and quota > 0 and period > 0:  # -1: no limit
            found.append(quota / period)
    return min(found, default=None)


def _groups(controller: str, folder: Path, own: Path) -> Iterator[Path]:
    """Find the folders of the groups that this process is in, the innermost first, as far as they can be seen."""
    for line in (_read(own, str) or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "" and number == "0":  # version 2
            roots = [folder, folder / "unified"]
        elif controller in controllers.split(","):
            roots = [folder / controllers, folder / controller]
        else:
            continue
        root = next((root for root in roots if (root / "cgroup.procs").exists()), None)
        if root is None:
            continue
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        while parts and not root.joinpath(*parts).is_dir():
            del parts[0]  # a container sees the last part of the path alone
        for count in range(len(parts), -1, -1):
            yield root.joinpath(*parts[:count])


def _page_cache(file: Path, prefix: str) -> int:
    """Return the bytes of page cache that a group's statistics count; 0 where they do not say."""
    try:
        values = dict(line.split(maxsplit=1) for line in (_read(file, str) or "").splitlines())
        return sum(max(0, int(values.get(prefix + name, values.get(name, "0")))) for name in _PAGE_CACHE)
    except ValueError:
        return 0


def _read(file: Path, parse: Callable[[str], Value]) -> Value | None:
    """Read a file; `None` where it is not there, or says "max" or what nobody understands."""
    try:
        return parse(file.read_text().strip())
    except (OSError, ValueError):
        return None
