"""Models that cannot be simulated: one line that says which, where, and what to do; they stay as they are."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.blueprint import request_for
from penstock.errors import ConfigError
from penstock.planner.simulation.simulate import Setup, simulate


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Branching(Part):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x if x.sum() > 0 else -x


class Item(Part):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x * x.abs().max().item()


class _Pointer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy().copy())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.from_numpy(grad.numpy().copy())


class Numpy(Part):
    def forward(self, x: Tensor) -> Tensor:
        return _Pointer.apply(self.layer(x))


class Listed(Part):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x * x.sum().tolist()


class Uncopied(Part):
    def __deepcopy__(self, memo: Any) -> nn.Module:
        raise TypeError("a handle\nof a library cannot be copied")


class NoGradient(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).detach()


class Broken(Part):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("pixels\nof the picture")


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("no backward here")


class BrokenBackward(Part):
    def forward(self, x: Tensor) -> Tensor:
        return _Broken.apply(self.layer(x))


def inputs() -> Tensor:
    return torch.ones(2, 8)


def fails() -> Tensor:
    raise OSError("no such\nfile")


MODULES: dict[str, tuple[type[nn.Module], str]] = {
    "if of values": (Branching, r"blocks.1.*penstock plan --measure"),
    "item": (Item, r"blocks.1.*penstock plan --measure"),
    "tolist": (Listed, r"blocks.1.*penstock plan --measure"),
    "numpy": (Numpy, r"blocks.1.*penstock plan --measure"),
    "broken": (Broken, r"Net cannot be simulated.*pixels.*penstock plan --measure"),
    "broken backward": (BrokenBackward, r"Net cannot be simulated.*no backward here"),
    "not copied": (Uncopied, r"Net cannot be copied.*on the meta device"),
    "no gradient": (NoGradient, r"Net.*requires a gradient"),
}


class Net(nn.Module):
    def __init__(self, part: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Part(), part()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def refusal(model: nn.Module, batch: Callable[[], Any]) -> str:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    dictionaries = [dict(module.__dict__) for module in model.modules()]
    setup = Setup(model, torch.optim.AdamW, batch)
    with pytest.raises(ConfigError) as caught:
        simulate(setup, request_for(model, weights="init", units=(Part,), precision="fp32"))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    for module, before in zip(model.modules(), dictionaries, strict=True):
        assert module.__dict__.keys() == before.keys()
        assert all(not module.__dict__[name] for name in before if name.endswith("_hooks"))
    assert torch._C._len_torch_dispatch_stack() == 0
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(("part", "said"), MODULES.values(), ids=MODULES)
def test_what_cannot_be_simulated_is_named(part: type[nn.Module], said: str) -> None:
    assert re.search(said, refusal(Net(part), inputs))


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (fails, r"batch\(\) failed: .*no such"),
        (lambda: None, r"batch\(\) made a NoneType without a tensor"),
        (lambda: "text", r"batch\(\) made a str"),
        (lambda: {}, r"batch\(\) made a dict without a tensor"),
        (lambda: {"x": torch.ones(2, 8), 3: torch.ones(2)}, r"batch\(\).*3"),
        (lambda: torch.ones(2, 9), r"blocks.0"),
    ],
    ids=["raises", "nothing", "text", "empty", "no name", "other shape"],
)
def test_a_batch_that_is_none_is_refused(batch: Callable[[], Any], said: str) -> None:
    assert re.search(said, refusal(Net(Part), batch))
