"""What one step of one rank consists of, in bytes and seconds, before anything is placed; what memory there is.

Where nothing fits: what is missing, and the changes after which something does. Nothing takes less than cuts that all
kinds share: then no tile has its parameters apart from its update. So state fits if its bytes are no more than the room
of all tiers together, beside what is there anyway.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from math import ceil, floor
from typing import Literal, NamedTuple

from penstock.config import GRAD, MASTER, OPTIMIZER, Overlap, Tier, TierName
from penstock.planner.cost import MachineCosts
from penstock.planner.formatting import size
from penstock.planner.simulation.engine_internals import (
    LEAST_FILE_SLOTS,
    RING_BYTES,
    ROOT,
    Blueprint,
    Grid,
    Reach,
    UnitPlan,
    gradient_bytes,
    packed_bytes,
)
from penstock.planner.simulation.program import OF_MODEL, Program, ProgramJob, WorkKind
from penstock.planner.simulation.simulate import BACKWARD, FORWARD, STEP, Simulation
from penstock.trace import Label

KINDS = ("params", "grads", "optimizer")
TIERS: tuple[TierName, ...] = ("device", "cpu", "nvme")
#: What has a fraction of its bytes on each tier: "params", "grads", "optimizer".
Fractions = Mapping[str, Mapping[TierName, float]]
#: Seconds of a row of a trace ("upload"), or of a capacity that rows share ("host memory").
Busy = Mapping[str, float]
#: Forward: from `step` to the end of the first forward, which waits for every update. Backward: from there until `step`
#: has all gradients. Any: what may begin in one of them and end in the other.
Window = Literal["forward", "backward", "any"]
#: What state off the device adds to a step. "in place" is compute's own update, "update first" one that forward waits
#: for as a whole.
Flow = Literal["upload", "download", "read", "write", "update", "device update", "in place", "update first"]
#: What a step moves or updates: by what, when, and how many bytes.
Move = tuple[Flow, Window, float]
#: All work, if one thing were done after the other.
WORK = "work"
#: Rates are read off a job of so many bytes, beside which latencies are nothing.
_LARGE = 1 << 40
#: How many tiles buffers beside rings of files have in all.
_PASSING_TILES = 64


class Choice(NamedTuple):
    """What is not a matter of degree. In order: what costs nothing beside it comes first.

    Attributes:
        activations: the tier of what forward saves for backward; `None` where it stays.
        recompute: whether the model computes activations again in backward.
        streamed: the share of the updates of what rests off the device that the device does; of a choice that is
            searched, the most of them.
    """

    activations: TierName | None = None
    recompute: bool = False
    streamed: float = 0.0

    @property
    def order(self) -> tuple[int, bool, float]:
        """What choices are sorted by, where their steps are alike."""
        return (None, *TIERS).index(self.activations), self.recompute, self.streamed

    def __str__(self) -> str:
        words = [f"activations on {self.activations}" if self.activations else ""]
        words += ["recomputing" if self.recompute else ""]
        words += [f"streamed_updates={self.streamed:g}" if self.streamed else ""]
        return ", ".join(word for word in words if word) or "all on the device at once"


@dataclass(frozen=True, kw_only=True)
class StepWorkload:
    """One rank's step for one choice, wherever the state is. What is gathered or reduced is this rank's part.

    Attributes:
        params_bytes: parameters that are trained, as they rest in memory.
        frozen_bytes: parameters that are not trained, as they rest in memory.
        own_params_bytes: those trained parameters that this rank updates: its shard.
        grads_bytes: its shard of the gradients, in the dtype in which they rest.
        optimizer_bytes: its shard of the master weights and of every state.
        update_bytes: what the update of its shard reads and writes.
        reduced_bytes: its shard of a gradient as it comes out of a reduction.
        reductions: how often gradients are reduced in a step.
        micro_batches: how many there are.
        forward_gathered_bytes, backward_gathered_bytes: what of the parameters a pass gathers, if none is resident: not
            what is still there from the pass before.
        kept_bytes: of files: what rings may hold still, so that it is not read again.
        there_bytes: what is on each tier wherever the state is, activations apart.
        activation_peak_bytes: what activations take at their peak, by tier; it grows with the batch.
        passing_bytes: what buffers may take where state is off the device, by tier, as far as nothing was simulated.
        busy: what is done wherever the state is, by window: compute, collectives, activations on their way.
        rates: seconds of each byte of a flow.
        tile_ends: where the engine may cut, as shares of all tiles in order, from 0 to 1; empty where nobody says it.
        overlap: when updates run.
        one_memory: compute reaches all that is not in files, as where a cpu computes.
        ranks: among how many the state is sharded.
        copies: how many copies of the sharded state there are, each among so many ranks.
        sharded: the kinds of which each rank has a part.
    """

    params_bytes: int
    own_params_bytes: int
    grads_bytes: int
    optimizer_bytes: int
    update_bytes: int
    reduced_bytes: int
    forward_gathered_bytes: int = 0
    backward_gathered_bytes: int = 0
    kept_bytes: int = 0
    frozen_bytes: int = 0
    reductions: int = 1
    micro_batches: int = 1
    there_bytes: Mapping[TierName, float] = field(default_factory=dict)
    activation_peak_bytes: Mapping[TierName, float] = field(default_factory=dict)
    passing_bytes: Mapping[TierName, float] = field(default_factory=dict)
    busy: Mapping[Window, Busy] = field(default_factory=dict)
    rates: Mapping[Flow, Busy] = field(default_factory=dict)
    tile_ends: Sequence[float] = ()
    overlap: Overlap = "forward"
    one_memory: bool = False
    ranks: int = 1
    copies: int = 1
    sharded: frozenset[str] = frozenset()

    @property
    def kind_bytes(self) -> dict[str, int]:
        """Bytes of each kind at rest."""
        params = self.params_bytes + self.frozen_bytes
        return {"params": params, "grads": self.grads_bytes, "optimizer": self.optimizer_bytes}

    def there(self, tier: TierName) -> float:
        """Count what is on a tier wherever the state is."""
        return self.there_bytes.get(tier, 0) + self.activation_peak_bytes.get(tier, 0)

    @property
    def in_shards(self) -> "StepWorkload":
        """The same with each parameter resting on one rank: as it is where some of them are in files."""
        frozen = self.frozen_bytes * self.own_params_bytes // max(1, self.params_bytes)
        return replace(self, params_bytes=self.own_params_bytes, frozen_bytes=frozen)

    def beside(self, nbytes: Mapping[TierName, float]) -> "StepWorkload":
        """Add bytes to what is on each tier wherever the state is."""
        return replace(self, there_bytes={t: self.there_bytes.get(t, 0) + nbytes.get(t, 0) for t in TIERS})

    def over(self, ranks: int) -> "StepWorkload":
        """Shard the state at rest over more ranks; seconds and what is gathered stay as they are."""
        of = {"params_bytes": "params", "frozen_bytes": "params", "grads_bytes": "grads"}
        of |= {"own_params_bytes": "optimizer", "optimizer_bytes": "optimizer"}
        parts = {name: getattr(self, name) for name, kind in of.items() if kind in self.sharded}
        return replace(self, ranks=ranks, **{name: ceil(all_ * self.ranks / ranks) for name, all_ in parts.items()})


@dataclass(frozen=True)
class Limits:
    """How many bytes a rank may take of each tier. A tier without a limit is not there.

    Attributes:
        bytes: what may be taken.
        shared: device and host are one memory, whose limit is that of "cpu": as on a cpu.
    """

    bytes: Mapping[TierName, int]
    shared: bool = False

    @property
    def tiers(self) -> tuple[TierName, ...]:
        """Where state can be, fastest first. Of one memory it is on the device."""
        return tuple(t for t in TIERS if (t == "device" if self.shared and t != "nvme" else t in self.bytes))

    def room(self, tier: TierName) -> int:
        """Count what may be taken of one of `tiers`: of a memory that is shared, all of it."""
        return self.bytes.get("cpu" if self.shared and tier == "device" else tier, 0)

    def taken(self, tier: TierName, taken: Mapping[TierName, float]) -> float:
        """Sum up what is taken of the memory of one of `tiers`."""
        return taken.get(tier, 0) + (taken.get("cpu", 0) if self.shared and tier == "device" else 0)

    def excess(self, peak_bytes: Mapping[TierName, float]) -> dict[TierName, int]:
        """Return by how many bytes peaks exceed the limits, by tier; empty where they do not."""
        over = {tier: round(self.taken(tier, peak_bytes)) - self.room(tier) for tier in self.tiers}
        return {tier: nbytes for tier, nbytes in over.items() if nbytes > 0}

    def with_room(self, tier: TierName, nbytes: int) -> "Limits":
        """Set how much may be taken of one of `tiers`."""
        tier = "cpu" if self.shared and tier == "device" else tier
        return replace(self, bytes={**self.bytes, tier: nbytes})


def count_workload(
    simulation: Simulation, costs: MachineCosts, grid: Grid, *, micro_batches: int, folders: int = 1
) -> StepWorkload:
    """Count what a step consists of, wherever the state is.

    Arguments:
        simulation: of a choice, with all state on the device.
        costs: what its parts take.
        grid: the ranks.
        micro_batches: how many a step has.
        folders: how many folders of the nvme tier there are.
    """
    program, blueprint = simulation.program, simulation.blueprint
    trained = [plan for plan in blueprint.units if plan.spec.trainable]
    own, grads = _own(trained), _kind(trained, GRAD)
    optimizer = _kind(trained, MASTER) + _kind(trained, OPTIMIZER)
    update_bytes = 2 * own + grads + 2 * optimizer
    # Of several micro-batches only the first one gathers what stays gathered between uses.
    gathered = _own(plan for plan in blueprint.units if micro_batches == 1 or not plan.spec.persistent)
    # What is around all others stays from forward through backward. Where ranks have copies, each brings its own whole:
    # but for the first forward, which has from the others what they have updated.
    gathered_again = [p for p in blueprint.units if not p.spec.persistent and p.spec.name.split(".")[0] != ROOT]
    held_back = blueprint.request.stage <= 1 and grid.world_size > 1
    forwards, backwards, updates = (simulation.phases[phase] for phase in (FORWARD, BACKWARD, STEP))
    first, *later = forwards[-micro_batches:]
    busy: dict[Window, Busy] = {"forward": _busy(program, costs, [first])}
    busy["backward"] = _busy(program, costs, [*later, *backwards[-micro_batches:]])
    in_place = _busy(program, costs, updates[-1:])
    tile_bytes = blueprint.request.options.tile_bytes
    record_bytes = ceil(tile_bytes * (own + grads + optimizer) / max(own, 1))
    return StepWorkload(
        params_bytes=_kind(trained, "param"),
        frozen_bytes=_kind((plan for plan in blueprint.units if not plan.spec.trainable), "param"),
        own_params_bytes=own,
        grads_bytes=grads,
        optimizer_bytes=optimizer,
        update_bytes=update_bytes,
        reduced_bytes=sum(plan.shard_numel for plan in trained) * blueprint.request.sum_dtype.itemsize,
        reductions=1 if held_back else micro_batches,
        micro_batches=micro_batches,
        forward_gathered_bytes=gathered,
        backward_gathered_bytes=_kind(gathered_again, "param"),
        # Two rings of files: one of updates, and one of gathers and gradients.
        kept_bytes=2 * max(RING_BYTES, LEAST_FILE_SLOTS * record_bytes),
        activation_peak_bytes={"device": _more(simulation, Tier.DEVICE), "cpu": _more(simulation, Tier.CPU)},
        passing_bytes={"device": _passing(blueprint), "cpu": tile_bytes * _PASSING_TILES},
        busy=busy,
        rates=_rates(program, costs, folders)
        | {"in place": {row: seconds / max(1, update_bytes) for row, seconds in in_place.items()}},
        tile_ends=_tile_ends(blueprint.units),
        overlap="forward" if blueprint.request.overlap == "auto" else blueprint.request.overlap,
        one_memory=program.back_end != "accelerator",
        ranks=grid.shards,
        copies=grid.replicas if grid.shards > 1 else 1,
        sharded=frozenset(("optimizer", "grads", "params")[: blueprint.request.stage]),
    )


def _busy(program: Program, costs: MachineCosts, phases: Iterable[range]) -> Busy:
    """Sum the seconds for which each row and each capacity is needed in some phases."""
    found: defaultdict[str, float] = defaultdict(float)
    for item in (program.items[number] for number in chain.from_iterable(phases)):
        row = "compute"
        if item.kind is WorkKind.COMPUTE:
            taken = costs.segment(program, item.index)
        elif item.kind is WorkKind.SUBMIT:
            job = program.jobs[item.index]
            taken = costs.job(job, program)
            # Compute waits at once for what the model sends itself.
            row = "compute" if job.stream == OF_MODEL else f"{job.stream} {max(0, job.folder)}"
        elif item.kind is WorkKind.MEET:
            taken = costs.meeting(program.meetings[item.index], program)
        else:
            continue
        for name, share in ((row, 1.0), (WORK, 1.0), *taken.uses.items()):
            found[name] += share * taken.seconds
    return found


def _rates(program: Program, costs: MachineCosts, folders: int) -> dict[Flow, Busy]:
    """Return the seconds of a byte of each flow, by row and capacity. Bytes of files are spread over all folders."""
    found: dict[Flow, Busy] = {}
    host: tuple[Flow, ...] = ("update", *(() if program.back_end != "accelerator" else ("upload", "download")))
    files: tuple[Flow, ...] = ("device update", *(("read", "write") if folders else ()))
    for flow in (*host, *files):
        at_once, folder = (folders, 0) if flow in ("read", "write") else (1, -1)
        taken = costs.job(ProgramJob(flow, Label("update"), _LARGE, folder=folder), program)
        shares = {f"{flow} 0": 1.0, WORK: 1.0, **taken.uses}
        found[flow] = {
            name: share * taken.seconds / _LARGE / (1 if name.startswith(("host", "cores")) else at_once)
            for name, share in shares.items()
        }
    found["update first"] = {**found["update"], "compute": found["update"]["update 0"]}
    return found


def _tile_ends(plans: Iterable[UnitPlan]) -> Sequence[float]:
    """Return where tiles end: cuts go to the nearest end."""
    tiles = [
        min(plan.tile_numel, plan.shard_numel - start) * plan.spec.dtype.itemsize
        for plan in plans
        for start in range(0, plan.shard_numel, plan.tile_numel)
    ]
    whole = max(1, sum(tiles))
    return [0.0, *(end / whole for end in accumulate(tiles))]


def _own(plans: Iterable[UnitPlan]) -> int:
    """Count the bytes of this rank's shard of parameters."""
    return sum(plan.shard_numel * plan.spec.dtype.itemsize for plan in plans)


