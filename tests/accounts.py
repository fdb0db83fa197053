"""The table of an engine against the memory and the files that there are."""

import gc
from pathlib import Path

import torch
from torch import Tensor

import penstock
from penstock.engine.passes.handles import Handle
from penstock.kinds import Tier
from penstock.machine.arena import Arena
from penstock.tiers.home import CellPlan
from penstock.tiers.host import _HostSlab
from penstock.tiers.records import Records, record_sizes
from penstock.tiers.store import Store


def slabs(optimizer: penstock.Optimizer) -> list[Arena]:
    """The mapped slabs of the cpu tier."""
    return [slab._arena for slab in optimizer._engine.store._left if isinstance(slab, _HostSlab)]


def file_bytes(folder: Path) -> int:
    """Bytes of the files of all engines in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*.[0-9]*"))


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
            if issubclass(kind, Tensor) and not issubclass(kind, Handle) and value.layout is torch.strided:
                storage = value.untyped_storage()
                if storage.resizable():
                    found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def assert_table_agrees(optimizer: penstock.Optimizer, folder: Path | None = None) -> None:
    """Nothing is moving: the table is what the slabs and the files take, but for padding to pages.

    Arguments:
        folder: of this engine's files alone.
    """
    store, report = optimizer._engine.store, optimizer.locations()
    assert not store._leaving
    slab_rows = [s for s, slab in store._sections.items() if isinstance(slab, _HostSlab)]
    expected = sum(cell.lease_bytes for section in slab_rows for cell in section.plan.cells)
    assert sum(arena.capacity for arena in slabs(optimizer)) == expected, "no slab but for what is in the table"
    kept = list(store._kept.values())
    for each in kept:
        if isinstance(each, _HostSlab):
            assert each._arena.capacity == sum(c.lease_bytes for plan in each.plans for c in plan.cells)
    assert report.bytes(kind="kept") == sum(c.nbytes for each in kept for plan in each.plans for c in plan.cells)
    assert all(arena.used == arena.capacity for arena in slabs(optimizer)), "in exact size"
    lent = [
        c.nbytes for s, slab in store._sections.items() if slab is None and s.tier is Tier.CPU for c in s.plan.cells
    ]
    mapped = sum(cell.nbytes for section in slab_rows for cell in section.plan.cells)
    assert report.bytes(tier="cpu") - report.bytes(kind="kept", tier="cpu") == mapped + sum(lent)
    records = [section for section in store._sections if isinstance(section, Records)]
    assert report.bytes(tier="nvme") - report.bytes(kind="kept", tier="nvme") == sum(
        cell.nbytes for section in records for cell in section.plan.cells
    )
    if folder is not None:
        in_files = [plan for each in kept for plan in each.plans if plan.tier is Tier.NVME]
        assert file_bytes(folder) == sum(s.record_bytes(n) for s in records for n in range(s.tiles)) + sum(
            sum(record_sizes(plan)) for plan in in_files
        )
    assert [row for row in report.rows if row.in_flight and row.kind != "gathered"] == []
