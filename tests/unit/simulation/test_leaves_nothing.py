"""Planning leaves the process, the model and its optimizer as they were: also when the model fails, and on Ctrl-C."""

import contextlib
import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock.planner
from penstock.errors import ConfigError
from tests.lib.memory import freeze_heap


class Stop(nn.Module):
    """The identity, until it raises, in forward or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.raises: dict[str, BaseException] = {}

    def forward(self, x: Tensor) -> Tensor:
        if "forward" in self.raises:
            raise self.raises["forward"]
        if "backward" in self.raises and x.requires_grad:
            x.register_hook(self.stop)
        return x

    def stop(self, grad: Tensor) -> Tensor:
        raise self.raises["backward"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(3))
        self.stop = Stop()
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x) * self.scale[number]
            if number == 1:
                x = self.stop(x)
        return x


def trained() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Net()
    model.blocks[0].eval()
    model.blocks[2][0].bias.requires_grad_(False)
    model.blocks[1].register_forward_hook(lambda module, args, out: out * 1.0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model(torch.ones(4, 16)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def of_the_process() -> dict[str, Any]:
    gc.collect()
    return {
        "threads": {thread.name for thread in threading.enumerate()},
        "descriptors": len(os.listdir("/proc/self/fd")),
        "random numbers": torch.get_rng_state().tolist(),
        "dtype": torch.get_default_dtype(),
        "device": str(torch.get_default_device()),
        "threads of torch": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "collector": gc.isenabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "modes": torch._C._len_torch_dispatch_stack(),
        "modes of functions": torch._C._len_torch_function_stack(),
        "folder": sorted(os.listdir(".")),
    }


def of_the_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    hooks = [name for name in vars(model) if name.endswith("_hooks")]
    return {
        "tensors": {name: (id(t), t._version, t.requires_grad, t.data_ptr()) for name, t in tensors.items()},
        "values": {name: t.tolist() for name, t in tensors.items()},
        "gradients": {name: None if t.grad is None else (id(t.grad), t.grad.tolist()) for name, t in tensors.items()},
        "attributes": {name: list(vars(tensors[name])) for name in tensors},
        "modules": {name: (type(m), m.training, sorted(vars(m))) for name, m in model.named_modules()},
        "hooks": [(name, hook, list(getattr(m, hook))) for name, m in model.named_modules() for hook in hooks],
        "state": [(id(p), {k: (id(v), v.tolist()) for k, v in s.items()}) for p, s in optimizer.state.items()],
        "groups": [
            {k: [id(p) for p in v] if k == "params" else v for k, v in g.items()} for g in optimizer.param_groups
        ],
        "hooks of the optimizer": [list(v) for k, v in vars(optimizer).items() if k.endswith("_hooks")],
    }


def planned(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    penstock.planner.plan(
        model,
        optimizer,
        lambda: torch.rand(4, 16),
        machine="rtx4090-desktop",
        placement=penstock.Placement(params="cpu", grads="cpu", optimizer="cpu"),
    )


@pytest.fixture(scope="module")
def once() -> None:
    """What is imported, and made once for all, is there."""
    planned(*trained())
    freeze_heap()


@pytest.mark.parametrize(
    "raises",
    [
        {},
        {"forward": ValueError("in forward")},
        {"backward": ValueError("in backward")},
        {"forward": KeyboardInterrupt()},
        {"backward": KeyboardInterrupt()},
    ],
    ids=repr,
)
def test_a_plan_leaves_everything_as_it_was(
    raises: dict[str, BaseException], once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, optimizer = trained()
    model.stop.raises = raises
    before = of_the_process(), of_the_model(model, optimizer)
    (raised,) = raises.values() or (None,)
    with contextlib.ExitStack() as stack:
        if raised is not None:
            stack.enter_context(pytest.raises(ConfigError if isinstance(raised, ValueError) else KeyboardInterrupt))
        planned(model, optimizer)
    assert of_the_process() == before[0]
    assert of_the_model(model, optimizer) == before[1]
