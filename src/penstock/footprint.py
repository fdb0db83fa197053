"""The bytes that `prepare` would take of each memory and each disk, counted without taking any.

They are those of the blueprint that `prepare` builds with the same arguments. The model may be on the meta device, and
no process group is needed: `world_size` is the number of future ranks.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.blueprint import Blueprint, draw_blueprint, request_for
from penstock.checkpoint.beside import persistent_buffers
from penstock.checkpoint.format import to_bytes
from penstock.checkpoint.tables import HomeTable, UnitTable, draw_table, kept_storages
from penstock.config import MASTER, OPTIMIZER, PARAM, Tier
from penstock.engine.unit.plan import UnitPlan
from penstock.errors import ConfigError
from penstock.memory_budget import MemoryBudget, Need, Room, budget_of, disks, memories
from penstock.planned import asks_for_plan, check_asked, planned, taken
from penstock.runtime.accelerator import reach_for
from penstock.runtime.aio import free_disk_bytes
from penstock.runtime.hardware import device_for, visible_devices
from penstock.runtime.host_memory import needs_pinning
from penstock.runtime.modes import engine_entry
from penstock.runtime.system import ranks_of_host
from penstock.runtime.topology import Grid, grid_of, node_size, peers_of
from penstock.tiers.tier import Location, LocationReport

# The most bytes of a checkpoint beside tiles and buffers, on any rank: states of random numbers, the model's
# configuration, groups; for each parameter a line of the marker, and of a table; for each record a checksum.
_SMALL_BYTES, _LINE_BYTES, _CHECKSUM_BYTES = 1 << 16, 256, 10


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The bytes that one rank will take. Print it for a table.

    Attributes:
        at_rest: the table of training state as it will be, as `Optimizer.locations()` reports it between two steps; of
            parameters gathered ahead of their use it has nothing.
        budget: the bytes that the rank takes of each memory at once: state, and temporaries.
        rooms: the device (where it has memory of its own, or a budget), the host, and each folder of the nvme tier:
            the bytes that this rank needs there, and those that are available for it.
        checkpoint_bytes: an estimate of the bytes that `Optimizer.save` will write on this rank, without `extra`.
        world_size: the number of ranks.
    """

    at_rest: LocationReport
    budget: MemoryBudget
    rooms: Sequence[Room]
    checkpoint_bytes: int
    world_size: int

    @property
    def device(self) -> Need:
        """The bytes that the rank takes of its device at once."""
        return self.budget.device

    @property
    def lacks(self) -> list[str]:
        """For each room that is too small, a message of what is missing, and what to do."""
        return [room.lack for room in self.rooms if room.lack is not None]

    @property
    def fits(self) -> bool:
        """True if all of it fits, as far as that is known."""
        return not self.lacks

    def lack_of_checkpoints(self, folder: str | os.PathLike[str], count: int) -> str | None:
        """Check the space for some checkpoints of all ranks in a folder.

        Arguments:
            folder: the folder, which need not exist yet.
            count: the number of checkpoints at once: those that are kept, and the one that is being written.

        Returns:
            A message of what is missing; `None` if they fit.
        """
        place, free = free_space(folder)
        each = self.checkpoint_bytes * self.world_size
        if count * each <= free:
            return None
        return (
            f"{count} checkpoints of {each:,} bytes take {count * each:,}; {str(place)!r} has {free:,} bytes free, "
            f"{count * each - free:,} too few. Keep fewer of them, or save elsewhere."
        )

    def __str__(self) -> str:
        lines = [f"{'kind':<24} {'tier':<7} {'bytes':>18}"]
        kinds = dict.fromkeys((row.kind, row.tier) for row in self.at_rest.rows)
        lines += [f"{kind:<24} {tier:<7} {self.at_rest.bytes(kind=kind, tier=tier):>18,}" for kind, tier in kinds]
        lines += [f"{what:<24} {'device':<7} {nbytes:>18,}" for what, nbytes in self.device.beside.items() if nbytes]
        lines.append(f"{'at once, on this rank':<32} {'needed':>18} {'available':>18}")
        for room in self.rooms:
            available = "unknown" if room.available is None else f"{room.available:,}"
            lines.append(f"{room.name:<32} {room.needed:>18,} {available:>18}")
        lines.append(f"{'a checkpoint':<32} {self.checkpoint_bytes:>18,}")
        return "\n".join([*lines, *self.lacks])


def free_space(folder: str | os.PathLike[str]) -> tuple[Path, int]:
    """Return the nearest folder that is there, for one that may be made, and the bytes that can be written in it."""
    place = Path(os.path.abspath(folder))
    while not place.exists() and place != place.parent:
        place = place.parent
    return place, free_disk_bytes(place)


