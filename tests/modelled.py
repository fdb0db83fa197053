"""Steps on the strict device in modelled time, and what the planner says of them with the same figures.

Modelled: a copy takes bytes over a bandwidth, each way for itself, a kernel a stated time, the host none
(`tests/device/README.md`). So does the machine that the planner is told of; nothing here depends on a clock.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import penstock
from penstock.planner.machine import Machine
from penstock.planner.plan_request import made, plan_request
from penstock.planner.rates import Rate
from penstock.planner.search import given
from penstock.planner.simulation import operation_times as measured_ops
from penstock.planner.simulation.operation_cost import Recipe
from penstock.planner.simulation.program import Op
from penstock.planner.simulation.simulate import Setup
from penstock.planner.trials import Trials
from tests.lib.engines import prepare_on

#: What takes no time to speak of.
AT_ONCE = 1e18
WARM_UP, FEW, MANY = 3, 2, 5


@dataclass(frozen=True)
class Case:
    """A step of a model somewhere.

    Attributes:
        name: of the row.
        model: makes it.
        batch: makes a micro-batch, on the cpu.
        placement: where state is.
        link: bytes/s each way.
        kernel_s: seconds of an operation.
        micro_batches: of a step.
        overlap: of updates: the planner's own is "forward", where `prepare` may take another.
        arguments: others of `prepare`.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], Mapping[str, torch.Tensor]]
    placement: penstock.Placement
    link: float = 1e9
    kernel_s: float = 1e-5
    micro_batches: int = 1
    overlap: str = "none"
    arguments: Mapping[str, Any] = field(default_factory=dict)


def machine_of(link: float, kernel_s: float, **figures: float) -> Machine:
    """The strict device in figures: what it does not model takes no time."""
    quick = ("flops_float32", "flops_bfloat16", "flops_float16", "device_bandwidth", "host_bandwidth")
    values = {
        **dict.fromkeys((*quick, "update", "device_update"), AT_ONCE),
        **dict.fromkeys(("h2d", "d2h", "h2d_pageable", "d2h_pageable"), link),
        **dict.fromkeys(("device_memory", "host_memory", "pinnable_memory"), float(1 << 40)),
        "op_seconds": max(kernel_s, 1e-15),
        **dict.fromkeys(("op_host_seconds", "job_seconds"), 1e-15),
        "devices": 1,
        "host_threads": 1,
        **figures,
    }
    return Machine("strict", "cuda", {name: Rate(value, value, value, "stated") for name, value in values.items()})


def predicted(case: Case) -> float:
    """Seconds of a step, as the planner says; an operation takes as many kernels as the device makes of it."""
    request = plan_request(
        Setup(made(case.model), torch.optim.AdamW, case.batch, micro_batches=case.micro_batches, hosts=1),
        machine=machine_of(case.link, case.kernel_s),
        arguments={**case.arguments, "overlap": case.overlap},
    )
    known: dict[Op, float] = {}
    trials = Trials(request, measured=known)
    found = given(request, trials, case.placement).trial.simulation
    known |= {op: count * case.kernel_s for op, count in kernels(found.recipes).items()}
    return Trials(request, measured=known).time(found, request.machine).step_s


def kernels(recipes: Mapping[Op, Recipe]) -> dict[Op, int]:
    """Count the kernels that the strict device makes of each kind of operation; of what cannot run alone, one."""
    from tests.device.backend import native

    found = {}
    for op, recipe in recipes.items():
        try:
            with torch.no_grad():
                call = measured_ops.call_of(recipe, torch.device("strict:0"))
                torch.accelerator.synchronize()
                native.take_launches()
                call()
        except Exception:
            native.take_launches()
            found[op] = 1
        else:
            found[op] = sum(count for name, count in native.take_launches().items() if not name.startswith("copy "))
        torch.accelerator.synchronize()
    return found


def measured(case: Case) -> float:
    """Seconds of a step on the strict device, as modelled."""
    from tests.device.backend import native
    from tests.device.running import strict

    torch.manual_seed(0)
    model = case.model()
    stock = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = prepare_on(strict(), model, stock, placement=case.placement, overlap=case.overlap, **case.arguments)
    batch = [{name: value.to("strict") for name, value in case.batch().items()} for _ in range(case.micro_batches)]
    for _ in range(WARM_UP):
        _step(model, optimizer, batch)
    optimizer.synchronize()
    torch.accelerator.synchronize()
    native.model_time(case.link, case.kernel_s, False)
    try:
        # Each from idle to idle: what begins and ends a run is in both, and a step is what more steps take.
        few, many = (_elapsed(model, optimizer, batch, steps) for steps in (FEW, MANY))
        return (many - few) / (MANY - FEW)
    finally:
        optimizer.synchronize()
        torch.accelerator.synchronize()
        native.model_time(0.0, 0.0, False)
        optimizer.close()


def _elapsed(
    model: nn.Module, optimizer: penstock.Optimizer, batch: list[dict[str, torch.Tensor]], steps: int
) -> float:
    begin, end = (torch.Event("strict:0", enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(steps):
        _step(model, optimizer, batch)
    optimizer.synchronize()
    torch.accelerator.synchronize()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _step(model: nn.Module, optimizer: penstock.Optimizer, batch: list[dict[str, torch.Tensor]]) -> None:
    for number, inputs in enumerate(batch):
        last = number == len(batch) - 1
        with contextlib.nullcontext() if last else optimizer.no_sync():
            optimizer.backward(model(**inputs).loss)
    optimizer.step()
    optimizer.zero_grad()
