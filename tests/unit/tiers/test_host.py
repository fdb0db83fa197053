"""The cpu tier: what of it is pinned, within a budget and within what the system allows."""

import warnings

import pytest
import torch

from penstock.config import Tier
from penstock.tiers.host import HostTier, bounce_bytes
from penstock.tiers.storage import CellPlan, MemorySegment, SegmentPlan
from penstock.tiers.tier import Store
from tests.lib.memory import pinning_on_cpu

CPU = torch.device("cpu")
PAGE = 4096
RING = bounce_bytes(PAGE)


def plan(storage: str, pages: int) -> SegmentPlan:
    cell = CellPlan("a", storage, Tier.CPU, torch.uint8, pages * PAGE)
    return SegmentPlan(storage, Tier.CPU, (cell,), 0, pages * PAGE, PAGE)


#: In the order in which an engine plans them.
PLANS = [plan("param", 100), plan("grad", 100), plan("optimizer", 400), plan("shadow", 100), plan("staging", 10)]


def take(tier: HostTier, *plans: SegmentPlan, pin: bool = True) -> dict[str, MemorySegment]:
    reserved = Store([tier]).reserve(plans, pin=pin)
    made = {plan.storage: reserved.make(plan) for plan in plans}
    assert all(isinstance(segment, MemorySegment) for segment in made.values())
    return made  # type: ignore[return-value]


def pinned_homes(tier: HostTier) -> list[str]:
    allocations = tier.reserve({plan.storage: [plan] for plan in PLANS})
    storages = [
        storage for storage in ("param", "grad", "optimizer", "shadow", "staging") if allocations[storage].pinned
    ]
    for allocation in allocations.values():
        allocation.close()
    return storages


def test_a_budget_goes_first_to_what_a_device_copies_in_every_step(monkeypatch):
    pinned = pinning_on_cpu(monkeypatch)
    tier = HostTier(CPU, 309 * PAGE + RING, tile_bytes=PAGE)
    with pytest.warns(
        UserWarning, match=r"2,048,000 bytes of the cpu tier are not pinned \(shadow 409,600, optimizer"
    ) as said:
        made = take(tier, *PLANS)
    assert f"pass {RING:,} bytes of pinned buffers" in str(said[0].message)
    assert str(said[0].message).endswith(f"Options(pinned_bytes={309 * PAGE + RING:,}) has no room for more: raise it.")
    assert sum(pinned.values()) == tier.pinned_bytes == 210 * PAGE + RING
    assert [storage for storage, segment in made.items() if segment.bounce is None] == ["param", "grad", "staging"]
    assert made["shadow"].bounce() is made["optimizer"].bounce(), "one ring for all"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pinned_homes(tier) == ["staging"], "said once"


def test_what_the_system_refuses_is_pageable(monkeypatch):
    pinning_on_cpu(monkeypatch, limit=250 * PAGE + RING)
    tier = HostTier(CPU, tile_bytes=PAGE)
    with pytest.warns(
        UserWarning, match=r"optimizer 1,638,400.*The system refused to pin more: raise.*ulimit -l"
    ) as said:
        assert pinned_homes(tier) == ["param", "grad", "staging"]
    assert len(said) == 1
    ((segment, allocation),) = tier.own
    assert allocation.pinned
    assert sum(tensor.numel() for tensor in segment.tensors) == RING
    tier.close()
    assert (tier.own, tier.pinned_bytes) == ((), 0)


def test_where_nothing_can_be_pinned_the_host_waits_and_is_told_so(monkeypatch):
    pinned = pinning_on_cpu(monkeypatch, limit=0)
    tier = HostTier(CPU, tile_bytes=PAGE)
    with pytest.warns(UserWarning, match="could not be pinned either: the host waits for each of them"):
        made = take(tier, *PLANS)
    assert pinned == {}
    assert made["staging"].bounce is None
    assert made["param"].bounce is not None
