"""The looks of `penstock doctor`: versions, the device, the processor, memory, limits, and folders of the nvme tier.

A drive counts what was written in all its life, and how much of its rated endurance that is: its SMART log (NVM Express
Base Specification, Get Log Page, log page 02h), which root alone may read.
"""

import contextlib
import ctypes
import fcntl
import os
import platform
import resource
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import torch

from penstock.errors import ConfigError, one_line
from penstock.planner.formatting import decimal, size
from penstock.probe.disks import IN_MEMORY, check_folders, file_system
from penstock.probe.fingerprint import DRIVER, accelerator, cpu_model, driver
from penstock.rules.rule import instruction_set
from penstock.runtime.hardware import default_device
from penstock.runtime.host_memory import available_host_memory
from penstock.runtime.system import NODES, core_quota, numbered_nodes

#: Libraries whose versions are told: Penstock runs on them, has loops for them, or reads their files.
LIBRARIES = ("penstock", "torch", "transformers", "accelerate", "trl", "lightning", "peft", "datasets", "deepspeed")
#: The files that drivers of accelerators have while they are loaded.
DRIVERS = {"an NVIDIA": DRIVER, "an AMD": Path("/sys/module/amdgpu/initstate")}
HUGE_PAGES, SHM = Path("/sys/kernel/mm/transparent_hugepage/enabled"), Path("/dev/shm")
#: Of memory: below it the cpu tier holds no model of today. Of /dev/shm: data loaders' workers and NCCL share memory
#: there. Of a disk: states of a model of 1B parameters.
LEAST_BYTES, LEAST_DISK_BYTES = 1 << 30, 16 << 30
#: Files of the nvme tier, of checkpoints and of a data loader's workers are open at once.
LEAST_FILES = 1024
#: glibc gives larger blocks than this back to the kernel when they are freed, unless it is told otherwise.
MALLOC, MALLOC_VARIABLES = "MALLOC_MMAP_THRESHOLD_", ("LD_PRELOAD", "GLIBC_TUNABLES")
#: File systems on which the nvme tier is slow.
SLOW_KINDS = dict.fromkeys(IN_MEMORY, "the host's memory, no disk") | dict.fromkeys(
    ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "9p", "virtiofs", "fuse.sshfs"), "on another machine"
)
#: Percent of a drive's life.
WORN, WORN_OUT = 80, 100

_SECTOR_BYTES, _MOST_CHARS = 512, 300
_LOCAL = "Name a folder on a local NVMe disk."


class Verdict(StrEnum):
    """State of one thing."""

    FINE = "fine"
    SLOW = "slow"
    BROKEN = "broken"


class Finding(NamedTuple):
    """Result of a look at one thing.

    Attributes:
        about: the thing, in a word or two.
        verdict: its state: `SLOW` works, `BROKEN` does not.
        found: a description of it.
        mend: what to do; empty where it is fine.
    """

    about: str
    verdict: Verdict
    found: str
    mend: str = ""


def finding(about: str, found: object, mend: str = "", *, is_broken: bool = False) -> Finding:
    """Make a finding, in one line whatever the machine says: fine without `mend`, else slow, or broken."""
    verdict = Verdict.FINE if not mend else Verdict.BROKEN if is_broken else Verdict.SLOW
    return Finding(about, verdict, one_line(str(found), _MOST_CHARS), mend)


def versions() -> Iterator[Finding]:
    """Report the versions of libraries, of Python and of the system."""
    installed = []
    for name in LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            installed.append(f"{name} {version(name)}")
    yield finding("libraries", ", ".join(installed))
    yield finding("system", f"{platform.platform()}, Python {platform.python_version()}, {sys.executable}")


def devices(drivers: Mapping[str, Path] = DRIVERS) -> Iterator[Finding]:
    """Report which device computes, and whether there is one that torch does not see.

    Arguments:
        drivers: the files of loaded drivers, by their makers.
    """
    device = default_device()
    hiding = [name for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if os.environ.get(name) in ("", "-1")]
    loaded = [maker for maker, file in drivers.items() if file.exists()]
    if device.type != "cpu":
        name, nbytes, count = accelerator(device)
        yield finding("device", f"{count} x {name}, {size(nbytes)}, {device.type} {driver(device)}".rstrip())
    elif not loaded:
        yield finding("device", "the cpu; no accelerator's driver is loaded")
    elif hiding:
        yield finding("device", f"the cpu: {hiding[0]} hides the others", f"Unset {hiding[0]}.")
    else:
        built = torch.version.cuda or getattr(torch.version, "hip", None)
        why = f"torch is built for {built} and finds no device" if built else "torch is built for the cpu alone"
        mend = "Install a torch that is built for the driver (pytorch.org), and see that nvidia-smi or rocm-smi works."
        yield finding("device", f"the cpu, though {loaded[0]} driver is loaded: {why}", mend, is_broken=True)


