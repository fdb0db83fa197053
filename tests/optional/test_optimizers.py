"""Optimizer classes of other packages, declared element-wise: equal to the class itself, or refused by name."""

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import ConfigError

pytestmark = pytest.mark.optional

RIGHT = [
    ("timm.optim", "Adan"),
    ("timm.optim", "Adopt"),
    ("timm.optim", "NAdamW"),
    ("schedulefree", "AdamWScheduleFree"),
    ("schedulefree", "RAdamScheduleFree"),
    ("schedulefree", "SGDScheduleFree"),
    ("pytorch_optimizer", "Adan"),
    ("pytorch_optimizer", "AdEMAMix"),
    ("pytorch_optimizer", "Yogi"),
]
REFUSED = [
    ("timm.optim", "AdamP", "is not element-wise"),
    ("timm.optim", "Muon", "is not element-wise"),
    ("timm.optim", "Mars", "is not element-wise"),
    ("timm.optim", "Lamb", "writes 'step' into its parameter group, a Tensor"),
    ("pytorch_optimizer", "AdamS", "is not element-wise"),
    ("pytorch_optimizer", "MADGRAD", "keeps 'k' in its state, which is of no parameter"),
    ("pytorch_optimizer", "StableSPAM", "keeps 'total_step' on the optimizer itself"),
    ("prodigyopt", "Prodigy", "keeps 's', a tensor"),
    ("dadaptation", "DAdaptAdam", ".* the value depends on more than the number of the step"),
    ("dadaptation", "DAdaptSGD", "failed on a parameter of zeros"),
]


class Net(nn.Module):
    """A convolution, a norm and a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.LayerNorm(288), nn.Linear(288, 10)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.norm(self.convolution(x).flatten(1)))


def declared(module: str, name: str) -> Any:
    try:
        return penstock.elementwise(getattr(importlib.import_module(module), name))
    except ImportError as error:
        pytest.skip(str(error))


def made(cls: Any, model: nn.Module) -> Any:
    optimizer = cls(model.parameters(), lr=1e-3)
    if hasattr(optimizer, "train"):
        optimizer.train()
    return optimizer


@pytest.mark.parametrize(("module", "name"), RIGHT)
def test_it_trains_as_the_class_itself(module: str, name: str) -> None:
    cls = declared(module, name)
    torch.manual_seed(0)
    plain = Net()
    model = copy.deepcopy(plain)
    stock, optimizer = made(cls, plain), penstock.prepare(model, made(cls, model), precision="fp32")
    for step in range(6):
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        for trained, by in ((plain, stock), (model, optimizer)):
            trained(x).square().mean().backward()
            by.step()
            by.zero_grad()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(optimizer.full_param(mine), theirs.detach(), rtol=1e-6, atol=1e-9)
    options = [{n: v for n, v in by.param_groups[0].items() if n != "params"} for by in (stock, optimizer)]
    assert options[0] == options[1]
    optimizer.close()


@pytest.mark.parametrize(("module", "name", "message"), REFUSED)
def test_it_is_refused_by_name(module: str, name: str, message: str) -> None:
    model = Net()
    optimizer = made(declared(module, name), model)
    with pytest.raises(ConfigError, match=f"{name} {message}"):
        penstock.prepare(model, optimizer, precision="fp32")