def _kind(plans: Iterable[UnitPlan], storage: str) -> int:
    return sum(cell.nbytes for plan in plans for segment in plan.segments.get(storage, ()) for cell in segment.cells)


def _passing(blueprint: Blueprint) -> int:
    """Count the device bytes of buffers that there are where state rests elsewhere."""
    full = [plan.full_bytes for plan in blueprint.units]
    gathered = min(sum(full), max(full, default=0) + blueprint.request.options.prefetch_bytes)
    gathered += packed_bytes(blueprint.units, blueprint.request.options.gather_format)
    return gathered + gradient_bytes(replace(blueprint, reach=Reach(aliases_host=False, reads_in_place=False)))


def _more(simulation: Simulation, tier: Tier) -> int:
    """Count what was on a tier beside what rests there: activations."""
    return max(0, simulation.program.peak_bytes.get(tier.value, 0) - simulation.budget.on(tier).at_rest)


def moves(
    workload: StepWorkload, params: TierName, grads: TierName, optimizer: TierName, *, streamed: bool
) -> list[Move]:
    """Count what a step moves and updates if all tiles are placed alike.

    What forward waits for is in its window: what the update reads, and parameters on their way to where forward gathers
    them. State that goes back is waited for by the next update of the same tile.

    Arguments:
        workload: the step.
        params: the tier of a tile's parameters.
        grads: of its gradient.
        optimizer: of its state.
        streamed: the device updates it though its state rests elsewhere.
    """
    found = _update_moves(workload, params, grads, optimizer, streamed=streamed)
    again = workload.reductions - 1
    if grads == "nvme":  # what there is comes up, to be added to
        nbytes = workload.grads_bytes
        found += [("write", "any", workload.reductions * nbytes), ("read", "any", again * nbytes)]
        found += [("upload", "any", again * nbytes)]
        found += [("download", "any", min(workload.reduced_bytes, nbytes) + again * nbytes)]
    elif grads == "cpu":
        found.append(("download", "backward", workload.reductions * workload.reduced_bytes))
    if params != "device":
        batches, forward = workload.micro_batches, workload.forward_gathered_bytes
        later = (batches - 1) * forward + batches * workload.backward_gathered_bytes
        found += [("upload", "forward", forward), ("upload", "backward", later)]
        if params == "nvme":  # what an update has just written is taken from its buffer by the first forward
            frozen = workload.frozen_bytes / max(1, workload.frozen_bytes + workload.params_bytes)
            found += [("read", "forward", forward * frozen), ("read", "backward", later)]
    if workload.one_memory:
        return [move for move in found if move[0] not in ("upload", "download")]
    return found


