"""Entries of a state dict as copies: in the dtypes of training, or of masters at their precision."""

import torch
from torch import nn

import penstock
from penstock.integrations.weights import gather_entries, state_entries


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
