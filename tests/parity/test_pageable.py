"""Host memory that could not be pinned: what copies between it and the device pass changes no bit."""

import warnings
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch

import penstock
from penstock.engine.forward_backward import saved_tensors
from penstock.runtime import host_memory
from penstock.runtime.streams import Streams
from penstock.tiers.host import bounce_bytes
from tests.lib.engines import prepare_on
from tests.lib.memory import disks, pinning_on_cpu
from tests.lib.streams import inline, separate, simulated
from tests.parity.compare import bits
from tests.parity.rows import Arithmetic, Movement, batches, changed, loss_of, make_model, prepared, shares, train
from tests.support import run_ranks, thorough

KIB = 1 << 10
STEPS = 2
ROWS = (
    Arithmetic(accumulation=3, clip=0.5),
    Arithmetic(precision="bf16"),
    Arithmetic(precision="bf16", accumulation=3, clip=0.5, accumulation_dtype=torch.float32),
    Arithmetic(precision="bf16", reduce_dtype=torch.float32, accumulation_dtype=torch.bfloat16, clip=0.5),
)
RINGS_ALONE = bounce_bytes(4 * KIB) + 32 * KIB  # and those of updates

pytestmark = pytest.mark.filterwarnings("ignore:.*of the cpu tier are not pinned")


def movements() -> Iterator[Movement]:
    for params, grads, optimizer in product(("device", "cpu"), repeat=3):
        if "cpu" in (params, grads, optimizer):
            yield Movement(3, params, grads, optimizer).but(tile_bytes=4 * KIB)
    everything = Movement(3, "cpu", "cpu", "cpu", "forward").but(tile_bytes=4 * KIB)
    yield everything.but(prefetch_bytes=0)
    yield everything.but(live_bytes=40 * KIB)
    yield Movement(3, "cpu", "cpu", "cpu").but(tile_bytes=4 * KIB, streamed_updates=0.5)
    parts = shares(device=0.35, cpu=0.65)
    yield Movement(3, parts, shares(device=0.6, cpu=0.4), parts).but(tile_bytes=4 * KIB)
    yield Movement(3, shares(cpu=0.5, nvme=0.5), "cpu", shares(device=0.3, cpu=0.4, nvme=0.3)).but(tile_bytes=16 * KIB)


