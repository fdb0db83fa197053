"""Which placements are tried, and which is the best of them.

A placement is a cut between device and cpu and one between cpu and nvme of each kind. Its **busy time** is a closed
formula: what each resource has to do, in the windows in which it may. No step is much shorter; it may be longer, as the
formula knows nothing of who waits for whom. A step is estimated as its busy time and a share of all its work.

1. For each choice: cuts in quarters of a kind, and around the best of them in eighths, sixteenths, ... 64ths.
2. Simulate the best of the choice that is expected to be the fastest. It shows how much longer than estimated its steps
   are, and what they take of each tier beside the state; both are expected of the next one.
3. Stop when nothing is expected to be faster than the best: after 2 or 3 simulations in most cases.
4. Do the same with activations elsewhere, if that may be faster: to count what those move takes a simulation, too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from penstock.config import Placement, TierName
from penstock.errors import ConfigError, EngineError
from penstock.planner.plan_request import PlanRequest
from penstock.planner.simulation.engine_internals import can_be_told, recomputes
from penstock.planner.trials import Trial, Trials, placement_of
from penstock.planner.workload import (
    KINDS,
    TIERS,
    WORK,
    Change,
    Choice,
    Fractions,
    Infeasible,
    Limits,
    StepWorkload,
    Window,
    count_workload,
    fits,
    lacks,
    moves,
)

#: How many placements are simulated at most.
SIMULATIONS = 12
COARSE, STEPS = 4, (1 / 8, 1 / 16, 1 / 32, 1 / 64)
#: How many are looked around.
KEPT = 12
#: How much of all work counts beside the busy time: what is hidden delays something now and then.
HASTE = 0.3
#: By how much a step is longer whose first updates wait for gradients that backward left on the device.
LATE = 0.02
#: What is not expected to be faster than the best by this share is not simulated, which takes seconds.
WORTHWHILE = 0.005
_WINDOWS: tuple[Window, ...] = ("forward", "backward", "any")


@dataclass(frozen=True)
class Best:
    """The best placement.

    Attributes:
        trial: its simulation.
        tried: all simulated ones that fit, the fastest first.
        others: what the best step of each other choice is expected to take.
        lacking: what is missing, where nothing fits.
    """

    trial: Trial
    tried: Sequence[Trial] = ()
    others: Mapping[Choice, float] = field(default_factory=dict)
    lacking: Infeasible | None = None


class Placements:
    """All placements of one choice, as rows of a tensor: two cuts of each kind, and the device's share of updates.

    Arguments:
        workload: what a step consists of.
        limits: what there is of each tier.
        streamed: how much of the updates of what rests off the device the device does, at least and at most.
        alike: those of another choice: what simulations have shown of them is expected of these.
    """

    def __init__(
        self,
        workload: StepWorkload,
        limits: Limits,
        streamed: tuple[float, float] = (0.0, 0.0),
        alike: "Placements | None" = None,
    ) -> None:
        self.workload, self._limits, self._streamed = workload, limits, streamed
        self._cells = [*product(TIERS, repeat=len(KINDS))]
        rows = dict.fromkeys(name for busy in (*workload.busy.values(), *workload.rates.values()) for name in busy)
        self._rows = [row for row in rows if row not in ("compute", WORK)] + ["compute", WORK]
        self._known: list[tuple[Tensor, Tensor]] = [] if alike is None else [*alike._known]
        self._longer: float | None = None if alike is None else alike._longer

    def best(self) -> tuple[float, Tensor] | None:
        """Return the seconds that the best placement is expected to take, and its row; `None` where none fits.

        As long as nothing was simulated it is expected to take its busy time: no less.
        """
        in_memory = replace(self._limits, bytes={t: n for t, n in self._limits.bytes.items() if t != "nvme"})
        tiers = (in_memory if fits(self.workload.beside(self.beside), in_memory) else self._limits).tiers
        known = torch.cat([self.filled(self.beside), *(point[None] for point, _ in self._known)])
        best = self._sorted(torch.cat([self.grid(tiers), known]))[:KEPT]
        for step in STEPS:
            before = torch.empty(0)
            while len(best) and not torch.equal(best[0], before):
                before = best[0]
                best = self._sorted(torch.cat([best, self.around(best, step, tiers)]))[:KEPT]
        if not len(best):
            return None
        seconds = self.seconds(best[:1])[0] if self._longer is None else self.estimate(best[:1]) * self._longer
        return float(seconds), best[0]

    def learn(self, point: Tensor, step_s: float, peak_bytes: Mapping[TierName, int]) -> None:
        """Note what a simulation has shown."""
        beside = _by_tier(peak_bytes) - self.peak(point[None], torch.zeros(len(TIERS)))[0]
        self._known.append((point, beside))
        if self._longer is None or not self._limits.excess(peak_bytes):
            self._longer = step_s / float(self.estimate(point[None]))

    @property
    def beside(self) -> dict[TierName, float]:
        """What is on each tier beside what the formula knows of: as in the last simulation, or as far as is known."""
        if self._known:
            return dict(zip(TIERS, self._known[-1][1].tolist(), strict=True))
        passing = self.workload.passing_bytes
        return dict(passing) if fits(self.workload.beside(passing), self._limits) else {}

    def grid(self, tiers: Sequence[TierName]) -> Tensor:
        """Give the cuts of each kind that are multiples of a quarter, between some tiers."""
        marks = [number / COARSE for number in range(COARSE + 1)]
        pairs = [
            (device, memory)
            for device, memory in product(marks, repeat=2)
            if device <= memory and (memory == 1 or "nvme" in tiers) and (device == memory or "cpu" in tiers)
        ]
        shares = sorted(set(self._streamed))
        return _tensor([[*a, *b, *c, s] for a, b, c, s in product(pairs, pairs, pairs, shares)])

    def around(self, points: Tensor, step: float, tiers: Sequence[TierName]) -> Tensor:
        """Shift every cut of points by a step, and by none."""
        least, most = self._streamed
        free = [len(tiers) > 1, "nvme" in tiers and "cpu" in tiers] * len(KINDS)
        shifts = [(-step, 0.0, step) if each else (0.0,) for each in (*free, least < most)]
        found = (points[:, None] + _tensor([*product(*shifts)])).reshape(-1, points.shape[1])
        if "cpu" not in tiers:  # both cuts of a kind are one
            found[:, 1:-1:2] = found[:, :-1:2]
        found[:, :-1].clamp_(0, 1)
        found[:, -1].clamp_(least, most)
        return found[(found[:, :-1:2] <= found[:, 1:-1:2]).all(1)]

    def cut(self, points: Tensor) -> Tensor:
        """Put cuts where the engine does, and give each placement once."""
        ends = torch.tensor(self.workload.tile_ends or (0.0, 1.0), dtype=torch.float64)
        if self.workload.tile_ends:
            number = torch.searchsorted((ends[1:] + ends[:-1]) / 2, points[:, :-1].contiguous())
            points = torch.cat([ends[number], points[:, -1:]], 1)
        found: Tensor = torch.unique(points, dim=0)
        return found

    def filled(self, beside: Mapping[TierName, float]) -> Tensor:
        """Give the placement whose kinds have equal cuts, with as much on each tier as it has room for."""
        workload = self.workload.beside(beside)
        there = {tier: workload.there(tier) for tier in TIERS}
        whole, passed, cuts = sum(self.workload.kind_bytes.values()), 0.0, dict.fromkeys(TIERS, 1.0)
        for tier in self._limits.tiers[:-1]:
            passed += max(0.0, self._limits.room(tier) - self._limits.taken(tier, there))
            share = passed / max(1, whole)
            cuts[tier] = max([end for end in self.workload.tile_ends if end <= share], default=min(1.0, share))
        memory = cuts["cpu"] if "cpu" in self._limits.tiers else cuts["device"]
        return _tensor([[cuts["device"], memory] * len(KINDS) + [self._streamed[0]]])

    def seconds(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Give the busy time of points, and seconds of all their work."""
        in_files = self._at_rest(points)[:, TIERS.index("nvme")]
        read = (1 - self.workload.kept_bytes / in_files.clamp(min=1)).clamp(0, 1)
        shares, streamed = self._shares(points), points[:, -1:]
        by_side = torch.stack([shares * (1 - streamed), shares * streamed])
        moved, of_files = torch.einsum("snc,rscwo->rnwo", by_side, self._tables)
        done = self._always + moved + of_files * read[:, None, None]
        busy, work = done[..., :-1], done[..., -1].sum(1)
        busy[..., -1] += (1 - points[:, :1]) * self._late
        windows = busy[:, 0].amax(1) + busy[:, 1].amax(1)
        return torch.maximum(busy.sum(1).amax(1), windows), work

    def estimate(self, points: Tensor) -> Tensor:
        """Estimate the steps of points: their busy time, and a share of all work."""
        busy_s, work_s = self.seconds(points)
        in_memory = (points[:, 1:-1:2] == 1).all(1)  # else gradients on the device leave files to others
        waits = in_memory & (points[:, 2] > points[:, 4])
        return (busy_s + HASTE * work_s) * (1 + LATE * waits)

    def peak(self, points: Tensor, beside: Tensor) -> Tensor:
        """Estimate peaks by tier: what is there anyway, state, shadows of it, and what was found beside them."""
        return self._at_rest(points) + _by_tier({tier: self.workload.there(tier) for tier in TIERS}) + beside

    def _sorted(self, points: Tensor) -> Tensor:
        """Sort those of some points that are expected to fit, the fastest first."""
        points = self.cut(points)
        points = points[self._fit(points)]
        return points[self.estimate(points).argsort(stable=True)]

    def _fit(self, points: Tensor) -> Tensor:
        """Return True for points that are expected to fit, with as much beside their state as the nearest known one."""
        beside = _by_tier(self.beside)
        if self._known:
            apart = torch.stack([(points - point).abs().sum(1) for point, _ in self._known])
            beside = torch.stack([beside for _, beside in self._known])[apart.argmin(0)]
        peak, limits = self.peak(points, beside), self._limits
        taken = {tier: peak[:, number] for number, tier in enumerate(TIERS)}
        over = [torch.as_tensor(limits.taken(tier, taken) > limits.room(tier)) for tier in limits.tiers]  # type: ignore[arg-type]
        return ~torch.stack(over).any(0)

    def _shares(self, points: Tensor) -> Tensor:
        """Say what share of the tiles is in each cell: the engine cuts all kinds in one order."""
        ends = points[:, :-1].reshape(-1, len(KINDS), 2)
        lower, upper = torch.nn.functional.pad(ends, (1, 0)), torch.nn.functional.pad(ends, (0, 1), value=1.0)
        shapes = [(len(points), *(len(TIERS) if kind == axis else 1 for axis in range(3))) for kind in range(3)]
        after = reduce(torch.maximum, (lower[:, kind].reshape(shapes[kind]) for kind in range(3)))
        until = reduce(torch.minimum, (upper[:, kind].reshape(shapes[kind]) for kind in range(3)))
        return (until - after).clamp(min=0).flatten(1)

    def _at_rest(self, points: Tensor) -> Tensor:
        shares = self._shares(points)
        memory, in_shards = shares @ self._resting
        return torch.where(points[:, 1:2] < 1, in_shards, memory)

    @cached_property
    def _resting(self) -> Tensor:
        """Bytes by cell and tier: with parameters as they rest in memory, and where a part of them is in files."""
        both = (self.workload, self.workload.in_shards)
        return _tensor([[[_resting(each, cell, tier) for tier in TIERS] for cell in self._cells] for each in both])

    @cached_property
    def _always(self) -> Tensor:
        busy = [self.workload.busy.get(window, {}) for window in _WINDOWS]
        return _tensor([[each.get(row, 0.0) for row in self._rows] for each in busy])

    @cached_property
    def _late(self) -> Tensor:
        """Seconds by which all parameters come later than compute could use them, by window.

        Units come shortly before their use: those off the device have only the compute of their own to hide behind.
        """
        workload = self.workload
        rate = 0.0 if workload.one_memory else workload.rates.get("upload", {}).get("upload 0", 0.0)
        first, batches = workload.forward_gathered_bytes, workload.micro_batches
        gathered = [first, (batches - 1) * first + batches * workload.backward_gathered_bytes, 0]
        return (_tensor(gathered) * rate - self._always[:, -2]).clamp(min=0)

    @cached_property
    def _tables(self) -> Tensor:
        """Seconds but for reads, and of reads: updated where state rests and by the device, by cell, window and row."""
        found = torch.zeros(2, 2, len(self._cells), len(_WINDOWS), len(self._rows), dtype=torch.float64)
        for (number, cell), streamed in product(enumerate(self._cells), (False, True)):
            if set(cell) - set(self._limits.tiers):
                continue
            for flow, window, nbytes in moves(self.workload, *cell, streamed=streamed and cell[-1] != "device"):
                for row, rate in self.workload.rates[flow].items() if nbytes else ():
                    place = int(flow == "read"), int(streamed), number, _WINDOWS.index(window), self._rows.index(row)
                    found[place] += nbytes * rate
        return found


