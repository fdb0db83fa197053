"""The probe of an accelerator, on the strict device: links, arithmetic and memory, with every wait that they need."""

import contextlib
from typing import Any

import pytest
import torch

from penstock.probe import links
from penstock.probe.arithmetic import measure_arithmetic, measure_device, measure_device_update
from penstock.probe.links import Link, measure_jobs, measure_links, measure_room
from penstock.probe.measure import measure
from penstock.probe.sampling import Deadline

DEVICE = "strict:0"  # no device outside of the strict process
MIB = 1 << 20
LINKS = {"h2d", "d2h", "duplex", "h2d_pageable", "d2h_pageable"}


@pytest.fixture(autouse=True)
def at_once() -> None:
    """Work is late by little: a probe does much of it."""
    from tests.device.backend import native

    native.configure(0, 0.0002, False)


def test_links_are_measured_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MOST_BYTES", 2 * MIB)
    figures = measure_links(torch.device(DEVICE), Deadline(0.3))
    assert figures.keys() == LINKS
    for figure in figures.values():
        assert figure.value > 0
    assert "page-locked memory" in figures["h2d"].how


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


def test_arithmetic_has_figures_of_three_dtypes() -> None:
    figures = measure_arithmetic(torch.device(DEVICE), Deadline(0.5))
    assert {"flops_float32", "flops_bfloat16", "flops_float16"} < figures.keys()
    assert {"op_seconds", "op_host_seconds"} < figures.keys()
    del figures["op_seconds"]  # the difference of two times, which this device's clock does not resolve
    for figure in figures.values():
        assert figure.value > 0


def test_a_hand_over_between_the_device_and_a_thread_takes_longer_than_a_job() -> None:
    figures = measure_jobs(torch.device(DEVICE), Deadline(0.2))
    assert figures.keys() == {"job_seconds", "wake_seconds"}
    assert 0 < figures["job_seconds"].value < figures["wake_seconds"].value
    assert "while another thread enqueues operations" in figures["wake_seconds"].how


def test_memory_of_the_device_is_page_locked_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "PIN_STEP_BYTES", MIB)
    monkeypatch.setattr(links, "MOST_PIN_BYTES", 4 * MIB)
    figures = measure_room(torch.device(DEVICE), Deadline(5))
    assert figures["pinnable_memory"].low == 4 * MIB
    assert figures["pinnable_memory"].value == figures["host_memory"].value


def test_passes_and_an_update_on_the_device() -> None:
    figures = measure_device(torch.device(DEVICE), Deadline(0.1))
    figures |= measure_device_update(torch.device(DEVICE), Deadline(0.1))
    assert figures.keys() == {"device_bandwidth", "device_update"}
    for figure in figures.values():
        assert figure.value > 0


def test_the_whole_probe_leaves_the_device_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.device.backend import native

    monkeypatch.setattr(links, "MOST_PIN_BYTES", 256 * MIB)
    before: Any = native.memory(0)
    figures, fingerprint = measure(seconds=2, device=torch.device(DEVICE))
    assert LINKS | {"flops_float16", "device_update", "devices", "device_memory"} <= figures.keys() | {
        "device_memory"  # where the device says how much it has
    }
    assert fingerprint["device"] == "strict"
    torch.accelerator.synchronize(DEVICE)
    assert native.memory(0)["allocated"] == before["allocated"]
