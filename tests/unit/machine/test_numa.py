"""NUMA nodes, on machines made of folders and on the one that the tests run on."""

import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.runtime.system import device_node, device_nodes, numbered_nodes, parse_cores, prefer_node
from tests.unit.machine.test_threads import machine

CPU = torch.device("cpu")
ACCELERATOR = torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("text", "cores"), [("0-3", {0, 1, 2, 3}), ("0-1,8,10-11\n", {0, 1, 8, 10, 11}), ("5", {5}), ("\n", set())]
)
def test_lists_of_cores(text: str, cores: set[int]) -> None:
    assert parse_cores(text) == cores


def test_nodes_in_the_order_of_their_numbers_without_those_that_are_memory_alone(tmp_path: Path) -> None:
    machine(tmp_path, *(str(n) for n in range(11)), "")
    assert list(numbered_nodes(tmp_path).items()) == [(n, {n}) for n in range(11)]


def attached(folder: Path, monkeypatch: pytest.MonkeyPatch, node: str, **place: int) -> Path:
    """A device in the slot 0001:a3:00.0, which says what node it is attached to."""
    properties = SimpleNamespace(**(place or {"pci_domain_id": 1, "pci_bus_id": 0xA3, "pci_device_id": 0}))
    module: Any = SimpleNamespace(get_device_properties=lambda device: properties, device_count=lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    (folder / "0001:a3:00.0").mkdir(parents=True)
    (folder / "0001:a3:00.0" / "numa_node").write_text(node + "\n")
    return folder


@pytest.mark.parametrize(("said", "node"), [("1", 1), ("0", 0), ("-1", None), ("", None)])
def test_the_node_of_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, node: int | None) -> None:
    nodes, devices = machine(tmp_path, "0-7", "8-15"), attached(tmp_path / "pci", monkeypatch, said)
    assert device_node(ACCELERATOR, nodes, devices) == node
    assert device_nodes(ACCELERATOR, nodes, devices) == [node, node]
    assert device_nodes(CPU, nodes, devices) == []


def test_the_kernel_knows_what_node_a_mapping_prefers() -> None:
    memory = mmap.mmap(-1, 1 << 20)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    if not prefer_node(address, 1 << 20, 0):
        pytest.skip("this container does not let its processes choose")
    (line,) = (li for li in Path("/proc/self/numa_maps").read_text().splitlines() if li.startswith(f"{address:x} "))
    assert line.split()[1].startswith("prefer")
