"""Placements that may be the fastest, for each choice that is not a matter of degree, in order of their bound."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, floor
from typing import NamedTuple

from penstock.config import Overlap, TierName
from penstock.planner.bounds import Bound, least_step
from penstock.planner.simulation.program import BackEnd
from penstock.planner.workload import KINDS, TIERS, Figures, Fractions, Limits, Load

#: Cuts are multiples of one part of so many where that fits; those this near to one are taken to be there.
GRID, NEARLY = 64, 0.25
#: How much work that is hidden counts beside the bound, in the proposals for a choice.
HASTES = (0.0, 0.1, 1.0)
MOST_OF_A_CHOICE, CHOICES_WITH_CORNERS = 4, 8
#: Bounds that differ by less than this share are taken in order of their work.
ALIKE = 0.01


class Choice(NamedTuple):
    """What is not a matter of degree. In order: what costs nothing beside it comes first.

    Attributes:
        activations: the tier of what forward saves for backward; `None` where it stays.
        recompute: whether the model computes activations again in backward.
        streamed: the most of the updates of what rests off the device that the device may do.
    """

    activations: TierName | None = None
    recompute: bool = False
    streamed: float = 0.0

    @property
    def order(self) -> tuple[int, bool, float]:
        """What choices are sorted by, where their bounds are alike."""
        tiers = (None, *TIERS)
        return tiers.index(self.activations), self.recompute, self.streamed

    def __str__(self) -> str:
        words = [f"activations on {self.activations}" if self.activations else ""]
        words += ["recomputing" if self.recompute else ""]
        words += [f"streamed_updates={self.streamed:g}" if self.streamed else ""]
        return ", ".join(word for word in words if word) or "all on the device at once"


@dataclass(frozen=True)
class CandidatePlacement:
    """A placement to be tried.

    Attributes:
        choice: what is not a matter of degree.
        fractions: by kind and tier.
        streamed: the share of the updates of what rests off the device that the device is to do.
        bound_s: a step with it is not shorter.
        work_s: seconds of all its work, if one thing were done after the other.
    """

    choice: Choice
    fractions: Fractions
    streamed: float
    bound_s: float
    work_s: float = 0.0

    @property
    def key(self) -> tuple[object, ...]:
        """What two candidates that are the same placement have in common."""
        shares = [round(self.fractions[kind].get(tier, 0.0), 9) for kind in KINDS for tier in TIERS]
        return (self.choice, *shares, round(self.streamed, 9))


class Candidates:
    """Candidates in order of their bound, and what is needed to make others of them.

    Arguments:
        loads: what a step consists of, for each choice.
        machine: figures, in bytes and operations in a second.
        limits: what there is of each tier.
        back_end: who runs what is submitted.
        overlap: when updates run.

    Attributes:
        loads: as given.
        limits: as given.
        bounds: of each choice for which something fits.
        in_order: the candidates.
    """

    def __init__(
        self, loads: Mapping[Choice, Load], machine: Figures, limits: Limits, back_end: BackEnd, overlap: Overlap
    ) -> None:
        self.loads, self.limits = loads, limits
        self._machine = machine
        self._back_end: BackEnd = back_end
        self._overlap: Overlap = overlap
        ordered = sorted(loads, key=lambda choice: choice.order)
        solved = {choice: self._least(loads[choice], limits) for choice in ordered}
        self.bounds: Mapping[Choice, Bound] = {choice: b for choice, b in solved.items() if b is not None}
        self.in_order: Sequence[CandidatePlacement] = self._propose_all()

    @property
    def lower_bound_s(self) -> float:
        """No step with any of the choices is shorter."""
        return min(bound.step_s for bound in self.bounds.values())

    def at(self, choice: Choice, fractions: Fractions, streamed: float | None = None) -> CandidatePlacement | None:
        """Make the candidate of given fractions; `None` where they do not fit.

        Arguments:
            choice: what is not a matter of degree.
            fractions: by kind and tier; each kind's sum to 1.
            streamed: the device's share of updates; `None` for the best one that the choice allows.
        """
        load = self.loads[choice] if streamed is None else replace(self.loads[choice], streamed=streamed)
        found = self._least(load, self.limits, fractions)
        if found is None:
            return None
        share = found.streamed if streamed is None else streamed
        return CandidatePlacement(choice, fractions, share, found.step_s, found.work_s)

    def at_rest(self, choice: Choice, fractions: Fractions) -> dict[TierName, float]:
        """Count the bytes on each tier that the bound knows of: what is there anyway, state, and shadows of it."""
        load = self.loads[choice]
        there: dict[TierName, float] = {tier: float(load.there(tier)) for tier in TIERS}
        for kind, nbytes in load.kind_bytes.items():
            for tier, share in fractions[kind].items():
                there[tier] += share * nbytes
        params, state = fractions["params"], fractions["optimizer"]
        if not self.limits.shared:  # all kinds are cut in one order: where one ends before the other, tiles are apart
            near, far = params.get("device", 0.0), state.get("device", 0.0)
            up, down = near + params.get("cpu", 0.0), far + state.get("cpu", 0.0)
            there["cpu"] += load.own_params_bytes * max(0.0, min(near, down) - far)
            there["device"] += load.own_params_bytes * max(0.0, min(far, up) - near)
        return there

    def tighter(self, choice: Choice, nbytes: Mapping[TierName, float]) -> list[CandidatePlacement]:
        """Give placements for a choice that leave so many bytes more of each tier free."""
        less = self.limits.less({tier: ceil(more) for tier, more in nbytes.items()})
        return list(self._proposals(choice, less))

    def _least(
        self, load: Load, limits: Limits, fractions: Fractions | None = None, haste: float = 0.0
    ) -> Bound | None:
        return least_step(
            load,
            self._machine,
            limits,
            back_end=self._back_end,
            overlap=self._overlap,
            fractions=fractions,
            haste=haste,
        )

    def _propose_all(self) -> list[CandidatePlacement]:
        """List some placements for each choice, and sort them."""
        by_bound = sorted(self.bounds, key=lambda choice: self.bounds[choice].step_s)
        found: list[CandidatePlacement] = []
        for number, choice in enumerate(by_bound):
            load = self.loads[choice]
            roomy = self.limits.less(load.passing_bytes)
            proposed = [*(self._proposals(choice, roomy) or self._proposals(choice, self.limits))]
            if number < CHOICES_WITH_CORNERS:
                proposed += self._corners(choice)
            unlike = {candidate.key: candidate for candidate in proposed}.values()
            found += sorted(unlike, key=order_among(unlike))[:MOST_OF_A_CHOICE]
        return sorted(found, key=order_among(found))

    def _proposals(self, choice: Choice, limits: Limits) -> list[CandidatePlacement]:
        """Give the placements at the bound, on the grid where they fit there; none where nothing fits the limits."""
        load = self.loads[choice]
        proposed: list[CandidatePlacement] = []
        for haste in HASTES:
            found = self._least(load, limits, haste=haste)
            if found is None:
                continue
            rounded = (cut(found.fractions, limits.tiers, slack) for slack in (NEARLY, 1e-6, None))
            streamed = None if load.streamed == 0 else round(found.streamed * GRID) / GRID
            proposed += _first(self.at(choice, fractions, streamed) for fractions in rounded)
        return proposed

    def _corners(self, choice: Choice) -> Iterator[CandidatePlacement]:
        """Yield the placements of one tier for each kind."""
        for tiers in product(self.limits.tiers, repeat=len(KINDS)):
            fractions: Fractions = {kind: {tier: 1.0} for kind, tier in zip(KINDS, tiers, strict=True)}
            yield from _first([self.at(choice, fractions)])


def candidates(
    loads: Mapping[Choice, Load], machine: Figures, limits: Limits, *, back_end: BackEnd, overlap: Overlap
) -> Candidates:
    """Find placements that may be the fastest, in order of their bound.

    Arguments:
        loads: what a step consists of, for each choice.
        machine: figures, in bytes and operations in a second.
        limits: what there is of each tier.
        back_end: who runs what is submitted.
        overlap: when updates run; "auto" as "forward".

    Returns:
        The candidates; none where nothing fits (see `infeasible`).
    """
    return Candidates(loads, machine, limits, back_end, overlap)


def cut(fractions: Fractions, tiers: Sequence[TierName], slack: float | None) -> Fractions:
    """Put cuts between tiers on the grid, none later than it is: what moves, moves to the slower tier.

    Equal cuts of two kinds stay equal.

    Arguments:
        fractions: by kind and tier.
        tiers: those that there are, fastest first.
        slack: what share of a step of the grid a cut may be before a step to go there; `None` leaves cuts as they are.
    """
    found: dict[str, dict[TierName, float]] = {}
    for kind in KINDS:
        before, passed = 0.0, 0.0
        shares: dict[TierName, float] = {}
        for tier in tiers:
            passed += fractions[kind].get(tier, 0.0)
            end = passed if slack is None else floor(passed * GRID + slack) / GRID
            end = 1.0 if tier == tiers[-1] else min(1.0, max(before, end))
            if end - before > 1e-9:
                shares[tier] = end - before
            before = end
        found[kind] = shares
    return found


#: What candidates are sorted by.
_Place = tuple[int, float, tuple[int, bool, float], str]


def order_among(among: Iterable[CandidatePlacement]) -> Callable[[CandidatePlacement], _Place]:
    """Make what sorts candidates: by bound, and those that are alike in it by their work."""
    least = min((candidate.bound_s for candidate in among), default=1.0) or 1.0

    def place(candidate: CandidatePlacement) -> _Place:
        alike = floor((candidate.bound_s / least - 1) / ALIKE + 1e-6)
        return alike, candidate.work_s, candidate.choice.order, str(candidate.fractions)

    return place


def _first(found: Iterable[CandidatePlacement | None]) -> Iterator[CandidatePlacement]:
    """Yield the first one that fits."""
    for candidate in found:
        if candidate is not None:
            yield candidate
            return
