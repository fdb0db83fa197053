"""Which placements are tried, and which is the best of them."""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.config import Placement, TierName
from penstock.errors import ConfigError, EngineError
from penstock.forecast.candidates import CandidatePlacement, Choice
from penstock.forecast.lacks import Change, fits
from penstock.forecast.load import Load
from penstock.forecast.solve import Evaluation, Found, Infeasible, candidates, infeasible, search
from penstock.planner.loads import load_of
from penstock.planner.question import Question
from penstock.planner.trials import Trial, Trials, placement_of
from penstock.rehearsal.engine_internals import can_be_told, recomputes

REHEARSALS = 12
#: How much of the updates of what rests elsewhere an accelerator may do.
STREAMED = 1.0


@dataclass(frozen=True)
class Best:
    """The best placement.

    Attributes:
        trial: its rehearsal.
        lower_bound_s: no step with any placement is shorter.
        gap: how far the step is above that, as a share of it.
        tried: what was rehearsed, with the step of each that fits.
        lacking: what is missing, where nothing fits.
    """

    trial: Trial
    lower_bound_s: float
    gap: float
    tried: tuple[tuple[CandidatePlacement, Evaluation], ...] = ()
    lacking: Infeasible | None = None


def find_best(question: Question, trials: Trials) -> Best:
    """Find the placement whose step is shortest, of those that fit.

    1. Everything on the device, if that fits.
    2. Activations where they are made, as the model is; computed again; or kept elsewhere: memory that they leave free
       takes state in, so all of these are searched together.
    """
    choices = _choices(question)
    everything = trials.run(Placement(), choices[0])
    if not question.limits.excess(everything.peak_bytes):
        return given(question, trials, everything.placement)  # what need not move is not moved
    counted = {choice: _load(question, trials, choice) for choice in choices}
    loads = {choice: load for choice, load in counted.items() if load is not None}
    found = _search(question, trials, loads)
    if isinstance(found, Found):
        trial = trials.run(
            placement_of(found.best.fractions, found.best.choice, question), _fixed(found.best, question)
        )
        return Best(trial, found.lower_bound_s, found.gap, found.tried)
    return Best(_nearest(question, trials, loads), 0.0, 0.0, lacking=found)


def given(question: Question, trials: Trials, placement: Placement) -> Best:
    """Look at one placement, with its lower bound."""
    choice = Choice(placement.activations, streamed=_stated(question))
    trial = trials.run(placement, choice)
    load = _load(question, trials, choice)
    if load is None:
        return Best(trial, 0.0, 0.0)
    fractions = {kind: _fractions(placement, kind) for kind in ("params", "grads", "optimizer")}
    among = candidates(
        {choice: load}, question.machine, question.limits, back_end=question.scene.back_end, overlap=_overlap(question)
    )
    bound = among.at(choice, fractions)
    excess = question.limits.excess(trial.peak_bytes)
    lacking = Infeasible(dict(excess)) if excess else None
    if lacking is not None:
        elsewhere = (Change("choice", 0, "another placement, which placement='auto' finds"),)
        there = fits(load.beside(load.passing_bytes), question.limits)
        changes = elsewhere if there else infeasible({choice: load}, question.limits).changes
        lacking = Infeasible(dict(excess), changes)
    if bound is None or not bound.bound_s:
        return Best(trial, 0.0, 0.0, lacking=lacking)
    return Best(trial, bound.bound_s, max(0.0, trial.timing.step_s / bound.bound_s - 1), lacking=lacking)


def _choices(question: Question) -> list[Choice]:
    """List the choices that are searched together, first those that cost least."""
    model = question.scene.model
    accelerator = question.on_accelerator
    streamed = (0.0, STREAMED) if accelerator and question.options.streamed_updates == "auto" else (_stated(question),)
    plain = [Choice(streamed=share) for share in streamed]
    again = can_be_told(model) and not recomputes(model)
    less = [Choice(None, True, share) for share in streamed] if again else []
    if accelerator:
        less.append(Choice("cpu", False, streamed[0]))
        if again:
            less.append(Choice("cpu", True, streamed[0]))
    elif question.folders:
        less.append(Choice("nvme", again, streamed[0]))
    return [*plain, *less]


def _stated(question: Question) -> float:
    """Give the share of updates that was asked for by name."""
    streamed = question.options.streamed_updates
    return 0.0 if streamed == "auto" or not question.on_accelerator else float(streamed)


def _load(question: Question, trials: Trials, choice: Choice) -> Load | None:
    """Count what a step consists of with a choice; `None` where the model does not take it."""
    tier = choice.activations
    folders = tuple(question.folders) if tier == "nvme" else None
    try:
        trial = trials.run(Placement(activations=tier, nvme_path=folders), choice)
    except (ConfigError, EngineError):
        if choice.activations is None and not choice.recompute:
            raise  # nothing was asked of the model beyond what it does
        return None
    return load_of(
        trial.rehearsal, choice, question.machine, question.scene.grid, micro_batches=question.scene.micro_batches
    )


def _search(question: Question, trials: Trials, loads: Mapping[Choice, Load]) -> Found | Infeasible:
    """Search among the placements of some choices."""
    limits = question.limits
    among = candidates(loads, question.machine, limits, back_end=question.scene.back_end, overlap=_overlap(question))
    if not among.bounds:
        return infeasible(loads, limits)

    def evaluate(candidate: CandidatePlacement) -> Evaluation:
        trial = trials.run(placement_of(candidate.fractions, candidate.choice, question), _fixed(candidate, question))
        return Evaluation(trial.timing.step_s, trial.peak_bytes, not limits.excess(trial.peak_bytes))

    return search(among, evaluate, rehearsals=REHEARSALS)


def _fixed(candidate: CandidatePlacement, question: Question) -> Choice:
    """Give the choice with the share of updates that is to be streamed, in place of the most that may be."""
    is_free = question.options.streamed_updates == "auto"
    return candidate.choice._replace(streamed=round(candidate.streamed, 3) if is_free else _stated(question))


def _overlap(question: Question):  # type: ignore[no-untyped-def] # of the kinds that there are
    overlap = question.arguments.get("overlap", "auto")
    return "forward" if overlap == "auto" else overlap


def _nearest(question: Question, trials: Trials, loads: Mapping[Choice, Load]) -> Trial:
    """Rehearse what needs least of the device, to say what it would take."""
    slowest: TierName = question.limits.tiers[-1]
    fractions = {kind: {slowest: 1.0} for kind in ("params", "grads", "optimizer")}
    choice = max(loads, key=lambda each: each.order)
    return trials.run(placement_of(fractions, choice, question), choice)


def _fractions(placement: Placement, kind: str) -> dict[TierName, float]:
    return {tier.value: share for tier, share in placement.home(kind).items()}
