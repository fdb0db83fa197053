"""Weights from files: each byte is read once by a host, and what one rank cannot read stops all of them at once."""

from functools import partial
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
from penstock.errors import CheckpointError
from tests.lib.engines import prepared, train
from tests.lib.models import stack
from tests.lib.ranks import run_ranks
from tests.lib.refusals import said_by
from tests.lib.streams import inline

SIZES = (64, 512, 333, 7)


net = partial(stack, *SIZES)


def write(folder: Path) -> None:
    torch.manual_seed(1)
    values = {name: torch.randn(value.shape).bfloat16() for name, value in net().state_dict().items()}
    values["0.bias"] = values["0.bias"].float()
    half = len(values) // 2
    for number, names in enumerate((list(values)[:half], list(values)[half:])):
        save_file({name: values[name] for name in names}, folder / f"model-{number}.safetensors")


#: By the number of ranks: stages, and shapes of meshes.
READS: dict[int, list[tuple[int, tuple[int, int] | None]]] = {2: [(3, None), (1, None)], 4: [(0, None), (3, (2, 2))]}


def mesh_of(shape: tuple[int, int] | None) -> Any:
    return None if shape is None else init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))


def read(rank: int, world_size: int, folder: str) -> list[dict[str, Any]]:
    found, init = [], WeightFiles.__init__
    for stage, shape in READS[world_size]:
        seen: list[WeightFiles] = []

        def note(files: WeightFiles, path: Any, seen: list[WeightFiles] = seen) -> None:
            init(files, path)
            seen.append(files)

        with torch.device("meta"):
            model = net()
        stock = torch.optim.AdamW(model.parameters())
        how = {"stage": stage, "precision": "fp32", "weights": folder, "units": (nn.Linear,)}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(WeightFiles, "__init__", note)
            optimizer = penstock.prepare(model, stock, mesh=mesh_of(shape), **how)
        values = {name: optimizer.full_param(p) for name, p in model.named_parameters()}
        optimizer.close()
        found.append({"bytes": sum(each.read_bytes for each in seen), "values": values})
    return found


@pytest.mark.parametrize("world_size", READS)
def test_a_host_reads_each_byte_once(tmp_path: Path, world_size: int) -> None:
    write(tmp_path)
    files = WeightFiles(tmp_path)
    total = sum(prod(shape) * dtype.itemsize for shape, dtype in files.forms().values())
    for of_ranks in zip(*run_ranks(read, world_size, world_size, str(tmp_path)), strict=True):
        for name, value in (item for of_rank in of_ranks for item in of_rank["values"].items()):
            assert torch.equal(value, files.read(name, 0, value.numel()).float().view(value.shape)), name
        # A row that two ranks have parts of is read by both.
        assert total <= sum(of_rank["bytes"] for of_rank in of_ranks) <= 1.05 * total
    files.close()


def failing(rank: int, folder: str) -> list[str]:
    """On the second rank: a read that fails, and what comes after a read."""
    found = []
    for place, name in ((WeightFiles, "read"), (construct, "fill_unit")):
        calls, real = [], getattr(place, name)

        def fail(*arguments: Any, calls: list[int] = calls, real: Any = real) -> Any:
            calls.append(rank)
            if rank == 1 and len(calls) == 2:
                raise ValueError("broken")
            return real(*arguments)

        model = net()
        stock = torch.optim.AdamW(model.parameters())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(place, name, fail)
            try:
                found.append(
                    said_by(partial(penstock.prepare, model, stock, stage=1, weights=folder, units=(nn.Linear,)))
                )
            except ValueError as error:
                found.append(str(error))
    return found


def test_what_fails_on_one_rank_stops_those_who_read_with_it(tmp_path: Path) -> None:
    write(tmp_path)
    first, second = run_ranks(failing, 2, str(tmp_path))
    assert second == ["broken"] * 2
    assert all(said.startswith("EngineError: ") for said in first)
    assert all("could not read its part of the files" in said for said in first)


def loaded(rank: int, folder: str, stage: int, shape: tuple[int, int] | None) -> dict[str, Any]:
    """Save, change everything, and load; then load again, with a tile that this rank cannot read."""
    how = {"stage": stage, "mesh": mesh_of(shape), "precision": "bf16", "tile_bytes": 1 << 14}
    model, optimizer = prepared(net(seed=rank), inline, **how)

    def values() -> list[torch.Tensor]:
        every = [optimizer.full_param(p) for p in model.parameters()]
        return every + [optimizer.full_state(p, "exp_avg_sq") for p in model.parameters()]

    train(model, optimizer)
    optimizer.save(f"{folder}/checkpoint")
    before = values()
    train(model, optimizer)
    read_bytes: list[int] = []
    start, fails = TileReader._start, False

    def count(self: TileReader, key: Any, buffer: torch.Tensor, storages: Any) -> Any:
        read_bytes.append(sum(record.nbytes for record in key.unit.records(key.number)))
        if fails and rank == 1 and len(read_bytes) == 2:
            raise CheckpointError("broken")
        return start(self, key, buffer, storages)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TileReader, "_start", count)
        optimizer.load(f"{folder}/checkpoint", verify=False)
        found = {"bytes": sum(read_bytes), "same": all(map(torch.equal, before, values()))}
        fails = True
        read_bytes.clear()
        with pytest.raises(CheckpointError) as caught:
            optimizer.load(f"{folder}/checkpoint", verify=True)
    optimizer.close(keep_params=False)
    return found | {"words": str(caught.value)}


@pytest.mark.parametrize(("world_size", "stage", "shape"), [(2, 0, None), (2, 3, None), (4, 1, (2, 2))])
def test_copies_on_a_host_read_a_checkpoint_once(
    tmp_path: Path, world_size: int, stage: int, shape: tuple[int, int] | None
) -> None:
    found = run_ranks(loaded, world_size, str(tmp_path), stage, shape)
    stored = sum(file.stat().st_size for file in (tmp_path / "checkpoint").glob("*.tiles"))
    assert all(of_rank["same"] for of_rank in found)
    assert "broken" in found[1]["words"]
    assert 0.95 * stored <= sum(of_rank["bytes"] for of_rank in found) <= 1.05 * stored
