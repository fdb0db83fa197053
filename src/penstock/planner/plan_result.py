"""From the best placement to a plan: what it takes, how long a step is, what binds, and what would change that."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import MappingKey, tree_flatten_with_path

from penstock.config import Tier, TierName
from penstock.planner.machine import Machine
from penstock.planner.plan_request import PlanRequest
from penstock.planner.plans import Plan, Reason, Shortfall, WhatIf, model_fingerprint
from penstock.planner.search import Best
from penstock.planner.simulation.engine_internals import Grid, recomputes
from penstock.planner.trials import Trial, Trials
from penstock.planner.what_if import what_ifs

_KINDS = ("params", "grads", "optimizer")
#: What shortens a step by less than this share of it is not worth a word.
LEAST_SAVING = 0.005
_TIERS: tuple[TierName, ...] = ("device", "cpu", "nvme")


def answer(request: PlanRequest, trials: Trials, best: Best) -> Plan:
    """Make the plan of the best placement."""
    trial = best.trial
    prepare_request, timing = trial.simulation.blueprint.request, trial.timing
    program = trial.simulation.program
    grid, step_s = request.setup.grid, timing.step_s
    flat = Grid.first_of(grid.world_size, sharded=prepare_request.stage != 0)
    kind_bytes = _kind_bytes(trial)
    lacking = best.lacking
    lacks = _lacks(lacking, request, trial)
    return Plan(
        placement=trial.placement,
        overlap=prepare_request.overlap,
        options=prepare_request.options,
        recompute=trial.choice.recompute or recomputes(request.setup.model),
        world_size=grid.world_size,
        fits=not lacks,
        step_s=step_s,
        step_range_s=_range(request.machine, lambda machine: trials.time(trial.simulation, machine).step_s, step_s),
        bound_by=timing.bound_by,
        bytes={tier: sum(kind_bytes[kind].get(tier, 0) for kind in _KINDS) for tier in _TIERS},
        peak_bytes=trial.peak_bytes,
        busy_s=timing.busy_s,
        stage=prepare_request.stage,
        precision=str(request.arguments.get("precision", "bf16")),  # `prepare` marks a default by a class of its own
        hosts=request.hosts,
        mesh={} if grid == flat else grid.sizes,
        machine=request.machine.name,
        device=request.machine.device,
        machine_fingerprint=request.machine.fingerprint if request.machine.probed else {},
        model_fingerprint=model_fingerprint(request.setup.model),
        batch=_batch(request),
        tokens_per_s=program.tokens * grid.data_size / step_s if step_s else 0.0,
        limit_bytes={tier: request.limits.of(tier) for tier in _TIERS if tier in request.limits.bytes},
        kind_bytes=kind_bytes,
        waits_s=timing.waits_s,
        what_ifs=_what_ifs(request, trials, trial) if not lacks else (),
        why=_why(best),
        rounding_notes=_rounding(request, trial),
        lacks=lacks,
    )


def _kind_bytes(trial: Trial) -> dict[str, dict[TierName, int]]:
    """Count the bytes of each kind at rest, and of activations at their peak."""
    budget = trial.simulation.budget
    found: dict[str, dict[TierName, int]] = {}
    for kind in _KINDS:
        by_tier: dict[TierName, int] = {tier: budget.on(Tier(tier)).parts[kind] for tier in _TIERS}
        found[kind] = {tier: nbytes for tier, nbytes in by_tier.items() if nbytes}
    tier: TierName = trial.placement.activations or "device"
    away = trial.peak_bytes.get(tier, 0) - budget.on(Tier(tier)).at_rest if tier != "device" else 0
    found["activations"] = {"device": trial.simulation.activation_bytes}
    if away > 0:
        found["activations"][tier] = away
    return found


def _range(machine: Machine, step: Callable[[Machine], float], step_s: float) -> tuple[float, float]:
    """Time the step with every figure at its worse and at its better end."""
    worst, best = machine.replace(**_ends(machine, worse=True)), machine.replace(**_ends(machine, worse=False))
    return min(step_s, step(best)), max(step_s, step(worst))


def _ends(machine: Machine, *, worse: bool) -> dict[str, float]:
    found = {}
    for name, figure in machine.figures.items():
        slow = name.endswith("_seconds")  # of these less is better
        if figure.low != figure.high and not name.endswith(("_memory", "_free")):
            found[name] = figure.high if slow is worse else figure.low
    return found


def _lacks(lacking: Any, request: PlanRequest, trial: Trial) -> tuple[Shortfall, ...]:
    """Say what is missing: of what was simulated, or of what can be at all."""
    if lacking is None:
        missing: Mapping[TierName, int] = request.limits.excess(trial.peak_bytes)
        changes = ""
    else:
        missing, changes = lacking.missing, "" if lacking.smallest is None else lacking.smallest.words
    return tuple(Shortfall(tier, nbytes, changes) for tier, nbytes in missing.items() if nbytes > 0)


def _what_ifs(request: PlanRequest, trials: Trials, trial: Trial) -> tuple[WhatIf, ...]:
    """Time the same step on machines that differ in one thing."""
    program, step_s = trial.simulation.program, trial.timing.step_s
    timed = what_ifs(
        request.machine,
        step_s,
        lambda machine: trials.time(trial.simulation, machine).step_s,
        rules=(program.rule,),
    )
    least = LEAST_SAVING * step_s
    found = [WhatIf(each.what_if.name, each.saved_s) for each in timed if each.saved_s and each.saved_s >= least]
    smaller = trials.simulate_other(trial, state_dtype="int8")
    if smaller is not None and (saved := step_s - smaller.timing.step_s) > least:
        found.append(WhatIf("8-bit states", saved))
    larger = trials.simulate_other(trial, twice=True)
    if larger is not None and program.tokens:
        share = (larger.simulation.program.tokens / larger.timing.step_s) / (program.tokens / step_s) - 1
        words = "" if not request.limits.excess(larger.peak_bytes) else " (which does not fit as it is placed)"
        found.append(WhatIf(f"a batch twice as large{words}", tokens_share=share))
    return tuple(found)


def _why(best: Best) -> tuple[Reason, ...]:
    """Say for each choice what the next best would have cost."""
    chosen = best.trial.choice
    fit = [(candidate, found.step_s) for candidate, found in best.tried if found.fits]
    others = sorted(
        (each for each in fit if each[0].choice._replace(streamed=0) != chosen._replace(streamed=0)),
        key=lambda each: each[1],
    )
    reasons = []
    if others:
        cost = others[0][1] - best.trial.timing.step_s
        reasons.append(Reason("activations, recomputing", str(chosen), str(others[0][0].choice), cost))
    step_s = best.trial.timing.step_s
    for kind in ("params", "grads", "optimizer"):
        home = best.trial.placement.home(kind)
        mine = {tier.value: share for tier, share in home.items()}
        # What reads the same is the same to people.
        differ = sorted(
            (step, words) for candidate, step in fit if (words := _words(candidate.fractions[kind])) != _words(mine)
        )
        if differ:
            reasons.append(Reason(kind, _words(mine), differ[0][1], differ[0][0] - step_s))
    return tuple(reasons)


def _words(shares: Mapping[Any, float]) -> str:
    """Say in percent what is where, fastest tier first: "12% device, 88% cpu"."""
    there = {tier: f"{shares[tier]:.0%}" for tier in _TIERS if shares.get(tier, 0.0) > 0}
    return ", ".join(f"{share} {tier}" for tier, share in there.items() if share != "0%")


def _rounding(request: PlanRequest, trial: Trial) -> tuple[str, ...]:
    """Name choices that may round otherwise than the same run elsewhere: a device whose compiler does not know how."""
    if request.on_accelerator and trial.choice.streamed:
        return (f"the device updates {trial.choice.streamed:.0%} of what rests elsewhere (streamed_updates)",)
    return ()


def _batch(request: PlanRequest) -> str:
    """Put names and shapes of a micro-batch into words, alike ones together: "input_ids, labels 4x8 int64"."""
    named: dict[str, list[str]] = {}
    for path, leaf in tree_flatten_with_path(request.setup.batch())[0]:
        if isinstance(leaf, Tensor):
            shape = "x".join(map(str, leaf.shape)) or "1"
            names = [str(part.key) for part in path if isinstance(part, MappingKey)]
            named.setdefault(f"{shape} {str(leaf.dtype).removeprefix('torch.')}", []).append(".".join(names))
    shapes = "; ".join(" ".join(filter(None, (_listed(names), shape))) for shape, names in named.items())
    count = request.setup.micro_batches
    return f"{count} of {shapes}" if count > 1 else shapes


def _listed(names: Sequence[str]) -> str:
    """List names, or count what has none."""
    given = [name for name in names if name]
    if not given:
        return f"{len(names)} x" if len(names) > 1 else ""
    return ", ".join(given)
