"""Which placements are tried, and which is the best of them.

A placement is a cut between device and cpu and one between cpu and nvme of each kind. Its **busy time** is a closed
formula: what each resource has to do, in the windows in which it may. No step is much shorter; it may be longer, as the
formula knows nothing of who waits for whom.

1. For each choice: cuts in quarters of a kind, and around the best of them in eighths, sixteenths, ... 64ths.
2. Simulate those with the least busy time, of all choices together, until none that is left could be better. A peak
   that the formula did not expect is expected from then on.
3. Simulate neighbours of the best.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
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

SIMULATIONS, NEIGHBOURS = 12, 8
#: How much of the updates of what rests elsewhere an accelerator may do.
STREAMED = 1.0
COARSE, STEPS = 4, (1 / 8, 1 / 16, 1 / 32, 1 / 64)
#: How many of each choice are looked around; by how much cuts of those differ that are simulated for themselves.
KEPT, ALIKE, SAME = 12, 1 / 16, 1e-9
#: How much work that is hidden counts beside the busy time.
HASTE = 0.1
#: What cannot be faster than the best by this share is not simulated, which takes seconds.
WORTHWHILE = 0.002
#: By how much cuts of the best are shifted, and how many are tried each time.
SHIFTS, AT_ONCE = (1 / 16, 1 / 32, 1 / 64), 2
_WINDOWS: tuple[Window, ...] = ("forward", "backward", "any")


@dataclass(frozen=True)
class Tried:
    """A placement that was simulated.

    Attributes:
        choice: what is not a matter of degree.
        fractions: by kind and tier.
        step_s: seconds of a step.
        busy_s: its busy time.
        fits: whether its peaks are within the limits.
    """

    choice: Choice
    fractions: Fractions
    step_s: float
    busy_s: float
    fits: bool


@dataclass(frozen=True)
class Best:
    """The best placement.

    Attributes:
        trial: its simulation.
        tried: what was simulated.
        lacking: what is missing, where nothing fits.
    """

    trial: Trial
    tried: tuple[Tried, ...] = ()
    lacking: Infeasible | None = None


class Placements:
    """All placements of one choice, as rows of a tensor: two cuts of each kind, and the device's share of updates.

    Arguments:
        workload: what a step consists of.
        limits: what there is of each tier.
        streamed: how much of the updates of what rests off the device the device does, at least and at most.
    """

    def __init__(self, workload: StepWorkload, limits: Limits, streamed: tuple[float, float] = (0.0, 0.0)) -> None:
        self.workload, self._limits, self._streamed = workload, limits, streamed
        self._cells = [*product(TIERS, repeat=len(KINDS))]
        rows = dict.fromkeys(name for busy in (*workload.busy.values(), *workload.rates.values()) for name in busy)
        self._rows = [row for row in rows if row != WORK] + [WORK]

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
        windows = busy[:, 0].amax(1) + busy[:, 1].amax(1)
        return torch.maximum(busy.sum(1).amax(1), windows), work

    def peak(self, points: Tensor, beside: Tensor) -> Tensor:
        """Estimate peaks by tier: what is there anyway, state, shadows of it, and what was found beside them."""
        return self._at_rest(points) + _tensor([self.workload.there(tier) for tier in TIERS]) + beside

    def fit(self, points: Tensor, beside: Tensor) -> Tensor:
        """Say which points fit."""
        peak = self.peak(points, beside)
        taken = {tier: peak[:, number] for number, tier in enumerate(TIERS)}
        limits = self._limits
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


def _resting(workload: StepWorkload, cell: tuple[TierName, ...], tier: TierName) -> int:
    """Count what tiles take of a tier if all are in a cell. An update that does not reach parameters has a shadow."""
    params, _, optimizer = cell
    nbytes = sum(workload.kind_bytes[kind] for kind, there in zip(KINDS, cell, strict=True) if there == tier)
    apart = not workload.one_memory and {params, optimizer} == {"device", "cpu"} and tier == optimizer
    return nbytes + (workload.own_params_bytes if apart else 0)


@dataclass
class Search:
    """A search that is under way.

    Attributes:
        choices: the placements of each choice.
        limits: what there is of each tier.
        evaluate: simulates one: seconds of a step, and peaks by tier.
        tried: what was simulated, with its row, and with what was on each tier beside what the formula knows of.
    """

    choices: Mapping[Choice, Placements]
    limits: Limits
    evaluate: Callable[[Choice, Fractions], tuple[float, Mapping[TierName, int]]]
    tried: list[tuple[Tried, Tensor, Tensor]] = field(default_factory=list)
    _ranked: dict[Choice, list[tuple[float, float, Tensor]]] = field(default_factory=dict)

    def run(self) -> Tried | None:
        """Find the best; `None` where nothing fits. Deterministic, if `evaluate` is."""
        for _ in range(SIMULATIONS):
            best = self._best
            longer = {choice: self._longer(choice) for choice in self.choices}
            ranked = [
                (score * longer[choice], choice.order, number, choice, point)
                for choice in self.choices
                for number, (score, busy_s, point) in enumerate(self._rank(choice))
                if best is None or busy_s * longer[choice] < best[0].step_s * (1 - WORTHWHILE)
            ]
            if not ranked:
                break
            *_, choice, point = min(ranked, key=lambda each: each[:3])
            self._try(choice, point)
        left = NEIGHBOURS
        for shift in SHIFTS:
            while left > 0 and (best := self._best) is not None and (near := self._near(best, shift)):
                left -= len(near)
                for choice, point in near:
                    self._try(choice, point)
                assert self._best is not None
                if self._best[0] is best[0]:
                    break
        return None if self._best is None else self._best[0]

    def beside(self, choice: Choice) -> dict[TierName, float]:
        """Say what is beside what the formula knows of, of a choice: in its last simulation, or as far as is known."""
        if known := self._of(choice):
            return dict(zip(TIERS, known[-1][2].tolist(), strict=True))
        workload = self.choices[choice].workload
        passing = workload.passing_bytes if fits(workload.beside(workload.passing_bytes), self.limits) else {}
        return {tier: float(passing.get(tier, 0)) for tier in TIERS}

    @property
    def _best(self) -> tuple[Tried, Tensor] | None:
        found = [(tried, point) for tried, point, _ in self.tried if tried.fits]
        return min(found, key=lambda each: each[0].step_s, default=None)

    def _of(self, choice: Choice) -> list[tuple[Tried, Tensor, Tensor]]:
        return [each for each in self.tried if each[0].choice[:2] == choice[:2]]

    def _longer(self, choice: Choice) -> float:
        """Say by what factor steps of a choice are longer than they are busy: half of what simulations have shown."""
        shown = [tried.step_s / tried.busy_s for tried, *_ in self._of(choice) if tried.busy_s]
        return 1 + max(0.0, min(shown, default=1.0) - 1) / 2

    def _expected(self, choice: Choice, points: Tensor) -> Tensor:
        """Say what is beside what the formula knows of: as it was in the nearest simulation of the choice."""
        known = self._of(choice)
        if not known:
            return _tensor([*self.beside(choice).values()])
        apart = torch.stack([(points - point).abs().amax(1) for _, point, _ in known])
        return torch.stack([beside for *_, beside in known])[apart.argmin(0)]

    def _rank(self, choice: Choice) -> list[tuple[float, float, Tensor]]:
        """List the best few that fit of a choice, as far as is known by now, unlike each other and those tried."""
        if choice not in self._ranked:
            self._ranked[choice] = self._look(choice)
        return self._ranked[choice]

    def _look(self, choice: Choice) -> list[tuple[float, float, Tensor]]:
        placements = self.choices[choice]
        beside = self.beside(choice)
        workload = placements.workload.beside(beside)
        in_memory = replace(self.limits, bytes={t: n for t, n in self.limits.bytes.items() if t != "nvme"})
        tiers = (in_memory if fits(workload, in_memory) else self.limits).tiers  # files are no faster
        points = placements.grid(tiers)
        filled = placements.filled(beside)
        for step in STEPS:
            *_, best = self._fitting(choice, torch.cat([points, filled]))
            points = torch.cat([best[:KEPT], placements.around(best[:KEPT], step, tiers)]) if len(best) else filled
        score, busy_s, points = self._fitting(choice, points)
        unlike = torch.ones(len(points), dtype=torch.bool)
        for tried, point, _ in self._of(choice):
            unlike &= (points - point).abs().amax(1) >= (ALIKE if tried.fits else SAME)
        found: list[tuple[float, float, Tensor]] = []
        while len(found) < KEPT and unlike.any():
            first = int(unlike.to(torch.int8).argmax())
            found.append((float(score[first]), float(busy_s[first]), points[first]))
            unlike &= (points - points[first]).abs().amax(1) >= ALIKE
        return found

    def _fitting(self, choice: Choice, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sort those of some points that fit: by busy time, with some of the work that is hidden."""
        placements = self.choices[choice]
        points = placements.cut(points)
        points = points[placements.fit(points, self._expected(choice, points))]
        busy_s, work_s = placements.seconds(points)
        score = busy_s + HASTE * work_s
        order = score.argsort(stable=True)
        return score[order], busy_s[order], points[order]

    def _near(self, best: tuple[Tried, Tensor], shift: float) -> Sequence[tuple[Choice, Tensor]]:
        """List neighbours of the best that may be better, the most promising first."""
        choice = next(each for each in self.choices if each[:2] == best[0].choice[:2])
        tiers = [tier for tier in self.limits.tiers if tier != "nvme" or (best[1][1:-1:2] < 1).any()]
        _, busy_s, points = self._fitting(choice, self.choices[choice].around(best[1][None], shift, tiers))
        better = busy_s < best[0].step_s * (1 - WORTHWHILE)
        for _, point, _ in self._of(choice):
            better &= (points - point).abs().amax(1) > SAME
        return [(choice, point) for point in points[better][:AT_ONCE]]

    def _try(self, choice: Choice, point: Tensor) -> None:
        fractions, streamed = fractions_of(point), round(float(point[-1]), 3)
        step_s, peak = self.evaluate(choice._replace(streamed=streamed), fractions)
        placements = self.choices[choice]
        known = placements.peak(point[None], torch.zeros(len(TIERS)))[0]
        busy_s = float(placements.seconds(point[None])[0])
        beside = _tensor([peak.get(tier, 0) for tier in TIERS]) - known
        tried = Tried(choice._replace(streamed=streamed), fractions, step_s, busy_s, not self.limits.excess(peak))
        self.tried.append((tried, point, beside))
        self._ranked.pop(choice, None)


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
    2. Activations where they are made, as the model is; computed again; or kept elsewhere: memory that they leave free
       takes state in, so all of these are searched together.
    """
    choices = _choices(request)
    everything = trials.run(Placement(), choices[0])
    if not request.limits.excess(everything.peak_bytes):
        return Best(everything)
    counted = {choice: _workload(request, trials, choice) for choice in choices}
    workloads = {choice: workload for choice, workload in counted.items() if workload is not None}
    limits = request.limits

    def evaluate(choice: Choice, fractions: Fractions) -> tuple[float, Mapping[TierName, int]]:
        if progress is not None:
            progress(f"simulating placement {len(trials) + 1}")
        trial = trials.run(placement_of(fractions, choice, request), choice)
        return trial.timing.step_s, trial.peak_bytes

    share = (0.0, STREAMED) if _is_free(request) else (_stated(request),) * 2
    placements = {c: Placements(w, limits, share) for c, w in workloads.items() if fits(w, limits)}
    search = Search(placements, limits, evaluate)
    found = search.run()
    if found is not None:
        trial = trials.run(placement_of(found.fractions, found.choice, request), found.choice)
        return Best(trial, tuple(tried for tried, *_ in search.tried))
    return _lacking(
        request, trials, {c: w.beside(search.beside(c)) if c in placements else w for c, w in workloads.items()}
    )


def given(request: PlanRequest, trials: Trials, placement: Placement) -> Best:
    """Look at one placement."""
    choice = Choice(placement.activations, streamed=_stated(request))
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
    if not lacking.missing:  # by the formula it fits, and no simulation has shown how: what this one lacks, if anything
        return Best(trial, lacking=Infeasible(excess) if excess else None)
    return Best(trial, lacking=lacking)


def _choices(request: PlanRequest) -> list[Choice]:
    """List the choices that are searched together, first those that cost least."""
    model, in_one = request.setup.model, request.limits.shared
    streamed, again = _stated(request), can_be_told(model) and not recomputes(model)
    found = [Choice(streamed=streamed), *([Choice(None, True, streamed)] if again else [])]
    if not in_one:
        found += [choice._replace(activations="cpu") for choice in found]
    elif request.folders:
        found.append(Choice("nvme", again, streamed))
    return found


def _is_free(request: PlanRequest) -> bool:
    """Whether the device's share of updates is the planner's to choose."""
    return request.options.streamed_updates == "auto" and request.on_accelerator and not request.limits.shared


def _stated(request: PlanRequest) -> float:
    """Give the share of updates that was asked for by name."""
    streamed = request.options.streamed_updates
    return 0.0 if streamed == "auto" or not request.on_accelerator else float(streamed)


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
