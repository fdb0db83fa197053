"""What a rank takes of its device and of the host: counted before any of it is taken, refused where there is less."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock import MemoryBudgetError, Options, Placement, memory_budget
from penstock.blueprint import Blueprint, draw_blueprint, request_for
from penstock.rules import rule_for
from penstock.runtime import hardware
from penstock.runtime.host_memory import HostMemory
from penstock.runtime.topology import Grid, Reach
from penstock.tiers.host import DeviceTier, HostTier
from tests.lib.engines import squared
from tests.lib.memory import disks
from tests.lib.models import Blocks
from tests.lib.streams import separate
from tests.measured import PLACEMENTS, measured

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
SEPARATE = Reach(aliases_host=False)
ONE = Grid()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters())


@pytest.fixture
def nothing_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("something was taken before the refusal")

    for tier in (DeviceTier, HostTier):
        monkeypatch.setattr(tier, "reserve", forbidden)


def drawn(model: nn.Module, reach: Reach = SEPARATE, grid: Grid = ONE, **arguments: Any) -> Blueprint:
    return draw_blueprint(model, adamw(model), request_for(model, **arguments), grid, reach)


def refused(model: nn.Module, **arguments: Any) -> str:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(MemoryBudgetError) as caught:
        penstock.prepare(model, adamw(model), **arguments)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return str(caught.value)


# Each parameter on 256 elements: a root of 4 * 256, two blocks of 4 * 256 + 2 * 512.
NUMEL = 1024 + 2 * 2048
#: Of the model itself, in fp32.
OWN = 4 * sum(p.numel() for p in Blocks().parameters())
LARGEST = max(p.numel() for p in Blocks().parameters())


@pytest.mark.usefixtures("nothing_taken")
def test_a_budget_of_the_device_that_is_too_small_is_refused_before_anything_is_taken() -> None:
    need = 14 * NUMEL + 2 * LARGEST + first_values()
    message = refused(Blocks(), options=Options(device_bytes=need - 100))
    assert message == (
        f"The device needs {need:,} bytes on this rank, activations apart (params {2 * NUMEL:,}, grads {2 * NUMEL:,}, "
        f"optimizer {10 * NUMEL:,}, gradients on their way {2 * LARGEST:,}, first values {first_values():,}); "
        f"Options(device_bytes={need - 100:,}) gives it {need - 100:,}, 100 too few. "
        "Move state with Placement(optimizer='cpu'), or use more ranks."
    )


def first_values() -> int:
    """What is beside everything while the last unit's master is split, beyond what training has beside it."""
    return 16 * LARGEST - 2 * LARGEST


def test_a_budget_that_is_just_enough_trains() -> None:
    model = Blocks()
    need = 14 * NUMEL + 2 * LARGEST + first_values()
    optimizer = penstock.prepare(model, adamw(model), options=Options(device_bytes=need))
    optimizer.backward(squared(model(torch.ones(2, 8))))
    assert not optimizer.step().skipped
    optimizer.close()


@pytest.mark.usefixtures("nothing_taken")
@pytest.mark.parametrize(
    ("missing", "moved"),
    [
        (100, "Placement(optimizer='cpu')"),
        (10 * NUMEL + 1, "Placement(optimizer='cpu', grads='cpu')"),
        (12 * NUMEL + 1, "Placement(optimizer='cpu', grads='cpu', params='cpu')"),
    ],
)
def test_the_advice_moves_what_is_used_least_until_it_is_enough(missing: int, moved: str) -> None:
    blueprint = drawn(Blocks())
    need = memory_budget.budget_of(blueprint, Blocks(), CPU).device
    message = refused(Blocks(), options=Options(device_bytes=need.nbytes - missing))
    assert f"{missing:,} too few. Move state with {moved}, or use more ranks." in message


@pytest.mark.usefixtures("nothing_taken")
@pytest.mark.parametrize("whose", ["the host has", "the container or job of this process (/c/memory.max) has"])
def test_the_device_and_the_cpu_tier_of_a_cpu_share_the_host(monkeypatch: pytest.MonkeyPatch, whose: str) -> None:
    monkeypatch.setattr(memory_budget, "available_host_memory", lambda: HostMemory(10_000, whose))
    message = refused(Blocks(), placement=Placement(optimizer="cpu"))
    # On whole pages: remainder of 2 bytes and two moments of 4 bytes for units of 1,024, 2,048 and 2,048 elements.
    on_cpu = 4096 + 2 * 4096 + 2 * (4096 + 2 * 8192)
    on_device = 4 * NUMEL + 2 * LARGEST
    loading = 4 * LARGEST  # of the last unit, beside all that rests and the last unit's own memory
    last = 4 * sum(p.numel() for p in Blocks().blocks[-1].parameters())
    needed = on_cpu + max(on_device - OWN, 4 * NUMEL + loading - (OWN - last))
    assert f"and need {needed:,} bytes on this rank" in message
    assert f"cpu tier: optimizer {on_cpu:,}); {whose} 10,000 available, {needed - 10_000:,} too few. " in message
    assert message.endswith("Move state with Placement(optimizer='nvme', grads='nvme'), or use more ranks.")


