"""What the host asks of the device, and when: no waits, every copy early enough, no more memory than the formula."""

import gc
from functools import partial
from typing import Any

import pytest
import torch

import penstock
from tests.device.running import strict
from tests.lib.engines import prepare_on
from tests.lib.models import llama as lib_llama

ON_CPU = penstock.Placement(params="cpu", grads="cpu", optimizer="cpu")
BYTES_PER_SECOND = 25e9
SIZES = {"vocab_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
llama = partial(lib_llama, 8, 64, **SIZES)


def prepared(placement: penstock.Placement, **options: Any) -> tuple[torch.nn.Module, penstock.Optimizer]:
    model = llama()
    stock = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, prepare_on(
        strict(), model, stock, placement=placement, max_grad_norm=1.0, options=penstock.Options(**options)
    )


@pytest.fixture
def native():
    from tests.device.backend import native

    return native


@pytest.fixture
def ids():
    return torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1)).to("strict")


def step(model: torch.nn.Module, optimizer: penstock.Optimizer, ids: torch.Tensor) -> None:
    optimizer.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    optimizer.zero_grad()


def ours(waits: dict[str, int]) -> set[str]:
    """Without those of the model itself, whose forward this file calls."""
    return {wait for wait in waits if "test_schedule.py" not in wait}


PLACEMENTS = {
    "optimizer on cpu": (penstock.Placement(grads="cpu", optimizer="cpu"), {}),
    "everything on cpu": (ON_CPU, {}),
    "streamed": (ON_CPU, {"streamed_updates": 0.5}),
    "nothing ahead": (ON_CPU, {"prefetch_bytes": 0}),
}


@pytest.mark.parametrize("name", ["optimizer on cpu", "streamed", "nothing ahead"])
def test_the_host_waits_for_nothing_in_forward_and_backward(native, ids, name):
    """On any thread: hooks of backward run on autograd's. Waits of the threads of updates are for what they read."""
    placement, options = PLACEMENTS[name]
    model, optimizer = prepared(placement, **options)
    for _ in range(3):  # the order is learned, and buffers are there
        step(model, optimizer, ids)
    optimizer.synchronize()
    torch.accelerator.synchronize()
    native.take_waits()
    loss = model(input_ids=ids, labels=ids).loss
    optimizer.backward(loss)
    assert ours(native.take_waits()) == set()
    optimizer.close()


def test_micro_batches_are_added_on_the_host_without_its_waiting(native, ids):
    model, optimizer = prepared(ON_CPU)
    for _ in range(2):
        step(model, optimizer, ids)
    optimizer.backward(model(input_ids=ids, labels=ids).loss)
    native.take_waits()
    optimizer.backward(model(input_ids=ids, labels=ids).loss)
    # The thread that adds waits for what came down, and nobody else.
    assert {wait for wait in ours(native.take_waits()) if "event.synchronize" not in wait} == set()
    optimizer.close()


def test_compute_waits_for_the_link_and_for_nothing_else(native, ids):
    """Kernels and the host take no time, copies take bytes / bandwidth: parameters come up one after the other."""
    model, optimizer = prepared(ON_CPU)
    for _ in range(3):
        step(model, optimizer, ids)
    optimizer.synchronize()
    torch.accelerator.synchronize()
    native.take_spans()
    begin, end = (torch.Event("strict:0", enable_timing=True) for _ in range(2))
    native.model_time(BYTES_PER_SECOND, 0.0, True)
    try:
        begin.record()
        optimizer.backward(model(input_ids=ids, labels=ids).loss)
        end.record()
        end.synchronize()
        spans = native.take_spans()
    finally:
        native.model_time(0.0, 0.0, False)
    nbytes = sum(nbytes for _, what, _, _, nbytes in spans if what.startswith("copy up"))
    units = optimizer._engine.context.units
    once, again = sum(u.nbytes for u in units), sum(u.nbytes for u in units if u.name != "root")
    assert nbytes <= once + again  # each block for forward and for backward, and its last one not twice
    seconds = begin.elapsed_time(end) / 1e3
    assert seconds <= 1.03 * nbytes / BYTES_PER_SECOND
    optimizer.close()


@pytest.mark.parametrize("name", ["everything on cpu", "streamed"])
def test_device_memory_is_the_formula(native, ids, name):
    """What is gathered at once, gradients on their way, tiles that stream, and what the plain model needs."""
    plain = llama().to("strict", torch.bfloat16)
    plain(input_ids=ids, labels=ids).loss.backward()
    plain.zero_grad()
    torch.strict.reset_peak_memory_stats()
    before = torch.strict.memory_allocated()
    loss = plain(input_ids=ids, labels=ids).loss
    activations = torch.strict.max_memory_allocated() - before
    largest = max(p.numel() for p in plain.parameters()) * 2
    del loss, plain
    gc.collect()
    empty = torch.strict.memory_allocated()
    placement, options = PLACEMENTS[name]
    model, optimizer = prepared(placement, **options)
    engine = optimizer._engine
    for _ in range(3):
        torch.strict.reset_peak_memory_stats()
        step(model, optimizer, ids)
        optimizer.synchronize()
    peak = torch.strict.max_memory_allocated() - empty
    rings = optimizer.locations().bytes(kind="staging", tier="device")
    # Nothing compiles updates here: fp32 temporaries of what the device updates at once, twelve at a time.
    tile = penstock.Options(**options).tile_bytes // 2 if name == "streamed" else 0
    working = 12 * 4 * min(tile, max(unit.shard_numel for unit in engine.context.units))
    formula = engine.gatherer.peak_live_bytes + engine.reducer.buffers.nbytes + rings + activations + largest + working
    small = 512 * 4 * sum(1 for _ in model.parameters())  # norms and placeholders: a grain of the allocator each
    assert peak <= 1.03 * formula + small
    optimizer.close()
    del model, optimizer, engine
    gc.collect()
    assert torch.strict.memory_allocated() <= empty + (64 << 10)


def test_memory_does_not_creep(native, ids):
    model, optimizer = prepared(ON_CPU, streamed_updates=0.5)
    taken = []
    for _ in range(12):
        step(model, optimizer, ids)
        optimizer.synchronize()
        taken.append((native.memory(0)["reserved"], native.memory(0)["blocks"]))
    assert taken[-1] == taken[4]
    optimizer.close()
