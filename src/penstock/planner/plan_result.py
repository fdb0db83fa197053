"""From the best placement to a plan: what it takes, how long a step is, what binds, and what would change that."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import MappingKey, tree_flatten_with_path

from penstock.config import Tier, TierName
from penstock.planner.machine import Machine
from penstock.planner.plan_request import PlanRequest
from penstock.planner.plans import Plan, Reason, Shortfall, WhatIf, model_fingerprint
from penstock.planner.residuals import step_range
from penstock.planner.search import Best
from penstock.planner.shortfall import Infeasible
from penstock.planner.simulation.engine_internals import Grid, recomputes
from penstock.planner.simulation.program import WorkKind
from penstock.planner.trials import Trial, Trials
from penstock.planner.workload import KINDS, TIERS

#: What shortens a step by less than this share of it is not worth a word.
LEAST_SAVING = 0.005
#: What is twice as much after each: "update_*" is the figure of the optimizer's rule. A second disk takes half of what
#: the first one does, as a disk that is twice as fast would. Where memory is twice as fast updates are, too: they do
#: little but read and write it.
UPGRADES: Mapping[str, Sequence[str]] = {
    "a second disk": ("disk_read", "disk_write", "disk_mixed"),
    "host memory twice as fast": ("host_bandwidth", "update", "update_*"),
    "a link to the device twice as fast": ("h2d", "d2h", "h2d_pageable", "d2h_pageable", "duplex"),
    "links between ranks twice as fast": ("link_bandwidth", "net_bandwidth"),
}


def answer(request: PlanRequest, trials: Trials, best: Best) -> Plan:
    """Make the plan of the best placement."""
    trial, machine = best.trial, request.machine
    prepare_request, timing = trial.simulation.blueprint.request, trial.timing
    program = trial.simulation.program
    grid, step_s = request.setup.grid, timing.step_s
    flat = Grid.first_of(grid.world_size, sharded=prepare_request.stage != 0)
    kind_bytes = _kind_bytes(trial)
    precision: Any = str(request.arguments.get("precision", "bf16"))  # `prepare` marks a default by its class
    lacks = _lacks(best.lacking)
    on_files = any("nvme" in by_tier for by_tier in kind_bytes.values())
    return Plan(
        placement=trial.placement,
        overlap=prepare_request.overlap,
        options=prepare_request.options,
        recompute=trial.choice.recompute or recomputes(request.setup.model),
        world_size=grid.world_size,
        fits=not lacks,
        step_s=step_s,
        step_range_s=step_range(step_s, device=machine.device, on_files=on_files, probed=machine.probed),
        bound_by=timing.bound_by,
        bytes={tier: sum(kind_bytes[kind].get(tier, 0) for kind in KINDS) for tier in TIERS},
        peak_bytes=trial.peak_bytes,
        written_bytes=_written(trial),
        disk_endurance_bytes=machine.value("disk_endurance") if machine.has("disk_endurance") else 0.0,
        unified_memory=machine.unified_memory,
        busy_s=timing.busy_s,
        stage=prepare_request.stage,
        precision=precision,
        hosts=request.hosts,
        mesh={} if grid == flat else grid.sizes,
        machine=machine.name,
        device=machine.device,
        machine_fingerprint=machine.fingerprint if machine.probed else {},
        model_fingerprint=model_fingerprint(request.setup.model),
        batch=_batch(request),
        tokens_per_s=program.tokens * grid.data_size / step_s if step_s else 0.0,
        limit_bytes={tier: request.limits.of(tier) for tier in TIERS if tier in request.limits.bytes},
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
    for kind in KINDS:
        by_tier: dict[TierName, int] = {tier: budget.on(Tier(tier)).parts[kind] for tier in TIERS}
        found[kind] = {tier: nbytes for tier, nbytes in by_tier.items() if nbytes}
    tier: TierName = trial.placement.activations or "device"
    away = trial.peak_bytes.get(tier, 0) - budget.on(Tier(tier)).at_rest if tier != "device" else 0
    found["activations"] = {"device": trial.simulation.activation_bytes}
    if away > 0:
        found["activations"][tier] = away
    return found


def _lacks(lacking: Infeasible | None) -> tuple[Shortfall, ...]:
    """Say what is missing, with the smallest change that makes it fit."""
    if lacking is None:
        return ()
    change = lacking.changes[0].words if lacking.changes else ""
    return tuple(Shortfall(tier, nbytes, change) for tier, nbytes in lacking.missing.items())


def _written(trial: Trial) -> dict[TierName, int]:
    """Count what the last step writes to files."""
    program = trial.simulation.program
    last = program.items[program.steps[-2] : program.steps[-1]]
    jobs = (program.jobs[item.index] for item in last if item.kind is WorkKind.SUBMIT)
    written = sum(job.nbytes for job in jobs if job.stream == "write")
    return {"nvme": written} if written else {}


def _what_ifs(request: PlanRequest, trials: Trials, trial: Trial) -> tuple[WhatIf, ...]:
    """Time the same step on machines that differ in one thing, and with other states and batches."""
    program, step_s = trial.simulation.program, trial.timing.step_s
    least = LEAST_SAVING * step_s
    saved = savings(
        request.machine, step_s, lambda machine: trials.time(trial.simulation, machine).step_s, program.rule
    )
    found = [WhatIf(name, seconds) for name, seconds in saved if seconds >= least]
    smaller = trials.simulate_other(trial, state_dtype="int8")
    if smaller is not None and (seconds := step_s - smaller.timing.step_s) > least:
        found.append(WhatIf("8-bit states", seconds))
    larger = trials.simulate_other(trial, twice=True)
    if larger is not None and program.tokens:
        share = (larger.simulation.program.tokens / larger.timing.step_s) / (program.tokens / step_s) - 1
        words = "" if not request.limits.excess(larger.peak_bytes) else " (which does not fit as it is placed)"
        found.append(WhatIf(f"a batch twice as large{words}", tokens_share=share))
    return tuple(found)


def savings(
    machine: Machine, step_s: float, retime: Callable[[Machine], float], rule: str = ""
) -> list[tuple[str, float]]:
    """Measure how many seconds each upgrade saves that the machine has figures of; most comes first.

    Arguments:
        machine: what there is.
        step_s: seconds of a step on it.
        retime: gives the seconds of the same step on another machine.
        rule: the optimizer's, whose updates may have a figure of their own: "adamw".
    """
    found = []
    for name, figures in UPGRADES.items():
        there = {each for figure in figures if machine.has(each := figure.replace("*", rule))}
        if there:
            better = machine.replace(**{each: 2 * machine.value(each) for each in sorted(there)})
            found.append((name, max(0.0, step_s - retime(better))))
    return sorted(found, key=lambda each: -each[1])


def _why(best: Best) -> tuple[Reason, ...]:
    """Say for each choice what the next best would have cost."""
    step_s, reasons = best.trial.timing.step_s, []
    if best.others:
        other = min(best.others, key=lambda choice: best.others[choice])
        cost = max(0.0, best.others[other] - step_s)
        reasons.append(Reason("activations, recomputing", str(best.trial.choice), str(other), cost, "estimated"))
    for kind in KINDS:
        mine, *others = (_words(trial.placement.home(kind)) for trial in (best.trial, *best.tried))
        # What reads the same is the same to people.
        found = next((pair for pair in zip(others, best.tried, strict=True) if pair[0] != mine), None)
        if found is not None:
            reasons.append(Reason(kind, mine, found[0], found[1].timing.step_s - step_s))
    return tuple(reasons)


def _words(shares: Mapping[Tier, float]) -> str:
    """Say in percent what is where, fastest tier first: "12% device, 88% cpu"."""
    there = {tier: f"{shares[Tier(tier)]:.0%}" for tier in TIERS if shares.get(Tier(tier), 0.0) > 0}
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
