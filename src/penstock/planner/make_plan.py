"""Answer whether a model fits on a machine, how long a step is, and where its state should be."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from penstock.config import Options, Placement
from penstock.planner.machine import Machine
from penstock.planner.plan_request import plan_request
from penstock.planner.plan_result import answer
from penstock.planner.plans import Plan
from penstock.planner.search import find_best, given
from penstock.planner.simulation.engine_internals import (
    Grid,
    free_device_memory,
    host_memory,
    hosts_of,
    own_elements,
    shares_host_memory,
    user_mode,
)
from penstock.planner.this_machine import machine_for
from penstock.planner.trials import Trials, quick_collection


@torch.random.fork_rng(devices=[])  # the batch, the model's first values and what is measured may draw some
def plan(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: type[torch.optim.Optimizer] | torch.optim.Optimizer,
    batch: Callable[[], Any],
    *,
    machine: Machine | str | os.PathLike[str] | None = None,
    device_bytes: int | None = None,
    host_bytes: int | None = None,
    folders: Sequence[str | os.PathLike[str]] = (),
    world_size: int = 1,
    hosts: int = 1,
    mesh: Mapping[str, int] | None = None,
    placement: Placement | Literal["auto"] = "auto",
    micro_batches: int = 1,
    expert_share: float | None = None,
    measure: bool = False,
    trace: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
    **prepare_arguments: Any,
) -> Plan:
    """Find the placement whose step is shortest, of those that fit; or say what a given one would do.

    The engine itself is simulated: on tensors without values, streams without threads and tiers without memory. Nothing
    is loaded and nothing is left. `prepare(placement="auto", plan=...)` does what the plan says.

    Arguments:
        model: on any device, as it would be prepared, or a function that makes one, which is called for the meta
            device. It stays as it is. With DTensors each rank has its part: `simulated_mesh(mesh)` gives a `DeviceMesh`
            of ranks that need not be there.
        optimizer: the class, which takes all parameters with its defaults, or an optimizer over the model's parameters.
        batch: makes one micro-batch, as the model takes it: a mapping of keyword arguments, a tuple of positional ones,
            or one value. What the model returns has a `loss`, or is the loss; else the mean of it stands for one.
        machine: what the step is timed for: a machine, its file, or the name of one that comes with the package; `None`
            for this one, which is probed once.
        device_bytes: bytes of the device of a rank; `None` for the machine's.
        host_bytes: bytes of the memory of a host; `None` for the machine's.
        folders: folders of the nvme tier; of a machine that has folders by its figures none need be named.
        world_size: how many ranks there are.
        hosts: on how many hosts they are.
        mesh: how many of them there are along each dimension, by the names that a `DeviceMesh` has for them, such as
            `{"dp_replicate": 16, "dp_shard": 8}`: copies of the state, each shared by neighbours. `None`: all of them
            share one copy.
        placement: one to be looked at; `"auto"` for the best one.
        micro_batches: how many of them a step has.
        expert_share: the part of the rows that a mask chooses, where a model makes it of values other than the experts
            that a router chooses. These get equal parts. `None`: such a mask is refused.
        measure: time each kind of operation for real, on this machine, once: for models whose operations are not what
            figures of machines expect.
        progress: is called with a line of words before each simulation of a search.
        trace: a file to which the planned step is written, for Perfetto.
        prepare_arguments: other arguments of `prepare`: precision, stage, units, options, ...

    Returns:
        The plan. It may say that nothing fits: by how much, on which tier, and what the smallest change is.

    Raises:
        ConfigError: an argument is wrong; the machine lacks a figure; or the model cannot be simulated, because its
            control flow depends on values.

    Source: docs/planner.md; the idea of a simulator that is the engine, and its accuracy, are there.
    """
    there = machine_for(machine, folders)
    request = plan_request(
        model,
        optimizer,
        batch,
        machine=there,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        folders=folders,
        world_size=world_size,
        hosts=hosts,
        mesh=mesh,
        placement=placement,
        micro_batches=micro_batches,
        expert_share=expert_share,
        arguments=prepare_arguments,
    )
    trials = Trials(request, measures=measure)
    with quick_collection():
        best = find_best(request, trials, progress) if isinstance(placement, str) else given(request, trials, placement)
        if trace is not None:
            trials.write_trace(best.trial, trace)
        return answer(request, trials, best)


def plan_here(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[], Any],
    arguments: Mapping[str, Any],
    *,
    machine: Machine,
    device: torch.device,
    grid: Grid,
) -> Plan:
    """Plan for a run that is about to be prepared on this machine, within the memory that is free on it.

    Arguments:
        model: the model; what it has on the device counts as free, since `prepare` moves it.
        optimizer: its optimizer.
        batch: makes one micro-batch. It is called on the user's side, and random numbers are afterwards as before.
        arguments: other arguments of `prepare`, without a placement.
        machine: this one.
        device: the one that computes.
        grid: the ranks.

    Raises:
        ConfigError: as for `plan`.
    """
    hosts = hosts_of(grid.world_size)
    device_bytes, host_bytes = _free_bytes(model, arguments, device, grid.world_size // hosts)
    devices = [] if device.type == "cpu" else [device]
    kind = "cuda" if device.type == "cpu" else device.type  # of no devices: torch wants to know it all the same
    with user_mode(), torch.random.fork_rng(devices, device_type=kind):
        return plan(
            model,
            optimizer,
            batch,
            machine=machine,
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            hosts=hosts,
            mesh=grid.sizes,
            **arguments,
        )


def _free_bytes(
    model: nn.Module, arguments: Mapping[str, Any], device: torch.device, ranks: int
) -> tuple[int | None, int | None]:
    """Return the bytes that a rank can have of its device, and all ranks of a host of its memory; `None` if unknown."""
    options = arguments.get("options") or Options()
    there = {id(each): each for each in [*model.parameters(), *model.buffers()] if each.device == device}
    own_bytes = sum(own_elements(each).nbytes for each in there.values())
    host, free = host_memory(options), free_device_memory(device)
    host_bytes = None if host is None else host.nbytes
    if shares_host_memory(device):
        return None, None if host_bytes is None else host_bytes + ranks * own_bytes
    limits = (None if free is None else free + own_bytes, options.device_bytes)
    return min((each for each in limits if each is not None), default=None), host_bytes
