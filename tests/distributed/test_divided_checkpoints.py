"""Checkpoints of tensor-parallel runs, beside loading: what is exported, said, imported; and ranks that are killed."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import penstock
from penstock.checkpoint.reader import Checkpoint, checkpoints_in, summarize
from penstock.checkpoint.tiles import TileWriter
from penstock.ext.interop.dcp import import_checkpoint
from tests.distributed.test_resharding import values_of
from tests.distributed.test_tensor_parallel import batches, loss_of, make, mesh_of, parallelize, whole
from tests.lib.engines import prepared
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline

VOCABULARY = 13  # which two ranks do not divide evenly


def _prepared(tp: int, precision: str = "bf16") -> tuple[Any, Any]:
    mesh, model = mesh_of(1, tp) if tp > 1 else None, make(VOCABULARY)
    if mesh is not None:
        parallelize(model, mesh["tp"], "rows")
    return prepared(model, inline, mesh=mesh, precision=precision)


def _step(model: Any, optimizer: Any, step: int) -> None:
    optimizer.backward(loss_of(model, batches(step, 0, 1)))
    optimizer.step()
    optimizer.zero_grad()


def _saved(rank: int, folder: Path) -> dict[str, Any]:
    model, optimizer = _prepared(2)
    _step(model, optimizer, 0)
    optimizer.save(folder / "divided")
    penstock.export(folder / "divided", folder / "by-two", dtype="fp32")
    values = values_of(optimizer, model)
    optimizer.close()
    return values


def test_exports_and_summaries_are_those_of_one_rank(tmp_path: Path) -> None:
    expected, _ = run_ranks(_saved, 2, tmp_path)
    model, optimizer = _prepared(1)
    optimizer.load(tmp_path / "divided")
    optimizer.save(tmp_path / "whole")
    optimizer.close()
    for dtype in ("fp32", "bf16"):
        for name in ("divided", "whole"):
            penstock.export(tmp_path / name, tmp_path / f"{name}-{dtype}", dtype=dtype)
        divided, undivided = (load_file(tmp_path / f"{n}-{dtype}" / "model.safetensors") for n in ("divided", "whole"))
        assert divided.keys() == undivided.keys() == dict(model.named_parameters()).keys()
        for name, value in undivided.items():
            assert torch.equal(divided[name], value), name
            assert dtype == "bf16" or torch.equal(value, expected[name]), name
    files = sorted((tmp_path / "by-two").glob("*.safetensors"))
    by_two = {name: value for file in files for name, value in load_file(file).items()}
    for name, value in load_file(tmp_path / "whole-fp32" / "model.safetensors").items():
        assert torch.equal(by_two[name], value), name

    said, whole_said = (summarize(Checkpoint.open(tmp_path / name)) for name in ("divided", "whole"))
    assert said["parameters"] == whole_said["parameters"] | {"divided": 8}
    assert whole_said["parameters"]["divided"] == 0
    # Parts are padded one by one: of each of the divided ones there is one more, of at most 256 elements.
    numel, parts = said["parameters"]["numel"], said["parameters"]["count"] + 8
    for row in said["kinds"]:
        assert numel <= row["bytes"] / getattr(torch, row["dtype"]).itemsize <= numel + 256 * parts, row


def _killed(rank: int, folder: Path) -> None:
    """Rank 1 is killed when it has written some tiles of its second checkpoint, in the background."""
    model, optimizer = _prepared(2)
    _step(model, optimizer, 0)
    optimizer.save(folder / "runs" / "step-1")
    _step(model, optimizer, 1)
    write, count = TileWriter._write_tile, [0]

    def dying(self: TileWriter, *rest: Any) -> Any:
        count[0] += 1
        if rank == 1 and count[0] == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self, *rest)

    TileWriter._write_tile = dying  # type: ignore[method-assign]
    optimizer.save(folder / "runs" / "step-2", blocking=False)
    optimizer.synchronize()


def _goes_on(rank: int, folder: Path) -> float:
    model, optimizer = _prepared(2)
    optimizer.load(folder / "runs")
    step = float(optimizer.full_state(model.head.weight, "step"))
    _step(model, optimizer, 1)
    optimizer.save(folder / "runs" / "step-2", keep=1)
    optimizer.close()
    return step


def test_a_rank_that_is_killed_leaves_no_checkpoint_that_looks_whole(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1 died with exit code -9"):
        run_ranks(_killed, 2, tmp_path, fresh=True)
    runs = tmp_path / "runs"
    assert [folder.name for folder, _ in checkpoints_in(runs)] == ["step-1"]
    assert list((runs / "step-2").glob("*-00001.tiles")), "it was killed while it wrote"
    with pytest.raises(penstock.CheckpointError, match="no whole checkpoint"):
        Checkpoint.open(runs / "step-2")
    assert run_ranks(_goes_on, 2, tmp_path) == [1.0, 1.0]
    assert [folder.name for folder in runs.iterdir()] == ["step-2"]
    assert len(list((runs / "step-2").glob("*.tiles"))) == 2


def _of_torch(rank: int, folder: Path) -> dict[str, Any]:
    """Train with torch alone, save by its own checkpoints, and load that into the same model."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = parallelize(make(VOCABULARY), mesh_of(1, 2)["tp"], "rows")
    of_torch = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, batches(0, 0, 1)).backward()
    of_torch.step()
    of_torch.zero_grad()
    state, states = get_state_dict(model, of_torch)
    dcp.save({"model": state, "optim": states}, checkpoint_id=str(folder / "dcp"))
    expected = {name: whole(p) for name, p in model.named_parameters()}
    for kind in ("exp_avg", "exp_avg_sq"):
        expected |= {f"{name} {kind}": whole(of_torch.state[p][kind]) for name, p in model.named_parameters()}
    if rank == 0:
        import_checkpoint(folder / "dcp", folder / "imported")
    torch.distributed.barrier()
    loaded, optimizer = _prepared(2, "fp32")
    optimizer.load(folder / "imported")
    found = values_of(optimizer, loaded)
    optimizer.close()
    return {name: (value, found[name]) for name, value in expected.items()}


def test_checkpoints_of_torch_are_imported_into_divided_models(tmp_path: Path) -> None:
    for rows in run_ranks(_of_torch, 2, tmp_path):
        assert len(rows) == 3 * len(list(make(VOCABULARY).parameters()))
        for name, (value, found) in rows.items():
            assert torch.equal(found, value), name
