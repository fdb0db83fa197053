"""The memory that a blueprint takes: of a device, of a rank, and of all ranks of a host."""

import contextlib
import errno
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock import checks
from penstock.blueprint import Blueprint, PrepareRequest
from penstock.config import GRAD, MASTER, OPTIMIZER, PARAM, SECONDARY, SHADOW, STAGING, Options, Tier
from penstock.engine.forward_backward.gather import packed_bytes
from penstock.engine.gradients.reduce import BUFFERS_OF_A_SIZE, summing_bytes
from penstock.engine.unit.dtensor import own_elements, own_shape
from penstock.engine.unit.first_values import FirstValues, open_source
from penstock.engine.unit.plan import UnitPlan
from penstock.errors import MemoryBudgetError, NvmeError
from penstock.runtime.aio import ELSEWHERE, existing_folder, free_disk_bytes
from penstock.runtime.collectives import Collectives
from penstock.runtime.control_group import ControlGroup
from penstock.runtime.hardware import free_device_memory, shares_host_memory
from penstock.runtime.host_memory import HostMemory, available_host_memory
from penstock.runtime.system import Host, ranks_of_host, this_host
from penstock.runtime.topology import Grid
from penstock.tiers.host import DeviceTier, HostTier
from penstock.tiers.nvme import NvmeTier, bytes_by_folder, stripe
from penstock.tiers.storage import SegmentPlan
from penstock.tiers.tier import TierMemory, bytes_on
from penstock.tiers.transfer import in_reach

# ----------------------------------------------------------------------------------------------------------------------
# The bytes of each memory that a blueprint takes at once, compared with the available ones before any is taken.
#
# A device has resident state, and temporaries beside it: gathered units, flat gradients before they are reduced to
# their storage, buffers of tiles, and at the start the first values of one unit. Activations and workspaces of kernels
# are not known here, and not counted.
#
# If device and host share memory, as on a cpu, both together are compared with the host's. A host's memory and disks
# belong to all of its ranks, which compare what they take together (below).
# ----------------------------------------------------------------------------------------------------------------------


GATHERED, PACKED, ON_THEIR_WAY = "gathered", "packed", "gradients on their way"
TILES, UPDATE, BUFFERS, FIRST = "tiles", "an update", "buffers", "first values"
#: Planned segments of a memory: kinds by the names of `Placement`, and buffers, each with its storages.
_AT_REST = {
    "params": (PARAM, SECONDARY),
    "grads": (GRAD,),
    "optimizer": (MASTER, OPTIMIZER, SHADOW),
    TILES: (STAGING,),
}
DEVICE, HOST = "device", "host"  # names of rooms

# Bytes per element of first values on their way to their storages: in fp32; and, while they are split into bf16 and a
# remainder, as integers beside that.
_FP32_BYTES, _SPLIT_BYTES, _SPLIT_OF_COPY_BYTES = 4, 12, 16


