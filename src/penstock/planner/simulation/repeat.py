"""Equal blocks are simulated once: a model without most of them is simulated, and its program repeats what is left out.

1. Plan the units of the whole model. Blocks that follow each other are a `Run` where they are equal, and their state is
   on the same tiers; a run needs a few blocks, the others are left out (`shortened`).
2. In each pass over a run, what happens for one block in its middle happens for the next one too, but for the names of
   units and for the jobs that are referred to: `Repetition` inserts it for each block that was left out.

Where neighbours in the middle of a run differ, the whole model is simulated. One thing is not exact: what a model
computes of the outputs of all its blocks at once is counted for those that are simulated.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, pairwise, zip_longest
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from penstock.config import GRAD, MASTER, PARAM, Placement, Tier, TierName
from penstock.planner.simulation.engine_internals import (
    RING_BYTES,
    Blueprint,
    Grid,
    PrepareRequest,
    Reach,
    UnitPlan,
    draw_blueprint,
    record_sizes,
)
from penstock.planner.simulation.fake_tensor import rounded
from penstock.planner.simulation.program import Item, ProgramJob, WorkKind
from penstock.planner.simulation.recorder import Recorder
from penstock.trace import NO_LABEL, Label

_T = TypeVar("_T")

#: The norm of a gradient, as native arithmetic is noted.
NORM = "penstock.norm"
#: The verb of updates, and the stream of those that the host computes.
UPDATE = "update"
#: So many blocks at either end of a run are unlike those in the middle: buffers for their gradients are free at first.
LEAST_EDGE = 2
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)
_NUMBERED = re.compile("layer|block|idx|index|number")  # attributes that count blocks
_OF_MODULE = frozenset(vars(nn.Module())) - {"training"}


class UnlikeError(Exception):
    """Blocks of a run differ in what is done for them: the whole model has to be simulated."""


@dataclass(frozen=True)
class Run:
    """Equal blocks that follow each other, with state on the same tiers.

    Attributes:
        names: of all of them, in order.
        kept: how many are simulated.
        last: the number of the last one before those that are left out.
    """

    names: Sequence[str]
    kept: int
    last: int

    @property
    def left_out(self) -> int:
        """The number of blocks that are left out."""
        return len(self.names) - self.kept

    def number(self, kept: int) -> int:
        """Return the number among all blocks of one that is simulated."""
        return kept if kept <= self.last else kept + self.left_out

    def removed(self) -> Sequence[str]:
        """Return the names of the blocks that are left out."""
        return self.names[self.last + 1 : self.last + 1 + self.left_out]


# ----------------------------------------------------------------------------------------------------------------------
# Which blocks are left out
# ----------------------------------------------------------------------------------------------------------------------


def equal_blocks(model: nn.Module) -> list[list[str]]:
    """List the blocks of a model's lists that follow each other and are equal, but for a number that they have."""
    found: list[list[str]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            before = None
            for number, (child_name, child) in enumerate(module.named_children()):
                described = _described(child, number)
                if described != before:
                    found.append([])
                found[-1].append(f"{name}.{child_name}" if name else child_name)
                before = described
    return [names for names in found if len(names) > 2 * LEAST_EDGE + 2]


def _described(block: nn.Module, number: int) -> object:
    """Describe what a block consists of."""
    parts = []
    for name, module in block.named_modules():
        held = {key: _of(key, value, number) for key, value in vars(module).items() if key not in _OF_MODULE}
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        shapes = [(key, t.dtype, tuple(t.shape), t.requires_grad) for key, t in tensors]
        parts.append((name, type(module), held, shapes))
    return parts


def _of(name: str, value: Any, number: int) -> object:
    if type(value) is int and value == number and _NUMBERED.search(name):
        return "its number"
    if isinstance(value, list | tuple) and all(isinstance(each, _PLAIN) for each in value):
        return tuple(value)
    return value if isinstance(value, _PLAIN) else id(value)


@dataclass(frozen=True)
class Whole:
    """A whole model, of which a shortened one is simulated.

    Attributes:
        runs: of equal blocks, most of which are left out.
        blueprint: of the whole model.
    """

    runs: Sequence[Run]
    blueprint: Blueprint

    @property
    def removed(self) -> list[str]:
        """The names of the blocks that are left out."""
        return [name for run in self.runs for name in run.removed()]

    def removed_units(self) -> list[UnitPlan]:
        """List the units of the blocks that are left out."""
        removed = self.removed
        return [plan for plan in self.blueprint.units if _is_of(plan.spec.name, removed)]

    def host_bytes(self) -> int:
        """Count the bytes at rest in host memory."""
        return rest_bytes(self.blueprint.units)[Tier.CPU]

    def late_norms(self, *, kept: bool) -> Counter[int]:
        """Count the norms that are taken of gradients on the device all at once in `step`, by their bytes."""
        removed = {plan.spec.name for plan in self.removed_units()} if kept else set()
        found: Counter[int] = Counter()
        for plan in self.blueprint.units:
            gradients = plan.segments.get(GRAD, ())
            if plan.spec.name not in removed and len(gradients) == 1 and gradients[0].tier is Tier.DEVICE:
                itemsize = self.blueprint.storages.grad_dtype.itemsize
                found.update((p.stop - p.start) * itemsize for p in plan.layout.parts(self.blueprint.grid.shard_rank))
        return found

    def check(self, blueprint: Blueprint) -> None:
        """Check that the units of the shortened model have their state where the whole one has it.

        Raises:
            UnlikeError: they do not.
        """
        planned = {plan.spec.name: plan for plan in self.blueprint.units}
        if any(_tiers({"": plan}) != _tiers({"": planned[plan.spec.name]}) for plan in blueprint.units):
            raise UnlikeError


def whole_model(
    model: nn.Module, optimizer: torch.optim.Optimizer, request: PrepareRequest, grid: Grid, reach: Reach
) -> Whole | None:
    """Plan a whole model and find which of its blocks need not be simulated; `None` where all of them do.

    Arguments:
        model: the model.
        optimizer: over its parameters.
        request: how it is prepared.
        grid: the ranks.
        reach: which tiers compute reads in place.
    """
    placement = request.placement
    # Which slot of a ring, or which piece of memory, a tile or an activation gets depends on all before it.
    if placement.activations is not None or Tier.NVME in placement.home("params"):
        return None
    blocks = equal_blocks(model)
    if not blocks:
        return None
    blueprint = draw_blueprint(model, optimizer, request, grid, reach)
    runs = [run for run in runs_of(blocks, blueprint) if holds_all(model, run, blueprint)]
    return Whole(runs, blueprint) if runs else None


def runs_of(blocks: Sequence[Sequence[str]], blueprint: Blueprint) -> list[Run]:
    """Find the runs of a model of which blocks can be left out.

    Arguments:
        blocks: its equal blocks (`equal_blocks`).
        blueprint: of the whole model.
    """
    plans = {plan.spec.name: plan for plan in blueprint.units}
    ahead_bytes = blueprint.request.options.prefetch_bytes
    found: list[Run] = []
    for names in blocks:
        units = {name: _units(name, plans) for name in names}
        for _, alike in groupby(names, lambda name, units=units: _tiers(units[name])):  # type: ignore[misc]
            group = list(alike)
            of_block = units[group[0]].values()
            nbytes = sum(plan.shard_numel * plan.spec.dtype.itemsize for plan in of_block)
            in_files = any(segment.tier is Tier.NVME for plan in of_block for segment in plan.all_segments())
            last = max(LEAST_EDGE, 1 + max(ahead_bytes, RING_BYTES if in_files else 0) // max(nbytes, 1))
            kept = 2 * last + 2
            if nbytes and len(group) > kept:
                found.append(Run(group, kept, last))
    return [run for run in found if not any(_is_of(run.names[0], other.names) for other in found if other is not run)]


def _is_of(name: str, blocks: Iterable[str]) -> bool:
    """Return True if a module is one of some blocks, or inside of one."""
    return any(name == block or name.startswith(f"{block}.") for block in blocks)


def _units(block: str, plans: Mapping[str, UnitPlan]) -> dict[str, UnitPlan]:
    """Return the plans of a block's units, by the rest of their names."""
    return {name.removeprefix(block): plan for name, plan in plans.items() if _is_of(name, [block])}


def _tiers(units: Mapping[str, UnitPlan]) -> object:
    """Return where the state of a block's units is."""
    return [
        (
            rest,
            plan.resident,
            plan.replicated,
            [(each.storage, each.tier, each.start, each.numel) for each in plan.all_segments()],
        )
        for rest, plan in units.items()
    ]


def holds_all(model: nn.Module, run: Run, blueprint: Blueprint) -> bool:
    """Return True if the blocks' parameters are in units of their own, and in no other ones."""
    plans = {plan.spec.name: plan for plan in blueprint.units}
    for name in (run.names[0], run.names[-1]):
        own = {id(parameter) for plan in _units(name, plans).values() for parameter in plan.spec.parameters}
        if own != {id(parameter) for parameter in model.get_submodule(name).parameters()}:
            return False
    return True


def shortened(placement: Placement, whole: Whole) -> Placement:
    """Return the placement of the shortened model in which each unit's state is where it is in the whole one."""
    removed = {plan.spec.name for plan in whole.removed_units()}
    kept = [plan for plan in whole.blueprint.units if plan.spec.name not in removed]
    homes: dict[str, dict[TierName, float]] = {}
    for storage in (PARAM, GRAD, MASTER):
        there: Counter[TierName] = Counter()
        for segment in (segment for plan in kept for segment in plan.segments.get(storage, ())):
            there[segment.tier.value] += sum(cell.nbytes for cell in segment.cells)
        homes[storage] = {tier: nbytes / there.total() for tier, nbytes in there.items() if nbytes}
    return replace(
        placement,
        params=homes[PARAM],
        grads=homes[GRAD] or placement.grads,
        optimizer=homes[MASTER] or placement.optimizer,
    )


def rest_bytes(units: Iterable[UnitPlan]) -> Counter[Tier]:
    """Count the bytes of units at rest."""
    found: Counter[Tier] = Counter()
    for segment in (segment for plan in units for segment in plan.all_segments()):
        if segment.tier is Tier.NVME:
            found[Tier.NVME] += sum(record_sizes(segment))
        elif segment.tier is Tier.CPU:
            found[Tier.CPU] += sum(cell.taken_bytes for cell in segment.cells)
        else:
            found[Tier.DEVICE] += sum(rounded(cell.nbytes) for cell in segment.cells)
    return found


# ----------------------------------------------------------------------------------------------------------------------
# What is done for the blocks that were left out
# ----------------------------------------------------------------------------------------------------------------------


class _Chunk(NamedTuple):
    """Items of one block in one pass over its run."""

    sweep: int
    run: int
    block: int


#: The numbers of items that stay together: one of them, or those of the update of a range of tiles.
_Turn = Sequence[int]


class _Sweep(NamedTuple):
    """A pass over a run: the turns of each block, in the order in which the blocks are met."""

    run: int
    turns: Mapping[int, Sequence[_Turn]]

    @property
    def ascends(self) -> bool:
        """True if the first block is the first one that is met."""
        return next(iter(self.turns)) == 0


class Repetition:
    """Makes the program of a whole model from that of a shortened one.

    Each phase is cut into tracks of one lane of turns, or of two that alternate; each lane is searched for passes.

    Arguments:
        recorder: what was recorded of the shortened model.
        whole: the whole model.
    """

    def __init__(self, recorder: Recorder, whole: Whole) -> None:
        self._recorder, self._whole = recorder, whole
        self._runs = whole.runs
        self._items, self._jobs = recorder.items, recorder.jobs
        self._memory: defaultdict[int, list[tuple[Tier, int]]] = defaultdict(list)  # by the item that comes next
        for index, tier, nbytes in recorder.memory:
            self._memory[index].append((tier, nbytes))
        self._places: dict[str, tuple[int, int, str] | None] = {}
        self._tracks: list[tuple[int, Sequence[Sequence[_Turn]]]] = []  # with the number of the first item
        self._sweeps: list[_Sweep] = []
        self._chunks: list[_Chunk | None] = [None] * len(self._items)
        self._where: dict[int, tuple[_Chunk, int]] = {}  # of jobs: their chunk, and which one they are there
        self._find_sweeps()
        self._repeated = [self._steady(number) for number in range(len(self._sweeps))]
        self._new_items: list[Item] = []
        self._new_jobs: list[ProgramJob] = []
        self._new_memory: list[tuple[int, Tier, int]] = []
        # New numbers of jobs: by sweep, number of the block among all, and number there; else by -1, 0 and the old one.
        self._renamed: dict[tuple[int, int, int], int] = {}

    # Passes over runs

    def _place(self, unit: str) -> tuple[int, int, str] | None:
        """Return the run and the block that a unit is of, and the rest of its name."""
        if unit not in self._places:
            self._places[unit] = None
            for number, run in enumerate(self._runs):
                for block in range(run.kept):
                    name = run.names[run.number(block)]
                    if _is_of(unit, [name]):
                        self._places[unit] = number, block, unit.removeprefix(name)
        return self._places[unit]

    def _unit(self, item: Item) -> str:
        if item.kind in (WorkKind.SUBMIT, WorkKind.WAIT, WorkKind.HOST_WAIT):
            return self._jobs[item.index].label.unit
        return item.label.unit if item.kind is WorkKind.COMPUTE else ""

    def _find_sweeps(self) -> None:
        phases = self._recorder.phases
        ends = [first for _, first in phases[1:]] + [len(self._items)]
        for (phase, start), stop in zip(phases, ends, strict=True):
            turns = self._updates(start, stop) if phase == "step" else []
            first, last = (turns[0][0], turns[-1][-1] + 1) if turns else (stop, stop)
            lanes = [[turn for turn in turns if self._on_host(turn) is on_host] for on_host in (True, False)]
            if turns != list(_alternating(lanes)):
                raise UnlikeError
            for begin, track in (
                (start, [[(index,) for index in range(start, first)]]),
                (first, lanes),
                (last, [[(index,) for index in range(last, stop)]]),
            ):
                self._tracks.append((begin, track))
                for lane in track:
                    self._cut(lane, phase)
        self._check_outside()

    def _updates(self, start: int, stop: int) -> list[list[int]]:
        """Cut the updates of a step into turns: a thread of the host and the device take turns with ranges of tiles.

        A wait belongs to the turn of what comes next.
        """
        labels: dict[int, Label] = {}
        for index in range(start, stop):
            item = self._items[index]
            label = self._jobs[item.index].label if item.kind is WorkKind.SUBMIT else item.label
            if item.kind in (WorkKind.SUBMIT, WorkKind.COMPUTE) and label.verb == UPDATE and label.tile is not None:
                labels[index] = label
        turns: list[list[int]] = []
        waiting: list[int] = []
        for index in range(min(labels, default=stop), max(labels, default=start) + 1):
            waiting.append(index)
            if index not in labels:
                continue
            before = labels[turns[-1][-1]] if turns else NO_LABEL
            if (before.unit, before.tile) == (labels[index].unit, labels[index].tile):
                turns[-1] += waiting
            else:
                turns.append(waiting)
            waiting = []
        return turns

    def _on_host(self, turn: _Turn) -> bool:
        """Return True if a thread of the host computes an update."""
        jobs = [self._jobs[self._items[n].index] for n in turn if self._items[n].kind is WorkKind.SUBMIT]
        return any(job.stream == job.label.verb == UPDATE for job in jobs)

    def _cut(self, lane: Sequence[_Turn], phase: str) -> None:
        """Find the passes over runs in a lane.

        Forward and backward are told apart by what is computed: what comes ahead belongs to where it is met.
        """
        met: dict[int, list[tuple[int, int]]] = {}  # by run: the turns, and the block of each
        told: dict[int, tuple[int, int] | None] = {}
        for number, turn in enumerate(lane):
            item = self._items[turn[-1]]
            if phase == "step" or item.kind is WorkKind.COMPUTE:
                place = self._place(self._unit(item))
                told[number] = place and place[:2]
                if place is not None:
                    met.setdefault(place[0], []).append((number, place[1]))
        for run, found in met.items():
            starts: dict[int, int] = {}
            for number, block in [*found, (len(lane), -1)]:
                if len(starts) == self._runs[run].kept and block in (-1, next(iter(starts))):
                    last, begun = [*starts.items()][-1]
                    ends = (n for n in range(begun + 1, number) if told.get(n, (run, last)) != (run, last))
                    bounds = [*starts.values(), next(ends, number)]
                    blocks = zip(starts, pairwise(bounds), strict=True)
                    self._add(_Sweep(run, {block: lane[first:end] for block, (first, end) in blocks}))
                    starts = {}
                starts.setdefault(block, number)

    def _add(self, sweep: _Sweep) -> None:
        order = list(range(len(sweep.turns)))
        if list(sweep.turns) not in (order, order[::-1]):
            raise UnlikeError
        for block, turns in sweep.turns.items():
            chunk = _Chunk(len(self._sweeps), sweep.run, block)
            jobs = 0
            for index in chain.from_iterable(turns):
                if self._chunks[index] is not None:
                    raise UnlikeError
                self._chunks[index] = chunk
                if self._items[index].kind is WorkKind.SUBMIT:
                    self._where[self._items[index].index] = chunk, jobs
                    jobs += 1
        self._sweeps.append(sweep)

    def _check_outside(self) -> None:
        """Refuse what is done for blocks on both sides of the gap and is not in a pass over them."""
        met: dict[int, set[int]] = {}
        for index, item in enumerate(self._items):
            place, chunk = self._place(self._unit(item)), self._chunks[index]
            if chunk is not None:
                met.pop(chunk.run, None)
            if place is not None and (chunk is None or chunk.run != place[0]):
                blocks = met.setdefault(place[0], set())
                blocks.add(place[1])
                last = self._runs[place[0]].last
                if min(blocks) <= last < max(blocks):
                    raise UnlikeError

    def _steady(self, number: int) -> int:
        """Return the block of a pass that is repeated: like the one before it, and as near to the middle as can be."""
        blocks = list(self._sweeps[number].turns)
        places = sorted(range(1, len(blocks) - 1), key=lambda place: abs(2 * place - len(blocks)))
        for place in places:
            if self._signature(number, blocks[place]) == self._signature(number, blocks[place - 1]):
                return blocks[place]
        raise UnlikeError

    def _number(self, sweep: int, block: int) -> int:
        """Return the number among all blocks of one that was met in a pass."""
        repeated, of = self._repeated[sweep], self._sweeps[sweep]
        is_behind = block > repeated if of.ascends else block >= repeated
        return block + self._runs[of.run].left_out if is_behind else block

    # What a block's items are, whichever block it is

    def _signature(self, sweep: int, block: int) -> object:
        """Describe what is done for a block, with units and jobs as seen from it."""
        chunk = _Chunk(sweep, self._sweeps[sweep].run, block)
        found: list[object] = []
        for index in chain.from_iterable(self._sweeps[sweep].turns[block]):
            item = self._items[index]
            payload: object = item.index
            if item.kind is WorkKind.SUBMIT:
                job = self._jobs[item.index]
                after = sorted((self._seen(other, chunk) for other in job.after), key=repr)
                payload = job._replace(label=self._relative(job.label, chunk), after=()), after  # type: ignore[arg-type]
            elif item.kind in (WorkKind.WAIT, WorkKind.HOST_WAIT):
                payload = self._seen(item.index, chunk)
            found.append((item.kind, self._relative(item.label, chunk), payload, self._memory[index]))
        return found

    def _relative(self, label: Label, chunk: _Chunk) -> object:
        place = self._place(label.unit)
        if place is None or not self._is_near(chunk, *place[:2]):
            return label
        return label._replace(unit=f"{place[1] - chunk.block}{place[2]}")

    def _seen(self, job: int, chunk: _Chunk) -> object:
        found = self._where.get(job)
        if found is None or not self._is_near(chunk, *found[0][1:]):
            return job
        return found[0].sweep, found[0].block - chunk.block, found[1]

    def _is_near(self, chunk: _Chunk, run: int, block: int) -> bool:
        return run == chunk.run and abs(block - chunk.block) <= self._runs[run].last

    # The program of the whole model

    def repeat(self, rests: Mapping[Tier, int]) -> None:
        """Have the recorder tell of the whole model in place of the shortened one.

        Arguments:
            rests: the bytes at rest of what is left out.

        Raises:
            UnlikeError: it is not known what is done for them.
        """
        before = min((item.index for item in self._items if item.kind is WorkKind.SUBMIT), default=len(self._jobs))
        self._new_jobs += self._jobs[:before]  # of the time before the program begins
        positions: dict[int, int] = {}  # of items that begin a track, and of the end, among the new ones
        for start, lanes in self._tracks:
            positions[start] = len(self._new_items)
            for turn, shift in _alternating([[*self._with_copies(lane)] for lane in lanes]):
                for index in turn:
                    self._write(index, shift)
        positions[len(self._items)] = len(self._new_items)
        self._take(len(self._items))
        recorder = self._recorder
        recorder.items, recorder.jobs, recorder.memory = self._new_items, self._new_jobs, self._new_memory
        recorder.phases = [(name, positions[first]) for name, first in recorder.phases]
        recorder.steps = [positions[first] for first in recorder.steps]
        recorder.rests.update(rests)

    def _with_copies(self, lane: Iterable[_Turn]) -> Iterator[tuple[_Turn, int]]:
        """Yield the turns of a lane with those of the blocks left out, as how far behind the one that is repeated."""
        for turn in lane:
            yield turn, 0
            chunk = self._chunks[turn[-1]]
            if chunk is not None and chunk.block == self._repeated[chunk.sweep]:
                sweep = self._sweeps[chunk.sweep]
                turns, left_out = sweep.turns[chunk.block], self._runs[chunk.run].left_out
                if turn == turns[-1]:
                    shifts = range(1, left_out + 1) if sweep.ascends else range(-1, -left_out - 1, -1)
                    yield from ((again, shift) for shift in shifts for again in turns)

    def _take(self, index: int) -> None:
        """Take and give back the bytes that an item of the shortened model's program did."""
        self._new_memory += ((len(self._new_items), tier, nbytes) for tier, nbytes in self._memory[index])

    def _write(self, index: int, shift: int) -> None:
        """Write an item once more, for the block so many behind its own."""
        item, chunk = self._items[index], self._chunks[index]
        self._take(index)
        label = self._labelled(item.label, chunk, shift)
        place = item.index
        if item.kind is WorkKind.SUBMIT:
            job = self._jobs[item.index]
            after = tuple(sorted({self._job(other, chunk, shift) for other in job.after}))
            place = len(self._new_jobs)
            self._new_jobs.append(job._replace(label=self._labelled(job.label, chunk, shift), after=after))
            key = (-1, 0, item.index)
            if chunk is not None:
                key = chunk.sweep, self._number(chunk.sweep, chunk.block) + shift, self._where[item.index][1]
            self._renamed[key] = place
        elif item.kind in (WorkKind.WAIT, WorkKind.HOST_WAIT):
            place = self._job(item.index, chunk, shift)
        elif item.kind is WorkKind.COMPUTE and not label.unit:
            place = self._with_all_norms(place)
        self._new_items.append(Item(item.kind, place, label))

    def _with_all_norms(self, segment: int) -> int:
        """Put the norms of all units in place of those that were taken, where a segment takes them at once."""
        counted = self._recorder.operations(segment)
        if {op.name for op in counted} != {NORM}:
            return segment
        norms: Counter[int] = Counter()
        for op, count in counted.items():
            norms[op.nbytes] += count
        if norms != self._whole.late_norms(kept=True):
            raise UnlikeError
        like = next(iter(counted))
        all_norms = self._whole.late_norms(kept=False)
        return self._recorder.segment({like._replace(nbytes=nbytes): count for nbytes, count in all_norms.items()})

    def _labelled(self, label: Label, chunk: _Chunk | None, shift: int) -> Label:
        """Name the unit that is meant: those near a block of the middle are as far from the block that is written."""
        place = self._place(label.unit)
        if place is None or chunk is None or not self._is_near(chunk, *place[:2]):
            return label
        names = self._runs[chunk.run].names
        number = self._number(chunk.sweep, chunk.block) + shift + place[1] - chunk.block
        if not 0 <= number < len(names):
            raise UnlikeError
        return label._replace(unit=names[number] + place[2])

    def _job(self, job: int, chunk: _Chunk | None, shift: int) -> int:
        """Return the new number of a job that an item refers to."""
        found = self._where.get(job)
        if found is None:
            return self._renamed.get((-1, 0, job), job)
        at, place = found
        if chunk is not None and self._is_near(chunk, at.run, at.block):
            block = self._number(chunk.sweep, chunk.block) + shift + at.block - chunk.block
            like = self._renamed.get((at.sweep, block, place))
            if like is not None or shift:  # blocks at the ends of a run refer to what others do not have
                if like is None:
                    raise UnlikeError
                return like
        return self._renamed[at.sweep, self._number(at.sweep, at.block), place]


def _alternating(lanes: Iterable[Iterable[_T]]) -> Iterator[_T]:
    """Yield from lanes in turns, as a step does: updates of the host and of the device alternate."""
    return (each for of_all in zip_longest(*lanes) for each in of_all if each is not None)
