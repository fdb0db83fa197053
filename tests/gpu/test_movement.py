"""What the device sees of movement: its memory, overlap, and no waiting of the host."""

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch

import penstock
from penstock.runtime import accelerator
from penstock.runtime.accelerator import AcceleratorStreams
from penstock.runtime.streams import HostEvent, Streams, WorkerThread
from tests.gpu.models import EVERYTHING_ON_CPU, HYPER, batches, build, is_emulated, loss_of, take_step
from tests.lib.engines import prepare_on


def test_peak_device_memory_is_the_formula(device):
    """Gathered parameters, gradients on their way, and what the same model needs for its activations."""
    if device.type == "cpu":
        pytest.skip("a cpu does not count what it allocates")
    memory = torch.get_device_module(device)
    width, depth = 1024, 8
    (x,) = batches(1, device, size=64)
    # Activations: the peak of the plain model beyond its weights and gradients, which live until the end. The first
    # round is for what libraries take once for each thread and stream (workspaces of matrix products: 32 MiB).
    plain = build(width, depth).to(device, torch.bfloat16)
    loss_of(plain, x.bfloat16()).backward()
    plain.zero_grad()
    torch.accelerator.synchronize(device)
    memory.reset_peak_memory_stats(device)
    before = memory.memory_allocated(device)
    loss = loss_of(plain, x.bfloat16())
    activations = memory.max_memory_allocated(device) - before
    del loss, plain
    model = build(width, depth)
    empty = memory.memory_allocated(device)
    optimizer = penstock.prepare(
        model,
        torch.optim.AdamW(model.parameters(), **HYPER),
        placement=EVERYTHING_ON_CPU,
        options=penstock.Options(prefetch_bytes=10 << 20),
    )
    engine = optimizer._engine
    for _ in range(3):
        optimizer.synchronize()
        torch.accelerator.synchronize(device)
        memory.reset_peak_memory_stats(device)
        take_step(model, optimizer, x)
    optimizer.synchronize()
    torch.accelerator.synchronize(device)
    peak = memory.max_memory_allocated(device) - empty
    block = next(unit for unit in engine.context.units if unit.name == "blocks.0")
    root = next(unit for unit in engine.context.units if unit.name == "root")
    largest_gradient = 4 * width * width * 2  # autograd's own, before it is collected
    formula = engine.gatherer.peak_live_bytes + engine.reducer.buffers.nbytes + activations + largest_gradient
    assert peak <= formula * 1.03 + (1 << 20), f"{peak:,} bytes instead of {formula:,}"
    assert engine.reducer.buffers.nbytes <= 2 * block.nbytes + 2 * root.nbytes
    optimizer.close()
    memory.empty_cache()
    assert memory.memory_allocated(device) <= empty + (1 << 20)


def test_the_host_waits_for_nothing_inside_forward_and_backward(make_streams, device):
    """No thread but our workers', whose work that is, between the start of forward and the end of backward.

    Backward's hooks run on a thread of autograd's where there is a device.
    """
    model = build()
    streams = make_streams()
    optimizer = prepare_on(
        streams, model, torch.optim.AdamW(model.parameters(), **HYPER), placement=EVERYTHING_ON_CPU, max_grad_norm=1.0
    )
    inputs = batches(3, device)
    for x in inputs[:2]:  # learn the order, fill the caches
        take_step(model, optimizer, x)
    optimizer.synchronize()  # a forward may wait for the update of the step before
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    with _watched_waits(streams, device) as waits:
        optimizer.backward(loss_of(model, inputs[2]))
    assert waits == []
    assert not optimizer.step().skipped
    optimizer.close()


@contextmanager
def _watched_waits(streams: Streams, device: torch.device) -> Iterator[list[str]]:
    """What makes a thread wait inside the block: for our events that are not over, and for the device.

    On simulated streams `wait` of an event blocks its thread because compute is that thread; there, what counts is
    `synchronize`.
    """
    waits: list[str] = []
    with pytest.MonkeyPatch.context() as patch:

        def watch(kind, name, is_over) -> None:
            original = getattr(kind, name)

            def watched(event, *arguments, **named):
                thread = threading.current_thread()
                if not isinstance(thread, WorkerThread) and not is_over(event):
                    waits.append(f"{kind.__name__}.{name} on {thread.name}")
                return original(event, *arguments, **named)

            patch.setattr(kind, name, watched)

        if isinstance(streams, AcceleratorStreams):
            module = torch.get_device_module(device)
            watch(HostEvent, "synchronize", HostEvent.done)  # of events that wait for the host to enqueue, too
            watch(accelerator._DeviceEvent, "synchronize", accelerator._DeviceEvent.done)
            for kind in (module.Event, module.Stream):
                with contextlib.suppress(TypeError):  # a class of C++ stays as it is
                    watch(kind, "synchronize", lambda event: event.query())
            synchronize = module.synchronize

            def wait_for_device(*given, **named) -> None:
                if not isinstance(threading.current_thread(), WorkerThread):
                    waits.append(f"the device on {threading.current_thread().name}")
                synchronize(*given, **named)

            patch.setattr(module, "synchronize", wait_for_device)
        else:
            # Compute on the host is the calling thread: it follows an event by blocking. That is no wait of the host.
            patch.setattr(HostEvent, "wait", HostEvent.synchronize)
            watch(HostEvent, "synchronize", HostEvent.done)
        with _torch_waits_are_errors(device):
            yield waits


