"""Operations that a device is given for a step whose state rests on it: torch's AdamW and ours, backward and update.

    python benchmarks/operations.py --out benchmarks/results/operations.json

What is counted are torch's operators that a device runs as a kernel or a copy of their own, by a dispatch mode; views
and allocations are none. Nothing here needs a device: the engine runs on cpu tensors, and the way of an accelerator is
forced upon its rule and its gradients. A `_foreach` or `_fused` operator counts once, whatever launches it makes of its
list (on CUDA one for each 320 chunks of 65,536 elements, or about 100 tensors). Compiled, a call of the rule's function
is one kernel. Its host time is that of torch.compile's own call on the cpu, with segments so small that they take
none; a launch of the device's driver comes on top.

The model has the shape of a Llama of 32 blocks, at a width where a block is 52 tiles of the smallest size.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import machine
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import penstock
from penstock.rules import UpdateSlice, device, fused, rule_for
from penstock.rules.device import DeviceUpdate

deposit: Any = import_module("penstock.rules.formats")  # the package has a function of that name
VIEWS = {
    *("view", "slice", "select", "unbind", "split", "split_with_sizes", "detach", "alias", "unsqueeze", "empty"),
    *("_unsafe_view", "reshape", "as_strided", "lift_fresh", "t", "transpose", "expand", "_reshape_alias"),
}
WIDTH, BLOCKS, TILE_BYTES = 96, 32, 4096
ADAMW: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}


class Counting(TorchDispatchMode):
    """Counts operators while it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in VIEWS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def operators(work: Callable[[], Any]) -> int:
    """How many operators it takes."""
    with Counting() as counting:
        work()
    return counting.counts.total()


class Block(nn.Module):
    """The nine parameters of a Llama's block."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(WIDTH, WIDTH), (WIDTH // 4, WIDTH), (WIDTH // 4, WIDTH), (WIDTH, WIDTH)]
        shapes += [(3 * WIDTH, WIDTH), (3 * WIDTH, WIDTH), (WIDTH, 3 * WIDTH), (WIDTH,), (WIDTH,)]
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape) / WIDTH) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        return x + sum(weight.mean() for weight in self.weights)


def torchs(which: str) -> dict[str, Any]:
    """One step of torch's AdamW over the same fp32 parameters."""
    parameters = [p for _ in range(BLOCKS) for p in Block().parameters()]
    optimizer = torch.optim.AdamW(parameters, **{which: True}, **ADAMW)
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return {"step": operators(optimizer.step), "parameters": len(parameters)}


def takes_the_way_of_a_device(copies: list[int]) -> None:
    """Force it upon the rule and the gradients."""
    from penstock.engine.step import step

    def update_many(self: Any, segments: Any, grad_scale: float, pool: Any, sums: Any = None) -> None:
        self.on_device(self, list(segments), grad_scale)

    on_device = device._on_device

    def counted(*arguments: Any) -> Tensor:
        copies.append(1)
        return on_device(*arguments)

    fused.FusedRule.update_many = update_many  # type: ignore[method-assign]
    device._on_device = counted
    step.squared_norms_of = deposit._squared_norms_in_torch  # type: ignore[attr-defined]


def ours(*, compiled: bool) -> dict[str, Any]:
    """One micro-batch and one step of the engine."""
    torch.manual_seed(0)
    calls: list[int] = []
    copies: list[int] = []
    takes_the_way_of_a_device(copies)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    optimizer = penstock.prepare(
        model,
        torch.optim.AdamW(model.parameters(), **ADAMW),
        units=[Block],
        precision="bf16",
        placement=penstock.Placement(params="device", grads="device", optimizer="device"),
        options=penstock.Options(tile_bytes=TILE_BYTES),
    )
    engine: Any = optimizer._engine
    engine.reducer._measures_late = True
    if compiled:
        engine.context.rule = replace(engine.context.rule, on_device=DeviceUpdate(lambda *_: calls.append(1)))

    def counted(owner: Any, name: str, counting: Counting) -> None:
        """Inside: the engine's own side of a hook or a method leaves the modes of its callers."""
        method = getattr(owner, name)

        def inside(*given: Any, **rest: Any) -> Any:
            with counting:
                return method(*given, **rest)

        setattr(owner, name, inside)

    def backward() -> None:
        optimizer.backward(model(torch.ones(1, dtype=torch.bfloat16)).sum())

    backward()
    optimizer.step()
    optimizer.zero_grad()
    of_backward, of_measure, of_update = Counting(), Counting(), Counting()
    counted(engine.reducer, "add", of_backward)
    counted(engine.reducer, "flush", of_backward)
    counted(engine.stepper, "measure", of_measure)
    counted(engine.stepper, "update", of_update)
    backward()
    calls.clear()
    copies.clear()
    optimizer.step()
    units, parameters = len(engine.context.units), len(list(model.parameters()))
    optimizer.close()
    return {
        "units": units,
        "parameters": parameters,
        "backward": of_backward.counts.total(),
        "measure": of_measure.counts.total(),
        "update": of_update.counts.total() + len(calls) + len(copies),
        "compiled_calls": len(calls),
        "copies_of_scalars": len(copies),
    }


def compiled_call(numel: int = 2048, rounds: int = 300) -> dict[str, float]:
    """Processor time of the host, in microseconds: of a call with one segment, and for each of 34 in one call."""
    optimizer = torch.optim.AdamW([torch.zeros(1)], **ADAMW)
    rule: Any = rule_for(optimizer)
    step_scalars = rule.step_scalars(optimizer.param_groups[0], 10)
    states = (torch.zeros(numel), torch.zeros(numel))
    param, grad = torch.zeros(numel, dtype=torch.bfloat16), torch.zeros(numel, dtype=torch.bfloat16)
    segment = UpdateSlice(param, grad, torch.zeros(numel, dtype=torch.int16), states)
    update = DeviceUpdate(device.compile_pass(device.one_pass))

    def alone() -> None:
        update(rule, [(segment, step_scalars)], 0.5)

    def together() -> None:
        update(rule, [(segment, step_scalars)] * 34, 0.5)

    found = {}
    for name, work, share in (("alone", alone, 1), ("each_of_34", together, 34)):
        times = []
        work()
        for _ in range(max(5, rounds // share)):
            before = time.thread_time()
            work()
            times.append((time.thread_time() - before) / share)
        found[name] = round(1e6 * statistics.median(times), 1)
        found[f"{name}, least"] = round(1e6 * min(times), 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        "machine": machine.describe(),
        "torch": {which: torchs(which) for which in ("fused", "foreach")},
        "penstock, no compiler": ours(compiled=False),
        "penstock, compiled": ours(compiled=True),
        "microseconds_of_a_compiled_call": compiled_call(),
    }
    print(json.dumps(found, indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
