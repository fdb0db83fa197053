"""The probe of an accelerator, on the strict device: links, arithmetic and memory, with every wait that they need."""

import contextlib
from typing import Any

import pytest
import torch

from penstock.probe import links
from penstock.probe.links import Link, measure_room
from penstock.probe.measure import measure
from penstock.probe.sampling import Deadline

DEVICE = "strict:0"  # no device outside of the strict process
MIB = 1 << 20
FIGURES = {
    *("h2d", "d2h", "duplex", "h2d_pageable", "d2h_pageable", "flops_float32", "flops_bfloat16", "flops_float16"),
    *("op_seconds", "op_host_seconds", "job_seconds", "wake_seconds", "device_bandwidth", "device_update", "devices"),
}


@pytest.fixture(autouse=True)
def at_once() -> None:
    """Work is late by little: a probe does much of it."""
    from tests.device.backend import native

    native.configure(0, 0.0002, False)


def test_copies_bring_what_was_there() -> None:
    with contextlib.ExitStack() as closing:
        link = Link(torch.device(DEVICE), MIB, closing)
        (down, up), (device_down, device_up) = link.host, link.device
        up.random_(0, 256)
        link.rate(True)
        assert torch.equal(device_up.cpu(), up)
        device_down.copy_(up)
        link.rate(False)
        assert torch.equal(down, up)
        link.rate(True, bounces=True)
        assert bool((device_up.cpu() == 1).all())
        link.rate(False, bounces=True)
        assert torch.equal(link.pageable, up)
        del down, up


def test_memory_of_the_device_is_page_locked_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "PIN_STEP_BYTES", MIB)
    monkeypatch.setattr(links, "MOST_PIN_BYTES", 4 * MIB)
    figures = measure_room(torch.device(DEVICE), Deadline(60))
    assert figures["pinnable_memory"].low == 4 * MIB
    assert figures["pinnable_memory"].value == figures["host_memory"].value


def test_the_whole_probe_leaves_the_device_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.device.backend import native

    monkeypatch.setattr(links, "MOST_PIN_BYTES", 256 * MIB)
    monkeypatch.setattr(links, "MOST_BYTES", 2 * MIB)
    before: Any = native.memory(0)
    figures, fingerprint = measure(seconds=2, device=torch.device(DEVICE))
    assert figures.keys() >= FIGURES
    assert "page-locked memory" in figures["h2d"].how
    assert "while another thread enqueues operations" in figures["wake_seconds"].how
    del figures["op_seconds"]  # the difference of two times, which this device's clock does not resolve
    assert all(figure.value > 0 for figure in figures.values())
    assert fingerprint["device"] == "strict"
    torch.accelerator.synchronize(DEVICE)
    assert native.memory(0)["allocated"] == before["allocated"]