def _update_moves(
    workload: StepWorkload, params: TierName, grads: TierName, optimizer: TierName, *, streamed: bool
) -> list[Move]:
    """Count the update of tiles: what comes to it, and what of it goes back."""
    own, state, nbytes = workload.own_params_bytes, workload.optimizer_bytes, workload.update_bytes
    on_device, early = optimizer == "device", workload.overlap == "backward"
    # Those that begin in backward may be anywhere between it and the end of the next forward.
    window: Window = "any" if early and (streamed or not on_device) else "forward"
    found: list[Move] = []
    # A write may end long after forward has.
    found += [("read", window, state), ("write", "any", state)] * (optimizer == "nvme")
    found += [("read", window, own), ("write", "any", own)] * (params == "nvme")
    if grads == "nvme" and not early:  # else still in a buffer
        found.append(("read", window, workload.grads_bytes))
    if workload.one_memory:
        in_place = on_device and "nvme" not in (params, grads)  # else a record has to come first
        found.append(("in place" if in_place else "device update" if on_device else "update", window, nbytes))
    elif on_device or streamed:
        found.append(("device update" if streamed else "in place", window, nbytes))
        up = (state if streamed else 0) + (workload.grads_bytes if grads != "device" else 0)
        down, published = state if streamed else 0, 0
        if params == "cpu":  # home again, or published
            up, published = up + (own if streamed else 0), own
        elif params == "nvme":
            up, down = up + own, down + own
        elif streamed and optimizer == "cpu":  # the shadow comes up and goes down, and is published
            up, published = up + 2 * own, own
        found += [("upload", window, up), ("download", "any", down), ("download", window, published)]
    else:
        first = workload.overlap == "none" and optimizer == "cpu" and params != "nvme"
        found.append(("update first" if first else "update", window, nbytes))
        if grads == "device":
            found.append(("download", window, workload.grads_bytes))
        if params == "device":  # a tile of files brings its parameters along, and has no shadow
            found += [("download", window, own if optimizer == "nvme" else 0), ("upload", window, own)]
    return found


