"""What a step gives the device: kernels and waits, counted by the device itself."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from tests.device.running import strict
from tests.lib.engines import prepared as lib_prepared
from tests.lib.models import stack

WIDTH, BLOCKS = 64, 4
PARAMETERS = 2 * BLOCKS


@pytest.fixture
def native() -> Any:
    from tests.device.backend import native

    return native


def prepared() -> tuple[nn.Module, penstock.Optimizer]:
    return lib_prepared(stack(layers=BLOCKS, width=WIDTH), strict, precision="bf16")


def backward(model: nn.Module, optimizer: penstock.Optimizer) -> None:
    optimizer.backward(model(torch.ones(2, WIDTH, device="strict")).float().square().mean())


def launches(native: Any) -> Counter[str]:
    return Counter(native.take_launches())


def test_one_kernel_per_parameter_takes_its_gradient_home(native: Any) -> None:
    model, optimizer = prepared()
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))).to("strict", torch.bfloat16)
    loss = plain(torch.ones(2, WIDTH, device="strict", dtype=torch.bfloat16)).float().square().mean()
    launches(native)
    loss.backward()
    of_autograd = launches(native)
    for _ in range(2):
        loss = model(torch.ones(2, WIDTH, device="strict")).float().square().mean()
        launches(native)
        optimizer.backward(loss)
        found = launches(native)
        assert found.total() <= of_autograd.total() + PARAMETERS + 4, found - of_autograd
        assert not [name for name in found if "norm" in name]
    optimizer.close()


def test_a_step_is_one_update_of_all_units_and_one_measure(native: Any) -> None:
    """No more operations for four units of nine tiles each than for a tile; norms of all parts in one."""
    model, optimizer = prepared()
    for _ in range(2):
        backward(model, optimizer)
        torch.accelerator.synchronize()
        launches(native)
        optimizer.step()
        torch.accelerator.synchronize()
        found = launches(native)
        assert sum(count for name, count in found.items() if "norm" in name) <= PARAMETERS, found
        assert found.total() <= 100, found
        optimizer.zero_grad()
    optimizer.close()


def test_the_host_waits_for_the_norm_alone(native: Any) -> None:
    model, optimizer = prepared()
    backward(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    backward(model, optimizer)
    torch.accelerator.synchronize()
    native.take_waits()
    optimizer.step()
    waits = native.take_waits()
    assert sum(waits.values()) == 1, waits
    optimizer.close()
