"""Moves that keep their memory and files for the next one."""

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import MemoryBudgetError
from penstock.runtime.host_memory import Arena, HostMemory
from tests.accounts import allocations, assert_table_agrees, file_bytes, swap_files
from tests.lib.engines import assert_same_state, state, train
from tests.lib.engines import prepared as prepare
from tests.lib.models import stack
from tests.lib.streams import separate, simulated

WIDTH = 64


Prepared = tuple[nn.Sequential, penstock.Optimizer]


def prepared(folder: Path, streams: Any = separate) -> Prepared:
    return prepare(stack(8, WIDTH, WIDTH, 8), streams, precision="bf16", nvme_path=folder)


def host_addresses(optimizer: penstock.Optimizer) -> set[int]:
    return {arena._allocation.data_ptr() for arena in allocations(optimizer) if arena._allocation is not None}


def files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_ino for path in swap_files(folder)}


@pytest.mark.parametrize(("to", "non_blocking"), [("cpu", False), ("cpu", True), ("nvme", True)])
def test_the_next_move_takes_what_the_last_one_kept(to: str, non_blocking: bool, tmp_path: Path) -> None:
    model, optimizer = prepared(tmp_path, simulated if non_blocking else separate)
    plain = prepared(tmp_path)
    seen = []
    for seed in range(3):
        train(model, optimizer, first=seed)
        train(*plain, first=seed)
        moved = optimizer.locations().bytes(tier="device") - optimizer.locations().bytes(kind="gathered")
        optimizer.offload_states(to=to, keep=True, non_blocking=non_blocking)
        optimizer._engine.offloader.finish()
        mine = {path: inode for path, inode in files(tmp_path).items() if to == "nvme"}
        seen.append(mine or host_addresses(optimizer))
        assert optimizer.locations().bytes(kind="kept", tier=to) == 0, "it is in use"
        optimizer.reload_states(non_blocking=non_blocking)
        optimizer._engine.offloader.finish()
        assert optimizer.locations().bytes(kind="kept", tier=to) == moved
        assert not any(row.in_flight for row in optimizer.locations().rows if row.kind == "kept")
        assert_table_agrees(optimizer)
    assert seen[0] == seen[1] == seen[2]
    assert_same_state(state(model, optimizer), state(*plain))
    for each in (optimizer, plain[1]):
        each.close()
    assert file_bytes(tmp_path) == 0


def test_an_offload_without_keep_gives_back_what_was_kept(tmp_path: Path) -> None:
    model, optimizer = prepared(tmp_path)
    train(model, optimizer)
    for to in ("cpu", "nvme"):
        optimizer.offload_states(to=to, keep=True)
        optimizer.reload_states()
        assert optimizer.locations().bytes(kind="kept", tier=to) > 0
    assert optimizer.locations().bytes(kind="kept", tier="cpu") > 0
    optimizer.offload_states({"optimizer"})
    assert optimizer.locations().bytes(kind="kept") == 0
    optimizer.reload_states()
    assert optimizer.locations().bytes(kind="kept") == 0
    assert_table_agrees(optimizer, tmp_path)
    assert list(tmp_path.iterdir()) == []
    optimizer.close()


def test_what_one_offload_leaves_for_another_is_not_kept(tmp_path: Path) -> None:
    model, optimizer = prepared(tmp_path)
    train(model, optimizer)
    optimizer.offload_states(keep=True)
    optimizer.offload_states(to="nvme", keep=True)
    assert optimizer.locations().bytes(tier="cpu") == optimizer.locations().bytes(kind="kept", tier="cpu")
    assert all(
        row.kind == "kept" and row.unit.startswith("(") for row in optimizer.locations().rows if row.tier == "cpu"
    )
    optimizer.close()


def test_kept_memory_has_no_values_of_before(tmp_path: Path) -> None:
    """The second time no gradients move: their home is zeros, and not the gradients of the first time."""
    model, optimizer = prepared(tmp_path)
    plain = prepared(tmp_path)
    for each in ((model, optimizer), plain):
        each[1].backward(each[0](torch.ones(4, 8)).float().sum())
    optimizer.offload_states(keep=True)
    optimizer.reload_states()
    for each in ((model, optimizer), plain):
        each[1].step()
        each[1].zero_grad()
    optimizer.offload_states(keep=True)
    for name, storage in ((n, h) for unit in optimizer._engine.context.units for n, h in unit.storages.items()):
        if name == "grad":
            assert not any(tensor.any() for segment in storage.segments for tensor in segment.tensors)
    for each in ((model, optimizer), plain):
        train(*each, first=3)
    assert_same_state(state(model, optimizer), state(*plain))
    for each in (optimizer, plain[1]):
        each.close()


def test_what_is_kept_goes_where_something_else_has_no_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, optimizer = prepared(tmp_path)
    train(model, optimizer)
    optimizer.offload_states({"optimizer"}, keep=True)
    optimizer.reload_states()
    kept = optimizer.locations().bytes(kind="kept")
    before = state(model, optimizer)

    def left() -> HostMemory:
        return HostMemory(0 if optimizer._engine.context.store._kept else 1 << 30, "the host has")

    with monkeypatch.context() as patch:
        patch.setattr(Arena, "available", staticmethod(left))
        optimizer.offload_states({"param"}, keep=True)
    assert kept > 0
    assert optimizer.locations().bytes(kind="kept") == 0
    with monkeypatch.context() as patch:
        patch.setattr(Arena, "available", staticmethod(lambda: HostMemory(0, "the host has")))
        with pytest.raises(MemoryBudgetError, match="too few"):
            optimizer.offload_states({"optimizer"}, keep=True)
    assert_same_state(state(model, optimizer), before)
    optimizer.close()


def test_close_gives_back_what_is_kept(tmp_path: Path) -> None:
    def all_of_it() -> None:
        model, optimizer = prepared(tmp_path)
        train(model, optimizer)
        for to in ("cpu", "nvme"):
            optimizer.offload_states(to=to, keep=True)
            optimizer.reload_states()
        assert all(optimizer.locations().bytes(kind="kept", tier=to) > 0 for to in ("cpu", "nvme"))
        optimizer.close()

    all_of_it()
    gc.collect()
    descriptors, mappings = len(os.listdir("/proc/self/fd")), len(Path("/proc/self/maps").read_text().splitlines())
    for _ in range(3):
        all_of_it()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert len(Path("/proc/self/maps").read_text().splitlines()) < mappings + 20
    assert list(tmp_path.iterdir()) == []
