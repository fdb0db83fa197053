"""A folder that hosts have each for themselves: refused by every rank, before training, and nothing is left of it."""

from pathlib import Path

import pytest
import torch
from torch import nn

import penstock
from penstock.checkpoint import save
from penstock.checkpoint.save import check_shared
from penstock.errors import CheckpointError
from tests.support import run_ranks


def _said(rank: int, folder: Path) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "_PATIENCE_S", 0.1)
        return _looked(rank, folder)


def _looked(rank: int, folder: Path) -> list[str]:
    said = []
    own = folder / f"host-{rank}"
    for path in (folder / "all" / "below", own):
        try:
            check_shared(path)
            said.append("shared")
        except CheckpointError as error:
            said.append(str(error))
    model = nn.Linear(3, 2)
    optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters()), precision="fp32")
    try:
        optimizer.save(own / "step-1")
    except CheckpointError as error:
        said.append(str(error))
    optimizer.save(folder / "all" / "step-1")
    optimizer.close()
    return said


def test_who_does_not_see_it_is_named_everywhere(tmp_path: Path) -> None:
    for shared, alone, saved in run_ranks(_said, 2, tmp_path):
        assert shared == "shared"
        for said in (alone, saved):
            assert "is not one folder for all ranks" in said
            assert "is not seen by rank 1 (" in said
    assert [path.name for path in tmp_path.iterdir()] == ["all"]
    assert [path.name for path in (tmp_path / "all").iterdir()] == ["step-1"]
    assert not [path for path in (tmp_path / "all" / "step-1").iterdir() if path.name.startswith("checkpoint.json.")]


def test_one_rank_alone_asks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "_leave", None)
    check_shared(tmp_path / "none")
    assert not (tmp_path / "none").exists()
