"""Which placements are tried, and which is the best of them."""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.config import Placement, TierName
from penstock.errors import ConfigError, EngineError
from penstock.planner.candidates import CandidatePlacement, Choice
from penstock.planner.count_workload import load_of
from penstock.planner.plan_request import PlanRequest
from penstock.planner.shortfall import Change, fits
from penstock.planner.simulation.engine_internals import can_be_told, recomputes
from penstock.planner.solve import Evaluation, Found, Infeasible, candidates, infeasible, search
from penstock.planner.trials import Trial, Trials, placement_of
from penstock.planner.workload import Load

SIMULATIONS = 12
#: How much of the updates of what rests elsewhere an accelerator may do.
STREAMED = 1.0


@dataclass(frozen=True)
class Best:
    """The best placement.

    Attributes:
        trial: its simulation.
        lower_bound_s: no step with any placement is shorter.
        gap: how far the step is above that, as a share of it.
        tried: what was simulated, with the step of each that fits.
        lacking: what is missing, where nothing fits.
    """

    trial: Trial
    lower_bound_s: float
    gap: float
    tried: tuple[tuple[CandidatePlacement, Evaluation], ...] = ()
    lacking: Infeasible | None = None


def find_best(request: PlanRequest, trials: Trials) -> Best:
    """Find the placement whose step is shortest, of those that fit.

    1. Everything on the device, if that fits.
    2. Activations where they are made, as the model is; computed again; or kept elsewhere: memory that they leave free
       takes state in, so all of these are searched together.
    """
    choices = _choices(request)
    everything = trials.run(Placement(), choices[0])
    if not request.limits.excess(everything.peak_bytes):
        return given(request, trials, everything.placement)  # what need not move is not moved
    counted = {choice: _load(request, trials, choice) for choice in choices}
    loads = {choice: load for choice, load in counted.items() if load is not None}
    found = _search(request, trials, loads)
    if isinstance(found, Found):
        trial = trials.run(placement_of(found.best.fractions, found.best.choice, request), _fixed(found.best, request))
        return Best(trial, found.lower_bound_s, found.gap, found.tried)
    return Best(_nearest(request, trials, loads), 0.0, 0.0, lacking=found)


def given(request: PlanRequest, trials: Trials, placement: Placement) -> Best:
    """Look at one placement, with its lower bound."""
    choice = Choice(placement.activations, streamed=_stated(request))
    trial = trials.run(placement, choice)
    load = _load(request, trials, choice)
    if load is None:
        return Best(trial, 0.0, 0.0)
    fractions = {kind: _fractions(placement, kind) for kind in ("params", "grads", "optimizer")}
    among = candidates(
        {choice: load}, request.machine, request.limits, back_end=request.setup.back_end, overlap=_overlap(request)
    )
    bound = among.at(choice, fractions)
    excess = request.limits.excess(trial.peak_bytes)
    lacking = Infeasible(dict(excess)) if excess else None
    if lacking is not None:
        elsewhere = (Change("choice", 0, "another placement, which placement='auto' finds"),)
        there = fits(load.beside(load.passing_bytes), request.limits)
        changes = elsewhere if there else infeasible({choice: load}, request.limits).changes
        lacking = Infeasible(dict(excess), changes)
    if bound is None or not bound.bound_s:
        return Best(trial, 0.0, 0.0, lacking=lacking)
    return Best(trial, bound.bound_s, max(0.0, trial.timing.step_s / bound.bound_s - 1), lacking=lacking)


def _choices(request: PlanRequest) -> list[Choice]:
    """List the choices that are searched together, first those that cost least."""
    model = request.setup.model
    accelerator = request.on_accelerator
    streamed = (0.0, STREAMED) if accelerator and request.options.streamed_updates == "auto" else (_stated(request),)
    plain = [Choice(streamed=share) for share in streamed]
    again = can_be_told(model) and not recomputes(model)
    less = [Choice(None, True, share) for share in streamed] if again else []
    if accelerator:
        less.append(Choice("cpu", False, streamed[0]))
        if again:
            less.append(Choice("cpu", True, streamed[0]))
    elif request.folders:
        less.append(Choice("nvme", again, streamed[0]))
    return [*plain, *less]


def _stated(request: PlanRequest) -> float:
    """Give the share of updates that was asked for by name."""
    streamed = request.options.streamed_updates
    return 0.0 if streamed == "auto" or not request.on_accelerator else float(streamed)


def _load(request: PlanRequest, trials: Trials, choice: Choice) -> Load | None:
    """Count what a step consists of with a choice; `None` where the model does not take it."""
    tier = choice.activations
    folders = tuple(request.folders) if tier == "nvme" else None
    try:
        trial = trials.run(Placement(activations=tier, nvme_path=folders), choice)
    except (ConfigError, EngineError):
        if choice.activations is None and not choice.recompute:
            raise  # nothing was asked of the model beyond what it does
        return None
    return load_of(
        trial.simulation, choice, request.machine, request.setup.grid, micro_batches=request.setup.micro_batches
    )


def _search(request: PlanRequest, trials: Trials, loads: Mapping[Choice, Load]) -> Found | Infeasible:
    """Search among the placements of some choices."""
    limits = request.limits
    among = candidates(loads, request.machine, limits, back_end=request.setup.back_end, overlap=_overlap(request))
    if not among.bounds:
        return infeasible(loads, limits)

    def evaluate(candidate: CandidatePlacement) -> Evaluation:
        trial = trials.run(placement_of(candidate.fractions, candidate.choice, request), _fixed(candidate, request))
        return Evaluation(trial.timing.step_s, trial.peak_bytes, not limits.excess(trial.peak_bytes))

    return search(among, evaluate, simulations=SIMULATIONS)


def _fixed(candidate: CandidatePlacement, request: PlanRequest) -> Choice:
    """Give the choice with the share of updates that is to be streamed, in place of the most that may be."""
    is_free = request.options.streamed_updates == "auto"
    return candidate.choice._replace(streamed=round(candidate.streamed, 3) if is_free else _stated(request))


def _overlap(request: PlanRequest):  # type: ignore[no-untyped-def] # of the kinds that there are
    overlap = request.arguments.get("overlap", "auto")
    return "forward" if overlap == "auto" else overlap


def _nearest(request: PlanRequest, trials: Trials, loads: Mapping[Choice, Load]) -> Trial:
    """Simulate what needs least of the device, to say what it would take."""
    slowest: TierName = request.limits.tiers[-1]
    fractions = {kind: {slowest: 1.0} for kind in ("params", "grads", "optimizer")}
    choice = max(loads, key=lambda each: each.order)
    return trials.run(placement_of(fractions, choice, request), choice)


def _fractions(placement: Placement, kind: str) -> dict[TierName, float]:
    return {tier.value: share for tier, share in placement.home(kind).items()}
