"""The fastest placement that is found in few simulations, and how far it can be from the fastest there is.

1. Try candidates in order of their bound (`candidates.py`), until the best step is below every bound that is left.
2. Where a peak exceeds a limit, move what is used least off that tier by what is missing, and try again. What the bound
   did not know of is known from then on.
3. Shift the cuts of the best, by less and less.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise, permutations
from math import ceil

from penstock.config import TierName
from penstock.planner.candidates import CandidatePlacement, Candidates, Choice, candidates, order_among
from penstock.planner.shortfall import Change, Infeasible, lacks
from penstock.planner.workload import KINDS, TIERS, Fractions, Limits, Load

__all__ = [
    "CandidatePlacement",
    "Candidates",
    "Change",
    "Choice",
    "Evaluation",
    "Found",
    "Infeasible",
    "candidates",
    "infeasible",
    "search",
]

SIMULATIONS = 12
#: The share of the simulations that is left for the cuts of the best.
FOR_CUTS = 1 / 3
MOST_REPAIRS = 3
#: A candidate that cannot be faster than the best by this share is not simulated, which takes seconds.
WORTHWHILE = 0.01
#: By how much cuts are shifted, as a share of a kind: less where nothing is gained; and how many are tried each time.
SHIFTS, TRIED_AT_ONCE = (1 / 8, 1 / 16, 1 / 32, 1 / 64), 2
#: No cut is shifted for less than this share of a step.
LEAST_GAIN = 1 / 500
#: What is missing is moved in parts of a kind of this size.
GRAIN = 1 / 256
#: Which kinds are shifted together. Equal cuts of gradients and state are worth keeping: such tiles are in one place.
TOGETHER = (("optimizer", "grads"), ("optimizer",), ("params",), ("grads",), KINDS)
#: What is used least in a step goes first.
LEAST_USED_FIRST = ("optimizer", "grads", "params")


@dataclass(frozen=True)
class Evaluation:
    """What a simulation of a candidate came to.

    Attributes:
        step_s: seconds of a step.
        peak_bytes: the most that was on each tier at once.
        fits: whether that is within the limits.
    """

    step_s: float
    peak_bytes: Mapping[TierName, int]
    fits: bool


@dataclass(frozen=True)
class Found:
    """The best of what was tried.

    Attributes:
        best: the placement.
        evaluation: what its simulation came to.
        lower_bound_s: no step with any placement of any choice is shorter.
        gap: how far the step is above that, as a share of it.
        tried: every candidate that was simulated, in order.
    """

    best: CandidatePlacement
    evaluation: Evaluation
    lower_bound_s: float
    gap: float
    tried: tuple[tuple[CandidatePlacement, Evaluation], ...]


def search(
    among: Candidates, evaluate: Callable[[CandidatePlacement], Evaluation], *, simulations: int = SIMULATIONS
) -> Found | Infeasible:
    """Find the fastest placement. Deterministic, if `evaluate` is.

    Arguments:
        among: the candidates.
        evaluate: simulates one; it may take seconds.
        simulations: how many are evaluated at most.

    Returns:
        The best one, or what is missing where none fits.
    """
    run = _Search(among, evaluate, simulations)
    run.sweep()
    if run.best is not None:
        run.shift_cuts()
    if run.best is None:
        return run.lacking()
    best, evaluation = run.best
    lower = among.lower_bound_s
    gap = max(0.0, evaluation.step_s / lower - 1) if lower > 0 else 0.0
    return Found(best, evaluation, lower, gap, tuple(run.tried))


def infeasible(loads: Mapping[Choice, Load], limits: Limits) -> Infeasible:
    """Say what is missing where nothing fits, and the smallest change after which something does.

    Arguments:
        loads: what a step consists of, for each choice.
        limits: what there is of each tier.

    Returns:
        What is missing with the choice that comes nearest, and changes, the smallest first: more files, a smaller
        batch, more ranks.
    """
    ordered = sorted(loads, key=lambda choice: choice.order)
    return min((lacks(loads[choice], limits) for choice in ordered), key=lambda each: sum(each.missing.values()))


@dataclass
class _Search:
    """A search that is under way.

    Attributes:
        left: how many simulations are left.
        best: the fastest that fits, and its evaluation.
        tried: every candidate that was simulated.
        unknown: for each choice, the bytes on each tier that the bound does not know of.
    """

    among: Candidates
    evaluate: Callable[[CandidatePlacement], Evaluation]
    left: int
    best: tuple[CandidatePlacement, Evaluation] | None = None
    tried: list[tuple[CandidatePlacement, Evaluation]] = field(default_factory=list)
    unknown: dict[Choice, Mapping[TierName, int]] = field(default_factory=dict)

    def sweep(self) -> None:
        """Try candidates in order, while one of those that are left could be better."""
        in_order = self.among.in_order
        for_cuts = int(self.left * FOR_CUTS)
        for number, candidate in enumerate(in_order):
            least = min(other.bound_s for other in in_order[number:])
            if self.best is not None and (self.left <= for_cuts or self._wanted_s <= least):
                return
            if self.left <= 0:
                return
            if self.best is None or candidate.bound_s < self._wanted_s:
                self._try_until_it_fits(candidate)

    def shift_cuts(self) -> None:
        """Shift the cuts of the best while that makes it better."""
        for shift in SHIFTS:
            better = True
            while better and self.left > 0:
                better = self._shift(shift)

    def lacking(self) -> Infeasible:
        """Say what was missing in the simulation that came nearest, and what would make something fit."""
        limits = self.among.limits
        loads = {choice: load.beside(self._unknown_of(choice)) for choice, load in self.among.loads.items()}
        found = infeasible(loads, limits)
        peaks = [limits.excess(evaluation.peak_bytes) for _, evaluation in self.tried]
        nearest = min((peak for peak in peaks if peak), key=lambda each: sum(each.values()), default=found.missing)
        return replace(found, missing=found.missing or nearest)

    def _shift(self, shift: float) -> bool:
        """Try the neighbours of the best that promise most; return whether one was better."""
        assert self.best is not None
        was, step_s = self.best[0], self.best[1].step_s
        near = {c.key: c for c in self._neighbours(was, shift) if c.bound_s < step_s * (1 - LEAST_GAIN)}
        promising = sorted(near.values(), key=lambda c: (c.bound_s + c.work_s, str(c.fractions), c.streamed))
        for candidate in [c for c in promising if not self._is_known(c)][:TRIED_AT_ONCE]:
            if self.left > 0:
                self._try(candidate)
        return self.best[0] is not was

    def _neighbours(self, candidate: CandidatePlacement, shift: float) -> Iterator[CandidatePlacement]:
        """Yield what is one shift away: of a cut, of two kinds that change places, or of the device's share."""
        choice, nbytes = candidate.choice, self.among.loads[candidate.choice].kind_bytes
        tiers = [pair for near in pairwise(self.among.limits.tiers) for pair in (near, near[::-1])]
        changed: list[Fractions] = []
        for here, there in tiers:
            changed += [_shifted(candidate.fractions, dict.fromkeys(kinds, shift), here, there) for kinds in TOGETHER]
            for one, other in permutations((kind for kind in KINDS if nbytes[kind]), 2):
                traded = _shifted(candidate.fractions, {one: shift}, here, there)
                share = shift * nbytes[one] / nbytes[other]  # as many bytes go the other way: where memory is full
                changed.append(_shifted(traded, {other: share}, there, here))
        for fractions in changed:
            if fractions != candidate.fractions and self._has_room(choice, fractions):
                found = self.among.at(choice, fractions, candidate.streamed)
                yield from [found] if found is not None else []
        if choice.streamed:
            shares = (max(0.0, candidate.streamed - shift), min(choice.streamed, candidate.streamed + shift))
            yield from filter(None, (self.among.at(choice, candidate.fractions, share) for share in shares))

    def _try_until_it_fits(self, candidate: CandidatePlacement) -> None:
        current: CandidatePlacement | None = candidate
        peak = self._peak(candidate.choice, candidate.fractions)
        if self.among.limits.excess(peak):  # as far as other simulations have shown
            current = self._instead(candidate, peak)
        for _ in range(MOST_REPAIRS):
            if current is None or self._is_known(current) or self.left <= 0:
                return
            evaluation = self._try(current)
            if evaluation.fits:
                return
            current = self._instead(current, evaluation.peak_bytes)

    def _instead(
        self, candidate: CandidatePlacement, peak_bytes: Mapping[TierName, float]
    ) -> CandidatePlacement | None:
        """Find what may fit in place of a candidate that does not: what is used least moves, or all is solved again."""
        choice, excess = candidate.choice, self.among.limits.excess(peak_bytes)
        unknown = self._unknown_of(choice)
        tighter = self.among.tighter(choice, {tier: excess.get(tier, 0) + unknown.get(tier, 0) for tier in TIERS})
        possible = [self._repaired(candidate, peak_bytes), *tighter]
        fitting = [c for c in possible if c and not self._is_known(c) and self._has_room(choice, c.fractions)]
        return min(fitting, key=order_among(fitting), default=possible[0])

    @property
    def _wanted_s(self) -> float:
        """The seconds that a step has to be below for a simulation to be worth its time."""
        assert self.best is not None
        return self.best[1].step_s * (1 - WORTHWHILE)

    def _is_known(self, candidate: CandidatePlacement) -> bool:
        return candidate.key in {tried.key for tried, _ in self.tried}

    def _try(self, candidate: CandidatePlacement) -> Evaluation:
        evaluation = self.evaluate(candidate)
        self.left -= 1
        self.tried.append((candidate, evaluation))
        at_rest = self.among.at_rest(candidate.choice, candidate.fractions)
        limits = self.among.limits
        self.unknown[candidate.choice] = {
            tier: max(0, ceil(limits.taken(tier, evaluation.peak_bytes) - limits.taken(tier, at_rest)))
            for tier in limits.tiers
        }
        if evaluation.fits and (self.best is None or evaluation.step_s < self.best[1].step_s):
            self.best = candidate, evaluation
        return evaluation

    def _unknown_of(self, choice: Choice) -> Mapping[TierName, int]:
        """Count the bytes that the bound does not know of: of a choice that was not tried, the fewest of any."""
        fewest = min(self.unknown.values(), key=lambda each: sum(each.values()), default={})
        return self.unknown.get(choice, fewest)

    def _peak(self, choice: Choice, fractions: Fractions) -> dict[TierName, float]:
        """Estimate peaks, with what the last simulation of a choice had beside state at rest."""
        at_rest = self.among.at_rest(choice, fractions)
        unknown = self._unknown_of(choice)
        return {tier: at_rest[tier] + unknown.get(tier, 0.0) for tier in TIERS}

    def _has_room(self, choice: Choice, fractions: Fractions) -> bool:
        return not self.among.limits.excess(self._peak(choice, fractions))

    def _repaired(
        self, candidate: CandidatePlacement, peak_bytes: Mapping[TierName, float]
    ) -> CandidatePlacement | None:
        """Move what is used least off tiers that have too little room, by what is missing; `None` if nothing helps."""
        limits, kind_bytes = self.among.limits, self.among.loads[candidate.choice].kind_bytes
        fractions, carried = dict(candidate.fractions), 0.0
        for tier, slower in pairwise((*limits.tiers, None)):
            assert tier is not None
            missing = limits.taken(tier, peak_bytes) + carried - limits.room(tier)
            carried = 0.0
            for kind in LEAST_USED_FIRST:
                nbytes, there = kind_bytes[kind], fractions[kind].get(tier, 0.0)
                if missing <= 0 or slower is None or not nbytes or not there:
                    continue
                share = min(there, ceil(missing / nbytes / GRAIN) * GRAIN)
                fractions[kind] = _moved(fractions[kind], tier, slower, share)
                missing -= share * nbytes
                carried += share * nbytes
            if missing > 0:
                return None
        return self.among.at(candidate.choice, fractions, candidate.streamed)


def _shifted(fractions: Fractions, shares: Mapping[str, float], here: TierName, there: TierName) -> Fractions:
    """Move shares of some kinds from one tier to another."""
    moved = {kind: _moved(fractions[kind], here, there, share) for kind, share in shares.items()}
    return {**fractions, **moved}


def _moved(shares: Mapping[TierName, float], here: TierName, there: TierName, share: float) -> Mapping[TierName, float]:
    """Move a share of a kind from one tier to another, or what there is of it."""
    share = min(share, shares.get(here, 0.0))
    moved = {**shares, here: shares.get(here, 0.0) - share, there: shares.get(there, 0.0) + share}
    return {tier: moved[tier] for tier in TIERS if moved.get(tier, 0.0) > 1e-9}
