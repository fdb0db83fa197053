"""The memory that a plan takes, of a device, of a rank and of all ranks of a host."""

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
from penstock.runtime.collectives import Collectives
from penstock.runtime.control_group import ControlGroup
from penstock.runtime.hardware import free_device_memory, shares_host_memory
from penstock.runtime.host_memory import HostMemory, available_host_memory
from penstock.runtime.swap import ELSEWHERE, existing_folder, free_disk_bytes, remove_leftovers
from penstock.runtime.system import Host, ranks_of_host, this_host
from penstock.runtime.topology import Grid
from penstock.tiers.host import DeviceTier, HostTier
from penstock.tiers.nvme import NvmeTier, bytes_by_folder, stripe
from penstock.tiers.storage import SegmentPlan
from penstock.tiers.tier import TierMemory, bytes_on
from penstock.tiers.transfer import in_reach

# ----------------------------------------------------------------------------------------------------------------------
# What a blueprint takes of each memory at once, held against what there is, before anything is taken.
#
# A device's memory holds what rests there, and beside it what is there for a while: gathered units, flat gradients on
# their way home, buffers of tiles, and at the start the values of one unit on their way to their homes. What the model
# computes (activations, and what kernels take for themselves) is not known here, and not counted.
#
# Where device and host share memory, as on a cpu, both together are held against the host's. A host's memory and disks
# are those of all its ranks: what they take together, they compare (`memory_budget.py`).
# ----------------------------------------------------------------------------------------------------------------------


GATHERED, PACKED, ON_THEIR_WAY = "gathered", "packed", "gradients on their way"
TILES, UPDATE, BUFFERS, FIRST = "tiles", "an update", "buffers", "first values"
#: What is planned of each memory: kinds as `Placement` calls them, and buffers; and the homes that they are made of.
_AT_REST = {
    "params": (PARAM, SECONDARY),
    "grads": (GRAD,),
    "optimizer": (MASTER, OPTIMIZER, SHADOW),
    TILES: (STAGING,),
}
DEVICE, HOST = "device", "host"  # names of rooms

# Bytes per element that values take on their way to their homes: in fp32; and while they are split into bf16 and a
# remainder, as integers beside that.
_FP32_BYTES, _SPLIT_BYTES, _SPLIT_OF_COPY_BYTES = 4, 12, 16