def _tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _by_tier(nbytes: Mapping[TierName, float]) -> Tensor:
    return _tensor([nbytes.get(tier, 0) for tier in TIERS])


def _resting(workload: StepWorkload, cell: tuple[TierName, ...], tier: TierName) -> int:
    """Count what tiles take of a tier if all are in a cell. An update that does not reach parameters has a shadow."""
    params, _, optimizer = cell
    nbytes = sum(workload.kind_bytes[kind] for kind, there in zip(KINDS, cell, strict=True) if there == tier)
    apart = not workload.one_memory and {params, optimizer} == {"device", "cpu"} and tier == optimizer
    return nbytes + (workload.own_params_bytes if apart else 0)


class Search:
    """A search among placements. Deterministic, if its arguments are.

    Arguments:
        limits: what there is of each tier.
        streamed: how much of the updates of what rests off the device the device does, at least and at most.
        count: counts what a step of a choice consists of; `None` where the model does not take it.
        simulate: simulates a placement.

    Attributes:
        placements: those of each choice that was counted.
        tried: what was simulated.
    """

    def __init__(
        self,
        limits: Limits,
        streamed: tuple[float, float],
        count: Callable[[Choice], StepWorkload | None],
        simulate: Callable[[Choice, Fractions], Trial],
    ) -> None:
        self._limits, self._streamed, self._count, self._simulate = limits, streamed, count, simulate
        self.placements: dict[Choice, Placements] = {}
        self.tried: list[Trial] = []

    @property
    def fitting(self) -> list[Trial]:
        """What was simulated and fits, the fastest first."""
        fitting = [trial for trial in self.tried if not self._limits.excess(trial.peak_bytes)]
        return sorted(fitting, key=lambda trial: trial.timing.step_s)

    def run(self, choices: Sequence[Choice]) -> None:
        """Look for the best placement of some choices: first of those with activations where they are made."""
        for elsewhere in (False, True):
            for choice in choices:
                if (choice.activations is not None) != elsewhere or not self._may_be_best(choice):
                    continue
                if (workload := self._count(choice)) is not None:
                    alike = self.placements.get(choice._replace(activations=None))
                    self.placements[choice] = Placements(workload, self._limits, self._streamed, alike)
            self._go_on()

    def _may_be_best(self, choice: Choice) -> bool:
        """Return True if a choice may be better than the best: not if it is not even where activations take nothing."""
        here, again = (self.placements.get(Choice(None, recompute, choice.streamed)) for recompute in (False, True))
        alike = again if choice.recompute else here
        if choice.activations is None or alike is None or not self.fitting:
            return True
        if not choice.recompute and again is not None and _is_slower(alike.workload, again.workload):
            return False
        freed = replace(alike.workload, activation_peak_bytes={})
        found = Placements(freed, self._limits, self._streamed, alike).best()
        return found is not None and self._is_worthwhile(found[0])

    def _is_worthwhile(self, step_s: float) -> bool:
        return all(step_s < trial.timing.step_s * (1 - WORTHWHILE) for trial in self.fitting)

    def _go_on(self) -> None:
        """Simulate what is expected to be the best, until nothing is expected to be better."""
        while len(self.tried) < SIMULATIONS:
            found = [(*best, choice) for choice, each in self.placements.items() if (best := each.best())]
            found = [each for each in found if self._is_worthwhile(each[0])]
            if not found:
                break
            _, point, choice = min(found, key=lambda each: (each[0], each[2].order))
            trial = self._simulate(choice._replace(streamed=round(float(point[-1]), 3)), fractions_of(point))
            self.placements[choice].learn(point, trial.timing.step_s, trial.peak_bytes)
            self.tried.append(trial)