@dataclass(frozen=True)
class Need:
    """Bytes of one memory that a rank takes at once, by purpose.

    Attributes:
        parts: the bytes by name. At rest: `"params"`, `"grads"`, `"optimizer"`, and `"tiles"`, the buffers that these
            pass. For a while: `"gathered"` parameters, `"packed"` ones between ranks, `"gradients on their way"`,
            temporaries of `"an update"` of a whole parameter, and `"first values"`: what the start takes beyond all of
            these. And the model's `"buffers"`.
        there: how many of them the model has there already: in buffers, and in parameters, whose own memory is freed
            while their storages are filled.
    """

    parts: Mapping[str, int]
    there: int = 0

    @property
    def nbytes(self) -> int:
        """The sum of all parts."""
        return sum(self.parts.values())

    @property
    def at_rest(self) -> int:
        """The bytes of planned segments: state, and the buffers that it passes."""
        return self.nbytes - sum(self.beside.values())

    @property
    def beside(self) -> dict[str, int]:
        """The bytes beside planned segments, by name."""
        return {what: nbytes for what, nbytes in self.parts.items() if what not in _AT_REST}

    def __str__(self) -> str:
        return ", ".join(f"{what} {nbytes:,}" for what, nbytes in self.parts.items() if nbytes)


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """Bytes that a rank takes of each memory at once, beside what its model computes. `budget_of` counts them.

    Attributes:
        device: bytes of the device that computes.
        host: bytes of the cpu tier, and for updates on it.
        files: bytes of the nvme tier, activations apart.
        pinned_bytes: bytes of the cpu tier that a device copies from or to. They are pinned first; others are pageable.
        folders: the bytes of `files` in each folder.
        is_shared: True if the device's memory is the host's.
        is_ahead: True if units are gathered ahead of their use.
        request: the arguments of `prepare`, with the limits of device and host.
    """

    device: Need
    host: Need
    files: Need
    pinned_bytes: int
    folders: Sequence[tuple[str | os.PathLike[str], int]]
    is_shared: bool
    is_ahead: bool
    request: PrepareRequest

    def on(self, tier: Tier) -> Need:
        """Return the bytes of a tier."""
        return {Tier.DEVICE: self.device, Tier.CPU: self.host, Tier.NVME: self.files}[tier]

    @property
    def host_bytes(self) -> int:
        """All bytes of the host's memory, with those of a device that shares it, less what its model has already."""
        return self.host.nbytes + (self.device.nbytes - self.device.there if self.is_shared else 0)

    def lack(self, of: str, whose: str, missing: int) -> str:
        """Make the message that a memory is too small.

        Arguments:
            of: `"device"` or `"host"`.
            whose: the available bytes, and the missing ones, as a clause.
            missing: how many bytes are missing, for this rank.
        """
        device, host = self.device, self.host
        if of == DEVICE:
            text, needs, to = f"The device needs {device.nbytes:,} bytes on this rank", [device], "cpu"
        elif self.is_shared:
            text = (
                f"The device and the cpu tier share the host's memory, and need {self.host_bytes:,} bytes on this rank"
            )
            text += f", beside {device.there:,} that the model takes already" if device.there else ""
            needs, to = [device, host], "nvme"
        else:
            text, needs, to = f"The cpu tier needs {host.nbytes:,} bytes on this rank", [host], "nvme"
        what = ", cpu tier: ".join(str(need) for need in needs if need.nbytes)
        return f"{text}, activations apart ({what}); {whose}. {self._advice(missing, needs, to)}"

    def _advice(self, missing: int, needs: Sequence[Need], to: str) -> str:
        """Choose which kinds to move from some memories to a tier: the least used ones first, until it is enough."""
        moved: list[str] = []
        for what in ("optimizer", "grads", "params"):
            resting = sum(need.parts[what] for need in needs)
            if missing > 0 and resting:
                moved.append(f"{what}='{to}'")
                missing -= resting
        ways = [f"Move state with Placement({', '.join(moved)})"] if moved else []
        # With more ranks a shard is smaller, of state that is sharded.
        ways.append("use more ranks" if self.request.stage == 3 else "use more ranks and a higher stage")
        if self.is_ahead and self.device in needs:
            ways.append("lower Options(prefetch_bytes=...)")
        text = f"{', '.join(ways[:-1])}, or {ways[-1]}." if len(ways) > 1 else f"{ways[0]}."
        return text[0].upper() + text[1:]


@dataclass(frozen=True)
class Room:
    """A memory or a file system, and the bytes that this rank needs there.

    Attributes:
        name: `"device"`, `"host"`, or a folder.
        needed: the bytes that this rank needs there.
        available: the bytes that it can have there; `None` if that is unknown.
        lack: a message of what is missing, and what to do; `None` if it fits.
    """

    name: str
    needed: int
    available: int | None
    lack: str | None = None


