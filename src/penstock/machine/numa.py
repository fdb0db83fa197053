"""NUMA nodes: their cores, the one that a device is attached to, and memory from it."""

import ctypes
import platform
from pathlib import Path

import torch

NODES = Path("/sys/devices/system/node")
PCI_DEVICES = Path("/sys/bus/pci/devices")

_MBIND = {"x86_64": 237, "aarch64": 235}  # the number of the system call: glibc has no function for it
_PREFERRED = 1  # MPOL_PREFERRED: another node's memory where this one has none left
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def numbered_nodes(folder: Path = NODES) -> dict[int, set[int]]:
    """Return the cores of each node that has some, by its number and in that order; empty where nothing is said."""
    numbered = {}
    for node in _folders(folder):
        try:
            numbered[int(node.name.removeprefix("node"))] = parse_cores((node / "cpulist").read_text())
        except (OSError, ValueError):
            continue
    return {number: numbered[number] for number in sorted(numbered) if numbered[number]}


def parse_cores(text: str) -> set[int]:
    """Read the kernel's list of cores, such as `0-3,8,10-11`."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def device_node(device: torch.device, nodes: Path = NODES, pci_devices: Path = PCI_DEVICES) -> int | None:
    """Return the number of the node that a device is attached to.

    Arguments:
        device: any device.
        nodes: the folder with one folder for each node.
        pci_devices: the folder with one folder for each device on the bus.

    Returns:
        `None` for a cpu, where there is one node only, and where nothing is said.
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
    """Return `device_node` of all devices of this type that the process sees; empty where there is one node only."""
    if device.type == "cpu" or len(_folders(nodes)) < 2:
        return []
    count = torch.get_device_module(device).device_count()
    return [device_node(torch.device(device.type, index), nodes, pci_devices) for index in range(count)]


def prefer_node(address: int, nbytes: int, node: int) -> bool:
    """Have the pages of a mapping come from a node, as long as it has some. Pages that were touched already stay.

    Arguments:
        address: the address of the mapping, at the start of a page.
        nbytes: the length of the mapping.
        node: the number of the node.

    Returns:
        Whether the kernel allows it: in many containers it does not.
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
