"""Curves: seconds of a step by GPUs, disks and the host's memory; and what planning takes."""

import resource
import time
from functools import partial
from typing import Any

import torch

from penstock.planner import Machine, plan
from planning.models import batch, large

CASES = (("8b", "rtx4090-desktop", 1, 60), ("70b", "h100-node", 8, 180))


def planning(name: str, machine: str, ranks: int, goal_s: float) -> dict[str, Any]:
    """Plan one model in this process: seconds of the clock and of the processor, and the peak resident set."""
    clock, processor = time.perf_counter(), time.process_time()
    found = plan(partial(large, name), torch.optim.AdamW, partial(batch, 1, 2048), machine=machine, world_size=ranks)
    told = {
        "case": f"{name} on {machine}, {ranks} ranks",
        "seconds": time.perf_counter() - clock,
        "processor_s": time.process_time() - processor,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "goal_s": goal_s,
        "step_s": found.step_s,
    }
    print(told, flush=True)
    return told


def scale() -> dict[str, Any]:
    """The placement is given, so that curves show the machine and not the search."""
    import penstock

    rows = []

    def step(curve: str, name: str, value: float, machine: Machine, placement: Any, ranks: int, hosts: int) -> None:
        started = time.perf_counter()
        found = plan(
            partial(large, name),
            torch.optim.AdamW,
            partial(batch, 1, 2048),
            machine=machine,
            world_size=ranks,
            hosts=hosts,
            placement=placement,
        )
        seconds = time.perf_counter() - started
        told = dict(curve=curve, model=name, x=value, step_s=found.step_s, tokens_per_s=found.tokens_per_s)
        rows.append(told | dict(bound_by=found.bound_by, fits=found.fits, planned_in_s=seconds))
        print(rows[-1], flush=True)

    state = penstock.Placement(grads="cpu", optimizer="cpu")
    on_cpu = penstock.Placement(params="cpu", grads="cpu", optimizer="cpu")
    node, desktop = Machine.read("h100-node"), Machine.read("rtx4090-desktop")
    for name in ("8b", "70b"):
        for ranks in (1, 8, 64, 256, 1024):
            step("gpus", name, ranks, node, state, ranks, max(1, ranks // 8))
    for disks in (1, 2, 4, 8):
        placement = penstock.Placement(
            params="cpu", grads="cpu", optimizer="nvme", nvme_path=[f"nvme{number}" for number in range(disks)]
        )
        step("disks", "8b", disks, desktop.replace(folders=disks), placement, 1, 1)
    for factor in (0.5, 1, 2, 4):
        faster = desktop.replace(**{key: desktop.value(key) * factor for key in ("host_bandwidth", "update")})
        step("host memory", "8b", factor, faster, on_cpu, 1, 1)
    return {"rows": rows}
