"""Parameters over the same memory are named; parameters in one storage are not the same memory."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from tests.models.modules_rows import squared


class Pair(nn.Module):
    def __init__(self, one: Tensor, other: Tensor, *, buffer: bool = False, trained: tuple[bool, bool] = (True, True)):
        super().__init__()
        self.one, self.other = nn.Module(), nn.Module()
        self.one.weight = nn.Parameter(one, requires_grad=trained[0])
        if buffer:
            self.other.register_buffer("weight", other)
        else:
            self.other.weight = nn.Parameter(other, requires_grad=trained[1])
        self.free = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.free + self.one.weight.sum() + self.other.weight.sum()


def flat() -> Tensor:
    return torch.linspace(0, 1, 24)


SHARED: dict[str, Any] = {
    "the same elements": lambda f: Pair(f, f),
    "the same, transposed": lambda f: Pair(f.reshape(4, 6), f.reshape(4, 6).T),
    "a part": lambda f: Pair(f, f[20:]),
    "one element": lambda f: Pair(f[:13], f[12:]),
    "a column": lambda f: Pair(f.reshape(4, 6)[:, :3], f.reshape(4, 6)[:, 2:4]),
    "a buffer": lambda f: Pair(f, f[2:4], buffer=True),
    "one of them frozen": lambda f: Pair(f, f, trained=(True, False)),
    "bytes of another dtype": lambda f: Pair(f, f.view(torch.bfloat16), trained=(True, False)),
}
APART: dict[str, Any] = {
    "packed": lambda f: Pair(f[:12], f[12:]),
    "columns": lambda f: Pair(f.reshape(4, 6)[:, :3], f.reshape(4, 6)[:, 3:]),
    "every other element": lambda f: Pair(f[::2], f[1::2]),
    "both frozen": lambda f: Pair(f, f, trained=(False, False)),
    "no elements": lambda f: Pair(f[:0], f[:0]),
    "memory of its own": lambda f: Pair(f, f.clone()),
    "a buffer beside": lambda f: Pair(f[:12], f[12:], buffer=True),
}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


@pytest.mark.parametrize("name", SHARED)
def test_two_parameters_over_the_same_memory_are_named(name: str) -> None:
    model = SHARED[name](flat())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(penstock.ConfigError) as caught:
        penstock.prepare(model, adam(model), precision="fp32")
    assert {"one.weight", "other.weight"} <= set(re.findall(r"'([\w.]+)'", str(caught.value)))
    assert "use one Parameter for both (other.weight = one.weight)" in str(caught.value)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    model.other.weight = model.one.weight if isinstance(model.other.weight, nn.Parameter) else None
    penstock.prepare(model, adam(model), precision="fp32").close()


@pytest.mark.parametrize("name", APART)
def test_parameters_of_one_storage_without_a_common_element_train(name: str) -> None:
    plain, model = APART[name](flat()), APART[name](flat())
    theirs = adam(plain)
    squared(plain(torch.ones(2))).backward()
    theirs.step()
    optimizer = penstock.prepare(model, adam(model), precision="fp32")
    optimizer.backward(squared(model(torch.ones(2))))
    optimizer.step()
    optimizer.close()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value)


def test_parameters_on_the_meta_device_have_no_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    penstock.prepare(model, adam(model), precision="fp32", weights="init").close()