def processor() -> Iterator[Finding]:
    """Report the processor that updates state on the host, and the instruction set of its kernels."""
    chosen = instruction_set()
    lacks_avx2 = chosen == "generic" and platform.machine() == "x86_64"
    mend = "Without AVX2, updates on the host take several times as long: keep the optimizer on the device."
    yield finding("processor", f"{cpu_model()}, {chosen}", mend if lacks_avx2 else "")


def cores(nodes: Path = NODES) -> Iterator[Finding]:
    """Report the cores that this process may use, their NUMA nodes, and how much of their time a control group leaves.

    Arguments:
        nodes: the kernel's folder of NUMA nodes.
    """
    usable = os.sched_getaffinity(0)
    quota = core_quota() or len(usable)
    count = sum(bool(of_node & usable) for of_node in numbered_nodes(nodes).values())
    found = f"{len(usable)} of {os.cpu_count()}" + (f", on {count} NUMA nodes" if count > 1 else "")
    if quota < len(usable):
        found += f", of which a control group gives the time of {quota:.3g}"
    threads = f"OMP_NUM_THREADS={max(1, int(quota))}"
    mend = f"Raise the container's quota (--cpus), or set {threads}: more threads are stopped inside updates."
    yield finding("cores", found, mend if quota < len(usable) else "")


def memory() -> Iterator[Finding]:
    """Report how much memory this process can still have, and who limits it: the host, or a control group."""
    left = available_host_memory()
    if left is None:
        yield finding("memory", "the kernel does not say what is free", "State it: plans and budgets take a size.")
    else:
        mend = "End other programs, or raise the container's limit (--memory)." if left.nbytes < LEAST_BYTES else ""
        yield finding("memory", f"{left.whose} {size(left.nbytes)} free", mend, is_broken=True)


def huge_pages(file: Path = HUGE_PAGES) -> Iterator[Finding]:
    """Report whether the kernel gives huge pages to memory that asks for them, as that of the cpu tier does.

    Arguments:
        file: the kernel's setting, the one in use in brackets.
    """
    setting = _read(file)
    chosen = setting.partition("[")[2].partition("]")[0] or setting or "the kernel does not say"
    is_off = setting and chosen not in ("always", "madvise")
    yield finding("huge pages", chosen, f"As root: echo madvise > {file}" if is_off else "")


def locked_memory() -> Iterator[Finding]:
    """Report how much memory may be page-locked, as copies to an accelerator need."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_limited = limit != resource.RLIM_INFINITY
    # CUDA's driver locks past the limit, others' do not; in containers of some runtimes neither does.
    mend = "Raise it (ulimit -l unlimited, or --ulimit memlock=-1 for a container): else copies pass a buffer."
    needs_more = is_limited and default_device().type != "cpu"
    yield finding("locked memory", f"at most {size(limit)}" if is_limited else "unlimited", mend if needs_more else "")


def shared_memory(folder: Path = SHM) -> Iterator[Finding]:
    """Report how much room shared memory has, of which containers get little.

    Arguments:
        folder: its mount point.
    """
    free = shutil.disk_usage(folder).free if folder.is_dir() else 0
    mend = "Mount a tmpfs of some GiB there (--shm-size 8g for a container): data loaders' workers and NCCL need it."
    yield finding("shared memory", f"{size(free)} free in {folder}", mend if free < LEAST_BYTES else "")


def open_files() -> Iterator[Finding]:
    """Report how many files may be open."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_limited = limit != resource.RLIM_INFINITY
    mend = f"Raise it: ulimit -n {min(4096, most) if most > 0 else 4096}" if is_limited and limit < LEAST_FILES else ""
    yield finding("open files", f"at most {limit:,}" if is_limited else "unlimited", mend)