MOST_TIMES_RANKS = 1024
#: No batch is smaller than a sample: what needs less than this share of it is no way out.
LEAST_BATCH = 1 / 256


@dataclass(frozen=True)
class Change:
    """A change after which something fits.

    Attributes:
        what: "choice", "nvme", "batch" or "ranks".
        amount: bytes more of the nvme tier; the share of the batch that fits; ranks in all; 0 for a choice.
        words: the same for people.
    """

    what: str
    amount: float
    words: str


@dataclass(frozen=True)
class Infeasible:
    """Nothing fits.

    Attributes:
        missing: bytes by tier: with so many more something fits, with fewer nothing does.
        changes: what else makes it fit, the smallest first.
    """

    missing: Mapping[TierName, int]
    changes: tuple[Change, ...] = ()


def lacks(workload: StepWorkload, limits: Limits) -> Infeasible:
    """Return what is missing for a workload that fits nowhere, and the changes that make it fit."""
    ways = (_files(workload, limits), _batch(workload, limits), _ranks(workload, limits))
    return Infeasible(missing(workload, limits), tuple(way for way in ways if way is not None))


def fits(workload: StepWorkload, limits: Limits) -> bool:
    """Return True if there is a placement within the limits, as fine as bytes."""
    return not missing(workload, limits)


