"""The table: what is planned is what is allocated, on the tier that was asked for."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from penstock.config import Tier
from penstock.errors import MemoryBudgetError
from penstock.tiers.host import DeviceTier, HostTier
from penstock.tiers.nvme import NvmeTier
from penstock.tiers.storage import CellPlan, MemorySegment, SegmentPlan
from penstock.tiers.tier import Allocation, Store, TierMemory
from tests.accounts import cells

CPU = torch.device("cpu")


def segment(storage: str, tier: Tier, *kinds: tuple[str, torch.dtype, int], numel: int = 2048) -> SegmentPlan:
    """`kinds`: name, dtype, and elements that one value belongs to."""
    cells = tuple(CellPlan("a", name, tier, dtype, numel // grain, grain) for name, dtype, grain in kinds)
    return SegmentPlan(storage, tier, cells, 0, numel, 512)


PLANS = [
    segment("param", Tier.DEVICE, ("param", torch.bfloat16, 1), numel=300),
    segment("optimizer", Tier.CPU, ("exp_avg", torch.float32, 1), ("exp_avg_sq", torch.float32, 1), numel=2000),
    segment("shadow", Tier.CPU),  # the parameters are in reach: it keeps nothing
    segment("master", Tier.CPU, ("master", torch.int16, 1), numel=5),
    segment("optimizer", Tier.CPU, ("exp_avg", torch.float32, 1), ("exp_avg_sq", torch.float32, 1), numel=10),
]


def test_every_plan_becomes_cells_of_zeros_on_its_tier_in_order() -> None:
    store = Store([DeviceTier(CPU), HostTier(CPU)])
    reserved = store.reserve(PLANS)
    assert list(store.table()) == [], "what is reserved is not there yet"
    segments = [reserved.make(plan) for plan in PLANS]
    assert cells(store) == [cell for plan in PLANS for cell in plan.cells]
    for made, plan in zip(segments, PLANS, strict=True):
        assert isinstance(made, MemorySegment)
        assert made.tier is plan.tier
        for value, cell in zip(made.tensors, plan.cells, strict=True):
            assert (value.numel(), value.dtype, value.device) == (cell.numel, cell.dtype, CPU)
            assert not value.any()
    assert not any(allocation.pinned for _, allocation, _ in store.table() if allocation)
    store.close()
    assert list(store.table()) == []


class Watched(TierMemory):
    """Notes what another tier's slabs go through."""

    def __init__(self, tier: TierMemory, *, refuses: bool = False) -> None:
        self.name = tier.name
        self._tier = tier
        self._refuses = refuses
        self.log: list[str] = []

    def reserve(self, wanted: Mapping[str, Sequence[SegmentPlan]], *, pin: bool = True) -> dict[str, Allocation]:
        if self._refuses:
            raise MemoryBudgetError("no room")
        self.log += [f"{storage} reserved" for storage in wanted]
        allocations = self._tier.reserve(wanted, pin=pin)
        for storage, allocation in allocations.items():
            allocation.close = partial(self._close, storage, allocation.close)  # type: ignore[method-assign]
        return allocations

    def close(self) -> None:
        self._tier.close()

    def _close(self, storage: str, close: Callable[[], None]) -> None:
        self.log.append(f"{storage} closed")
        close()


def test_what_a_home_has_on_a_tier_lies_in_one_slab_and_goes_with_its_last_section() -> None:
    tier = Watched(HostTier(CPU))
    store = Store([DeviceTier(CPU), tier])
    reserved = store.reserve(PLANS)
    _, first, _, master, second = (reserved.make(plan) for plan in PLANS)
    allocations = [{tensor.untyped_storage().data_ptr() for tensor in s.tensors} for s in (first, second, master)]
    assert allocations[0] == allocations[1] != allocations[2]
    tier.log.clear()
    store.leave(first)
    store.free(first)
    assert first.tensors == ()
    assert first.plan not in [plan for plan, *_ in store.table()]
    assert tier.log == []
    store.leave(second)
    store.free(second)
    assert tier.log == ["optimizer closed"]
    store.close()
    assert tier.log == ["optimizer closed", "master closed"]


def test_a_tier_that_has_no_room_leaves_nothing_taken_on_the_others(tmp_path: Path) -> None:
    files = Watched(NvmeTier([tmp_path], queue_depth=1, checksums=True))
    store = Store([DeviceTier(CPU), Watched(HostTier(CPU), refuses=True), files])
    with pytest.raises(MemoryBudgetError, match="no room"):
        store.reserve([*PLANS, segment("grad", Tier.NVME, ("grad", torch.bfloat16, 1))])
    assert files.log == ["grad reserved", "grad closed"]
    assert list(tmp_path.iterdir()) == []
    store.close()
    assert len(files.log) == 2, "closed once"