def _is_slower(kept: StepWorkload, again: StepWorkload) -> bool:
    """Return True if to bring the activations that recomputing spares takes longer than to compute them again."""
    nbytes = kept.activation_peak_bytes["device"] - again.activation_peak_bytes["device"]
    bring_s = kept.micro_batches * nbytes * kept.rates["upload"]["upload 0"]
    return bring_s > again.busy["backward"]["compute"] - kept.busy["backward"]["compute"]


def fractions_of(point: Tensor) -> Fractions:
    """Say what share of each kind is on each tier."""
    found: dict[str, dict[TierName, float]] = {}
    for kind, cuts in zip(KINDS, point[:-1].reshape(-1, 2).tolist(), strict=True):
        ends = [0.0, *(round(cut, 6) for cut in cuts), 1.0]
        shares = zip(TIERS, (end - start for start, end in pairwise(ends)), strict=True)
        found[kind] = {tier: share for tier, share in shares if share > 0}
    return found


def find_best(request: PlanRequest, trials: Trials, progress: Callable[[str], None] | None = None) -> Best:
    """Find the placement whose step is shortest, of those that fit.

    1. Everything on the device, if that fits: what need not move is not moved.
    2. Activations where they are made, as the model is or computed again: memory that those leave free takes state in.
    3. Activations elsewhere, where that may be better.
    """
    choices = _choices(request)
    everything = trials.run(Placement(), choices[0])
    if not request.limits.excess(everything.peak_bytes):
        return Best(everything)

    def simulate(choice: Choice, fractions: Fractions) -> Trial:
        if progress is not None:
            progress(f"simulating placement {len(trials) + 1}")
        return trials.run(placement_of(fractions, choice, request), choice)

    search = Search(request.limits, _streamed(request), partial(_workload, request, trials), simulate)
    search.run(choices)
    if not search.fitting:
        return _lacking(request, trials, {c: p.workload.beside(p.beside) for c, p in search.placements.items()})
    best, *_ = search.fitting
    others = {choice: found[0] for choice, each in search.placements.items() if (found := each.best())}
    return Best(best, search.fitting, {choice: s for choice, s in others.items() if choice[:2] != best.choice[:2]})