@dataclass(frozen=True)
class Need:
    """Bytes of one memory that a rank takes at once, by what they are for.

    Attributes:
        parts: the bytes by name. At rest: `"params"`, `"grads"`, `"optimizer"`, and `"tiles"`, the buffers that these
            pass. For a while: `"gathered"` parameters, `"packed"` ones between ranks, `"gradients on their way"`,
            temporaries of `"an update"` of a whole parameter, and `"first values"`: what the start takes beyond all of
            these. And the model's `"buffers"`.
        there: how many of them the model has there already: in buffers, and in parameters, whose own memory goes while
            their homes are filled.
    """

    parts: Mapping[str, int]
    there: int = 0

    @property
    def nbytes(self) -> int:
        """All of it."""
        return sum(self.parts.values())

    @property
    def at_rest(self) -> int:
        """The bytes of planned sections: state, and the buffers that it passes."""
        return self.nbytes - sum(self.beside.values())

    @property
    def beside(self) -> dict[str, int]:
        """What there is beside planned sections, by name."""
        return {what: nbytes for what, nbytes in self.parts.items() if what not in _AT_REST}

    def __str__(self) -> str:
        return ", ".join(f"{what} {nbytes:,}" for what, nbytes in self.parts.items() if nbytes)


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """Bytes that a rank takes of each memory at once, beside what its model computes. `budget_of` counts them.

    Attributes:
        device: of the device that computes.
        host: of the cpu tier, and for updates on it.
        files: of the nvme tier, activations apart.
        pinned_bytes: how many bytes of the cpu tier a device copies from or to. They are pinned first; others are
            pageable.
        folders: what of `files` goes to each folder.
        is_shared: whether the device's memory is the host's.
        is_ahead: whether units are gathered ahead of their use.
        stage: the ZeRO stage.
        options: what limits the device and the host.
    """

    device: Need
    host: Need
    files: Need
    pinned_bytes: int
    folders: Sequence[tuple[str | os.PathLike[str], int]]
    is_shared: bool
    is_ahead: bool
    stage: int
    options: Options

    def on(self, tier: Tier) -> Need:
        """Return what is taken of a tier."""
        return {Tier.DEVICE: self.device, Tier.CPU: self.host, Tier.NVME: self.files}[tier]

    @property
    def host_bytes(self) -> int:
        """All bytes of the host's memory; of a device that shares it those that the model does not have already."""
        return self.host.nbytes + (self.device.nbytes - self.device.there if self.is_shared else 0)

    def lack(self, of: str, whose: str, missing: int) -> str:
        """Say that a memory is too small, and what to do.

        Arguments:
            of: `"device"` or `"host"`.
            whose: what it has, and how much is missing.
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
        """Say which kinds to move from some memories to a tier, what is used least first, until it is enough."""
        moved: list[str] = []
        for what in ("optimizer", "grads", "params"):
            resting = sum(need.parts[what] for need in needs)
            if missing > 0 and resting:
                moved.append(f"{what}='{to}'")
                missing -= resting
        ways = [f"Move state with Placement({', '.join(moved)})"] if moved else []
        # With more ranks a shard is smaller, of what is sharded.
        ways.append("use more ranks" if self.stage == 3 else "use more ranks and a higher stage")
        if self.is_ahead and self.device in needs:
            ways.append("lower Options(prefetch_bytes=...)")
        text = f"{', '.join(ways[:-1])}, or {ways[-1]}." if len(ways) > 1 else f"{ways[0]}."
        return text[0].upper() + text[1:]


@dataclass(frozen=True)
class Room:
    """A memory, or a file system, and what is to go there.

    Attributes:
        name: what it is: `"device"`, `"host"`, or a folder.
        needed: the bytes that this rank needs there.
        available: the bytes that it can have there; `None` where nothing says how many.
        lack: a message that says what is missing, and what to do; `None` where it fits.
    """

    name: str
    needed: int
    available: int | None
    lack: str | None = None


def check_device(blueprint: Blueprint, model: nn.Module, device: torch.device) -> MemoryBudget:
    """Refuse a blueprint that takes more of its device than there is. Nothing was taken.

    Returns:
        What it takes of every memory.

    Raises:
        MemoryBudgetError: it says of what, how much is missing, and what to do.
    """
    budget = budget_of(blueprint, model, device)
    checks.check_pinned_memory(budget.pinned_bytes, budget.host.parts[TILES], device, budget.options)
    rooms = memories(budget, device, ranks_of_host())
    if any(room.lack for room in rooms if room.name == DEVICE):
        raise MemoryBudgetError(" ".join(room.lack for room in rooms if room.lack))
    return budget


def budget_of(blueprint: Blueprint, model: nn.Module, device: torch.device) -> MemoryBudget:
    """Count what a rank takes of each memory at once.

    Arguments:
        blueprint: what it will have.
        model: the one that the blueprint was drawn of, as it is before `prepare`.
        device: the one that computes.
    """
    return MemoryBudget(
        device=_device_need(blueprint, model, device),
        host=Need({**_planned(blueprint, Tier.CPU), UPDATE: _updating_bytes(blueprint, Tier.CPU)}),
        files=Need(_planned(blueprint, Tier.NVME)),
        pinned_bytes=bytes_on([section for section in blueprint.sections if section.copied], Tier.CPU),
        folders=nvme_bytes(blueprint),
        is_shared=shares_host_memory(device),
        is_ahead=blueprint.gathered_bytes > blueprint.least_gathered_bytes,
        stage=blueprint.request.stage,
        options=blueprint.request.options,
    )


def _planned(blueprint: Blueprint, tier: Tier) -> dict[str, int]:
    """Count what is planned of a tier, by name."""
    return {
        what: bytes_on([s for s in blueprint.sections if s.home in homes], tier) for what, homes in _AT_REST.items()
    }


def _device_need(blueprint: Blueprint, model: nn.Module, device: torch.device) -> Need:
    """Count what a rank takes of its device at once."""
    given = blueprint.request.weights is not None
    # What parameters have on the device before `prepare`, by unit.
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
    # While first values come, units are filled one after the other. Each one's own memory goes once it is filled, or
    # with the last one where other values take its place.
    resting, loading, loading_beside_own = 0, 0, 0
    for number, plan in enumerate(blueprint.units):
        resting += bytes_on(list(plan.all_sections()), Tier.DEVICE)
        least = resting + _filling_bytes(plan, blueprint.grid, given=given)
        loading = max(loading, least)
        loading_beside_own = max(loading_beside_own, least - (0 if given else sum(own[:number])))
    beside_own = max(training - sum(own) - buffers_there, loading_beside_own)
    parts[FIRST] = max(0, loading - training)
    return Need(parts, max(0, sum(parts.values()) - beside_own))


def _updating_bytes(blueprint: Blueprint, tier: Tier) -> int:
    """Count the most bytes of temporaries that an update of a whole parameter holds, on the device or on the cpu tier.

    One is updated after the other. Temporaries of element-wise updates are of pieces, and not counted.
    """
    most = 0
    for plan in blueprint.units:
        if not plan.spec.whole_numel or plan.spec.rule is None:
            continue
        rests = {section.tier for section in plan.sections[OPTIMIZER]}
        on_device = plan.homes.streams(plan.spec) == "all" or Tier.DEVICE in rests
        on_host = plan.homes.streams(plan.spec) != "all" and rests != {Tier.DEVICE}
        if on_device if tier is Tier.DEVICE else on_host:
            shapes = {own_shape(parameter) for parameter in plan.spec.parameters}
            most = max(most, *(plan.spec.rule.working_bytes(shape) for shape in shapes))
    return most


def gradient_bytes(blueprint: Blueprint) -> int:
    """Count the device bytes of gradients between autograd and their homes, at most.

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
    sections = [section for section in plan.sections[GRAD] if section.cells]
    in_place = len(sections) == 1 and in_reach(sections[0].tier, Tier.DEVICE, blueprint.reach)
    exact = request.sum_dtype in (plan.spec.dtype, torch.float32)
    if grid.data_size == 1 and in_place and exact:
        return  # straight from autograd to its home
    yield plan.layout.numel, request.sum_dtype
    if grid.shards > 1:
        yield plan.shard_numel, request.sum_dtype
    if len(sections) > 1 or not all(section.tier.is_memory for section in sections):
        yield plan.shard_numel, request.accumulation_dtype  # what the home holds comes up to be added to