@engine_entry
def footprint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    mesh: DeviceMesh | Mapping[str, int] | None = None,
    world_size: int | None = None,
    **arguments: Any,
) -> Footprint:
    """Count the bytes that `prepare` with these arguments would take on this rank. Not collective; takes nothing.

    Arguments:
        model: what `prepare` would be given, on any device; with `weights` it may be on the meta device.
        optimizer: what `prepare` would be given; `None` for inference.
        mesh: as for `prepare`; or, for future ranks, their number along each dimension, by its name:
            `{"dp_replicate": 2, "dp_shard": 8}`.
        world_size: the number of future ranks, of which this is the first; on an accelerator a host has as many as it
            has devices. `None` for the ranks of the mesh, of the default process group, or one.
        arguments: all other arguments of `prepare`; `placement="auto"` with a `plan`, since nothing is simulated here.

    Raises:
        ConfigError: `prepare` would refuse the arguments; or it is `"auto"` without a `plan`.
        MemoryBudgetError: `Options(live_bytes=...)` is smaller than what the largest unit needs.

    Example:
        >>> model = torch.nn.Linear(256, 256, device="meta")
        >>> found = footprint(model, torch.optim.AdamW(model.parameters()), weights="init", world_size=2)
        >>> found.at_rest.bytes(kind="param")
        66048
    """
    _check_world_size(world_size, mesh)
    plan, batch = arguments.pop("plan", None), arguments.pop("batch", None)
    auto = asks_for_plan(arguments.get("placement"))
    if auto and plan is None:
        raise ConfigError(
            "footprint(placement='auto') simulates nothing: give plan=, the file that penstock plan wrote."
        )
    check_asked(arguments.get("placement"), plan, batch, trains=optimizer is not None)
    request = request_for(model, **arguments | ({"placement": None} if auto else {}))
    made = None if isinstance(mesh, Mapping) else mesh
    device = device_for(model.parameters(), made).device
    sharded = request.stage != 0
    future = grid_of(mesh, sharded=sharded) if isinstance(mesh, Mapping) else None
    if world_size is not None:
        future = Grid.first_of(world_size, sharded=sharded)
    if future is None:
        peers = peers_of(made, sharded=sharded)
        grid, line, of_host, ranks_here = peers.grid, peers.shards, ranks_of_host(default=0), ranks_of_host()
    else:
        grid = future
        visible = visible_devices() if device.type != "cpu" else None
        ranks_here = of_host = grid.world_size if visible is None else min(grid.world_size, visible.count)
        line = range(grid.shards)
    if plan is not None:
        by_hand = {name: value for name, value in arguments.items() if name != "placement"}
        trains = optimizer is not None
        request = request_for(model, **planned(model, taken(plan), by_hand, grid=grid, device=device, trains=trains))
    grid = grid.in_nodes(node_size(line, request.options.nodes, of_host))
    reach = reach_for(device, debug_release=request.debug_release)
    blueprint = draw_blueprint(model, optimizer, request, grid, reach)
    budget = budget_of(blueprint, model, device)
    return Footprint(
        at_rest=_at_rest(blueprint, device),
        budget=budget,
        rooms=[*memories(budget, device, ranks_here), *disks(budget, ranks_here)],
        checkpoint_bytes=_checkpoint_bytes(blueprint, model),
        world_size=grid.world_size,
    )


def _check_world_size(world_size: object, mesh: object) -> None:
    """Refuse a number of ranks that is no positive integer, or that contradicts a mesh."""
    if world_size is None:
        return
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ConfigError(f"world_size={world_size!r}: use a whole number of ranks, 1 or more, or None.")
    if mesh is not None:
        raise ConfigError(f"world_size={world_size} and a mesh both say how many ranks there are. Give one of them.")


def _at_rest(blueprint: Blueprint, device: torch.device) -> LocationReport:
    """List the cells of all segments."""
    pins = needs_pinning(device)
    return LocationReport(
        [
            Location(
                unit=cell.unit,
                kind=cell.kind,
                tier=cell.tier.value,
                dtype=cell.dtype,
                numel=cell.numel,
                nbytes=cell.nbytes,
                pinned=pins and segment.copied and segment.tier is Tier.CPU,
                in_flight=False,
            )
            for segment in blueprint.segments
            for cell in segment.cells
        ]
    )


def _checkpoint_bytes(blueprint: Blueprint, model: nn.Module) -> int:
    """Count what this rank writes for a checkpoint: its tiles, the table of their locations, and buffers."""
    grid, nbytes, lines = blueprint.grid, 0, 0
    for plan in blueprint.units:
        table = _table_of(plan, grid)
        if table.checksums:
            checksums = len(table.checksums) * len(table.storages)
            nbytes += table.nbytes + len(to_bytes(table)) + _CHECKSUM_BYTES * checksums
        lines += sum(_LINE_BYTES + len(name) for name in plan.spec.names)
    if grid.shard_rank == 0 and grid.replica_rank == 0:  # this rank writes buffers and the marker
        nbytes += lines + sum(buffer.nbytes for buffer in persistent_buffers(model).values())
    return nbytes + _SMALL_BYTES


def _table_of(plan: UnitPlan, grid: Grid) -> UnitTable:
    """Draw up the table of a unit's tiles as a save of this rank will."""
    storages = {name: plan.segments[name][0].cells for name in (MASTER, OPTIMIZER) if plan.segments.get(name)}
    cells = {PARAM: plan.own_params[0].cells, **storages}
    kept = [HomeTable(name, cells[name], ()) for name in kept_storages(cells)]
    return draw_table(plan.spec.name, plan.layout, kept, plan.tile_numel, grid, offset=0)
