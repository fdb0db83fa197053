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


def ends(end: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """Make a part that does something with what its layer gives."""

    class Ending(Part):
        def forward(self, x: Tensor) -> Tensor:
            return end(super().forward(x))

    return Ending


def fails_with(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


class Pointer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy().copy())

    backward = fails_with(AssertionError("forward is refused"))


class Uncopied(Part):
    def __deepcopy__(self, memo: Any) -> nn.Module:
        raise TypeError("a handle\nof a library cannot be copied")


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("no backward here")


def inputs() -> Tensor:
    return torch.ones(2, 8)


MODULES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "numpy": (ends(Pointer.apply), r"'1'.*penstock plan --measure"),
    "broken": (
        ends(fails_with(KeyError("pixels\nof the picture"))),
        r"Sequential cannot be simulated.*pixels.*penstock plan --measure",
    ),
    "broken backward": (ends(NoBackward.apply), r"Sequential cannot be simulated.*no backward here"),
    "not copied": (Uncopied, r"Sequential cannot be copied.*on the meta device"),
    "no gradient": (ends(Tensor.detach), r"Sequential.*requires a gradient"),
}


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
def test_what_cannot_be_simulated_is_named(part: Callable[[], nn.Module], said: str) -> None:
    assert re.search(said, refusal(nn.Sequential(Part(), part()), inputs))


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (fails_with(OSError("no such\nfile")), r"batch\(\) failed: .*no such"),
        (lambda: None, r"batch\(\) made a NoneType without a tensor"),
        (lambda: "text", r"batch\(\) made a str"),
        (lambda: {}, r"batch\(\) made a dict without a tensor"),
        (lambda: {"x": torch.ones(2, 8), 3: torch.ones(2)}, r"batch\(\).*3"),
        (lambda: torch.ones(2, 9), r"'0\.layer'|'0'"),
    ],
    ids=["raises", "nothing", "text", "empty", "no name", "other shape"],
)
def test_a_batch_that_is_none_is_refused(batch: Callable[[], Any], said: str) -> None:
    assert re.search(said, refusal(nn.Sequential(Part()), batch))