def allocator(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Report how the C library's allocator treats large blocks, which matters where the cpu is the device.

    Arguments:
        environment: the variables that set it.
    """
    # LD_PRELOAD has jemalloc, tcmalloc or mimalloc; GLIBC_TUNABLES has glibc.malloc.mmap_threshold.
    is_set = MALLOC in environment or any("malloc" in environment.get(name, "") for name in MALLOC_VARIABLES)
    if is_set or default_device().type != "cpu" or platform.libc_ver()[0] != "glibc":
        yield finding("malloc", "set by the environment" if is_set else "as it comes")
    else:
        found = "glibc as it comes gives every large tensor's pages back when it is freed, and the cpu is the device"
        yield finding("malloc", found, f"export {MALLOC}=8000000000 MALLOC_TRIM_THRESHOLD_=16000000000")


def disks(folders: Sequence[str | PathLike[str]]) -> Iterator[Finding]:
    """Describe each folder, tell whether the nvme tier is fast there, and describe each drive below, once.

    Arguments:
        folders: the folders. Files that are made in them to find out are removed.
    """
    below: dict[Path, None] = {}
    for folder in folders:
        about = f"disk {one_line(os.fsdecode(os.fspath(folder)))}"
        try:
            check_folders([folder])
            yield _disk(about, Path(folder))
            below |= dict.fromkeys(drives(folder))
        except (ConfigError, OSError, ValueError) as error:
            yield finding(about, error, _LOCAL, is_broken=True)
    yield from map(_drive, below)


def _disk(about: str, folder: Path) -> Finding:
    """Describe a folder in which files can be made."""
    kind, free = file_system(folder), shutil.disk_usage(folder).free
    found = f"{kind or 'a file system without a name'}, {size(free)} free"
    indirect = "takes no direct I/O, so all goes through the page cache"
    if why := SLOW_KINDS.get(kind) or ("" if _takes_direct(folder) else indirect):
        return finding(about, f"{found}: {why}", _LOCAL)
    mend = "Free space, or name another folder: a model of 1B parameters keeps 16 GB there."
    return finding(about, f"{found}, direct I/O", mend if free < LEAST_DISK_BYTES else "")


def _takes_direct(folder: Path) -> bool:
    """Return True if a file in a folder can be read and written past the page cache."""
    with tempfile.TemporaryFile(dir=folder) as file, contextlib.suppress(OSError):
        fcntl.fcntl(file, fcntl.F_SETFL, os.O_DIRECT)
        return True
    return False


def _drive(block: Path) -> Finding:
    """Describe a drive by the kernel's folder of it, and tell how much of its life is used."""
    about, is_nvme = f"drive {block.name}", block.name.startswith("nvme")
    model, nbytes = _read(block / "device" / "model"), _SECTOR_BYTES * int(_read(block / "size"))
    found = f"{model}, {decimal(nbytes)}" if model else decimal(nbytes)
    for sensor in (*block.glob("device/hwmon*/temp1_input"), *block.glob("device/hwmon/hwmon*/temp1_input")):
        if degrees := _read(sensor):  # a drive that sleeps has none
            found += f", {int(degrees) / 1000:.0f} °C"
    wear = read_wear(f"/dev/{block.name}") if is_nvme else None
    if wear is None:
        found += f", {decimal(_SECTOR_BYTES * int(_read(block / 'stat').split()[6]))} written since the system started"
        how = f"; its wear: sudo penstock doctor, or sudo nvme smart-log /dev/{block.name}"
        return finding(about, found + (how if is_nvme else ""))
    found += f", {decimal(wear.written_bytes)} written, {wear.used} % of its life used"
    if wear.warnings or wear.used >= WORN_OUT:
        mend = "Save checkpoints on another drive, and replace this one."
        return finding(about, "; ".join([found, *wear.warnings]), mend, is_broken=True)
    mend = "Keep less on the nvme tier (penstock plan says what a step writes), and plan to replace the drive."
    return finding(about, found, mend if wear.used >= WORN else "")


def _read(file: Path) -> str:
    """Read a file of the kernel's; empty where there is none."""
    with contextlib.suppress(OSError):
        return file.read_text(errors="replace").strip()
    return ""


def examine(folders: Sequence[str | PathLike[str]] = ()) -> list[Finding]:
    """Look at this machine: whether it is fit to train on, what is slow on it, and how to mend it.

    Arguments:
        folders: the folders of the nvme tier.

    Returns:
        What was found, in a reader's order. A look that fails is a finding too.

    Example:
        >>> [finding.about for finding in examine() if finding.verdict is Verdict.BROKEN]
        []
    """
    system = (versions, devices, processor, cores, memory, huge_pages, locked_memory, shared_memory, open_files)
    found: list[Finding] = []
    for look in (*system, allocator, partial(disks, folders)):
        try:
            found.extend(look())
        except Exception as error:  # of a machine that nobody has seen: the other looks are what is wanted
            name = getattr(look, "__name__", "disks").replace("_", " ")
            found.append(finding(name, f"could not be looked at: {one_line(error)}", "Tell us, with this output."))
    return found


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