@contextmanager
def _torch_waits_are_errors(device: torch.device) -> Iterator[None]:
    """What torch itself waits for: reads of values, copies of pageable memory. It can tell of CUDA alone."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("placement", [penstock.Placement(), EVERYTHING_ON_CPU], ids=["device", "cpu"])
@pytest.mark.parametrize("activations", ["device", "cpu"])
def test_a_step_copies_pageable_memory_once_for_its_norm(device, uncompiled, placement, activations):
    """The host waits for the squares that it sums. A GPU does not tell of such copies, its emulation counts them."""
    if not is_emulated():
        pytest.skip("only the emulation counts them (docs/gpu.md)")
    pageable = partial(ctypes.CDLL(None).fake_get, b"pageable")
    model = build()
    optimizer = penstock.prepare(
        model,
        torch.optim.AdamW(model.parameters(), **HYPER),
        placement=replace(placement, activations=activations),
        max_grad_norm=1.0,
    )
    inputs = batches(4, device, size=512)
    for x in inputs:
        before = pageable()
        optimizer.backward(loss_of(model, x))
        assert pageable() == before
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
        assert pageable() == before + 1
    optimizer.close()


def test_copies_run_beside_compute(device):
    """Gradients go down and parameters come up while compute goes on."""
    if is_emulated() or device.type != "cuda":
        pytest.skip("there are no copies beside kernels, or no profiler tells of them")
    from torch.profiler import ProfilerActivity, profile

    model = build(width=2048, depth=4)
    optimizer = penstock.prepare(
        model, torch.optim.AdamW(model.parameters(), **HYPER), placement=EVERYTHING_ON_CPU, max_grad_norm=1.0
    )
    inputs = batches(3, device, size=16384)
    for x in inputs[:2]:
        take_step(model, optimizer, x)
    optimizer.synchronize()  # the copies of the last update are no part of what follows
    torch.accelerator.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        optimizer.backward(loss_of(model, inputs[2]))
        torch.accelerator.synchronize(device)
    spans: dict[str, list[tuple[float, float]]] = {"HtoD": [], "DtoH": [], "kernel": []}
    for event in recorded.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        kind = next((k for k in ("HtoD", "DtoH") if k in event.name), "kernel" if "Mem" not in event.name else None)
        if kind:
            spans[kind].append((event.time_range.start, event.time_range.end))
    kernels = _joined(spans["kernel"])
    for kind in ("HtoD", "DtoH"):
        total = sum(end - start for start, end in spans[kind])
        hidden = sum(
            max(0.0, min(end, kernel_end) - max(start, kernel_start))
            for start, end in spans[kind]
            for kernel_start, kernel_end in kernels
        )
        assert total > 0, kind
        assert hidden >= 0.5 * total, f"{kind}: {hidden / total:.0%} of {total:.0f} us run beside kernels"
    optimizer.close()


def _joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time, in spans that do not overlap: kernels of several streams run at once."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


@pytest.mark.parametrize("streamed", [0.0, 0.5])
def test_device_memory_does_not_creep(make_streams, device, uncompiled, streamed):
    """What is allocated after the first steps is what is allocated after many."""
    steps = 8 if device.type == "cpu" else 100
    model = build()
    optimizer = prepare_on(
        make_streams(),
        model,
        torch.optim.AdamW(model.parameters(), **HYPER),
        placement=EVERYTHING_ON_CPU,
        options=penstock.Options(streamed_updates=streamed, tile_bytes=8 << 10),
    )
    engine = optimizer._engine

    def taken() -> tuple[int, int, int]:
        optimizer.synchronize()
        allocated = 0 if device.type == "cpu" else torch.get_device_module(device).memory_allocated(device)
        return allocated, engine.reducer.buffers.nbytes, engine.gatherer.peak_live_bytes

    inputs = batches(4, device)
    early = (0, 0, 0)
    for step in range(steps):
        take_step(model, optimizer, inputs[step % len(inputs)])
        if step == steps // 2:
            early = taken()
    late = taken()
    # A second buffer of a size is made when the first one is still in use: that may happen late. A leak of 20 KiB a
    # step would be more.
    slack = 0 if device.type == "cpu" else 2 * max(unit.nbytes for unit in engine.context.units)
    for before, after, what in zip(early, late, ("allocated", "buffers of gradients", "gathered at most"), strict=True):
        assert after <= before + slack, f"{what}: {before:,} bytes after half of the steps, {after:,} after all"
    optimizer.close()


@pytest.mark.parametrize("real", ["a wait", "no wait"])
def test_the_watch_sees_every_thread_and_only_waits_that_wait(make_streams, device, real):
    """Of the test of waits: it would pass if it saw nothing."""
    streams = make_streams()
    go = threading.Event()

    def work() -> None:
        go.wait()

    event = streams.submit("update", work)
    if real == "no wait":
        go.set()
        event.synchronize()
    with _watched_waits(streams, device) as waits:
        other = threading.Thread(target=event.synchronize, name="autograd's")
        other.start()
        while real == "a wait" and not waits:
            time.sleep(0.001)
        go.set()
        other.join()
    assert [wait.rpartition(" on ")[2] for wait in waits] == (["autograd's"] if real == "a wait" else [])
    streams.close()
