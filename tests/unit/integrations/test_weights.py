"""Entries of a state dict as copies: in the dtypes of training, or of masters at their precision."""

from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import CheckpointError
from penstock.integrations import weights
from penstock.integrations.weights import gather_entries, nvme_folders, state_entries
from tests.lib.memory import disks
from tests.lib.plans import small


def test_masters_are_copied_in_fp32_and_others_as_they_are_trained() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters()), precision="bf16")
    masters = {model[0].weight, model[1].bias}
    copies = gather_entries(state_entries(model), optimizer, masters=masters)
    assert list(copies) == list(before)
    for name, value in before.items():
        is_master = name in ("0.weight", "1.bias")
        assert torch.equal(copies[name], value if is_master else value.bfloat16())
    assert gather_entries(state_entries(model), optimizer, masters=masters, keep=False) == {}
    optimizer.close()


def test_a_copy_that_fails_on_one_rank_leaves_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk without room on the rank that keeps the copies: it takes part in every gather before it raises."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters()), precision="fp32")
    gathered: list[nn.Parameter] = []
    gather = optimizer.gathered

    def fails(value: torch.Tensor, folders: object) -> torch.Tensor:
        raise CheckpointError("no room")

    monkeypatch.setattr(weights, "_copied", fails)
    monkeypatch.setattr(weights, "GATHER_BYTES", 100)
    monkeypatch.setattr(optimizer, "gathered", lambda group: gathered.extend(group) or gather(group))
    with pytest.raises(CheckpointError, match="no room"):
        gather_entries(state_entries(model), optimizer)
    assert len(gathered) == len(list(model.parameters()))
    optimizer.close()


@pytest.mark.parametrize("by", ["hand", "plan", "nothing"])
def test_folders_are_those_of_the_placement_that_a_plan_has_chosen(by: str) -> None:
    placement = penstock.Placement(optimizer="nvme", nvme_path=disks(2))
    arguments: dict[str, Any] = {"hand": {"placement": placement}, "nothing": {}}.get(by, {"placement": "auto"})
    chosen = {"plan": small(placement=placement)} if by == "plan" else {}
    model = nn.Linear(8, 8)
    optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters()), precision="fp32", **arguments, **chosen)
    assert list(nvme_folders(optimizer, arguments)) == ([] if by == "nothing" else disks(2))
    optimizer.close()
