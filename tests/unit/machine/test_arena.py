"""Host memory in exact sizes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import MemoryBudgetError
from penstock.machine.arena import PAGE_BYTES, Arena, return_free_memory

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.int16, torch.int8)


@given(st.lists(st.tuples(st.integers(1, 5000), st.sampled_from(DTYPES)), min_size=1, max_size=8))
def test_leases_are_zero_aligned_apart_and_fill_the_slab_exactly(wanted: list[tuple[int, torch.dtype]]) -> None:
    capacity = sum(Arena.lease_bytes(numel, dtype) for numel, dtype in wanted)
    arena = Arena(capacity, CPU)
    leases = [arena.lease(numel, dtype) for numel, dtype in wanted]
    assert arena.used == capacity
    for number, (lease, (numel, dtype)) in enumerate(zip(leases, wanted, strict=True)):
        assert (lease.numel(), lease.dtype, lease.is_contiguous()) == (numel, dtype, True)
        assert lease.data_ptr() % PAGE_BYTES == 0
        assert not lease.any()
        lease.fill_(number + 1)
    for number, lease in enumerate(leases):
        assert lease.eq(number + 1).all(), "no lease reaches into another"
    arena.close()


def test_sizes_are_rounded_to_pages_and_to_nothing_more() -> None:
    assert Arena.lease_bytes(1, torch.int8) == PAGE_BYTES
    assert Arena.lease_bytes(PAGE_BYTES, torch.int8) == PAGE_BYTES
    assert Arena.lease_bytes(PAGE_BYTES // 4 + 1, torch.float32) == 2 * PAGE_BYTES
    five_gib_and_a_bit = (5 << 30) // 4 + 1
    assert Arena.lease_bytes(five_gib_and_a_bit, torch.float32) == (5 << 30) + PAGE_BYTES, "no power of two"


def test_an_empty_arena_maps_nothing() -> None:
    arena = Arena(0, CPU)
    assert (arena.capacity, arena.used, arena.pinned) == (0, 0, False)
    arena.close()


def test_a_slab_that_the_host_refuses_is_a_budget_error_with_its_size() -> None:
    with pytest.raises(MemoryBudgetError, match=r"The host refused 1,152,921,504,606,846,976 bytes for the cpu tier"):
        Arena(1 << 60, CPU)


def test_more_than_was_planned_is_our_own_bug() -> None:
    arena = Arena(PAGE_BYTES, CPU)
    arena.lease(1, torch.int8)
    with pytest.raises(AssertionError, match="planned too small"):
        arena.lease(1, torch.int8)
    arena.close()


def test_a_lease_outlives_the_arena_that_gave_it() -> None:
    arena = Arena(PAGE_BYTES, CPU)
    lease = arena.lease(8, torch.float32)
    lease.fill_(7)
    arena.close()
    arena.close()
    assert lease.eq(7).all()


def test_freed_memory_can_be_returned_to_the_system() -> None:
    return_free_memory()
