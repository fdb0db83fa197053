"""The device itself: what a GPU forgives most of the time, it never does. And its numbers are the cpu's."""

import ctypes
import gc
import os

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

HOST, DEVICE = torch.device("cpu"), "strict:0"


@pytest.fixture
def native():
    from tests.device.backend import native

    return native


@pytest.fixture
def pinned():
    return torch.zeros(1 << 12).pin_memory()


def test_kernels_give_the_bits_of_the_cpu():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x = torch.randn(3, 7, 32, requires_grad=True)
    twin = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    twin.load_state_dict(layer.state_dict())
    twin.to(DEVICE)
    y = x.detach().to(DEVICE).requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):  # the cpu would take a kernel of its own, and the device has none
        layer(x).square().sum().backward()
        twin(y).square().sum().backward()
    assert torch.equal(x.grad, y.grad.cpu())
    for one, other in zip(layer.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad.cpu())


def test_random_numbers_follow_the_order_of_the_program():
    def numbers():
        torch.manual_seed(3)
        streams = [torch.Stream(DEVICE) for _ in range(4)]
        drawn = []
        for stream in streams:
            with stream:
                drawn.append(torch.rand(8, device=DEVICE))
        torch.accelerator.synchronize()
        dropped = nn.functional.dropout(torch.ones(64, device=DEVICE), 0.5)
        return [t.cpu() for t in (*drawn, dropped)]

    one, other = numbers(), numbers()
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.equal(one[0], one[1])


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


@pytest.mark.parametrize("how", ["event", "host", "query"])
def test_streams_that_are_ordered_are_not_reported(native, how):
    values = torch.zeros(64, device=DEVICE)
    side = torch.Stream(DEVICE)
    values.fill_(1)
    event = torch.Event(DEVICE)
    event.record()
    if how == "event":
        side.wait_event(event)
    elif how == "host":
        event.synchronize()
    else:
        while not event.query():
            pass
    with side:
        out = values + 1
    torch.accelerator.synchronize()
    assert out.cpu().eq(2).all()
    assert native.take_races() == []


def test_parts_of_one_buffer_may_be_used_by_different_streams(native):
    values = torch.zeros(64, device=DEVICE)
    torch.accelerator.synchronize()
    side = torch.Stream(DEVICE)
    values[:32].fill_(1)
    with side:
        values[32:].fill_(2)
    torch.accelerator.synchronize()
    assert native.take_races() == []


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


def test_record_stream_keeps_memory_until_the_stream_is_past(native):
    side = torch.Stream(DEVICE)
    values = torch.ones(64, device=DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        out = values + 1
    values.record_stream(side)
    address = values.data_ptr()
    del values
    other = torch.empty(64, device=DEVICE)
    assert other.data_ptr() != address
    torch.accelerator.synchronize()
    assert out.cpu().eq(2).all()
    assert native.take_races() == []


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


def test_a_cast_in_a_copy_is_made_where_the_values_come_from(native):
    """As torch does it: a copy down of bf16 into fp32 moves fp32."""
    native.take_copied()
    host = torch.empty(1024).pin_memory()
    host.copy_(torch.ones(1024, device=DEVICE, dtype=torch.bfloat16))
    assert native.take_copied()["down"] == 4096


def test_two_devices_have_streams_and_memory_of_their_own(native):
    one, other = torch.ones(8, device="strict:0"), torch.ones(8, device="strict:1")
    assert one.device != other.device
    with pytest.raises(RuntimeError, match="same device"):
        one + other
    assert (one.to("strict:1") + other).cpu().eq(2).all()
    with torch.strict.device(1):
        assert torch.ones(1, device="strict").device.index == 1
    assert native.take_races() == []


def test_resizing_a_storage_to_nothing_gives_its_memory_back(native):
    tensor = torch.ones(1 << 10, device=DEVICE)
    before = native.memory(0)["allocated"]
    tensor.untyped_storage().resize_(0)
    assert native.memory(0)["allocated"] == before - 4096
    tensor.untyped_storage().resize_(4096)
    assert tensor.isnan().all().item()


def test_an_error_of_a_kernel_is_raised_by_the_next_wait():
    indices = torch.tensor([5], device=DEVICE)
    torch.ones(2, device=DEVICE).index_select(0, indices)
    with pytest.raises(RuntimeError, match=r"index_select.*: index out of range"):
        torch.accelerator.synchronize()


def test_autocast_knows_the_device():
    x, w = torch.ones(4, 4, device=DEVICE), torch.ones(4, 4, device=DEVICE)
    with torch.autocast("strict", dtype=torch.bfloat16):
        assert (x @ w).dtype == torch.bfloat16
        assert nn.functional.softmax(x, -1).dtype == torch.float32


def test_modelled_time_is_of_copies_and_of_nothing_else(native, pinned):
    torch.accelerator.synchronize()
    native.model_time(1e6, 0.0, True)
    try:
        on_device = torch.empty(1 << 12, device=DEVICE)
        start, stop = (torch.Event(DEVICE, enable_timing=True) for _ in range(2))
        start.record()
        on_device.copy_(pinned, non_blocking=True)
        on_device.add_(1)
        stop.record()
        stop.synchronize()
        assert start.elapsed_time(stop) == pytest.approx(1e3 * pinned.nbytes / 1e6)
        names = [what.partition(" at ")[0] for _, what, *_ in native.take_spans()]
        assert names == ["copy up", "add"]
    finally:
        native.model_time(0.0, 0.0, False)


def test_memory_that_is_given_up_takes_no_modelled_time(native):
    """No real device spoils it: a step with many temporaries would be modelled as twice its kernels."""
    x = torch.ones(4, device=DEVICE)
    start, stop = (torch.Event(DEVICE, enable_timing=True) for _ in range(2))
    native.model_time(1e6, 1e-3, False)
    try:
        start.record()
        for _ in range(3):
            x + 1  # its result is given up
        stop.record()
        stop.synchronize()
        assert start.elapsed_time(stop) == pytest.approx(3.0)
    finally:
        native.model_time(0.0, 0.0, False)


def test_backward_runs_on_a_thread_of_the_device(native):
    import threading

    threads = []
    x = torch.ones(4, device=DEVICE, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: threads.append(threading.get_ident()))
    y.sum().backward()
    assert threads != [threading.get_ident()]
