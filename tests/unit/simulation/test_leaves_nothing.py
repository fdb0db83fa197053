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
from tests.lib.engines import adamw, loss_of
from tests.lib.models import batch_of, buffered


def trained() -> tuple[Any, torch.optim.Optimizer]:
    model = buffered()
    model.stages[0].eval()
    model.head.bias.requires_grad_(False)
    model.stages[1].register_forward_hook(lambda module, args, out: out * 1.0)
    optimizer = adamw([parameter for parameter in model.parameters() if parameter.requires_grad])
    loss_of(model).backward()
    optimizer.step()
    return model, optimizer


def fail(module: nn.Module, when: str, error: BaseException) -> None:
    """Have a module raise, in forward or in backward."""

    def at_once(*_: Any) -> None:
        raise error

    def later(module: nn.Module, args: Any, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(at_once)

    module.register_forward_hook(at_once if when == "forward" else later)


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
    modules = dict(model.named_modules())
    hooks = [name for name in vars(model) if name.endswith("_hooks")]
    groups = [{**group, "params": list(map(id, group["params"]))} for group in optimizer.param_groups]
    return {
        "tensors": {n: (id(t), t._version, t.requires_grad, t.data_ptr(), list(vars(t))) for n, t in tensors.items()},
        "values": {n: t.tolist() for n, t in tensors.items()},
        "gradients": {n: (id(t.grad), t.grad.tolist()) for n, t in tensors.items() if t.grad is not None},
        "modules": {name: (type(m), m.training, sorted(vars(m))) for name, m in modules.items()},
        "hooks": {name: [list(getattr(m, hook)) for hook in hooks] for name, m in modules.items()},
        "states": [(id(p), {k: (id(v), v.tolist()) for k, v in s.items()}) for p, s in optimizer.state.items()],
        "groups": groups,
        "hooks of the optimizer": [list(v) for k, v in vars(optimizer).items() if k.endswith("_hooks")],
    }


def planned(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    penstock.planner.plan(
        model,
        optimizer,
        lambda: batch_of(model),
        machine="rtx4090-desktop",
        placement=penstock.Placement(params="cpu", grads="cpu", optimizer="cpu"),
    )


@pytest.fixture(scope="module")
def once() -> None:
    """What is imported, and made once for all, is there."""
    planned(*trained())


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
    for when, error in raises.items():
        fail(model.stages[1], when, error)
    before = of_the_process(), of_the_model(model, optimizer)
    (raised,) = raises.values() or (None,)
    with contextlib.ExitStack() as stack:
        if raised is not None:
            stack.enter_context(pytest.raises(ConfigError if isinstance(raised, ValueError) else KeyboardInterrupt))
        planned(model, optimizer)
    assert of_the_process() == before[0]
    assert of_the_model(model, optimizer) == before[1]