def check_device(blueprint: Blueprint, model: nn.Module, device: torch.device) -> MemoryBudget:
    """Refuse a blueprint that takes more of its device than is available. Nothing was taken.

    Returns:
        The bytes that it takes of every memory.

    Raises:
        MemoryBudgetError: the message has the parts, the missing bytes, and what to do.
    """
    budget = budget_of(blueprint, model, device)
    checks.check_pinned_memory(budget.pinned_bytes, budget.host.parts[TILES], device, budget.request.options)
    rooms = memories(budget, device, ranks_of_host())
    if any(room.lack for room in rooms if room.name == DEVICE):
        raise MemoryBudgetError(" ".join(room.lack for room in rooms if room.lack))
    return budget


def budget_of(blueprint: Blueprint, model: nn.Module, device: torch.device) -> MemoryBudget:
    """Count the bytes that a rank takes of each memory at once.

    Arguments:
        blueprint: the plan of its segments.
        model: the model of the blueprint, as it is before `prepare`.
        device: the device that computes.
    """
    return MemoryBudget(
        device=_device_need(blueprint, model, device),
        host=Need({**_planned(blueprint, Tier.CPU), UPDATE: _updating_bytes(blueprint, Tier.CPU)}),
        files=Need(_planned(blueprint, Tier.NVME)),
        pinned_bytes=bytes_on([segment for segment in blueprint.segments if segment.copied], Tier.CPU),
        folders=nvme_bytes(blueprint),
        is_shared=shares_host_memory(device),
        is_ahead=blueprint.gathered_bytes > blueprint.least_gathered_bytes,
        request=blueprint.request,
    )


def _planned(blueprint: Blueprint, tier: Tier) -> dict[str, int]:
    """Count the planned bytes of a tier, by name."""
    return {
        what: bytes_on([s for s in blueprint.segments if s.storage in storages], tier)
        for what, storages in _AT_REST.items()
    }


def _device_need(blueprint: Blueprint, model: nn.Module, device: torch.device) -> Need:
    """Count the bytes that a rank takes of its device at once."""
    given = blueprint.request.weights is not None
    # Bytes of parameters on the device before `prepare`, by unit.
    own = [sum(p.nbytes for p in plan.spec.parameters if p.device == device) for plan in blueprint.units]
    buffers, buffers_there = _buffer_bytes(model, device)
    planned = _planned(blueprint, Tier.DEVICE)
    tiles = planned.pop(TILES)
    parts = {
        **planned,
        GATHERED: blueprint.gathered_bytes,
        PACKED: packed_bytes(blueprint.units, blueprint.request.options.gather_format),
        ON_THEIR_WAY: gradient_bytes(blueprint),
        TILES: tiles,
        UPDATE: _updating_bytes(blueprint, Tier.DEVICE),
        BUFFERS: buffers,
    }
    training = sum(parts.values())
    # Units are filled with first values one after the other. A unit's own memory is freed once it is filled, or, with
    # `weights`, after the last unit.
    resting, loading, loading_beside_own = 0, 0, 0
    for number, plan in enumerate(blueprint.units):
        resting += bytes_on(list(plan.all_segments()), Tier.DEVICE)
        least = resting + _filling_bytes(plan, blueprint.grid, given=given)
        loading = max(loading, least)
        loading_beside_own = max(loading_beside_own, least - (0 if given else sum(own[:number])))
    beside_own = max(training - sum(own) - buffers_there, loading_beside_own)
    parts[FIRST] = max(0, loading - training)
    return Need(parts, max(0, sum(parts.values()) - beside_own))