def given(request: PlanRequest, trials: Trials, placement: Placement) -> Best:
    """Look at one placement."""
    choice = Choice(placement.activations, streamed=_streamed(request)[0])
    trial = trials.run(placement, choice)
    excess = request.limits.excess(trial.peak_bytes)
    if not excess:
        return Best(trial)
    workload = _workload(request, trials, choice)
    if workload is None:
        return Best(trial, lacking=Infeasible(excess))
    elsewhere = (Change("choice", 0, "another placement, which placement='auto' finds"),)
    there = fits(workload.beside(workload.passing_bytes), request.limits)
    return Best(trial, lacking=Infeasible(excess, elsewhere if there else lacks(workload, request.limits).changes))


def _lacking(request: PlanRequest, trials: Trials, workloads: Mapping[Choice, StepWorkload]) -> Best:
    """Simulate what needs least of the device, and say what is missing with the choice that comes nearest."""
    found = [lacks(workloads[choice], request.limits) for choice in sorted(workloads, key=lambda each: each.order)]
    lacking = min(found, key=lambda each: sum(each.missing.values()))
    slowest = {kind: {request.limits.tiers[-1]: 1.0} for kind in KINDS}
    choice = max(workloads, key=lambda each: each.order)
    trial = trials.run(placement_of(slowest, choice, request), choice)
    excess = request.limits.excess(trial.peak_bytes)
    if lacking.missing:
        return Best(trial, lacking=lacking)
    # By the formula it fits, and no simulation has shown how: what this one lacks, if anything.
    return Best(trial, lacking=Infeasible(excess) if excess else None)


