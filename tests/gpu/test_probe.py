"""The probe of a real accelerator: every figure of it, of a size that hardware has, and nothing left behind."""

import pytest
import torch

from penstock.probe.measure import measure
from tests.gpu.models import is_emulated

LINKS = ("h2d", "d2h", "duplex", "h2d_pageable", "d2h_pageable")


def test_an_accelerator_has_figures_of_its_links_and_gives_all_back(device):
    if device.type == "cpu":
        pytest.skip("a cpu has no links")
    if is_emulated():
        pytest.skip("an emulation has no bandwidth")
    figures, _ = measure(seconds=20, device=device)
    value = {name: figure.value for name, figure in figures.items()}
    for name in LINKS:
        assert 1e9 < value[name] < 2e12, name
    assert value["duplex"] > 0.8 * max(value["h2d"], value["d2h"])
    assert 1e11 < value["flops_float32"] < value["flops_bfloat16"] < 1e16
    assert 1e10 < value["device_bandwidth"] < 2e13
    assert 1e-7 < value["op_seconds"] < 1e-4
    assert 1e-7 < value["op_host_seconds"] < 1e-3
    assert value["device_memory"] > 1e9
    assert value["pinnable_memory"] > 1e8
    if device.type == "cuda":
        assert torch.cuda.memory_allocated(device) == 0