def _updating_bytes(blueprint: Blueprint, tier: Tier) -> int:
    """Count the most bytes of temporaries of an update of a whole parameter, on the device or on the cpu tier.

    One is updated after the other. Temporaries of element-wise updates are of pieces, and not counted.
    """
    most = 0
    for plan in blueprint.units:
        if not plan.spec.whole_numel or plan.spec.rule is None:
            continue
        rests = {segment.tier for segment in plan.segments[OPTIMIZER]}
        on_device = plan.storages.streams(plan.spec) == "all" or Tier.DEVICE in rests
        on_host = plan.storages.streams(plan.spec) != "all" and rests != {Tier.DEVICE}
        if on_device if tier is Tier.DEVICE else on_host:
            shapes = {own_shape(parameter) for parameter in plan.spec.parameters}
            most = max(most, *(plan.spec.rule.working_bytes(shape) for shape in shapes))
    return most


def gradient_bytes(blueprint: Blueprint) -> int:
    """Count the most device bytes of gradients between autograd and their storages.

    That is what backward collects of a unit, whole, what is reduced of it, the codes that go between ranks, and the
    gradient of one parameter that autograd hands over. Buffers are kept for reuse, a few of each size. Whole gradients
    that `no_sync` holds back in stages 0 and 1 come on top: nobody knows beforehand whether it will be used.
    """
    sizes: set[tuple[int, torch.dtype]] = set()
    largest = 0
    for plan in blueprint.units:
        if not plan.spec.trainable:
            continue
        itemsize = plan.spec.dtype.itemsize
        largest = max(largest, max(own_elements(parameter).numel() for parameter in plan.spec.parameters) * itemsize)
        sizes.update(_gradient_buffers(plan, blueprint))
    summing = summing_bytes(blueprint.units, blueprint.request.options.reduce_format, blueprint.grid)
    return largest + summing + sum(BUFFERS_OF_A_SIZE * numel * dtype.itemsize for numel, dtype in sizes)


def _gradient_buffers(plan: UnitPlan, blueprint: Blueprint) -> Iterator[tuple[int, torch.dtype]]:
    """List the sizes of the buffers that a unit's gradient passes: elements and dtype."""
    request, grid = blueprint.request, blueprint.grid
    segments = [segment for segment in plan.segments[GRAD] if segment.cells]
    in_place = len(segments) == 1 and in_reach(segments[0].tier, Tier.DEVICE, blueprint.reach)
    exact = request.sum_dtype in (plan.spec.dtype, torch.float32)
    if grid.data_size == 1 and in_place and exact:
        return  # straight from autograd to its storage
    yield plan.layout.numel, request.sum_dtype
    if grid.shards > 1:
        yield plan.shard_numel, request.sum_dtype
    if len(segments) > 1 or not all(segment.tier.is_memory for segment in segments):
        yield plan.shard_numel, request.accumulation_dtype  # the stored gradient comes up to be added to


def _filling_bytes(plan: UnitPlan, grid: Grid, *, given: bool) -> int:
    """Count the device bytes, beside its storages, that filling a unit takes."""
    sent = not given and grid.world_size > 1  # a copy of the first rank's values, in the model's own dtype
    arrived = sum(own_elements(parameter).nbytes for parameter in plan.spec.parameters) if sent else 0
    # One parameter at a time passes its parameter staging, if it has one, and its master is split there.
    numel = min(max(slot.numel for slot in plan.layout.slots), max(s.numel for s in plan.segments[PARAM]))
    splits = any(kind.dtype == torch.int16 for kind in plan.storages.master_kinds(plan.spec))
    written = [*(s for s in plan.segments.get(SHADOW, ()) if s.cells)] or plan.segments[PARAM]
    passing = _FP32_BYTES * numel if sent or any(s.tier is Tier.DEVICE for s in written) else 0
    if splits and any(s.tier is Tier.DEVICE for s in plan.segments[MASTER]):
        passing += _SPLIT_BYTES * numel
    if splits and sent and plan.replicated:
        passing = max(passing, (_FP32_BYTES + _SPLIT_OF_COPY_BYTES) * numel)
    # The buffer of the gathered unit is made with memory, which is freed before the unit is filled.
    return arrived + max(passing, 0 if plan.resident else plan.full_bytes)