@pytest.mark.usefixtures("nothing_taken")
def test_ranks_of_one_host_have_each_their_part_of_it_unless_they_say_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_budget, "available_host_memory", lambda: HostMemory(1 << 20, "the host has"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    message = refused(Blocks())
    assert f"the host has {(1 << 20) // 64:,} available for each of its 64 ranks" in message
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    message = refused(Blocks(), options=Options(host_bytes=10_000))
    assert "Options(host_bytes=10,000) leaves 10,000 available" in message


class OneDevice:
    """What a device's module of torch says of its memory."""

    free, reserved, allocated = 50_000, 30_000, 20_000

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.free, 1 << 30

    def memory_reserved(self, device: torch.device) -> int:
        return self.reserved

    def memory_allocated(self, device: torch.device) -> int:
        return self.allocated

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(is_integrated=self.integrated)

    integrated = 0


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> OneDevice:
    module = OneDevice()
    monkeypatch.setattr(hardware.torch, "get_device_module", lambda device: module)
    return module


def test_a_device_without_memory_of_its_own_counts_with_the_host(one_device: OneDevice) -> None:
    assert hardware.shares_host_memory(CPU)
    assert not hardware.shares_host_memory(CUDA)
    one_device.integrated = 1
    assert hardware.shares_host_memory(CUDA)
    blueprint = drawn(Blocks())
    budget = memory_budget.budget_of(blueprint, Blocks(), CUDA)
    (host,) = memory_budget.memories(budget, CUDA, 1)
    assert host.needed == budget.device.nbytes
    assert host.name == "host"


def test_what_the_model_has_there_already_is_not_needed_twice() -> None:
    model, elsewhere = Blocks(), Blocks().to("meta")
    there = memory_budget.budget_of(drawn(model), model, CPU).device
    new = memory_budget.budget_of(drawn(elsewhere, weights="init"), elsewhere, CPU).device  # nothing is there before
    assert new.there == 0
    assert there.nbytes == new.nbytes
    # All of it goes, but while the last unit is filled its own memory is still there.
    last = 4 * sum(p.numel() for p in model.blocks[-1].parameters())
    assert there.there == OWN - last


def test_first_values_of_other_ranks_come_in_the_dtype_of_the_model() -> None:
    model = Blocks().double()
    request = request_for(model, placement=Placement(params="cpu"), options=Options(prefetch_bytes=0))
    alone, two = ONE, Grid.first_of(2, sharded=True)
    needs = [
        memory_budget.budget_of(draw_blueprint(model, None, request, grid, SEPARATE), model, CUDA).device
        for grid in (alone, two)
    ]
    assert needs[0].parts["first values"] == 0
    block = sum(p.nbytes for p in model.blocks[0].parameters())
    assert needs[1].nbytes == block + 2 * 2048  # of the last one, beside the buffer that it is gathered to


def test_gathers_are_counted_as_they_are_made() -> None:
    model = Blocks()
    on_cpu = Placement(params="cpu")
    every = drawn(model, placement=on_cpu).gathered_bytes
    assert every == 2 * NUMEL
    least = 2 * (1024 + 2048)  # a block, and the root around it
    one = drawn(model, placement=on_cpu, options=Options(prefetch_bytes=0))
    assert one.gathered_bytes == one.least_gathered_bytes == least
    ahead = drawn(model, placement=on_cpu, options=Options(prefetch_bytes=100))
    assert ahead.gathered_bytes == least + 100
    bounded = drawn(model, placement=on_cpu, options=Options(live_bytes=least + 50))
    assert bounded.gathered_bytes == least + 50
    kept = drawn(model, placement=on_cpu, options=Options(persistent_bytes=1 << 20, prefetch_bytes=0))
    assert kept.gathered_bytes == sum(plan.full_bytes for plan in kept.units)


@pytest.mark.parametrize("number", range(len(PLACEMENTS)), ids=[str(where) for where in PLACEMENTS])
def test_what_is_counted_is_what_training_takes(number: int) -> None:
    params, grads, optimizer = PLACEMENTS[number]
    stage, precision = [(3, "bf16"), (1, "fp32")][number % 2]
    placement = Placement(params=params, grads=grads, optimizer=optimizer, nvme_path=disks()[0])
    measured(stage, precision, placement, separate())


def test_it_is_so_where_sums_come_up_in_another_dtype() -> None:
    placement = Placement(params="cpu", grads="nvme", optimizer="cpu", nvme_path=disks()[0])
    measured(3, "bf16", placement, separate(), accumulation=torch.float32)


@pytest.mark.parametrize("whole", ["device", "home"])
def test_an_update_of_a_whole_parameter_is_counted_where_it_runs(whole: str) -> None:
    model = Blocks()
    optimizer = penstock.optim.Lamb(model.parameters())
    arguments = {"placement": Placement(params="cpu", grads="cpu", optimizer="cpu"), "precision": "bf16"}
    request = request_for(model, **arguments, options=Options(whole_updates=whole))
    blueprint = draw_blueprint(model, optimizer, request, ONE, SEPARATE)
    needs = [rule.working_bytes(tuple(p.shape)) for p in model.parameters() if (rule := rule_for(optimizer))]
    budget = memory_budget.budget_of(blueprint, model, CUDA)
    counts = (budget.device.parts["an update"], budget.host_bytes - budget.host.at_rest)
    assert counts == ((max(needs), 0) if whole == "device" else (0, max(needs)))
    assert memory_budget.budget_of(drawn(model), model, CUDA).device.parts["an update"] == 0
