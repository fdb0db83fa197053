"""What may be switched on and off while the result stays the same: overlap, streamed updates, moves, activations."""

import pytest
import torch
from torch import nn

import penstock
from tests.gpu.models import EVERYTHING_ON_CPU, assert_same, build, train

OPTIMIZER_ON_CPU = penstock.Placement(grads="cpu", optimizer="cpu")


def allocated(device: torch.device) -> int:
    return 0 if device.type == "cpu" else torch.get_device_module(device).memory_allocated(device)


@pytest.mark.parametrize("overlap", ["backward", "auto"])
@pytest.mark.parametrize("placement", [EVERYTHING_ON_CPU, OPTIMIZER_ON_CPU], ids=["cpu", "optimizer"])
def test_when_updates_run_changes_nothing(make_streams, device, placement, overlap):
    expected = train(make_streams(), device, placement=placement, overlap="none")
    assert_same(train(make_streams(), device, placement=placement, overlap=overlap), expected, overlap)


@pytest.mark.parametrize("non_blocking", [False, True], ids=["waits", "does not wait"])
@pytest.mark.parametrize("include", [None, {"master", "optimizer"}], ids=["all", "optimizer"])
def test_states_go_and_come_back(make_streams, device, uncompiled, include, non_blocking):
    """Between two steps, and for one step that is trained from the host."""
    expected = train(make_streams(), device)
    left: list[int] = []

    def move(model: nn.Module, optimizer: penstock.Optimizer, step: int) -> None:
        if step == 0:
            before = allocated(device)
            optimizer.offload_states(include, non_blocking=non_blocking)
            if not non_blocking:
                left.append(before - allocated(device))
                for kind in include or ("param", "grad", "master", "optimizer"):
                    optimizer.locations().assert_on(kind, "cpu")
        else:
            optimizer.reload_states(non_blocking=non_blocking)
            optimizer.synchronize()
            optimizer.locations().assert_on("optimizer", "device")

    assert_same(train(make_streams(), device, between=move), expected, "parameter")
    if left and device.type != "cpu":
        state_bytes = sum(p.numel() for p in build().parameters()) * (2 + 8)  # remainder and moments
        assert left[0] >= state_bytes * 0.9, "the device has the memory back"


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_activations_off_the_device_change_nothing(make_streams, device, uncompiled, tier, tmp_path):
    """What blocks save is not below the least size that is taken, 64 KiB."""
    expected = train(make_streams(), device, placement=OPTIMIZER_ON_CPU, size=512)
    taken: list[int] = []

    def look(model: nn.Module, optimizer: penstock.Optimizer, step: int) -> None:
        taken.append(optimizer.locations().bytes(kind="activation"))

    placement = penstock.Placement(grads="cpu", optimizer="cpu", activations=tier, nvme_path=tmp_path)
    found = train(make_streams(), device, placement=placement, size=512, between=look)
    assert min(taken) > 0
    assert_same(found, expected, f"with activations on {tier}")
