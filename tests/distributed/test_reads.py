"""Weights from files: each byte is read once by a host, and what one rank cannot read stops all of them at once."""

import time
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import penstock
from penstock import construct
from penstock.checkpoint.tensorfiles import WeightFiles
from penstock.checkpoint.tiles import TileReader
from penstock.errors import CheckpointError, PenstockError
from tests.support import run_ranks, thorough

SIZES = (64, 512, 333, 7)


def net() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(one, other) for one, other in pairwise(SIZES)))


def write(folder: Path) -> None:
    torch.manual_seed(1)
    values = {name: torch.randn(value.shape).bfloat16() for name, value in net().state_dict().items()}
    values["0.bias"] = values["0.bias"].float()
    half = len(values) // 2
    for number, names in enumerate((list(values)[:half], list(values)[half:])):
        save_file({name: values[name] for name in names}, folder / f"model-{number}.safetensors")


def read(rank: int, folder: str, stage: int, shape: tuple[int, int] | None) -> dict[str, Any]:
    seen: list[WeightFiles] = []
    patch = pytest.MonkeyPatch()
    init = WeightFiles.__init__
    patch.setattr(WeightFiles, "__init__", lambda self, path: (init(self, path), seen.append(self))[0])
    mesh = None if shape is None else init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    with torch.device("meta"):
        model = net()
    optimizer = penstock.prepare(
        model,
        torch.optim.AdamW(model.parameters()),
        stage=stage,
        precision="fp32",
        mesh=mesh,
        weights=folder,
        units=(nn.Linear,),
    )
    patch.undo()
    values = {name: optimizer.full_param(p) for name, p in model.named_parameters()}
    optimizer.close()
    return {"bytes": sum(each.read_bytes for each in seen), "values": values}


@pytest.mark.parametrize(
    ("world_size", "stage", "shape"),
    [
        (2, 3, None),
        (2, 1, None),
        thorough(4, 3, None),
        thorough(4, 0, None),
        thorough(4, 2, None),
        (4, 3, (2, 2)),
    ],
)
def test_a_host_reads_each_byte_once(
    tmp_path: Path, world_size: int, stage: int, shape: tuple[int, int] | None
) -> None:
    write(tmp_path)
    files = WeightFiles(tmp_path)
    total = sum(prod(shape) * dtype.itemsize for shape, dtype in files.forms().values())
    found = run_ranks(read, world_size, str(tmp_path), stage, shape)
    for of_rank in found:
        for name, value in of_rank["values"].items():
            assert torch.equal(value, files.read(name, 0, value.numel()).float().view(value.shape)), name
    # A row that two ranks have parts of is read by both.
    assert total <= sum(of_rank["bytes"] for of_rank in found) <= 1.05 * total
    files.close()


def failing(rank: int, folder: str) -> list[tuple[str, float]]:
    """On the second rank: a read that fails, and what comes after a read."""
    found = []
    for place, name in ((WeightFiles, "read"), (construct, "fill_unit")):
        patch, calls = pytest.MonkeyPatch(), []
        real = getattr(place, name)

        def fail(*arguments: Any, calls: list[int] = calls, real: Any = real) -> Any:
            calls.append(rank)
            if rank == 1 and len(calls) == 2:
                raise ValueError("broken")
            return real(*arguments)

        patch.setattr(place, name, fail)
        model, started = net(), time.monotonic()
        try:
            penstock.prepare(model, torch.optim.AdamW(model.parameters()), stage=1, weights=folder, units=(nn.Linear,))
        except (PenstockError, ValueError) as error:
            found.append((f"{type(error).__name__}: {error}", time.monotonic() - started))
        patch.undo()
    return found


def test_what_fails_on_one_rank_stops_those_who_read_with_it(tmp_path: Path) -> None:
    write(tmp_path)
    first, second = run_ranks(failing, 2, str(tmp_path))
    assert [words for words, _ in second] == ["ValueError: broken"] * 2
    assert [words.partition(":")[0] for words, _ in first] == ["EngineError"] * 2
    assert all("could not read its part of the files" in words for words, _ in first)
    assert max(seconds for _, seconds in (*first, *second)) < 20


def loaded(rank: int, folder: str, stage: int, shape: tuple[int, int] | None) -> dict[str, Any]:
    """Save, change everything, and load; then load again, with a tile that this rank cannot read."""
    mesh = None if shape is None else init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    torch.manual_seed(rank)
    model = net()
    optimizer = penstock.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        stage=stage,
        mesh=mesh,
        units=(nn.Linear,),
        options=penstock.Options(tile_bytes=1 << 14),
    )

    def step() -> None:
        optimizer.backward(model(torch.ones(2, SIZES[0])).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()

    def values() -> list[torch.Tensor]:
        every = [optimizer.full_param(p) for p in model.parameters()]
        return every + [optimizer.full_state(p, "exp_avg_sq") for p in model.parameters()]

    step()
    optimizer.save(f"{folder}/checkpoint")
    before = values()
    step()
    patch, read_bytes = pytest.MonkeyPatch(), []
    start = TileReader._start

    def count(self: TileReader, key: Any, buffer: torch.Tensor, storages: Any) -> Any:
        read_bytes.append(sum(record.nbytes for record in key.unit.records(key.number)))
        if fails and rank == 1 and len(read_bytes) == 2:
            raise CheckpointError("broken")
        return start(self, key, buffer, storages)

    patch.setattr(TileReader, "_start", count)
    fails, words = False, ""
    optimizer.load(f"{folder}/checkpoint", verify=False)
    found = {"bytes": sum(read_bytes), "same": [torch.equal(*pair) for pair in zip(before, values(), strict=True)]}
    fails = True
    read_bytes.clear()
    try:
        optimizer.load(f"{folder}/checkpoint", verify=True)
    except CheckpointError as error:
        words = str(error)
    patch.undo()
    optimizer.close(keep_params=False)
    return found | {"words": words}


@pytest.mark.parametrize(
    ("world_size", "stage", "shape"), [(2, 0, None), (2, 3, None), (4, 3, (2, 2)), thorough(4, 1, (2, 2))]
)
def test_copies_on_a_host_read_a_checkpoint_once(
    tmp_path: Path, world_size: int, stage: int, shape: tuple[int, int] | None
) -> None:
    found = run_ranks(loaded, world_size, str(tmp_path), stage, shape)
    stored = sum(file.stat().st_size for file in (tmp_path / "checkpoint").glob("*.tiles"))
    for of_rank in found:
        assert all(of_rank["same"])
        assert of_rank["words"]
    assert "broken" in found[1]["words"]
    assert 0.95 * stored <= sum(of_rank["bytes"] for of_rank in found) <= 1.05 * stored
