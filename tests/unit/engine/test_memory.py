"""Memory as a formula: the table, the allocator and the process agree, and close gives everything back."""

import gc
import json
import os
import subprocess
import sys
import threading
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.layout import ALIGNMENT_NUMEL
from penstock.runtime.host_memory import PAGE_BYTES, return_free_memory
from penstock.runtime.streams import Streams
from penstock.tiers.host import _HostAllocation
from tests.lib.engines import prepare_on
from tests.lib.streams import inline, separate, simulated

EVERYTHING_ON_CPU = penstock.Placement(params="cpu", grads="cpu", optimizer="cpu")
TIERS = ("device", "cpu")
MIB = 1 << 20


def stack(width: int = 48, blocks: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(blocks)))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(model: nn.Module, optimizer: penstock.Optimizer) -> None:
    width = next(model.parameters()).shape[-1]
    optimizer.backward(model(torch.ones(1, width)).float().square().sum())
    optimizer.step()
    optimizer.zero_grad()


def padded_numel(model: nn.Module) -> int:
    return sum(-(-p.numel() // ALIGNMENT_NUMEL) * ALIGNMENT_NUMEL for p in model.parameters())


PER_PARAMETER = {
    ("fp32", "remainder"): {"param": 4, "grad": 4, "exp_avg": 4, "exp_avg_sq": 4},
    ("bf16", "remainder"): {"param": 2, "grad": 2, "master": 2, "exp_avg": 4, "exp_avg_sq": 4},
    ("bf16", "fp32"): {"param": 2, "grad": 2, "master": 4, "exp_avg": 4, "exp_avg_sq": 4},
}


@pytest.mark.parametrize("streams", [inline, separate], ids=["in host memory", "beside it"])
@pytest.mark.parametrize(("precision", "master"), PER_PARAMETER)
def test_the_report_is_bytes_per_parameter_on_each_tier(precision: str, master: str, streams: Any) -> None:
    for params, grads, optimizer_tier in product(TIERS, repeat=3):
        model = stack()
        optimizer = prepare_on(
            streams(),
            model,
            adamw(model),
            placement=penstock.Placement(params=params, grads=grads, optimizer=optimizer_tier),
            precision=precision,
            master=master,
            options=penstock.Options(tile_bytes=4096),
        )
        numel = padded_numel(model)
        storages = {"param": params, "grad": grads}
        expected: dict[tuple[str, str], int] = {}
        for kind, nbytes in PER_PARAMETER[precision, master].items():
            expected[kind, storages.get(kind, optimizer_tier)] = nbytes * numel
        reach = streams is inline
        if not reach and params != optimizer_tier:  # the update writes beside its state, and publishes
            cell = "master", optimizer_tier
            expected[cell] = expected.get(cell, 0) + expected["param", params]
        staging = 0 if reach else 4096 * (2 * (grads == "cpu") + 2 * (grads != optimizer_tier))  # two slots a ring
        report = optimizer.locations()
        found: dict[tuple[str, str], int] = {}
        for row in report.rows:
            if row.kind != "staging":
                found[row.kind, row.tier] = found.get((row.kind, row.tier), 0) + row.nbytes
        assert found == expected, (params, grads, optimizer_tier)
        assert report.bytes(kind="staging") == staging, (params, grads, optimizer_tier)
        optimizer.close()


@pytest.mark.parametrize("streams", [inline, separate], ids=["in host memory", "beside it"])
def test_the_allocator_holds_what_the_report_says_and_less_than_a_page_a_cell_more(streams: Any) -> None:
    model = stack()
    optimizer = prepare_on(streams(), model, adamw(model), placement=EVERYTHING_ON_CPU)
    store = optimizer._engine.context.store
    cells = [cell for plan, *_ in store.table() for cell in plan.cells]
    reported = optimizer.locations().bytes(tier="cpu")
    assert reported == sum(cell.nbytes for cell in cells)
    arenas = [allocation._arena for allocation in store._left if isinstance(allocation, _HostAllocation)]
    assert all(arena.used == arena.capacity for arena in arenas), "planned exactly"
    assert 0 <= sum(arena.capacity for arena in arenas) - reported < PAGE_BYTES * len(cells)
    allocations: dict[str, set[int]] = {}
    for segment in store._segments:
        pointers = allocations.setdefault(segment.plan.storage, set())
        pointers |= {tensor.untyped_storage().data_ptr() for tensor in segment.tensors}
    assert set(map(len, allocations.values())) == {1}, "one slab for each home"
    assert len(arenas) == len(allocations)
    numel = sum(p.numel() for p in model.parameters())
    state = reported - optimizer.locations().bytes(kind="staging")
    slots = len(list(model.parameters()))
    assert state <= 14 * (numel + ALIGNMENT_NUMEL * slots)
    assert state - optimizer.locations().bytes(kind="grad") <= 12 * (numel + ALIGNMENT_NUMEL * slots)
    optimizer.close()


def test_gathered_memory_is_in_the_report_while_it_is_held_and_not_longer() -> None:
    model = stack()
    optimizer = prepare_on(separate(), model, adamw(model), placement=EVERYTHING_ON_CPU)
    assert optimizer.locations().bytes(kind="gathered") == 0
    with optimizer.gathered():
        assert optimizer.locations().bytes(kind="gathered", tier="device") == 2 * padded_numel(model)
    assert optimizer.locations().bytes(kind="gathered") == 0
    seen = []
    model[1].register_forward_hook(lambda *_: seen.append(optimizer.locations().bytes(kind="gathered", unit="1")))
    step(model, optimizer)
    assert seen == [2 * padded_numel(model[1])]
    assert optimizer.locations().bytes(kind="gathered") == 0
    optimizer.close()


@pytest.mark.parametrize("keep_params", [True, False])
@pytest.mark.parametrize("streams", [inline, separate, simulated])
def test_close_leaves_the_model_as_it_was(streams: Any, keep_params: bool) -> None:
    threads = set(threading.enumerate())
    model = stack()
    model.register_buffer("scale", torch.ones(3, dtype=torch.float64))
    hooks_before = hooks_of(model)
    optimizer = prepare_on(streams(), model, adamw(model), placement=EVERYTHING_ON_CPU)
    step(model, optimizer)
    expected = [optimizer.full_param(p) for p in model.parameters()]
    shapes = [p.shape for p in model.parameters()]
    optimizer.close(keep_params=keep_params)
    optimizer.close()
    assert set(threading.enumerate()) == threads
    assert hooks_of(model) == hooks_before
    assert "zero_grad" not in vars(model)
    assert model.scale.dtype == torch.float64
    for parameter, value in zip(model.parameters(), expected, strict=True):
        assert parameter.dtype == torch.float32
        assert parameter.grad is None
        assert parameter.requires_grad
        assert not vars(parameter), "no private attributes"
        if keep_params:
            assert torch.equal(parameter, value)
            assert parameter.is_contiguous()
            assert parameter.untyped_storage().nbytes() == 4 * value.numel(), "no view of a larger buffer"
        else:
            assert parameter.numel() == 0
    if keep_params:  # a plain model again
        model(torch.ones(1, 48)).sum().backward()
        assert all(p.grad.shape == shape for p, shape in zip(model.parameters(), shapes, strict=True))
        model.zero_grad()
        assert all(p.grad is None for p in model.parameters())


def hooks_of(model: nn.Module) -> dict[str, int]:
    found = {}
    for name, module in model.named_modules():
        for kind, value in vars(module).items():
            if kind.endswith(("hooks", "hooks_with_kwargs", "hooks_always_called")) and value:
                found[f"{name}.{kind}"] = len(value)
    for name, parameter in model.named_parameters():
        found[name] = len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ())
        found[f"{name}, grad"] = len(parameter._backward_hooks or ())
    return found


def test_a_closed_engine_is_garbage() -> None:
    gc.collect()
    model = stack()
    optimizer = prepare_on(separate(), model, adamw(model), placement=EVERYTHING_ON_CPU)
    step(model, optimizer)
    allocations = {
        allocation._arena._allocation.data_ptr()
        for allocation in optimizer._engine.context.store._left
        if isinstance(allocation, _HostAllocation)
    }
    assert allocations <= {t.untyped_storage().data_ptr() for t in live_tensors()}
    optimizer.close()
    gc.collect()
    assert not allocations & {t.untyped_storage().data_ptr() for t in live_tensors()}


def live_tensors() -> list[torch.Tensor]:
    found = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter)]
    return [tensor for tensor in found if tensor.layout is torch.strided]


