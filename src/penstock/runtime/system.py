"""Facts of the operating system: hosts, control groups, NUMA nodes, threads, and the C library's memory."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from penstock._native import Pool
from penstock.errors import one_line

# ----------------------------------------------------------------------------------------------------------------------
# Identity of the hosts of a job, and their names in messages.
# ----------------------------------------------------------------------------------------------------------------------


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # of the kernel: two machines of one name have two; Linux only
_MOST_CHARS = 64  # of a name, as the kernel takes them; another rank may say anything


class Host(NamedTuple):
    """A machine or a container, as its ranks tell it to others.

    Attributes:
        name: its host name.
        boot: an identity that containers of one machine have in common, and two machines do not.
    """

    name: str
    boot: str = ""


def this_host() -> Host:
    """Return the host of this process."""
    return Host(host_name(), boot_id())


def boot_id(file: Path = BOOT_ID) -> str:
    """Return the kernel's boot id; empty if it cannot be read.

    Arguments:
        file: the file of the boot id.
    """
    try:
        return file.read_text().strip()
    except (OSError, ValueError):
        return ""


def host_name() -> str:
    """Return the name of this host, in one line, for messages."""
    return one_line(os.uname().nodename, _MOST_CHARS)


def names_of_hosts(said: Sequence[bytes]) -> Sequence[str]:
    """Decode the host names that ranks have sent.

    Arguments:
        said: one for each rank.

    Returns:
        A name for each rank; empty if all are on one host.
    """
    names = [one_line(name.decode(errors="replace"), _MOST_CHARS) for name in said]
    return names if len(set(names)) > 1 else ()


# ----------------------------------------------------------------------------------------------------------------------
# Limits of the control groups of a process: a container or a job has less memory and fewer cores than its machine.
#
# A process is in a group of each hierarchy (`/proc/self/cgroup`), and what is set for a group holds for all below it.
# In version 2 one hierarchy has every controller, in version 1 each controller has a folder; a hybrid machine has
# both, and a controller is in one of them. In a container the path may be that of the machine, of which it sees the
# last part alone, or nothing but its own group, at the root.
# ----------------------------------------------------------------------------------------------------------------------


CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")

_PAGE_CACHE = ("inactive_file", "active_file")  # reclaimed by the kernel before it refuses memory to the group

Value = TypeVar("Value")


@dataclass(frozen=True)
class MemoryLimit:
    """Memory that is left in a control group.

    Attributes:
        nbytes: the bytes that are left.
        name: the file of the limit.
    """

    nbytes: int
    name: str


def memory_left(folder: Path = CGROUPS, own: Path = OWN) -> MemoryLimit | None:
    """Return the memory that is left in the tightest control group of this process.

    Arguments:
        folder: where the groups are mounted.
        own: the file in which the kernel lists the groups of the process.

    Returns:
        `None` if no group limits it.
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
                # The usage includes the page cache, which the kernel reclaims first: it is subtracted.
                taken = max(0, usage - _page_cache(group / "memory.stat", prefix))
                found.append(MemoryLimit(max(0, limit - taken), str(group / name)))
    return min(found, key=lambda limit: limit.nbytes, default=None)


