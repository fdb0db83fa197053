"""`penstock import-dcp`: what comes out is a checkpoint like any other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import penstock


def a_model() -> torch.nn.Module:
    model = torch.nn.Linear(3, 2)
    model.register_buffer("scale", torch.tensor([1.5, 2.5]))
    return model


def test_a_checkpoint_like_any_other(penstock_command: Callable[..., Any], tmp_path: Path) -> None:
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state, optim = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optim": optim, "step": 7}, checkpoint_id=tmp_path / "saved", no_dist=True)
    outcome = penstock_command("import-dcp", "saved", "out", "--buffer", "sc*")
    assert (outcome.exit_code, outcome.out) == (0, "out\n")
    assert penstock_command("inspect", "out", "--verify").exit_code == 0
    other = a_model()
    ours = penstock.prepare(other, torch.optim.AdamW(other.parameters()), precision="fp32")
    assert ours.load(tmp_path / "out") == {"step": 7}
    assert torch.equal(ours.full_param(other.weight), model.weight.detach())  # type: ignore[arg-type]
    assert ours.param_groups[0]["lr"] == 0.25
    ours.close()
