"""The table: what is planned is what is allocated, on the tier that was asked for."""

import torch

from penstock.kinds import Tier
from penstock.tiers.device import DeviceTier
from penstock.tiers.home import CellPlan
from penstock.tiers.host import HostTier
from penstock.tiers.store import Store, bytes_on

CPU = torch.device("cpu")
PLANS = [
    CellPlan("a", "param", Tier.DEVICE, torch.bfloat16, 300),
    CellPlan("a", "exp_avg", Tier.CPU, torch.float32, 2000),
    CellPlan("b", "master", Tier.CPU, torch.int16, 5),
    CellPlan("b", "master", Tier.CPU, torch.bfloat16, 5),  # a shadow beside its remainder
]


def test_bytes_are_counted_before_anything_is_allocated() -> None:
    assert [plan.nbytes for plan in PLANS] == [600, 8000, 10, 10]
    assert [plan.lease_bytes for plan in PLANS] == [4096, 8192, 4096, 4096]
    assert bytes_on(PLANS, Tier.DEVICE) == 600
    assert bytes_on(PLANS, Tier.CPU) == 8192 + 4096 + 4096
    assert bytes_on(PLANS, Tier.NVME) == 0


def test_every_plan_becomes_a_cell_of_zeros_on_its_tier_in_order() -> None:
    host = HostTier(bytes_on(PLANS, Tier.CPU), CPU)
    store = Store({Tier.DEVICE: DeviceTier(CPU), Tier.CPU: host}, nvme=None)
    values = [store.allocate(plan) for plan in PLANS]
    cells = list(store.cells())
    assert [cell.plan for cell in cells] == PLANS
    for cell, value, plan in zip(cells, values, PLANS, strict=True):
        assert (value.numel(), value.dtype, value.device) == (plan.numel, plan.dtype, CPU)
        assert not value.any()
        assert not cell.pinned
    store.close()
    assert list(store.cells()) == []


def test_a_home_has_a_cell_for_each_kind() -> None:
    plans = [
        CellPlan("a", "exp_avg", Tier.CPU, torch.uint8, 1024),
        CellPlan("a", "exp_avg_scale", Tier.CPU, torch.float32, 4, grain=256),
    ]
    store = Store({Tier.CPU: HostTier(bytes_on(plans, Tier.CPU), CPU)}, nvme=None)
    home = store.make_home(plans, 1024, 512)
    assert [(cell.plan, cell.home) for cell in store.cells()] == [(plan, home) for plan in plans]
    assert [home.tile_range(number) for number in range(home.tiles)] == [(0, 512), (512, 1024)]
    for first, last, (codes, scales) in home.visit(256, 1024, modify=True):
        assert (first, last, codes.numel(), scales.numel()) == (256, 1024, 768, 3)
        scales.fill_(2.0)
    ((_, _, (_, scales)),) = home.visit(0, 1024)
    assert scales.tolist() == [0, 2, 2, 2]
    store.close()