@pytest.mark.parametrize("limit", [0, RINGS_ALONE])
@pytest.mark.parametrize("what", [ROWS[2], *map(thorough, (ROWS[0], ROWS[1], ROWS[3]))], ids=changed)
def test_pageable_memory_changes_no_bit(what: Arithmetic, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = bits(train(what, Movement(3), streams=inline(), steps=STEPS))
    pinning_on_cpu(monkeypatch, limit)
    failures = []
    for seed, how in enumerate(movements()):
        late = train(what, how, streams=simulated(seed, most_seconds=0.001), steps=STEPS)
        if bits(late) != at_once:
            failures.append(changed(how))
    assert failures == []


def moving(streams: Streams) -> list[object]:
    """State that moves to pageable memory and back, also while it is not waited for, and training from there."""
    model, optimizer = prepared(
        Arithmetic(precision="bf16"), Movement(3, "device", "cpu").but(tile_bytes=4 * KIB), streams
    )
    seen: list[object] = []
    for step, (micro_batch, *_) in enumerate(batches(1, 1)[:5]):
        loss = loss_of(model, micro_batch[0] if isinstance(micro_batch, list) else micro_batch)
        optimizer.backward(loss)
        if step in (1, 3):
            optimizer.offload_states(pin_memory=False, non_blocking=step == 3)
        optimizer.step()
        optimizer.zero_grad()
        if step in (2, 3):
            optimizer.reload_states(non_blocking=step == 2)
        seen.append(loss.item())
    seen += [optimizer.full_state(p, "exp_avg_sq").tolist() for p in model.parameters()]
    optimizer.close()
    return seen


def saved_activations(streams: Streams) -> list[object]:
    """What forward saves goes to pageable memory and comes back."""
    model = make_model()
    stock = Arithmetic().make_optimizer(list(model.parameters()))
    placement, options = penstock.Placement(activations="cpu"), penstock.Options(tile_bytes=4 * KIB)
    optimizer = prepare_on(streams, model, stock, precision="fp32", placement=placement, options=options)
    for (batch,), *_ in batches(1, 1)[:2]:
        optimizer.backward(loss_of(model, batch))
    seen: list[object] = [optimizer.full_grad(p).tolist() for p in model.parameters()]
    optimizer.close()
    return seen


@pytest.mark.parametrize("run", [moving, saved_activations])
@pytest.mark.parametrize("make", [separate, simulated])
def test_what_moves_through_the_buffers_arrives(
    run: Callable[[Streams], list[object]], make: Callable[[], Streams], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_tensors, "LEAST_BYTES", KIB // 2)
    expected = run(inline())
    pinning_on_cpu(monkeypatch, RINGS_ALONE)
    assert run(make()) == expected


def test_the_report_says_what_is_pinned_and_counts_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = Movement(3, "cpu", "cpu", "cpu").but(tile_bytes=4 * KIB)
    pinned = pinning_on_cpu(monkeypatch)
    _, optimizer = prepared(Arithmetic(), everything, simulated())
    cells = optimizer.locations().bytes(tier="cpu")
    # The host alone works on the optimizer's state: no device copies it.
    assert {row.kind for row in optimizer.locations().rows if row.pinned} == {"param", "grad", "staging"}
    optimizer.close()
    limit = bounce_bytes(4 * KIB) + 96 * KIB
    options = penstock.Options(tile_bytes=4 * KIB, pinned_bytes=limit)
    stock_model = make_model()
    stock = Arithmetic().make_optimizer(list(stock_model.parameters()))
    placement = penstock.Placement(params="cpu", grads="cpu", optimizer="cpu")
    streams = simulated()
    optimizer = prepare_on(streams, stock_model, stock, precision="fp32", placement=placement, options=options)
    rows = [row for row in optimizer.locations().rows if row.tier == "cpu"]
    assert {row.kind for row in rows if row.pinned} == {"staging", "grad"}
    assert {row.kind for row in rows if not row.pinned} == {"param", "exp_avg", "exp_avg_sq"}
    assert sum(row.nbytes for row in rows) == cells + bounce_bytes(4 * KIB)
    assert sum(pinned.values()) <= limit
    assert not any(row.in_flight for row in rows)
    optimizer.close()
    assert pinned == {}


def pinned_kinds(optimizer: penstock.Optimizer) -> set[str]:
    return {row.kind for row in optimizer.locations().rows if row.pinned}


def test_what_the_host_alone_works_on_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 of the 14 bytes per parameter that the cpu tier may hold: page-locked memory is taken from all processes."""
    pinned = pinning_on_cpu(monkeypatch)
    faulted: list[int] = []
    touch = host_memory.touch
    monkeypatch.setattr(
        host_memory,
        "touch",
        lambda allocation, threads: (faulted.append(allocation.numel()), touch(allocation, threads)),
    )
    what, how = Arithmetic(precision="bf16"), Movement(3, "cpu", "cpu", "cpu").but(tile_bytes=4 * KIB)
    states = {"exp_avg", "exp_avg_sq"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, optimizer = prepared(what, how, separate())
        rows = optimizer.locations().rows
        assert pinned_kinds(optimizer) == {"param", "grad", "staging"}
        assert sum(faulted) >= sum(row.nbytes for row in rows if row.tier == "cpu"), "and is there from the start"
        copied = sum(row.nbytes for row in rows if row.pinned)
        assert copied <= sum(pinned.values()) < copied + 4 * KIB * len(rows), "whole pages"
        optimizer.close()
        _, optimizer = prepared(what, Movement(3, "device", "cpu", "cpu"), separate())
        masters = {(row.dtype, row.pinned) for row in optimizer.locations().rows if row.kind == "master"}
        assert masters == {(torch.bfloat16, True), (torch.int16, False)}, "the shadow goes up"
        optimizer.close()
        _, optimizer = prepared(what, how.but(streamed_updates=0.5), separate())
        assert not any(row.tier == "cpu" and not row.pinned for row in optimizer.locations().rows)
        optimizer.close()
        _, optimizer = prepared(what, Movement(3, optimizer=shares(device=0.5, cpu=0.5)), separate())
        assert pinned_kinds(optimizer) == {"master", "staging"}, "the host updates what is there"
        optimizer.offload_states({"optimizer"})
        assert pinned_kinds(optimizer) >= states, "what moves is pinned as its caller likes"
        assert {row.pinned for row in optimizer.locations().rows if row.kind in states} == {True, False}
        optimizer.close()
        model, (folder,) = make_model(), disks()
        placement = penstock.Placement(params="cpu", grads="cpu", optimizer="cpu", nvme_path=folder)
        optimizer = prepare_on(separate(), model, what.make_optimizer(list(model.parameters())), placement=placement)
        optimizer.offload_states({"param", "optimizer"}, "nvme")
        optimizer.reload_states()
        assert pinned_kinds(optimizer) == {"param", "grad", "staging"}, "the same as at the start"
        optimizer.close()
    assert pinned == {}


def test_a_budget_is_for_what_a_device_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    pinning_on_cpu(monkeypatch)
    what, placement = Arithmetic(precision="bf16"), penstock.Placement(optimizer="cpu")
    for streamed, all_fit in ((0.0, True), (0.5, False)):
        model = make_model()
        stock = what.make_optimizer(list(model.parameters()))
        options = penstock.Options(tile_bytes=4 * KIB, pinned_bytes=192 * KIB, streamed_updates=streamed)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            optimizer = prepare_on(separate(), model, stock, placement=placement, options=options)
        assert ("are not pinned" in " ".join(str(w.message) for w in said)) is not all_fit
        optimizer.close()


def on_rank(rank: int, stages: tuple[int, ...]) -> list[str]:
    warnings.simplefilter("ignore")
    failures: list[str] = []
    for stage in stages:
        hows = [
            Movement(stage, *storages).but(tile_bytes=4 * KIB)
            for storages in (("cpu", "cpu", "cpu"), ("cpu", "cpu", "device"), ("device", "device", "cpu"))
        ]
        at_once = bits(train(ROWS[0], Movement(stage), rank=rank, world_size=2, streams=inline(), steps=STEPS))
        with pytest.MonkeyPatch.context() as limited:
            pinning_on_cpu(limited, RINGS_ALONE)
            for how in hows:
                late = train(ROWS[0], how, rank=rank, world_size=2, streams=simulated(most_seconds=0.001), steps=STEPS)
                failures += [] if bits(late) == at_once else [changed(how)]
    return failures


@pytest.mark.parametrize("stages", [(3,), thorough((1, 3))], ids=str)
def test_pageable_memory_changes_no_bit_on_two_ranks(stages: tuple[int, ...]) -> None:
    assert run_ranks(on_rank, 2, stages) == [[], []]
