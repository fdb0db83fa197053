"""Memory as a formula: the table, the allocator and the process agree, and close gives everything back."""

import gc
import os
import threading
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.layout import ALIGNMENT_NUMEL
from penstock.runtime.host_memory import return_free_memory
from tests.lib.engines import ON_CPU, prepared, train
from tests.lib.models import stack
from tests.lib.ranks import run_ranks
from tests.lib.streams import STREAMS, inline, separate

TIERS = ("device", "cpu")
MIB = 1 << 20


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
    for params, grads, state in product(TIERS, repeat=3):
        how = {"params": params, "grads": grads, "optimizer": state}
        model, optimizer = prepared(lambda: stack(width=48), streams, precision=precision, master=master, **how)
        numel = padded_numel(model)
        storages = {"param": params, "grad": grads}
        expected: Counter[tuple[str, str]] = Counter()
        for kind, nbytes in PER_PARAMETER[precision, master].items():
            expected[kind, storages.get(kind, state)] = nbytes * numel
        reach = streams is inline
        if not reach and params != state:  # the update writes beside its state, and publishes
            expected["master", state] += expected["param", params]
        staging = 0 if reach else 4096 * (2 * (grads == "cpu") + 2 * (grads != state))  # two slots a ring
        report = optimizer.locations()
        found: Counter[tuple[str, str]] = Counter()
        for row in report.rows:
            if row.kind != "staging":
                found[row.kind, row.tier] += row.nbytes
        assert found == expected, how
        assert report.bytes(kind="staging") == staging, how
        optimizer.close()


def test_gathered_memory_is_in_the_report_while_it_is_held_and_not_longer() -> None:
    model, optimizer = prepared(stack, precision="bf16", **ON_CPU)
    assert optimizer.locations().bytes(kind="gathered") == 0
    with optimizer.gathered():
        assert optimizer.locations().bytes(kind="gathered", tier="device") == 2 * padded_numel(model)
    assert optimizer.locations().bytes(kind="gathered") == 0
    seen = []
    model[1].register_forward_hook(lambda *_: seen.append(optimizer.locations().bytes(kind="gathered", unit="1")))
    train(model, optimizer)
    assert seen == [2 * padded_numel(model[1])]
    assert optimizer.locations().bytes(kind="gathered") == 0


# The process: a new one, since memory that others free or keep would be counted.

WIDTH, LAYERS = 1920, 4
NUMEL = LAYERS * (WIDTH * WIDTH + WIDTH)  # 14.8 M
LAYER_BYTES = 2 * (WIDTH * WIDTH + WIDTH)
#: gathered layers (two), and gradients on their way (a ring of two)
GATHER_BUDGET, GRADIENT_BUFFERS = 2 * LAYER_BYTES, 2 * LAYER_BYTES
#: slabs in whole huge pages, stacks of threads, the allocator's own pages
CONSTANT = 16 * MIB


def resident_bytes() -> int:
    gc.collect()
    return_free_memory()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def life_of_an_engine(streams: str, keep_params: bool) -> dict[str, int]:
    how = {"precision": "bf16", "tile_bytes": 4 * MIB, **ON_CPU}
    warm, optimizer = prepared(stack, STREAMS[streams], **how)  # what torch allocates once
    train(warm, optimizer)
    optimizer.close()
    del warm, optimizer
    found = {"descriptors before": descriptors(), "threads before": threading.active_count()}
    base = resident_bytes()
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.constant_(p, 1e-4)
    found["model"] = resident_bytes() - base
    _, optimizer = prepared(model, STREAMS[streams], live_bytes=GATHER_BUDGET, **how)
    train(model, optimizer, 2)
    found["rest"] = resident_bytes() - base
    found["report"] = optimizer.locations().bytes() - optimizer.locations().bytes(kind="staging")
    optimizer.close(keep_params=keep_params)
    found["closed"] = resident_bytes() - base
    found["descriptors after"], found["threads after"] = descriptors(), threading.active_count()
    return found


LIVES = (("inline", True), ("separate", False))


def lives(rank: int) -> list[dict[str, int]]:
    return [life_of_an_engine(*life) for life in LIVES]


def test_the_process_holds_fourteen_bytes_a_parameter_and_gives_them_back() -> None:
    (of_both,) = run_ranks(lives, 1, fresh=True)
    for (streams, keep_params), found in zip(LIVES, of_both, strict=True):
        assert found["model"] == pytest.approx(4 * NUMEL, rel=0.1), "the process is measured right"
        assert found["report"] == 14 * LAYERS * padded_numel(nn.Linear(WIDTH, WIDTH, device="meta"))
        on_the_way = 0 if streams == "inline" else GATHER_BUDGET + GRADIENT_BUFFERS
        assert 13.5 * NUMEL < found["rest"] <= 14 * NUMEL + on_the_way + CONSTANT, found
        assert found["closed"] <= (4 * NUMEL if keep_params else 0) + CONSTANT, found
        assert found["descriptors after"] == found["descriptors before"]
        assert found["threads after"] == found["threads before"]
