"""What `prepare` would take, told without taking it: equal to what it takes then."""

from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock import ConfigError, MemoryBudgetError, Options, Placement, memory_budget
from penstock import footprint as module
from penstock.footprint import Footprint, footprint
from penstock.memory_budget import MemoryBudget, check_device
from penstock.runtime.host_memory import Arena, HostMemory
from penstock.tiers.host import DeviceTier, HostTier
from penstock.tiers.nvme import NvmeTier
from tests.accounts import file_bytes
from tests.measured import PLACEMENTS, deep
from tests.models.modules_rows import Stack, squared

SMALL = Options(tile_bytes=4 << 10)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters())


def told(model: nn.Module, **arguments: Any) -> Footprint:
    """The footprint, while nothing may be taken."""

    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("a footprint takes nothing")

    with pytest.MonkeyPatch.context() as patch:
        for tier in (DeviceTier, HostTier, NvmeTier):
            patch.setattr(tier, "reserve", forbidden)
        patch.setattr(Arena, "__init__", forbidden)
        return footprint(model, adamw(model), **arguments)


def cells(report: penstock.LocationReport) -> list[tuple[Any, ...]]:
    rows = [row for row in report.rows if row.kind != "gathered"]
    return sorted((r.unit, r.kind, r.tier, str(r.dtype), r.numel, r.nbytes) for r in rows)


@pytest.mark.parametrize("where", PLACEMENTS, ids=str)
@pytest.mark.parametrize(("stage", "precision", "options"), [(3, "bf16", SMALL), (0, "fp32", Options())])
def test_it_is_the_table_that_prepare_makes(where, stage, precision, options, tmp_path):
    params, grads, optimizer = where
    arguments: dict[str, Any] = {
        "placement": Placement(params=params, grads=grads, optimizer=optimizer, nvme_path=tmp_path),
        "stage": stage,
        "precision": precision,
        "options": options,
    }
    model = deep()
    found = told(model, **arguments)
    assert found.fits
    assert not list(tmp_path.iterdir())
    counted: list[MemoryBudget] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_budget, "check_device", lambda *given: counted.append(check_device(*given)) or counted[0])
        prepared = penstock.prepare(model, adamw(model), **arguments)
    assert [found.budget] == counted
    assert cells(found.at_rest) == cells(prepared.locations())
    assert file_bytes(tmp_path) == sum(room.needed for room in found.rooms if room.name == str(tmp_path))
    prepared.close()


@pytest.mark.parametrize("arguments", [{}, {"master": "fp32"}, {"precision": "fp32"}, {"optimizer": None}], ids=str)
def test_a_checkpoint_is_as_large_as_was_told(arguments, tmp_path):
    model = deep(width=256)
    model.register_buffer("seen", torch.zeros(10_000))
    optimizer = arguments.pop("optimizer", adamw(model))
    found = footprint(model, optimizer, **arguments)
    prepared = penstock.prepare(model, optimizer, **arguments)
    if optimizer is not None:
        prepared.backward(squared(model(torch.ones(2, 256))))
        prepared.step()
    prepared.save(tmp_path / "one")
    prepared.close()
    written = sum(path.stat().st_size for path in (tmp_path / "one").iterdir())
    assert written <= found.checkpoint_bytes <= 1.02 * written + (1 << 17)
    assert found.lack_of_checkpoints(tmp_path / "not" / "there", 3) is None


def test_too_little_room_for_checkpoints_is_said(monkeypatch, tmp_path):
    found = told(Stack(), world_size=2)
    monkeypatch.setattr(module, "free_disk_bytes", lambda folder: 6 * found.checkpoint_bytes - 1)
    assert found.lack_of_checkpoints(tmp_path, 2) is None
    each = 2 * found.checkpoint_bytes
    assert found.lack_of_checkpoints(tmp_path / "out", 3) == (
        f"3 checkpoints of {each:,} bytes take {3 * each:,}; {str(tmp_path)!r} has {3 * each - 1:,} bytes free, 1 too "
        "few. Keep fewer of them, or save elsewhere."
    )


