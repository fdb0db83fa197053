"""No simulated step of the engine is shorter than the bound of its placement, whatever the machine."""

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from penstock.blueprint import request_for
from penstock.config import Options, Overlap, Placement
from penstock.planner.bounds import least_step
from penstock.planner.candidates import Choice
from penstock.planner.cost import machine_costs
from penstock.planner.count_workload import load_of
from penstock.planner.machine import Machine, Rate
from penstock.planner.simulation.program import BackEnd
from penstock.planner.simulation.retime import retime
from penstock.planner.simulation.simulate import Setup, Simulation, simulate
from penstock.planner.workload import TIERS, Fractions, Limits
from penstock.runtime.topology import Grid

WIDTH, BLOCKS, TILE = 128, 4, 8192
# What rings hold of files here: 32 slots of tiles with all that belongs to them, for updates and on the way.
KEPT = 2 * 32 * TILE * 8
ROOMY = Limits(dict.fromkeys(TIERS, 1 << 40))
ONE_MEMORY = Limits({"cpu": 1 << 40, "nvme": 1 << 40}, shared=True)
HALVES = {"device": 0.5, "cpu": 0.25, "nvme": 0.25}
PLACED: dict[str, dict[str, Any]] = {
    "device": {},
    "cpu": {"params": "cpu", "grads": "cpu", "optimizer": "cpu"},
    "nvme": {"params": "nvme", "grads": "nvme", "optimizer": "nvme"},
    "state in files": {"optimizer": "nvme"},
    "parameters on the cpu": {"params": "cpu"},
    "shadows on the host": {"grads": "cpu", "optimizer": "cpu"},
    "cut": {"params": HALVES, "grads": HALVES, "optimizer": {"device": 0.25, "cpu": 0.5, "nvme": 0.25}},
}
RANGES = {
    "h2d": (1e8, 1e10),
    "d2h": (1e8, 1e10),
    "host_bandwidth": (5e8, 1e11),
    "update": (1e8, 1e11),
    "device_update": (1e9, 1e12),
    "disk_read": (1e8, 1e10),
    "disk_write": (1e8, 1e10),
    "flops_bfloat16": (1e9, 1e13),
}
SAME = {
    "duplex": 1.2e10,
    "device_bandwidth": 1e12,
    "disk_mixed": 6e9,
    "folders": 1.0,
    "devices": 1.0,
    "flops_float32": 1e11,
    "disk_seconds": 1e-9,
    "op_seconds": 1e-9,
    "op_host_seconds": 1e-10,
    "job_seconds": 1e-9,
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.down(torch.relu(self.up(values)))


@cache
def simulated(name: str, back_end: BackEnd, overlap: Overlap, micro_batches: int, streamed: float) -> Simulation:
    model = nn.Sequential(*[Block() for _ in range(BLOCKS)])
    options = Options(tile_bytes=TILE, prefetch_bytes=2 * WIDTH * WIDTH * 2, streamed_updates=streamed)
    placement = Placement(**PLACED[name], nvme_path="nowhere")
    request = request_for(model, placement=placement, overlap=overlap, units=[Block], options=options)
    setup = Setup(
        model, torch.optim.AdamW, lambda: torch.zeros(4, WIDTH), micro_batches=micro_batches, back_end=back_end
    )
    return simulate(setup, request)


def machine(seed: int, device: str) -> Machine:
    drawn = random.Random(seed)
    figures = {name: low * (high / low) ** drawn.random() for name, (low, high) in RANGES.items()} | SAME
    return Machine("drawn", device, {name: Rate(value, value, value, "drawn") for name, value in figures.items()})


def fractions(name: str) -> Fractions:
    placed = {"params": "device", "grads": "device", "optimizer": "device"} | PLACED[name]
    return {kind: home if isinstance(home, dict) else {home: 1.0} for kind, home in placed.items()}


ROWS: list[tuple[str, BackEnd, Overlap, int, float]] = [
    *((name, "accelerator", "forward", 1, 0.0) for name in PLACED),
    *((name, "inline", "forward", 1, 0.0) for name in ("device", "cpu", "nvme", "state in files")),
    ("cut", "accelerator", "none", 1, 0.0),
    ("cpu", "accelerator", "none", 1, 0.0),
    ("cpu", "accelerator", "backward", 1, 0.0),
    ("cpu", "accelerator", "forward", 1, 0.5),
    ("shadows on the host", "accelerator", "forward", 1, 0.5),
    ("cpu", "accelerator", "forward", 2, 0.0),
    ("nvme", "accelerator", "forward", 2, 0.0),
]


@pytest.mark.parametrize(("name", "back_end", "overlap", "micro_batches", "streamed"), ROWS)
def test_no_step_is_shorter(
    name: str, back_end: BackEnd, overlap: Overlap, micro_batches: int, streamed: float
) -> None:
    program = simulated(name, back_end, overlap, micro_batches, streamed).program
    # As a planner does: what a step consists of is counted once, with all state on the device.
    whole = simulated("device", back_end, "forward", micro_batches, 0.0)
    limits, device = (ROOMY, "cuda") if back_end == "accelerator" else (ONE_MEMORY, "cpu")
    for seed in range(8):
        there = machine(seed, device)
        load = load_of(whole, Choice(streamed=streamed), there, Grid(), micro_batches=micro_batches)
        load = replace(load, kept_bytes=KEPT)
        found = least_step(load, there, limits, back_end=back_end, overlap=overlap, fractions=fractions(name))
        assert found is not None
        step_s = retime(program, machine_costs(there)).step_s
        assert found.step_s <= step_s * 1.001, f"seed {seed}: {found.busy_s}"
        assert found.step_s > 0
