"""A plan for the run that asks: for this machine as it is now, and for ranks that are here already."""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.config import Options
from penstock.errors import EngineError
from penstock.planner import plan
from penstock.planner.machine import Machine, from_probe
from penstock.planner.plans import Plan
from penstock.planner.rates import Rate
from penstock.planner.simulation.engine_internals import (
    ControlGroup,
    Grid,
    control_group_of_all,
    device_for,
    free_device_memory,
    host_memory,
    hosts_of,
    own_elements,
    shares_host_memory,
    user_mode,
)
from penstock.probe.cache import keep, recall
from penstock.probe.collectives import measure_collectives
from penstock.probe.fingerprint import fingerprint
from penstock.probe.measure import measure
from penstock.probe.sampling import Deadline

SECONDS, SECONDS_OF_LINKS = 50.0, 10.0
PATIENCE_S = 3600.0  # for the first rank


def machine_of_ranks(folders: Sequence[str | os.PathLike[str]] = ()) -> Machine | None:
    """Give the machine of the ranks of the default process group, as it was probed before, or probed now. Collective.

    Arguments:
        folders: the folders of the nvme tier.

    Returns:
        The machine, on the first rank; `None` on the others.

    Raises:
        ConfigError, EngineError: measuring failed on the first rank.
    """
    with contextlib.closing(control_group_of_all(timeout_s=PATIENCE_S, error=EngineError)) as control_group:
        world = dist.group.WORLD if control_group.size > 1 else None
        every = {} if world is None else {"ranks": world}
        return machine_here(device_for((), None).device, control_group, every, folders=folders)


def machine_here(
    device: torch.device,
    control_group: ControlGroup,
    groups: Mapping[str, dist.ProcessGroup],
    *,
    folders: Sequence[str | os.PathLike[str]] = (),
    seconds: float = SECONDS,
) -> Machine | None:
    """Give this machine: as it was probed before, or probed now, which takes a minute. Collective.

    The first rank measures the machine while the others wait; then all of them measure their collectives.

    Arguments:
        device: the one that computes.
        control_group: the ranks, patient enough to wait for the first one.
        groups: the process groups that this rank is in, one for each dimension of the mesh, by name.
        folders: the folders of the nvme tier.
        seconds: how long the first rank may measure.

    Returns:
        The machine, on the first rank; `None` on the others.

    Raises:
        ConfigError, EngineError: measuring failed on the first rank, as `ControlGroup.together` says.
    """
    found: Machine | None = None
    is_new = False
    with control_group.together("probe"):
        if control_group.is_first:
            found = recall(fingerprint(device, folders), Machine.read)
            is_new = found is None or (control_group.size > 1 and not _knows_links(found))
            if is_new:
                found = _probed(device, seconds, folders)
    if not control_group.share(is_new):
        return found
    if control_group.size > 1:
        links = measure_collectives(device, groups, control_group, Deadline(SECONDS_OF_LINKS))
        if found is not None:
            figures = {**found.figures, **{name: Rate(*values) for name, values in links.items()}}
            found = replace(found, figures=figures)
    if found is not None:
        keep(found, found.write)
    return found


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
    world_size = grid.world_size
    hosts = hosts_of(world_size)
    device_bytes, host_bytes = _free_bytes(model, arguments, device, world_size // hosts)
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


def _probed(device: torch.device, seconds: float, folders: Sequence[str | os.PathLike[str]]) -> Machine:
    """Measure this machine, without its collectives."""
    return from_probe(*measure(device=device, folders=folders, seconds=seconds, groups={}))


def _knows_links(machine: Machine) -> bool:
    return machine.has("link_bandwidth") or machine.has("net_bandwidth")


def _free_bytes(
    model: nn.Module, arguments: Mapping[str, Any], device: torch.device, ranks: int
) -> tuple[int | None, int | None]:
    """Say what a rank can have of its device, and all ranks of a host of its memory; `None` where nobody knows."""
    own = {
        id(tensor): own_elements(tensor).nbytes
        for tensor in [*model.parameters(), *model.buffers()]
        if tensor.device == device
    }
    host = host_memory(arguments.get("options") or Options())
    if shares_host_memory(device):
        return None, None if host is None else host.nbytes + ranks * sum(own.values())
    free = free_device_memory(device)
    budget = getattr(arguments.get("options"), "device_bytes", None)
    known = [nbytes for nbytes in (None if free is None else free + sum(own.values()), budget) if nbytes is not None]
    return min(known, default=None), None if host is None else host.nbytes