def _buffer_bytes(model: nn.Module, device: torch.device) -> tuple[int, int]:
    """Count the bytes of a model's buffers, which move to the device, and of those that are there already."""
    plain = [buffer for buffer in model.buffers() if buffer.layout is torch.strided]
    return sum(buffer.nbytes for buffer in plain), sum(buffer.nbytes for buffer in plain if buffer.device == device)


def memories(budget: MemoryBudget, device: torch.device, ranks_here: int) -> list[Room]:
    """Compare the bytes that a rank needs of its device and of the host with the available ones.

    Arguments:
        budget: the bytes that it needs.
        device: the device that computes.
        ranks_here: how many ranks share the host's memory.

    Returns:
        The device, where it has memory of its own or a budget, and the host.
    """
    rooms = [] if budget.is_shared and budget.request.options.device_bytes is None else [_device_room(budget, device)]
    return [*rooms, _host_room(budget, ranks_here)]


def _device_room(budget: MemoryBudget, device: torch.device) -> Room:
    need, limit = budget.device, budget.request.options.device_bytes
    if limit is not None:
        available, whose = limit, f"Options(device_bytes={limit:,}) gives it {limit:,}"
    else:
        free = free_device_memory(device)
        if free is None:
            return Room(DEVICE, need.nbytes, None)
        available, whose = free + need.there, f"{device} has {free:,} free"
        if need.there:
            whose += f", and {need.there:,} that the model takes there now"
    missing = need.nbytes - available
    lack = budget.lack(DEVICE, f"{whose}, {missing:,} too few", missing) if missing > 0 else None
    return Room(DEVICE, need.nbytes, available, lack)


def _host_room(budget: MemoryBudget, ranks_here: int) -> Room:
    """Compare the cpu tier, and a device that shares its memory, with this rank's part of the host."""
    claims = _told(budget, with_disks=False)
    for pool in _pools({0: (this_host(), ranks_here, claims)}):
        return Room(HOST, budget.host_bytes, pool.share, _lack(pool, budget, 0) if pool.lacks else None)
    return Room(HOST, budget.host_bytes, None)


