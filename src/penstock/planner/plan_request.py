"""What is asked of the planner: a model, an optimizer and a batch on a machine, within limits."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from penstock.config import Options, Placement, TierName
from penstock.errors import ConfigError, one_line
from penstock.planner.machine import Machine
from penstock.planner.plans import placeholders
from penstock.planner.simulation.engine_internals import (
    Grid,
    PrepareRequest,
    check_elementwise,
    grid_of,
    node_size,
    request_for,
)
from penstock.planner.simulation.fake_collectives import check_parts
from penstock.planner.simulation.simulate import Setup
from penstock.planner.workload import Limits

#: What is left free of each memory: others take some, and allocators lose some to gaps.
RESERVE: Mapping[TierName, float] = {"device": 0.05, "cpu": 0.05, "nvme": 0.02}


@dataclass(frozen=True)
class PlanRequest:
    """What is asked.

    Attributes:
        setup: the model, its optimizer, its batch and its ranks.
        machine: what the figures are of.
        limits: what one rank may take of each memory.
        arguments: those of `prepare` that are given, beside the placement.
        folders: the folders of the nvme tier.
    """

    setup: Setup
    machine: Machine
    limits: Limits
    arguments: Mapping[str, Any]
    folders: Sequence[str]

    @property
    def options(self) -> Options:
        """The options that were given, or the defaults."""
        options: Options = self.arguments.get("options", Options())
        return options

    @property
    def on_accelerator(self) -> bool:
        """True if the device has memory of its own."""
        return self.setup.back_end == "accelerator"

    def request(self, placement: Placement, *, streamed: float) -> PrepareRequest:
        """Check a placement as `prepare` does, with all other arguments.

        Raises:
            ConfigError: as for `prepare`.
        """
        overlap = self.arguments.get("overlap", "auto")
        arguments = {
            **self.arguments,
            "placement": placement,
            "options": replace(self.options, streamed_updates=streamed),
            # By name alone updates begin in backward: a gradient that is not finite then ends the optimizer.
            "overlap": "forward" if overlap == "auto" else overlap,
            "weights": self.arguments.get("weights") or "init",  # the copy that is simulated has no values
        }
        return request_for(self.setup.model, **arguments)


def plan_request(
    setup: Setup,
    *,
    machine: Machine,
    arguments: Mapping[str, Any],
    world_size: int = 1,
    mesh: Mapping[str, int] | None = None,
    device_bytes: int | None = None,
    host_bytes: int | None = None,
    folders: Sequence[str | os.PathLike[str]] = (),
) -> PlanRequest:
    """Check what is asked, and add to the setup what follows from the ranks and the machine.

    Arguments:
        setup: the model, its optimizer, its batch, micro-batches and hosts; its ranks are those of the mesh.
        machine: what the figures are of.
        arguments: those of `prepare`, beside the placement.
        world_size: how many ranks there are.
        mesh: how many of them there are along each dimension; `None` for one copy of the state.
        device_bytes: bytes of the device of a rank; `None` for the machine's.
        host_bytes: bytes of the memory of a host; `None` for the machine's.
        folders: folders of the nvme tier; none for those of the machine.

    Raises:
        ConfigError: an argument is of the wrong kind or out of range; nothing was simulated.
    """
    hosts = setup.hosts
    _check_counts(world_size=world_size, hosts=hosts, micro_batches=setup.micro_batches)
    _check_counts("bytes", device_bytes=device_bytes, host_bytes=host_bytes)
    sharded = arguments.get("stage", 3) != 0
    grid = Grid.first_of(world_size, sharded=sharded) if mesh is None else grid_of(mesh, sharded=sharded)
    if world_size not in (1, grid.world_size):
        raise ConfigError(f"world_size={world_size} contradicts a mesh of {grid.world_size} ranks. Leave it out.")
    world_size, ranks = grid.world_size, grid.world_size // hosts
    if world_size % hosts:
        raise ConfigError(f"world_size={world_size} ranks cannot be shared by hosts={hosts}. Use a multiple of it.")
    if not callable(setup.batch):
        raise ConfigError(f"batch is a {type(setup.batch).__name__}. Give a function that makes one micro-batch.")
    for name in ("placement", "plan", "batch"):
        if name in arguments:
            raise ConfigError(f"{name}= is no argument of prepare() that a plan is made for. Leave it out.")
    check_elementwise(setup.optimizer)
    nodes = getattr(arguments.get("options"), "nodes", None)
    setup = replace(
        setup,
        model=check_parts(setup.model, grid),
        grid=grid.in_nodes(node_size(range(grid.shards), nodes, ranks)),
        back_end="inline" if machine.device == "cpu" else "accelerator",
        pinnable_bytes=int(machine.value("pinnable_memory")) // ranks if machine.has("pinnable_memory") else None,
    )
    named = [os.fspath(folder) for folder in folders]
    if not named and machine.has("folders") and machine.has("disk_free"):
        named = placeholders(int(machine.value("folders")))
    limits = _limits(machine, device_bytes, host_bytes, len(named), ranks)
    return PlanRequest(setup, machine, limits, dict(arguments), named)


def _check_counts(what: str = "", **values: int | None) -> None:
    """Refuse what is no number above 0, by its name; `None` only where it is a number of bytes."""
    for name, value in values.items():
        if value is None and what:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            rule = "Use 1 or more, or None." if what else "Use 1 or more."
            raise ConfigError(f"{name}={value!r} is no number of {what or name.replace('_', ' ')}. {rule}")


def made(model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """Return the model, or have the function make it on the meta device.

    Raises:
        ConfigError: it does not make one.
    """
    if isinstance(model, nn.Module):
        return model
    given: Any = model
    if not callable(given):
        raise ConfigError(f"model is a {type(model).__name__}. Give a module, or a function that makes one.")
    try:
        with torch.device("meta"):
            found = model()
    except Exception as error:  # it is somebody else's code
        raise ConfigError(f"model() failed on the meta device: {one_line(error)}.") from error
    if not isinstance(found, nn.Module):
        raise ConfigError(f"model() made a {type(found).__name__}, not a module.")
    return found


def _limits(
    machine: Machine, device_bytes: int | None, host_bytes: int | None, folders: int, ranks_of_host: int
) -> Limits:
    """Return the bytes that one rank may take of each memory."""
    there: dict[TierName, int] = {}
    shared = machine.device == "cpu" or machine.unified_memory
    host = host_bytes or int(machine.value("host_memory"))
    if shared:
        host = min(host, device_bytes or host)
    else:
        there["device"] = device_bytes or int(machine.value("device_memory"))
    there["cpu"] = host // ranks_of_host
    if folders and machine.has("disk_free"):
        there["nvme"] = int(machine.value("disk_free")) * folders // ranks_of_host
    return Limits({tier: nbytes - int(RESERVE[tier] * nbytes) for tier, nbytes in there.items()}, shared=shared)
