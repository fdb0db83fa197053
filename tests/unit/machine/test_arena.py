"""Host memory in exact sizes."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import MemoryBudgetError
from penstock.runtime import host_memory as machine_arena
from penstock.runtime.host_memory import PAGE_BYTES, Arena, HostMemory, available_host_memory
from tests.lib.memory import pinning_on_cpu
from tests.unit.machine.test_cgroups import Machine

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.int16, torch.int8)


@given(st.lists(st.tuples(st.integers(1, 5000), st.sampled_from(DTYPES)), min_size=1, max_size=8))
def test_leases_are_zero_aligned_apart_and_fill_the_slab_exactly(wanted):
    capacity = sum(Arena.allocated_bytes(numel, dtype) for numel, dtype in wanted)
    arena = Arena(capacity, CPU)
    leases = [arena.allocate(numel, dtype) for numel, dtype in wanted]
    assert arena.used == capacity
    for number, (allocate, (numel, dtype)) in enumerate(zip(leases, wanted, strict=True)):
        assert (allocate.numel(), allocate.dtype, allocate.is_contiguous()) == (numel, dtype, True)
        assert allocate.data_ptr() % PAGE_BYTES == 0
        assert not allocate.any()
        allocate.fill_(number + 1)
    for number, allocate in enumerate(leases):
        assert allocate.eq(number + 1).all(), "no lease reaches into another"
    arena.close()


def test_a_slab_that_the_host_refuses_is_a_budget_error_with_its_size():
    with pytest.raises(MemoryBudgetError, match=r"The host refused 1,152,921,504,606,846,976 bytes for the cpu tier"):
        Arena(1 << 60, CPU)


def test_a_lease_outlives_the_arena_that_gave_it():
    arena = Arena(PAGE_BYTES, CPU)
    allocate = arena.allocate(8, torch.float32)
    allocate.fill_(7)
    arena.close()
    arena.close()
    assert allocate.eq(7).all()


@pytest.mark.parametrize("threads", [1, 3])
def test_pages_are_faulted_in_to_the_last_one(monkeypatch, threads):
    monkeypatch.setattr(machine_arena, "TOUCH_BYTES", 2 * PAGE_BYTES)
    for pages in (1, 2, 7):
        allocation = torch.full((pages * PAGE_BYTES,), 7, dtype=torch.uint8)
        machine_arena.touch(allocation, threads)
        assert not allocation.any()


def test_a_slab_lies_on_the_node_of_its_device(monkeypatch):
    pinning_on_cpu(monkeypatch)
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(machine_arena, "prefer_node", lambda *mapping: asked.append(mapping))
    for node in (None, 1):
        monkeypatch.setattr(machine_arena, "device_node", lambda device, node=node: node)
        arena = Arena(2 * PAGE_BYTES, CPU)
        address = arena.allocate(1, torch.int8).data_ptr()
        arena.close()
    assert asked == [(address, 2 * PAGE_BYTES, 1)]


def flags_of(address: int) -> tuple[str, set[str]]:
    """Access and flags of the mapping that begins at an address."""
    smaps = Path("/proc/self/smaps").read_text().split(f"\n{address:x}-", 1)[1].splitlines()
    flags = next(line for line in smaps if line.startswith("VmFlags:"))
    return smaps[0].split()[1], set(flags.split()[1:])


@pytest.mark.parametrize("pins", [False, True])
def test_a_slab_may_lie_in_huge_pages_and_no_child_has_it(monkeypatch, pins):
    """Python maps shared memory unless it is told not to, for which most kernels have no huge pages."""
    if pins:
        pinning_on_cpu(monkeypatch)
    allocation = Arena(4 << 20, CPU)
    access, flags = flags_of(allocation.allocate(1, torch.int8).data_ptr())
    assert access == "rw-p"
    assert {"wf", "hg"} <= flags
    allocation.close()


def test_a_kernel_that_cannot_wipe_keeps_the_slab_from_children(monkeypatch):
    monkeypatch.setattr(machine_arena, "MADV_WIPEONFORK", 12345)
    allocation = Arena(4 << 20, CPU)
    assert "dc" in flags_of(allocation.allocate(1, torch.int8).data_ptr())[1]
    allocation.close()


def test_a_child_finds_zeros_and_what_it_writes_is_its_own():
    allocation = Arena(4 << 20, CPU)
    values = allocation.allocate(1 << 20, torch.float32).fill_(7)
    child = os.fork()
    if child == 0:
        found = values.any().item()
        values.fill_(9)
        os._exit(bool(found))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert values.eq(7).all()
    allocation.close()


@pytest.mark.parametrize(
    ("host", "group", "expected"),
    [
        (8, None, HostMemory(8 << 10, "the host has")),
        (8, 9, HostMemory(8 << 10, "the host has")),
        (8, 7, HostMemory(7 << 10, "the container or job of this process ({}/memory.max) has")),
        (None, 7, HostMemory(7 << 10, "the container or job of this process ({}/memory.max) has")),
        (None, None, None),
    ],
)
def test_a_container_has_less_than_its_host(tmp_path, host, group, expected):
    if host is not None:
        (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {host} kB\n")
    machine = Machine(tmp_path).process("0::/").group("")
    if group is not None:
        machine.group("", memory_max=str((group + 1) << 10), memory_current="1024")
    found = available_host_memory(tmp_path / "meminfo", machine.folder, machine.own)
    assert found == (expected and expected._replace(whose=expected.whose.format(machine.folder)))