def _filling_bytes(plan: UnitPlan, grid: Grid, *, given: bool) -> int:
    """Count the device bytes that it takes, beside its homes, to fill those of a unit."""
    sent = not given and grid.world_size > 1  # a copy of the first rank's values, in the model's own dtype
    arrived = sum(own_elements(parameter).nbytes for parameter in plan.spec.parameters) if sent else 0
    # A parameter at a time goes through the update's shadow of it where there is one, and its master is split there.
    numel = min(max(slot.numel for slot in plan.layout.slots), max(s.numel for s in plan.sections[PARAM]))
    splits = plan.homes.keeps_master(plan.spec) and plan.homes.master_dtype == torch.int16
    written = [*(s for s in plan.sections.get(SHADOW, ()) if s.cells)] or plan.sections[PARAM]
    passing = _FP32_BYTES * numel if sent or any(s.tier is Tier.DEVICE for s in written) else 0
    if splits and any(s.tier is Tier.DEVICE for s in plan.sections[MASTER]):
        passing += _SPLIT_BYTES * numel
    if splits and sent and plan.replicated:
        passing = max(passing, (_FP32_BYTES + _SPLIT_OF_COPY_BYTES) * numel)
    # The buffer of the gathered unit is made with memory, which it gives back before it is filled.
    return arrived + max(passing, 0 if plan.resident else plan.full_bytes)


def _buffer_bytes(model: nn.Module, device: torch.device) -> tuple[int, int]:
    """Count the bytes of a model's buffers, which go to the device, and of those that are there."""
    plain = [buffer for buffer in model.buffers() if buffer.layout is torch.strided]
    return sum(buffer.nbytes for buffer in plain), sum(buffer.nbytes for buffer in plain if buffer.device == device)


def memories(budget: MemoryBudget, device: torch.device, ranks_here: int) -> list[Room]:
    """Hold what a rank needs of its device and of the host against what there is.

    Arguments:
        budget: what it needs.
        device: the one that computes.
        ranks_here: how many ranks share the host's memory.

    Returns:
        The device, where it has memory of its own or a budget, and the host.
    """
    rooms = [] if budget.is_shared and budget.options.device_bytes is None else [_device_room(budget, device)]
    return [*rooms, _host_room(budget, ranks_here)]


def _device_room(budget: MemoryBudget, device: torch.device) -> Room:
    need, limit = budget.device, budget.options.device_bytes
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
    """Hold the cpu tier, and the device's state where that shares its memory, against this rank's part of the host."""
    claims = _told(budget, with_disks=False)
    for pool in _pools({0: (this_host(), ranks_here, claims)}):
        return Room(HOST, budget.host_bytes, pool.share, _lack(pool, budget, 0) if pool.lacks else None)
    return Room(HOST, budget.host_bytes, None)