def test_what_does_not_fit_is_said_as_prepare_says_it(monkeypatch):
    model = Stack()
    tight = Options(device_bytes=1000)
    found = told(model, options=tight)
    with pytest.raises(MemoryBudgetError) as caught:
        penstock.prepare(model, adamw(model), options=tight)
    assert not found.fits
    assert found.lacks == [str(caught.value)]
    monkeypatch.setattr(memory_budget, "available_host_memory", lambda: HostMemory(1000, "the host has"))
    found = told(model, options=tight)
    with pytest.raises(MemoryBudgetError) as caught:
        penstock.prepare(model, adamw(model), options=tight)
    assert len(found.lacks) == 2
    assert " ".join(found.lacks) == str(caught.value)


def test_disks_are_held_against_what_is_free(monkeypatch, tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    placement = Placement(optimizer="nvme", nvme_path=folders)
    one, two = told(Stack(), placement=placement, options=SMALL).rooms[-2:]
    assert (one.name, two.name) == tuple(map(str, folders))
    assert one.needed > 0
    assert two.needed > 0
    # Both folders are on one file system, which has room for less than both.
    monkeypatch.setattr(memory_budget, "free_disk_bytes", lambda folder: one.needed + two.needed - 1)
    found = told(Stack(), placement=placement, options=SMALL)
    assert found.lacks == [
        f"The nvme tier needs {two.needed:,} bytes on this rank; {str(folders[1])!r} has {two.needed - 1:,} available, "
        "1 too few. Keep less on the nvme tier, or choose another folder with Placement(nvme_path=...)."
    ]
    folders[0].rmdir()
    (lack,) = told(Stack(), placement=placement, options=SMALL).lacks
    assert lack.startswith(f"The nvme path {str(folders[0])!r} cannot be found")


def test_ranks_that_are_not_there_yet():
    model = deep()
    alone, four = told(model), told(model, world_size=4)
    assert (alone.world_size, four.world_size) == (1, 4)
    for kind in ("param", "grad", "exp_avg"):
        padded = [-(-cell.numel // 1024) * 1024 for cell in alone.at_rest.rows if cell.kind == kind]
        assert sum(row.numel for row in four.at_rest.rows if row.kind == kind) == sum(padded) // 4
    replicated = told(model, world_size=4, stage=0)
    assert replicated.at_rest.bytes() == alone.at_rest.bytes()
    hybrid = told(model, mesh={"dp_replicate": 2, "dp_shard": 1, "cp": 2})
    assert hybrid.world_size == 4
    assert hybrid.at_rest.bytes() == told(model, world_size=2).at_rest.bytes()
    host = next(room for room in four.rooms if room.name == "host")
    assert host.available is not None
    whole = next(room for room in alone.rooms if room.name == "host").available
    assert whole is not None
    assert abs(host.available - whole // 4) < whole // 10  # four ranks share the host


def test_a_model_without_values_is_enough():
    empty, full = deep().to("meta"), deep()
    found = told(empty, weights="init")
    assert cells(found.at_rest) == cells(told(full).at_rest)
    assert all(parameter.is_meta for parameter in empty.parameters())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"stage": 7}, "stage=7: use 0"),
        ({"world_size": 0}, "world_size=0: use a whole number of ranks, 1 or more, or None."),
        ({"world_size": True}, "world_size=True: use a whole number"),
        ({"mesh": {"rows": 2}}, "mesh has a dimension 'rows'. Use dp_replicate"),
        ({"mesh": {}}, "mesh is empty."),
        ({"world_size": 2, "mesh": {"cp": 2}}, "world_size=2 and a mesh both say how many ranks there are."),
        ({"world_size": 2, "mesh": object()}, "world_size=2 and a mesh both say how many ranks there are."),
        ({"placement": Placement(params="nvme")}, "params='nvme' needs a folder"),
    ],
)
def test_what_cannot_be_is_refused_as_by_prepare(arguments, said):
    with pytest.raises(ConfigError) as caught:
        told(Stack(), **arguments)
    assert str(caught.value).startswith(said)
