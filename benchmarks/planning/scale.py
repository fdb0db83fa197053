"""Curves: seconds of a step by GPUs, disks and the host's memory; and what planning takes."""

import os
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock.planner import Machine, plan
from planning.models import batch, large, large_config

CASES = (("8b", "rtx4090-desktop", 1, 10), ("70b", "h100-node", 8, 25))


def planning(name: str, machine: str, ranks: int, goal_s: float) -> dict[str, Any]:
    """Run the command for one model: seconds of the clock and of the processor, imports included, and its peak memory.

    The peak is that of all commands so far: call it in a process that has run none.
    """
    with tempfile.TemporaryDirectory() as folder:
        large_config(name).save_pretrained(folder)
        command = [
            str(Path(sys.executable).with_name("penstock")),
            "plan",
            "--model",
            folder,
            "--batch",
            "1x2048",
            "--machine",
            machine,
        ]
        clock = time.perf_counter()
        # On one thread: others wait for it, which counts as work.
        subprocess.run(
            [*command, "--gpus", str(ranks)],
            check=True,
            capture_output=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        seconds = time.perf_counter() - clock
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    told = {
        "case": f"{name} on {machine}, {ranks} ranks",
        "seconds": seconds,
        "processor_s": used.ru_utime + used.ru_stime,
        "peak_gib": used.ru_maxrss / 2**20,
        "goal_s": goal_s,
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