def disks(budget: MemoryBudget, ranks_here: int) -> Iterator[Room]:
    """Hold what goes to each folder of the nvme tier against what is free there, as `memories` does.

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
    """Look up what the host has for all of its ranks; `None` where nothing says it."""
    if options.host_bytes is not None:
        return HostMemory(options.host_bytes, f"Options(host_bytes={options.host_bytes:,}) leaves")
    return available_host_memory()


def nvme_bytes(blueprint: Blueprint) -> Sequence[tuple[str | os.PathLike[str], int]]:
    """Count the bytes that a rank puts into each folder of the nvme tier, those of activations apart."""
    parents = blueprint.request.placement.nvme_folders()
    wanted: dict[str, list[SegmentPlan]] = {}
    for section in blueprint.sections:
        if section.tier is Tier.NVME and section.cells:
            wanted.setdefault(section.home, []).append(section)
    needed = bytes_by_folder(stripe(wanted, len(parents)), len(parents)) if wanted else []
    return list(zip(parents, needed, strict=False))


# ----------------------------------------------------------------------------------------------------------------------
# What the ranks of a host take of its memory and of its disks together, held against what it has.
#
# Each rank counts what it takes itself (`memory_budget.py`). A host's memory and a file system are for all ranks on
# it, so they tell each other, before anything is taken, and all refuse what does not fit on one of the hosts.
# ----------------------------------------------------------------------------------------------------------------------


_MEMORY, _DISK = "memory", "disk"


class _Claim(NamedTuple):
    """One claim, as ranks tell it to each other.

    Attributes:
        kind: `"memory"` or `"disk"`.
        which: what tells it from others of that kind on one host: who limits the memory, the number of a file system.
        needed: how many bytes this rank needs there.
        available: how many there are, for all ranks of the host.
        whose: who has them, for messages.
    """

    kind: str
    which: str
    needed: int
    available: int
    whose: str


@dataclass
class _Pool:
    """A memory or a file system of one host, and what ranks need of it.

    Attributes:
        host: which host it is of.
        kind, whose: as the claims say.
        available: how many bytes there are, by the least that a rank has seen.
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
        """How many bytes there are for these ranks: of memory others that were started here, alone, have their part."""
        if self.kind == _DISK:
            return self.available
        return self.available * len(self.needed) // max(len(self.needed), self.started)

    @property
    def missing(self) -> int:
        """By how many bytes it is too small."""
        return sum(self.needed.values()) - self.share

    @property
    def lacks(self) -> bool:
        """Whether it is too small. A file system that one rank has for itself is looked at when its files are made."""
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
    """Refuse, on all ranks, what takes more than there is on one of the hosts. Collective; nothing was taken.

    Arguments:
        control_group: the ranks. All of them have counted: none is about to remove a leftover.
        budget: what this rank takes; `None` takes nothing, and finds nothing too small.

    Raises:
        MemoryBudgetError: the memory of a host is too small; it names the host, and says what to do.
        NvmeError: a file system of a host has too little room for all of its ranks.
    """
    rank = control_group.members[control_group.rank]
    told = control_group.collect([this_host(), ranks_of_host(), _told(budget, with_disks=control_group.size > 1)])
    lacking = [pool for pool in _pools(dict(zip(control_group.members, told, strict=True))) if pool.lacks]
    if not lacking:
        return
    # The first rank of each knows what to do there, and all say it.
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
    """Look up what there is of what a rank takes. What cannot be looked up is no claim: to take it will tell.

    Arguments:
        budget: what it takes.
        with_disks: whether disks count. Those of a rank alone are looked at when its files are made.
    """
    if budget is None:
        return []
    found = []
    host = host_memory(budget.options)
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
    """Add up what ranks need of each memory and each file system of each host.

    Arguments:
        told: what each rank has said: its host, how many ranks a launcher has started there, and its claims.
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
    """Say that a memory or a file system is too small, and what to do, on one of the ranks that need it."""
    if pool.kind == _MEMORY:
        assert budget is not None
        own = -(-pool.missing * pool.needed[rank] // sum(pool.needed.values()))
        return budget.lack(HOST, str(pool), own)
    return (
        f"The nvme tier needs {pool.needed[rank]:,} bytes on this rank; {pool}. Keep less on the nvme tier, or "
        f"{ELSEWHERE}."
    )


# ----------------------------------------------------------------------------------------------------------------------
# What an engine is built of and does not make itself: memory and files of the tiers, and first values.
#
# A rehearsal of a run that need not take place has others, of which nothing is taken.
# ----------------------------------------------------------------------------------------------------------------------


class Supply:
    """The memory of this machine, the folders that the placement names, and the values that `prepare` was given."""

    def check(self, blueprint: Blueprint, model: nn.Module, device: torch.device) -> MemoryBudget | None:
        """Refuse a blueprint that takes more of this rank's device than there is, before anything is taken.

        Returns:
            What it takes. Ranks of a host hold what they share against what there is next (`check_hosts`).

        Raises:
            MemoryBudgetError: it says of what, how much is missing, and what to do.
        """
        budget = check_device(blueprint, model, device)
        for parent, nbytes in budget.folders:
            if nbytes:
                remove_leftovers(parent)  # what dead runs have left counts as free
        return budget

    def tiers(self, request: PrepareRequest, device: torch.device) -> Sequence[TierMemory]:
        """Make the tiers that state may rest on. Nothing is taken yet."""
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
        """Open where first values come from. Collective. See `open_source`."""
        return open_source(model, request.weights, ranks, device, undo, keeps_whole=request.stage < 3)