def disks(budget: MemoryBudget, ranks_here: int) -> Iterator[Room]:
    """Compare the bytes of each folder of the nvme tier with the free ones, as `memories` does.

    Ranks of a host have the same folders.
    """
    taken: Counter[str] = Counter()  # by file system: several folders may be on one
    for parent, nbytes in budget.folders:
        try:
            disk = _disk_claim(parent, nbytes)
        except (NvmeError, OSError) as error:
            yield Room(str(parent), nbytes, None, str(error))
            continue
        available = max(0, disk.available // ranks_here - taken[disk.which])
        taken[disk.which] += nbytes
        pool = _Pool(this_host(), _DISK, disk.whose, available, ranks_here, {0: nbytes})
        yield Room(str(parent), nbytes, available, _lack(pool, budget, 0) if pool.missing > 0 else None)


def host_memory(options: Options) -> HostMemory | None:
    """Return the memory that the host has for all of its ranks; `None` if that is unknown."""
    if options.host_bytes is not None:
        return HostMemory(options.host_bytes, f"Options(host_bytes={options.host_bytes:,}) leaves")
    return available_host_memory()


def nvme_bytes(blueprint: Blueprint) -> Sequence[tuple[str | os.PathLike[str], int]]:
    """Count the bytes that a rank puts into each folder of the nvme tier, those of activations apart."""
    parents = blueprint.request.placement.nvme_folders()
    wanted: dict[str, list[SegmentPlan]] = {}
    for segment in blueprint.segments:
        if segment.tier is Tier.NVME and segment.cells:
            wanted.setdefault(segment.storage, []).append(segment)
    needed = bytes_by_folder(stripe(wanted, len(parents)), len(parents)) if wanted else []
    return list(zip(parents, needed, strict=False))


# ----------------------------------------------------------------------------------------------------------------------
# The memory and the disks of a host, compared with the bytes that its ranks take together.
#
# Each rank counts its own bytes. Ranks exchange the counts before anything is taken, and all of them refuse what does
# not fit on one of the hosts.
# ----------------------------------------------------------------------------------------------------------------------


_MEMORY, _DISK = "memory", "disk"


class _Claim(NamedTuple):
    """One claim of a rank, as ranks exchange it.

    Attributes:
        kind: `"memory"` or `"disk"`.
        which: its identity among claims of that kind on one host: the limit of the memory, the number of a file system.
        needed: the bytes that this rank needs there.
        available: the bytes for all ranks of the host.
        whose: the owner of the bytes, for messages.
    """

    kind: str
    which: str
    needed: int
    available: int
    whose: str


@dataclass
class _Pool:
    """A memory or a file system of one host, and the bytes that ranks need of it.

    Attributes:
        host: the host.
        kind, whose: as in the claims.
        available: the bytes there, by the smallest claim.
        started: how many ranks the launcher has started on the host.
        needed: bytes by rank.
    """

    host: Host
    kind: str
    whose: str
    available: int
    started: int
    needed: dict[int, int] = field(default_factory=dict)

    @property
    def share(self) -> int:
        """The bytes for these ranks. Of memory, other ranks of the launcher on this host have their part."""
        if self.kind == _DISK:
            return self.available
        return self.available * len(self.needed) // max(len(self.needed), self.started)

    @property
    def missing(self) -> int:
        """The bytes by which it is too small."""
        return sum(self.needed.values()) - self.share

    @property
    def lacks(self) -> bool:
        """True if it is too small. A file system of one rank alone is checked when its files are made."""
        return self.missing > 0 and (self.kind == _MEMORY or len(self.needed) > 1)

    def __str__(self) -> str:
        if len(self.needed) == 1:
            each = f" for each of its {self.started} ranks" if self.started > 1 else ""
            return f"{self.whose} {self.share:,} available{each}, {self.missing:,} too few"
        room = "available for them" if self.kind == _MEMORY else "bytes free"
        ranks = ", ".join(f"rank {rank}: {nbytes:,}" for rank, nbytes in self.needed.items())
        return (
            f"the ranks of host {self.host.name} need {sum(self.needed.values()):,} bytes together ({ranks}), and "
            f"{self.whose} {self.share:,} {room}, {self.missing:,} too few"
        )


def check_hosts(control_group: ControlGroup, budget: MemoryBudget | None) -> None:
    """Refuse, on all ranks, budgets that one of the hosts has no room for. Collective; nothing was taken.

    Arguments:
        control_group: the ranks.
        budget: the bytes that this rank takes; `None` for none.

    Raises:
        MemoryBudgetError: the memory of a host is too small; it names the host, and says what to do.
        NvmeError: a file system of a host has too little room for all of its ranks.
    """
    rank = control_group.members[control_group.rank]
    told = control_group.collect([this_host(), ranks_of_host(), _told(budget, with_disks=control_group.size > 1)])
    lacking = [pool for pool in _pools(dict(zip(control_group.members, told, strict=True))) if pool.lacks]
    if not lacking:
        return
    # The first rank of each pool makes the message, and all ranks raise it.
    said = control_group.collect([_lack(pool, budget, rank) for pool in lacking if rank == min(pool.needed)])
    texts = [
        f"Host {Host(*host).name}, rank {member}: {text}" if control_group.size > 1 else text
        for member, (host, *_), of_rank in zip(control_group.members, told, said, strict=True)
        for text in of_rank
    ]
    if any(pool.kind == _MEMORY for pool in lacking):
        raise MemoryBudgetError(" ".join(texts))
    raise NvmeError(" ".join(texts), errno=errno.ENOSPC)


def _told(budget: MemoryBudget | None, *, with_disks: bool) -> list[_Claim]:
    """List the claims of a rank. What cannot be looked up is no claim: the allocation itself will fail.

    Arguments:
        budget: the bytes that it takes.
        with_disks: whether to list disks. Those of a rank alone are checked when its files are made.
    """
    if budget is None:
        return []
    found = []
    host = host_memory(budget.request.options)
    if host is not None:
        found.append(_Claim(_MEMORY, host.whose, budget.host_bytes, host.nbytes, host.whose))
    for parent, nbytes in budget.folders if with_disks else ():
        if nbytes:
            with contextlib.suppress(NvmeError, OSError):
                found.append(_disk_claim(parent, nbytes))
    return found


def _disk_claim(parent: str | os.PathLike[str], nbytes: int) -> _Claim:
    """Claim bytes of the file system that a folder is on."""
    folder = existing_folder(parent)
    return _Claim(_DISK, str(folder.stat().st_dev), nbytes, free_disk_bytes(folder), f"{str(folder)!r} has")


def _pools(told: Mapping[int, Any]) -> Iterable[_Pool]:
    """Add up the claims on each memory and each file system of each host.

    Arguments:
        told: by rank its host, the number of ranks that a launcher has started there, and its claims.
    """
    pools: dict[tuple[Host, str, str], _Pool] = {}
    for rank, (host, started, claims) in told.items():
        for said in claims:
            claim = _Claim(*said)
            fresh = _Pool(Host(*host), claim.kind, claim.whose, claim.available, started)
            pool = pools.setdefault((fresh.host, claim.kind, claim.which), fresh)
            pool.available = min(pool.available, claim.available)
            pool.needed[rank] = pool.needed.get(rank, 0) + claim.needed
    return pools.values()


def _lack(pool: _Pool, budget: MemoryBudget | None, rank: int) -> str:
    """Make the message that a memory or a file system is too small, on one of the ranks that need it."""
    if pool.kind == _MEMORY:
        assert budget is not None
        own = -(-pool.missing * pool.needed[rank] // sum(pool.needed.values()))
        return budget.lack(HOST, str(pool), own)
    return (
        f"The nvme tier needs {pool.needed[rank]:,} bytes on this rank; {pool}. Keep less on the nvme tier, or "
        f"{ELSEWHERE}."
    )


# ----------------------------------------------------------------------------------------------------------------------
# The resources of an engine: memory and files of the tiers, and first values. A simulation has its own, which take
# nothing.
# ----------------------------------------------------------------------------------------------------------------------


class Resources:
    """The memory of this machine, the folders that the placement names, and the values that `prepare` was given."""

    def check(self, blueprint: Blueprint, model: nn.Module, device: torch.device) -> MemoryBudget | None:
        """Refuse a blueprint that takes more of this rank's device than is available, before anything is taken.

        Returns:
            The bytes that it takes. Next, ranks compare what they share of a host (`check_hosts`).

        Raises:
            MemoryBudgetError: the message has the parts, the missing bytes, and what to do.
        """
        return check_device(blueprint, model, device)

    def tiers(self, request: PrepareRequest, device: torch.device) -> Sequence[TierMemory]:
        """Make the tiers. Nothing is taken yet."""
        options = request.options
        folders = request.placement.nvme_folders()
        return [
            DeviceTier(device),
            HostTier(device, options.pinned_bytes, tile_bytes=options.tile_bytes),
            NvmeTier(folders, queue_depth=options.io_queue_depth, checksums=options.checksums),
        ]

    def source(
        self,
        model: nn.Module,
        request: PrepareRequest,
        ranks: Collectives,
        device: torch.device,
        undo: contextlib.ExitStack,
    ) -> FirstValues:
        """Open the source of first values. Collective. See `open_source`."""
        return open_source(model, request.weights, ranks, device, undo, keeps_whole=request.stage < 3)
