"""The device itself: what a GPU forgives most of the time, it never does. And its numbers are the cpu's."""

import ctypes
import gc
import os

import pytest
import torch

HOST, DEVICE = torch.device("cpu"), "strict:0"


@pytest.fixture
def native():
    from tests.device.backend import native

    return native


@pytest.fixture
def pinned():
    return torch.zeros(1 << 12).pin_memory()


def test_the_host_cannot_touch_device_memory():
    tensor = torch.ones(16, device=DEVICE)
    torch.accelerator.synchronize()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        ctypes.string_at(tensor.data_ptr(), 4)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)


def test_what_was_not_written_is_nan():
    assert torch.empty(1000, device=DEVICE).isnan().all().item()


def test_a_copy_down_is_not_there_before_it_was_waited_for(native, pinned):
    native.configure(0, 10.0, False)  # nobody is that late
    source = torch.ones(1 << 12, device=DEVICE)
    pinned.copy_(source, non_blocking=True)
    event = torch.Event(DEVICE)
    event.record()
    assert not pinned.any()
    event.synchronize()
    assert pinned.all()


def test_a_missing_wait_between_streams_is_reported_whoever_wins(native):
    values = torch.zeros(64, device=DEVICE)
    torch.accelerator.synchronize()
    side = torch.Stream(DEVICE)
    values.fill_(1)
    with side:
        torch.add(values, 1, out=torch.empty(64, device=DEVICE))
    torch.accelerator.synchronize()
    (report,) = native.take_races()
    assert "read by add" in report
    assert "write by fill_" in report


def test_memory_given_up_under_a_stream_that_uses_it_is_reported_and_nan(native):
    side = torch.Stream(DEVICE)
    values = torch.ones(64, device=DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        out = torch.empty(64, device=DEVICE)
        torch.add(values, 1, out=out)
    address = values.data_ptr()
    del values
    reports = native.take_races()
    assert len(reports) == 1
    assert "given up while in use" in reports[0]
    assert torch.empty(64, device=DEVICE).data_ptr() == address  # at once
    torch.accelerator.synchronize()


def test_the_queue_keeps_nothing_alive(native):
    native.configure(0, 10.0, False)
    gc.collect()
    before = native.memory(0)["blocks"]
    for _ in range(10):
        torch.ones(64, device=DEVICE).add_(1)
    gc.collect()
    assert native.memory(0)["blocks"] == before


def test_host_memory_given_up_under_a_copy_is_reported(native):
    host = torch.ones(1 << 12)
    torch.strict.host_register(host.data_ptr(), host.nbytes)
    assert host.is_pinned()
    on_device = host.to(DEVICE, non_blocking=True)
    torch.strict.host_unregister(host.data_ptr())
    (report,) = native.take_races()
    assert "registered host memory" in report
    assert on_device.cpu().eq(1).all()
    assert not host.is_pinned()


def test_who_waits_is_counted_with_the_line(native, pinned):
    native.take_waits()
    pageable = torch.ones(1 << 12)
    on_device = pageable.to(DEVICE, non_blocking=True)
    assert _reasons(native) == {"copy up from pageable memory"}
    on_device.copy_(pinned, non_blocking=True)
    pinned.copy_(on_device, non_blocking=True)
    assert _reasons(native) == set()
    on_device.copy_(pinned)
    assert _reasons(native) == {"blocking copy up"}
    on_device.sum().item()
    assert _reasons(native) == {"item"}
    on_device.nonzero()
    assert _reasons(native) == {"nonzero needs values"}
    on_device.to(torch.bfloat16).cpu()
    (where,) = native.take_waits()
    assert where.startswith("copy down to pageable memory at test_strictness.py:")


def _reasons(native) -> set[str]:
    return {key.partition(" at ")[0] for key in native.take_waits()}
