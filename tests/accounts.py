"""The table of an engine against the memory and the files that there are."""

import contextlib
import gc
import os
import threading
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

import penstock
from penstock.config import Tier
from penstock.engine.gradients.proxy import GradientProxy
from penstock.runtime.host_memory import Arena
from penstock.tiers.host import _HostAllocation
from penstock.tiers.storage import CellPlan, record_sizes
from penstock.tiers.tier import Store, bytes_on


def allocations(optimizer: penstock.Optimizer) -> list[Arena]:
    """The mapped slabs of the cpu tier."""
    return [
        allocation._arena
        for allocation in optimizer._engine.context.store._left
        if isinstance(allocation, _HostAllocation)
    ]


def file_bytes(folder: Path) -> int:
    """Bytes of the files of all engines in a folder."""
    return sum(path.stat().st_size for path in swap_files(folder))


def swap_files(folder: Path, storage: str = "") -> list[Path]:
    """Find the files of this process's engines in a folder, of one home or of all: open, and without names there."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            path = Path(os.readlink(link).removesuffix(" (deleted)"))
            if path.is_relative_to(folder.resolve()) and path.match(f"penstock-*-*-{storage or '*'}"):
                found[link.stat().st_ino] = link
    return list(found.values())


def cells(store: Store) -> list[CellPlan]:
    """The cells of all that takes memory or space."""
    return [cell for plan, *_ in store.table() for cell in plan.cells]


def tensor_bytes() -> int:
    """Bytes of all storages that Python sees, but of those that were mapped, and of handles, which have no data."""
    gc.collect()
    found = {}
    with torch._C.DisableTorchFunctionSubclass():  # of released parameters too
        for value in gc.get_objects():
            kind = type(value)
            if issubclass(kind, Tensor) and not issubclass(kind, GradientProxy) and value.layout is torch.strided:
                storage = value.untyped_storage()
                if storage.resizable():
                    found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def native_threads() -> int:
    """Threads of this process, those of C++ too. One that was joined is listed for a moment."""
    return len(os.listdir("/proc/self/task"))


def what_engines_take() -> dict[str, int]:
    """What engines take of the process."""
    return {
        "bytes": tensor_bytes(),
        "python threads": threading.active_count(),
        "threads": native_threads(),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def assert_table_agrees(optimizer: penstock.Optimizer, folder: Path | None = None) -> None:
    """Nothing is moving: the table is what the slabs and the files take, but for padding to pages.

    Arguments:
        folder: of this engine's files alone.
    """
    store, report = optimizer._engine.context.store, optimizer.locations()
    assert not store._leaving
    assert all(arena.used == arena.capacity for arena in allocations(optimizer)), "in exact size"
    held = [*store._left, *store._kept.values()]
    for allocation in held:
        if isinstance(allocation, _HostAllocation):
            assert allocation._arena.capacity == bytes_on(allocation.plans, Tier.CPU), "what was planned"
    made = [(plan, allocation) for plan, allocation, kind in store.table() if kind is None and allocation is not None]
    assert Counter(made) == Counter((plan, allocation) for allocation in store._left for plan in allocation.plans), (
        "and nothing else"
    )
    planned = [plan for allocation in held for plan in allocation.plans]
    lent = [plan for plan, allocation, _ in store.table() if allocation is None]
    for tier in (Tier.CPU, Tier.NVME):
        assert report.bytes(tier=tier.value) == sum(plan.nbytes for plan in [*planned, *lent] if plan.tier is tier)
    assert report.bytes(kind="kept") == sum(
        plan.nbytes for allocation in store._kept.values() for plan in allocation.plans
    )
    if folder is not None:
        assert file_bytes(folder) == sum(sum(record_sizes(plan)) for plan in planned if plan.tier is Tier.NVME)
    assert [row for row in report.rows if row.in_flight and row.kind != "gathered"] == []
