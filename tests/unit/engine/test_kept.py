"""Moves that keep their memory and files for the next one."""

import gc
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import MemoryBudgetError
from penstock.runtime.host_memory import Arena, HostMemory
from penstock.tiers.host import _HostAllocation
from penstock.tiers.nvme import FileAllocation
from tests.accounts import allocations, assert_table_agrees, file_bytes, swap_files
from tests.lib.engines import prepare_on
from tests.lib.streams import separate, simulated

WIDTH = 64


def prepared(folder: Path, make: object = separate, **storages: str) -> tuple[nn.Sequential, penstock.Optimizer]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8))
    given = torch.optim.AdamW(model.parameters(), lr=1e-2)
    placement = penstock.Placement(**storages, nvme_path=folder)  # type: ignore[arg-type]
    options = penstock.Options(tile_bytes=4096)
    return model, prepare_on(make(), model, given, placement=placement, options=options)  # type: ignore[operator]


def train(model: nn.Module, optimizer: penstock.Optimizer, seed: int) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    optimizer.backward(model(x).float().square().mean())
    optimizer.step()
    optimizer.zero_grad()


def state(model: nn.Module, optimizer: penstock.Optimizer) -> list[Tensor]:
    values = []
    for p in model.parameters():
        values += [optimizer.full_param(p), *(optimizer.full_state(p, n) for n in ("exp_avg", "exp_avg_sq"))]
    return values


def host_addresses(optimizer: penstock.Optimizer) -> set[int]:
    return {arena._allocation.data_ptr() for arena in allocations(optimizer) if arena._allocation is not None}


def files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_ino for path in swap_files(folder)}


@pytest.mark.parametrize("non_blocking", [False, True])
@pytest.mark.parametrize("to", ["cpu", "nvme"])
def test_the_next_move_takes_what_the_last_one_kept(to: str, non_blocking: bool, tmp_path: Path) -> None:
    model, optimizer = prepared(tmp_path, simulated if non_blocking else separate)
    plain = prepared(tmp_path)
    seen = []
    for seed in range(3):
        train(model, optimizer, seed)
        train(*plain, seed)
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
    assert all(torch.equal(a, b) for a, b in zip(state(model, optimizer), state(*plain), strict=True))
    for each in (optimizer, plain[1]):
        each.close()
    assert file_bytes(tmp_path) == 0


def test_an_offload_without_keep_gives_back_what_was_kept(tmp_path: Path) -> None:
    model, optimizer = prepared(tmp_path)
    train(model, optimizer, 0)
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
    train(model, optimizer, 0)
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
        train(*each, 3)
    assert all(torch.equal(a, b) for a, b in zip(state(model, optimizer), state(*plain), strict=True))
    for each in (optimizer, plain[1]):
        each.close()


def test_what_is_kept_goes_where_something_else_has_no_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, optimizer = prepared(tmp_path)
    train(model, optimizer, 0)
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
    assert all(torch.equal(a, b) for a, b in zip(state(model, optimizer), before, strict=True))
    optimizer.close()


def test_close_gives_back_what_is_kept(tmp_path: Path) -> None:
    def all_of_it() -> None:
        model, optimizer = prepared(tmp_path)
        train(model, optimizer, 0)
        for to in ("cpu", "nvme"):
            optimizer.offload_states(to=to, keep=True)
            optimizer.reload_states()
        kept = list(optimizer._engine.context.store._kept.values())
        assert {type(allocation) for allocation in kept} == {_HostAllocation, FileAllocation}
        optimizer.close()
        assert all(
            allocation._arena._allocation is None for allocation in kept if isinstance(allocation, _HostAllocation)
        )
        assert all(
            file.closed for allocation in kept if isinstance(allocation, FileAllocation) for file in allocation._files
        )

    all_of_it()
    gc.collect()
    descriptors, mappings = len(os.listdir("/proc/self/fd")), len(Path("/proc/self/maps").read_text().splitlines())
    for _ in range(3):
        all_of_it()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert len(Path("/proc/self/maps").read_text().splitlines()) < mappings + 20
    assert list(tmp_path.iterdir()) == []