# The process. It runs alone, since memory that others free or keep would be counted.

WIDTH, BLOCKS = 1920, 8
NUMEL = BLOCKS * (WIDTH * WIDTH + WIDTH)  # 29.5 M
BLOCK_BYTES = 2 * (WIDTH * WIDTH + WIDTH)
#: gathered blocks (two), and gradients on their way (a ring of two)
GATHER_BUDGET, GRADIENT_BUFFERS = 2 * BLOCK_BYTES, 2 * BLOCK_BYTES
#: slabs in whole huge pages, stacks of threads, the allocator's own pages
CONSTANT = 16 * MIB


def resident_bytes() -> int:
    gc.collect()
    return_free_memory()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def life_of_an_engine(streams: Streams, keep_params: bool) -> dict[str, int]:
    warm = stack()  # what torch allocates once
    optimizer = prepare_on(streams, warm, adamw(warm), placement=EVERYTHING_ON_CPU)
    step(warm, optimizer)
    optimizer.close()
    del warm, optimizer
    found = {"descriptors before": descriptors(), "threads before": threading.active_count()}
    base = resident_bytes()
    model = stack(WIDTH, BLOCKS)
    found["model"] = resident_bytes() - base
    options = penstock.Options(live_bytes=GATHER_BUDGET)
    optimizer = prepare_on(separate() if not streams.aliases_host else inline(), model, adamw(model),
                           placement=EVERYTHING_ON_CPU, options=options)  # fmt: skip
    for _ in range(2):
        step(model, optimizer)
    found["rest"] = resident_bytes() - base
    found["report"] = optimizer.locations().bytes() - optimizer.locations().bytes(kind="staging")
    optimizer.close(keep_params=keep_params)
    found["closed"] = resident_bytes() - base
    found["descriptors after"], found["threads after"] = descriptors(), threading.active_count()
    return found


@pytest.mark.parametrize("streams", ["inline", "separate"])
def test_the_process_holds_fourteen_bytes_a_parameter_and_gives_them_back(streams: str) -> None:
    keep_params = streams == "inline"
    code = (
        "import json; from tests.lib.streams import inline, separate; from tests.unit.engine import test_memory; "
        f"print(json.dumps(test_memory.life_of_an_engine({streams}(), {keep_params})))"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[3],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["model"] == pytest.approx(4 * NUMEL, rel=0.1), "the process is measured right"
    assert found["report"] == 14 * padded_numel_of_life()
    on_the_way = 0 if streams == "inline" else GATHER_BUDGET + GRADIENT_BUFFERS
    assert 13.5 * NUMEL < found["rest"] <= 14 * NUMEL + on_the_way + CONSTANT, found
    assert found["closed"] <= (4 * NUMEL if keep_params else 0) + CONSTANT, found
    assert found["descriptors after"] == found["descriptors before"]
    assert found["threads after"] == found["threads before"]


def padded_numel_of_life() -> int:
    with torch.device("meta"):
        return padded_numel(stack(WIDTH, BLOCKS))
