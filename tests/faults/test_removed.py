"""The swap folder is removed while its run goes on, by a cleaner or by hand: files that are open go on."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.checkpoint.reader import resolve

X = torch.ones(4, 32)


def make(disk: Path | None, params: str = "nvme") -> tuple[nn.Module, penstock.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(3)])
    placement = penstock.Placement(params=params, optimizer="nvme", nvme_path=str(disk)) if disk else None
    return model, penstock.prepare(
        model,
        torch.optim.AdamW(model.parameters()),
        units=(nn.Linear,),
        precision="bf16",
        placement=placement,
        options=penstock.Options(tile_bytes=4096),
    )


def train(model: nn.Module, optimizer: penstock.Optimizer) -> None:
    optimizer.backward(model(X).float().square().mean())
    optimizer.step()
    optimizer.zero_grad()


def values(model: nn.Module, optimizer: penstock.Optimizer) -> list[Tensor]:
    return [optimizer.full_param(p) for p in model.parameters()]


def remove(disk: Path) -> Path:
    """As a cleaner does, with something else of that name afterwards."""
    (folder,) = disk.iterdir()
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "of-somebody-else").touch()
    return folder


def test_training_saves_and_close_go_on(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    model, optimizer = make(disk)
    alone, other = make(None)
    train(model, optimizer)
    folder = remove(disk)
    train(model, optimizer)
    optimizer.save(tmp_path / "blocking")
    optimizer.save(tmp_path / "beside", blocking=False)
    train(model, optimizer)
    optimizer.synchronize()
    optimizer.save(tmp_path / "beside", keep=2)  # replaces it
    for _ in range(3):
        train(alone, other)
    expected = values(alone, other)
    assert all(torch.equal(a, b) for a, b in zip(values(model, optimizer), expected, strict=True))
    optimizer.close()
    assert [path.name for path in folder.iterdir()] == ["of-somebody-else"]
    for saved in ("blocking", "beside"):
        assert resolve(tmp_path / saved) == tmp_path / saved
    other.load(tmp_path / "blocking")
    train(alone, other)
    assert all(torch.equal(a, b) for a, b in zip(values(alone, other), expected, strict=True))
    other.load(tmp_path / "beside")
    assert all(torch.equal(a, b) for a, b in zip(values(alone, other), expected, strict=True))
    other.close()
    assert len(os.listdir(tmp_path)) == 3


def test_a_file_that_is_wanted_later_names_the_folder_that_is_gone(tmp_path: Path) -> None:
    model, optimizer = make(tmp_path, params="cpu")
    alone, other = make(None)
    train(model, optimizer)
    folder = remove(tmp_path)
    before = values(model, optimizer)
    with pytest.raises(penstock.NvmeError) as caught:
        optimizer.offload_states({"param"}, to="nvme")
    assert str(caught.value).startswith(f"The swap folder '{folder}' was removed while its run goes on")
    assert caught.value.file == str(folder)
    assert all(torch.equal(a, b) for a, b in zip(values(model, optimizer), before, strict=True))
    train(model, optimizer)
    optimizer.offload_states(to="cpu")
    train(model, optimizer)  # nothing is in files any more: the next folder is a new one
    optimizer.offload_states(to="nvme")
    train(model, optimizer)
    for _ in range(4):
        train(alone, other)
    for a, b in zip(values(model, optimizer), values(alone, other), strict=True):
        assert torch.equal(a, b)
    optimizer.close()
    other.close()
    assert list(tmp_path.iterdir()) == [folder]
    assert [path.name for path in folder.iterdir()] == ["of-somebody-else"]
