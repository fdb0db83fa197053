"""A plan for the run that asks: for the memory that is free on this machine now, and for ranks that are here."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from penstock.config import Options
from penstock.planner import plan
from penstock.planner.machine import Machine
from penstock.planner.plans import Plan
from penstock.planner.simulation.engine_internals import (
    Grid,
    free_device_memory,
    host_memory,
    hosts_of,
    own_elements,
    shares_host_memory,
    user_mode,
)


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
