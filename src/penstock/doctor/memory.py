"""Host memory: how much there is, what limits it, and what makes it slow."""

import os
import platform
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path

from penstock.doctor.finding import Finding, broken, fine, slow
from penstock.runtime.hardware import default_device
from penstock.runtime.host_memory import available_host_memory
from penstock.runtime.system import NODES, core_quota, numbered_nodes

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SHM = Path("/dev/shm")
#: Data loaders' workers and NCCL put what they share there.
LEAST_SHM_BYTES = 1 << 30
#: Below this the tier holds no model of today.
LEAST_FREE_BYTES = 1 << 30
#: Files of the nvme tier, of checkpoints and of a data loader's workers are open at once.
LEAST_FILES = 1024
#: glibc gives larger blocks than this back to the kernel when they are freed, unless it is told otherwise.
MALLOC = "MALLOC_MMAP_THRESHOLD_"
_OTHERS = ("tcmalloc", "jemalloc", "mimalloc")


def memory() -> Iterator[Finding]:
    """Tell what memory this process can still have, and who limits it: the host, or a control group."""
    left = available_host_memory()
    if left is None:
        yield slow("memory", "the kernel does not say what is free", "State it: plans and budgets take a size.")
    elif left.nbytes < LEAST_FREE_BYTES:
        mend = "End other programs, or raise the container's limit (--memory)."
        yield broken("memory", f"{left.whose} {_gib(left.nbytes)} free", mend)
    else:
        yield fine("memory", f"{left.whose} {_gib(left.nbytes)} free")


def cores() -> Iterator[Finding]:
    """Tell how many cores this process may use, and what a control group leaves of them."""
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota = core_quota()
    if quota is not None and quota < usable:
        yield slow(
            "cores",
            f"{usable}, of which a control group gives the time of {quota:.3g}",
            f"Raise the container's quota (--cpus), or set OMP_NUM_THREADS={max(1, int(quota))}: threads beyond it are "
            "stopped in the middle of an update.",
        )
    elif usable < there:
        yield fine("cores", f"{usable} of the machine's {there}")
    else:
        yield fine("cores", usable)


def numa(folder: Path = NODES) -> Iterator[Finding]:
    """Tell the NUMA nodes whose cores this process may use.

    Arguments:
        folder: where the kernel lists them.
    """
    usable = os.sched_getaffinity(0)
    nodes = [number for number, there in numbered_nodes(folder).items() if there & usable]
    if len(nodes) > 1:
        yield fine("numa nodes", f"{len(nodes)}: a rank keeps to its device's node, by its own threads and memory")


def huge_pages(file: Path = HUGE_PAGES) -> Iterator[Finding]:
    """Tell whether the kernel gives huge pages to those that ask, as Penstock does for its own memory.

    Arguments:
        file: the kernel's setting, the one in use in brackets.
    """
    setting = _read(file)
    if setting is None:
        yield fine("huge pages", "the kernel does not say")
        return
    chosen = setting.partition("[")[2].partition("]")[0]
    if chosen in ("always", "madvise"):
        yield fine("huge pages", chosen)
    else:
        yield slow("huge pages", chosen or setting, f"As root: echo madvise > {file}")


def locked_memory() -> Iterator[Finding]:
    """Tell how much memory may be page-locked, which copies to an accelerator want."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        yield fine("locked memory", "unlimited")
    elif default_device().type == "cpu":
        yield fine("locked memory", f"{_gib(limit)}; the cpu is the device, and nothing is locked")
    else:
        # CUDA's driver locks past the limit, others' do not; in containers of some runtimes neither does.
        yield slow(
            "locked memory",
            f"at most {_gib(limit)}",
            "Raise it (ulimit -l unlimited; --ulimit memlock=-1 for a container): copies from memory that is not "
            "locked pass a buffer.",
        )


def shared_memory(folder: Path = SHM) -> Iterator[Finding]:
    """Tell how much room shared memory has, of which containers get little.

    Arguments:
        folder: where it is mounted.
    """
    try:
        state = os.statvfs(folder)
    except OSError:
        yield slow("shared memory", f"{folder} is not there", "Mount a tmpfs there: data loaders' workers want it.")
        return
    free = state.f_bavail * state.f_frsize
    if free < LEAST_SHM_BYTES:
        yield slow(
            "shared memory",
            f"{_gib(free)} free in {folder}",
            "Raise it (--shm-size 8g, or --ipc host, for a container): data loaders' workers and NCCL fail without it.",
        )
    else:
        yield fine("shared memory", f"{_gib(free)} free in {folder}")


def open_files() -> Iterator[Finding]:
    """Tell how many files may be open."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < LEAST_FILES:
        yield slow("open files", f"at most {limit:,}", f"Raise it: ulimit -n {min(4096, most) if most > 0 else 4096}")
    else:
        yield fine("open files", "unlimited" if limit == resource.RLIM_INFINITY else f"at most {limit:,}")


def allocator(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Tell how the C library's allocator treats large blocks, which matters where the cpu is the device.

    Arguments:
        environment: the variables that set it.
    """
    preloaded = next((name for name in _OTHERS if name in environment.get("LD_PRELOAD", "")), None)
    if preloaded is not None:
        yield fine("malloc", preloaded)
    elif MALLOC in environment or "glibc.malloc" in environment.get("GLIBC_TUNABLES", ""):
        yield fine("malloc", "glibc, tuned")
    elif default_device().type != "cpu" or platform.libc_ver()[0] != "glibc":
        yield fine("malloc", "as it comes")
    else:
        yield slow(
            "malloc",
            "glibc as it comes gives every large tensor's pages back when it is freed, and the cpu is the device",
            f"export {MALLOC}=8000000000 MALLOC_TRIM_THRESHOLD_=16000000000",
        )


def _gib(nbytes: int) -> str:
    """Write bytes for people."""
    return f"{nbytes / 2**30:,.1f} GiB" if nbytes >= 2**29 else f"{nbytes / 2**20:,.1f} MiB"


def _read(file: Path) -> str | None:
    """Read a file of the kernel's; `None` where there is none."""
    try:
        return file.read_text(errors="replace").strip()
    except (OSError, ValueError):
        return None