def missing(workload: StepWorkload, limits: Limits) -> dict[TierName, int]:
    """Count the bytes that are missing on each tier, as few in all as can be; empty where it fits.

    Where it makes no difference in bytes, what is missing is missing on the slowest tier.
    """
    room = _room(workload, limits)
    lacking = {tier: ceil(-nbytes) for tier, nbytes in room.items() if nbytes < 0}
    if (rest := _at_rest(workload, limits) - sum(max(0.0, nbytes) for nbytes in room.values())) > 0:
        lacking[limits.tiers[-1]] = ceil(rest + max(0.0, -room[limits.tiers[-1]]))
    return lacking


def _room(workload: StepWorkload, limits: Limits) -> dict[TierName, float]:
    """Count what each tier has room for, beside what is there wherever the state is; below 0 where that is too much."""
    there = {tier: workload.there(tier) for tier in TIERS}
    return {tier: limits.room(tier) - limits.taken(tier, there) for tier in limits.tiers}


def _at_rest(workload: StepWorkload, limits: Limits) -> int:
    """Count the state. Where a part of the parameters can be in files, each rank has its shard alone."""
    return sum((workload.in_shards if "nvme" in limits.tiers else workload).kind_bytes.values())


def _files(workload: StepWorkload, limits: Limits) -> Change | None:
    """Find how many bytes more in files would do."""
    room = _room(workload, limits)
    if any(nbytes < 0 for tier, nbytes in room.items() if tier != "nvme"):
        return None
    unlimited = limits.with_room("nvme", 0)
    more = ceil(_at_rest(workload, unlimited) - sum(room.values()))
    words = "more of the nvme tier" if "nvme" in limits.bytes else "of an nvme tier"
    return Change("nvme", more, f"{size(more)} {words}")


def _batch(workload: StepWorkload, limits: Limits) -> Change | None:
    """Find what share of the batch would do."""
    room = _room(replace(workload, activation_peak_bytes={}), limits)
    peak = {tier: limits.taken(tier, workload.activation_peak_bytes) for tier in limits.tiers}
    whole = sum(peak.values())
    if not whole or any(nbytes < 0 for nbytes in room.values()):
        return None
    shares = [nbytes / peak[tier] for tier, nbytes in room.items() if peak[tier]]
    share = min(*shares, (sum(room.values()) - _at_rest(workload, limits)) / whole)
    if share < LEAST_BATCH:
        return None
    return Change("batch", share, f"a micro-batch of {floor(share * 100) or '<1'} % of this one")


def _ranks(workload: StepWorkload, limits: Limits) -> Change | None:
    """Find how many ranks would do, each with memory of its own."""
    ranks = range(workload.ranks, MOST_TIMES_RANKS * workload.ranks)
    found = bisect_left(ranks, True, key=lambda count: fits(workload.over(count), limits))
    if not workload.sharded or found == len(ranks):
        return None
    every, more = ranks[found] * workload.copies, found * workload.copies
    return Change("ranks", every, f"{more} more rank{'s' if more > 1 else ''}, {every} in all")
