"""Curves to 1,024 ranks by mesh: seconds of a step, and bytes over the links and the network. Predictions alone.

full      one copy of the state, shared by all ranks
hybrid    a copy of the state on each host, shared by its ranks
tp        eight ranks of a host have parts of the parameters and one batch, of eight times the samples; what they have
          is shared by the ranks of other hosts
hpZ       one copy, and of the parameters another one on each host, from which backward gathers (Wang et al., "ZeRO++",
          2023, section 3.2): by formula, from the program of `full`
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

import penstock
from penstock.blueprint import request_for
from penstock.integrations.tensor_parallel import divide
from penstock.planner import Machine, simulated_mesh
from penstock.planner.cost import MachineCosts, spread_of, through
from penstock.planner.plan_request import made
from penstock.planner.simulation.program import Collective, Program, WorkKind
from penstock.planner.simulation.retime import retime
from penstock.planner.simulation.simulate import BACKWARD, Setup, Simulation, simulate
from penstock.runtime.topology import grid_of
from planning.models import batch, large

OF_HOST = 8
PORTS = 8  # of a host, each of 400 Gb/s; the slower network has one
MACHINE = "h100-node"
PLACEMENTS = {"8b": penstock.Placement(), "70b": penstock.Placement(grads="cpu", optimizer="cpu")}
RANKS = (8, 16, 64, 256, 1024)
LENGTH = 4096


def collectives(program: Program) -> Iterator[Collective]:
    """Those of the last step, each as often as it is issued."""
    for item in program.items[program.steps[-2] : program.steps[-1]]:
        if item.kind is WorkKind.SUBMIT:
            yield from program.jobs[item.index].collectives
        elif item.kind is WorkKind.MEET:
            yield program.meetings[item.index]


def on_the_host(simulation: Simulation) -> Program:
    """Let backward gather among the ranks of a host."""
    program = simulation.program
    jobs = list(program.jobs)
    for phase in simulation.phases[BACKWARD]:
        for item in (program.items[number] for number in phase):
            if item.kind is WorkKind.SUBMIT:
                inside = [_inside(each) for each in jobs[item.index].collectives]
                jobs[item.index] = jobs[item.index]._replace(collectives=tuple(inside))
    return replace(program, jobs=jobs)


def _inside(each: Collective) -> Collective:
    return each._replace(ranks=min(each.ranks, OF_HOST)) if each.name == "all_gather" else each


def row(
    name: str, mesh: str, ranks: int, program: Program, machine: Machine, beside: int = 0, lines: int = 1
) -> dict[str, Any]:
    """Time a step, and count what goes over links and network.

    Arguments:
        beside: bytes of the device that the program does not know of.
        lines: how many ranks have one batch.
    """
    timing = retime(program, MachineCosts(machine))
    slow = retime(program, MachineCosts(machine.replace(net_bandwidth=machine.value("net_bandwidth") / PORTS)))
    links = network = 0.0
    for each in collectives(program):
        here, hosts, rings = spread_of(each, OF_HOST)
        links += through(each) if here > 1 else 0
        network += through(each) * rings if hosts > 1 else 0
    peak = program.peak_bytes.get("device", 0) + beside
    host = program.peak_bytes.get("cpu", 0) * OF_HOST
    return dict(
        model=name,
        mesh=mesh,
        ranks=ranks,
        step_s=timing.step_s,
        tokens_per_s=program.tokens * ranks // lines / timing.step_s,
        bound_by=timing.bound_by,
        one_port_step_s=slow.step_s,
        one_port_bound_by=slow.bound_by,
        link_gb_of_a_rank=links / 1e9,
        network_gb_of_a_host=network / 1e9,
        device_gib=peak / 2**30,
        host_gib=host / 2**30,
        fits=peak <= 0.95 * machine.value("device_memory") and host <= 0.95 * machine.value("host_memory"),
    )


def simulated(name: str, model: nn.Module, sizes: dict[str, int], samples: int) -> tuple[Simulation, dict[str, float]]:
    """Simulate the first rank of a mesh; say how long that took."""
    started = time.perf_counter()
    grid = grid_of(sizes, sharded=True)
    setup = Setup(
        model,
        torch.optim.AdamW,
        partial(batch, samples, LENGTH),
        grid=grid,
        hosts=grid.world_size // OF_HOST,
        back_end="accelerator",
        recompute=True,
    )
    options = penstock.Options(streamed_updates=0.0)
    request = request_for(model, placement=PLACEMENTS[name], weights="init", options=options)
    found = simulate(setup, request)
    return found, dict(rehearsed_in_s=time.perf_counter() - started)


def meshes(names: Sequence[str] = ("8b", "70b")) -> dict[str, Any]:
    """The placement is given, so that curves show the mesh and not the search."""
    machine = Machine.read(MACHINE)
    rows: list[dict[str, Any]] = []
    for name in names:
        model = made(partial(large, name))
        # Of parameters alone: what a rank has of the copy on its host.
        copy = 2 * sum(parameter.numel() for parameter in model.parameters()) // OF_HOST
        for ranks in RANKS:
            for mesh, sizes in (
                ("full", {"dp_shard": ranks}),
                ("hybrid", {"dp_replicate": ranks // OF_HOST, "dp_shard": OF_HOST}),
            ):
                if mesh == "hybrid" and ranks == OF_HOST:
                    continue  # the same
                found, told = simulated(name, model, sizes, 1)
                rows.append(row(name, mesh, ranks, found.program, machine) | told)
                print(rows[-1], flush=True)
                if mesh == "full" and ranks > OF_HOST:
                    rows.append(row(name, "hpZ", ranks, on_the_host(found), machine, copy) | told)
                    print(rows[-1], flush=True)
            sizes = {"dp_shard": ranks // OF_HOST, "tp": OF_HOST}
            with simulated_mesh(sizes) as within:
                part = made(partial(large, name))
                divide(part, within["tp"])
                found, told = simulated(name, part, sizes, OF_HOST)
            rows.append(row(name, "tp", ranks, found.program, machine, lines=OF_HOST) | told)
            print(rows[-1], flush=True)
    return {"machine_file": MACHINE, "sequence": LENGTH, "rows": rows}