def core_quota(folder: Path = CGROUPS, own: Path = OWN) -> float | None:
    """Return the CPU quota of this process's control groups, in cores.

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
    """Read a file; `None` if it is missing, or holds "max" or anything that does not parse."""
    try:
        return parse(file.read_text().strip())
    except (OSError, ValueError):
        return None


# ----------------------------------------------------------------------------------------------------------------------
# NUMA nodes: their cores, the one that a device is attached to, and memory from it.
# ----------------------------------------------------------------------------------------------------------------------


NODES = Path("/sys/devices/system/node")
PCI_DEVICES = Path("/sys/bus/pci/devices")

_MBIND = {"x86_64": 237, "aarch64": 235}  # the number of the system call: glibc has no function for it
_PREFERRED = 1  # MPOL_PREFERRED: another node's memory where this one has none left
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def numbered_nodes(folder: Path = NODES) -> dict[int, set[int]]:
    """Return the cores of each NUMA node that has some, by number, in order; empty if they cannot be read."""
    found = {int(node.name.removeprefix("node")): _read(node / "cpulist", parse_cores) for node in _folders(folder)}
    return {number: cores for number, cores in sorted(found.items()) if cores}


def parse_cores(text: str) -> set[int]:
    """Read the kernel's list of cores, such as `0-3,8,10-11`."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def device_node(device: torch.device, nodes: Path = NODES, pci_devices: Path = PCI_DEVICES) -> int | None:
    """Return the NUMA node that a device is attached to.

    Arguments:
        device: any device.
        nodes: the folder with one folder for each node.
        pci_devices: the folder with one folder for each device on the bus.

    Returns:
        `None` for a cpu, on a host with one node, and if the node cannot be read.
    """
    if device.type == "cpu" or len(_folders(nodes)) < 2:
        return None
    properties = torch.get_device_module(device).get_device_properties(device)
    try:
        domain, bus, slot = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
        node = int((pci_devices / f"{domain:04x}:{bus:02x}:{slot:02x}.0" / "numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return None
    return node if node >= 0 else None


def device_nodes(device: torch.device, nodes: Path = NODES, pci_devices: Path = PCI_DEVICES) -> list[int | None]:
    """Return `device_node` of all visible devices of this type; empty on a host with one node."""
    if device.type == "cpu" or len(_folders(nodes)) < 2:
        return []
    count = torch.get_device_module(device).device_count()
    return [device_node(torch.device(device.type, index), nodes, pci_devices) for index in range(count)]


def prefer_node(address: int, nbytes: int, node: int) -> bool:
    """Set the preferred NUMA node of a mapping's pages. Pages that were touched already stay.

    Arguments:
        address: the address of the mapping, at the start of a page.
        nbytes: the length of the mapping.
        node: the number of the node.

    Returns:
        True if the kernel allows it: in many containers it does not.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    words = node // _WORD_BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[-1] = 1 << node % _WORD_BITS
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long
    bits = ctypes.c_ulong(words * _WORD_BITS + 1)  # the kernel reads one less
    arguments = (ctypes.c_void_p(address), ctypes.c_ulong(nbytes), ctypes.c_int(_PREFERRED), mask, bits)
    return int(call(ctypes.c_long(number), *arguments, ctypes.c_uint(0))) == 0


def _folders(nodes: Path) -> list[Path]:
    try:
        return list(nodes.glob("node[0-9]*"))
    except OSError:  # also of a process without descriptors: nothing is said then
        return []


# ----------------------------------------------------------------------------------------------------------------------
# Threads of a rank's updates, and their cores: its share of the cores that are near its memory.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UpdateCores:
    """Threads and cores of a rank's updates.

    Attributes:
        count: the number of threads.
        cores: the cores that they are bound to; `None` if they are not bound.
    """

    count: int
    cores: frozenset[int] | None = None

    def with_threads(self, count: int | None) -> UpdateCores:
        """Return the same with another number of threads, if one is given.

        More threads than bound cores are not bound: they would be slower there.
        """
        if count is None:
            return self
        return UpdateCores(count, self.cores if self.cores and count <= len(self.cores) else None)


def update_cores(device: torch.device) -> UpdateCores:
    """Choose the cores of this rank near a device, within the limits of the machine and the container."""
    return share_of_cores(quota=core_quota(), near=device_node(device), devices=device_nodes(device))


def share_of_cores(
    environment: Mapping[str, str] = os.environ,
    allowed: Collection[int] | None = None,
    nodes: Path = NODES,
    *,
    quota: float | None = None,
    near: int | None = None,
    devices: Sequence[int | None] = (),
) -> UpdateCores:
    """Share the cores of this rank's NUMA node that the process may use among the ranks on that node.

    The node is the device's: the rank's host memory lies there, and threads elsewhere would read it over the link
    between nodes. Threads are bound to it, unless the launcher has bound the process to a node.

    If the node of the device is not known, the ranks of this host share all of its cores evenly; a process that
    its launcher has bound to one node, or to fewer cores than that share, has no more than those. A host without
    `/sys/devices/system/node` counts as one node.

    Arguments:
        environment: the variables that may hold `LOCAL_WORLD_SIZE`, as a launcher sets it; else there is one rank.
        allowed: the cores that this process may use; `None` asks the system.
        nodes: the folder with one folder for each node.
        quota: the CPU quota of all ranks of this host, in cores; `None` for no limit.
        near: the number of the device's node; `None` if it is not known.
        devices: the nodes of all devices that the process sees, by their index.

    Returns:
        One thread or more.
    """
    cores = set(os.sched_getaffinity(0) if allowed is None else allowed)
    ranks = ranks_of_host(environment)
    found = numbered_nodes(nodes)
    usable = {number: node & cores for number, node in found.items() if node & cores}
    count, bound = len(cores) // ranks, None
    if near in usable and len(usable) > 1:
        # A rank that sees its own device alone knows nothing of the others': they are taken to be spread evenly.
        ranks_here = devices[:ranks].count(near) if len(devices) >= ranks else -(-ranks // len(usable))
        count, bound = len(usable[near]) // max(1, ranks_here), frozenset(usable[near])
    elif len(usable) == 1:  # of one node: bound by the launcher, which has bound the other ranks to other cores
        count = min(len(cores), sum(map(len, found.values())) // ranks)
    if quota is not None:
        # Threads that use up the quota are all stopped until its period is over, those that feed the device too.
        count = min(count, int(quota / ranks))
    return UpdateCores(max(1, count), bound)


def ranks_of_host(environment: Mapping[str, str] = os.environ, *, default: int = 1) -> int:
    """Return the number of ranks on this host as the launcher sets it (`LOCAL_WORLD_SIZE`), or a default."""
    return _number(environment.get("LOCAL_WORLD_SIZE"), 0) or default


def neighbours_of_host(line: Sequence[int], by_host: int) -> int:
    """Return how many neighbours in a line of ranks share a host; all of them if hosts do not divide it evenly.

    Arguments:
        line: numbers of ranks in the job.
        by_host: how many ranks there are on each host, which have consecutive numbers; 0 if it is not known.
    """
    hosts = [rank // by_host for rank in line] if by_host > 0 else [0] * len(line)
    size = hosts.count(hosts[0])
    found = [hosts[first : first + size] for first in range(0, len(hosts), size)]
    even = all(len(host) == size and len(set(host)) == 1 for host in found)
    return size if even and len({host[0] for host in found}) == len(found) else len(line)


def hosts_of(ranks: int, environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of hosts of some ranks; 1 if the launcher does not set it: all ranks are on this host."""
    here = _number(environment.get("LOCAL_WORLD_SIZE"), 0)
    return ranks // here if here > 0 and ranks % here == 0 else 1


def _number(text: str | None, default: int) -> int:
    return int(text) if text is not None and text.strip().isdigit() else default


# ----------------------------------------------------------------------------------------------------------------------
# Free memory of the C library, returned to the system when the process has grown.
#
# Activations of many lengths leave holes that the next length does not fit into: with glibc a process holds half as
# much again after a hundred batches, all of it free. Returning it costs page faults in the steps that follow, so it is
# returned only after the process has grown.
# ----------------------------------------------------------------------------------------------------------------------


STATM = Path("/proc/self/statm")

# After memory was returned, a step takes what it needs again: so many steps are looked at, to see the longer batches.
SETTLING_LOOKS = 8
GROWTH = 9 / 8


def resident_bytes() -> int:
    """Return the resident set of this process in bytes; 0 if it cannot be read."""
    try:
        pages = STATM.read_text().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class Growth:
    """Returns free memory to the system when the process has grown.

    Arguments:
        give_back: returns free memory to the system.
        resident: returns the bytes that the process holds.
    """

    def __init__(self, give_back: Callable[[], None], resident: Callable[[], int] = resident_bytes) -> None:
        self._give_back = give_back
        self._resident = resident
        self._settled = 0  # the most of the first looks
        self._looks = 0

    def look(self) -> None:
        """Measure between two steps; after the first measurements, compare with their maximum."""
        now = self._resident()
        if self._looks < SETTLING_LOOKS:
            self._looks += 1
            self._settled = max(self._settled, now)
        elif now > GROWTH * self._settled:
            self._give_back()
            self._settled = self._looks = 0  # what is in use may have grown as well


# ----------------------------------------------------------------------------------------------------------------------
# torch's OpenMP threads on a cpu: the engine's passes between operations use them; worker threads of the engine do not.
#
# After an operation these threads spin for a while. A pool of other threads would need the cores that they spin on:
# each pass would wait for them, or run on one core alone. They spin only while the process has no more OpenMP threads
# than cores.
# ----------------------------------------------------------------------------------------------------------------------


def compute_pool(device: torch.device, otherwise: Pool) -> Pool:
    """Make the pool of passes over host memory that compute's own thread makes.

    Arguments:
        device: the device of compute.
        otherwise: the pool for other devices, and for a torch without an OpenMP runtime of GNU's interface.

    Returns:
        A pool whose work is done by as many threads as torch has for its caller.
    """
    parallel = _of_torch("GOMP_parallel") if device.type == "cpu" else None
    address = ctypes.cast(parallel, ctypes.c_void_p).value if parallel else None
    return Pool.openmp(address) if address else otherwise


def stay_alone() -> None:
    """Run torch's operations of the calling thread in this thread alone, from now on.

    Else the first operation of a copy's size gives the thread an OpenMP team of its own. The two teams are more threads
    than there are cores, so none of them spins any more: the system would have to wake them up for each operation of
    the model, as long as the process lives.
    """
    take = _of_torch("omp_set_num_threads")
    if take is not None:
        torch.get_num_threads()  # torch sets each thread's number at the first query, and would undo this one
        take(1)


def _of_torch(name: str) -> Any:
    """Find a function in the OpenMP runtime that torch is linked to; `None` if there is none."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # By what torch depends on: the process may have loaded another runtime before, whose threads sleep.
        return getattr(ctypes.CDLL(str(library)), name)
    except (OSError, AttributeError):
        return None
