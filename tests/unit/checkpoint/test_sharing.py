"""A folder that hosts have each for themselves: refused by every rank, before training, and nothing is left of it."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock
from penstock.checkpoint import save
from penstock.checkpoint.save import check_shared
from tests.lib.ranks import run_ranks
from tests.lib.refusals import said_by


def _said(rank: int, folder: Path) -> list[str]:
    own = folder / f"host-{rank}"
    model = nn.Linear(3, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "_PATIENCE_S", 0.1)
        said = [said_by(partial(check_shared, path)) for path in (folder / "all" / "below", own)]
        optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters()), precision="fp32")
        said.append(said_by(lambda: optimizer.save(own / "step-1")))
        optimizer.save(folder / "all" / "step-1")
    optimizer.close()
    return said


def test_who_does_not_see_it_is_named_everywhere(tmp_path: Path) -> None:
    for shared, alone, saved in run_ranks(_said, 2, tmp_path):
        assert shared == ""
        for said in (alone, saved):
            assert said.startswith("CheckpointError: ")
            assert "is not one folder for all ranks" in said
            assert "is not seen by rank 1 (" in said
    assert [path.name for path in tmp_path.iterdir()] == ["all"]
    assert [path.name for path in (tmp_path / "all").iterdir()] == ["step-1"]
    assert not [path for path in (tmp_path / "all" / "step-1").iterdir() if path.name.startswith("checkpoint.json.")]