def _choices(request: PlanRequest) -> list[Choice]:
    """List the choices that are searched together, first those that cost least."""
    model, in_one = request.setup.model, request.limits.shared
    streamed, again = _streamed(request)[0], can_be_told(model) and not recomputes(model)
    found = [Choice(streamed=streamed), *([Choice(None, True, streamed)] if again else [])]
    if not in_one:
        found += [choice._replace(activations="cpu") for choice in found]
    elif request.folders:
        found.append(Choice("nvme", again, streamed))
    return found


def _streamed(request: PlanRequest) -> tuple[float, float]:
    """Return the least and the most share of updates that the device does: the one that was asked for by name."""
    asked = request.options.streamed_updates if request.on_accelerator else 0.0
    if asked == "auto":
        return 0.0, 0.0 if request.limits.shared else 1.0
    return float(asked), float(asked)


def _workload(request: PlanRequest, trials: Trials, choice: Choice) -> StepWorkload | None:
    """Count what a step consists of with a choice; `None` where the model does not take it."""
    tier, setup = choice.activations, request.setup
    folders = tuple(request.folders) if tier == "nvme" else None
    try:
        trial = trials.run(Placement(activations=tier, nvme_path=folders), choice)
    except (ConfigError, EngineError):
        if tier is None and not choice.recompute:
            raise  # nothing was asked of the model beyond what it does
        return None
    costs = trials.costs(request.machine)
    return count_workload(
        trial.simulation, costs, setup.grid, micro_batches=setup.micro_batches, folders=len(request.folders)
    )
