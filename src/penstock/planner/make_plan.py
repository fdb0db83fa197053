"""Answer whether a model fits on a machine, how long a step is, and where its state should be.

From the best placement to a plan: what it takes, how long a step is, what binds, and what would change that. How far
off the prediction may be follows from past ones: `residuals.json` has a row for each step that was predicted and then
measured; `benchmarks/plan.py` adds rows.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import MappingKey, tree_flatten_with_path

from penstock.config import Options, Placement, Tier, TierName
from penstock.planner.machine import Machine
from penstock.planner.plan_request import PlanRequest, made, plan_request
from penstock.planner.plans import Plan, Reason, Shortfall, WhatIf, model_fingerprint
from penstock.planner.search import Best, find_best, given
from penstock.planner.simulation.engine_internals import (
    Grid,
    free_device_memory,
    host_memory,
    hosts_of,
    own_elements,
    recomputes,
    shares_host_memory,
    user_mode,
)
from penstock.planner.simulation.program import WorkKind
from penstock.planner.simulation.simulate import Setup
from penstock.planner.this_machine import machine_for
from penstock.planner.trials import Trial, Trials
from penstock.planner.workload import KINDS, TIERS, Infeasible


@torch.random.fork_rng(devices=[])  # the batch, the model's first values and what is measured may draw some
def plan(  # noqa: PLR0913 (those of `prepare`, and of the run)
    model: nn.Module | Callable[[], nn.Module],
    optimizer: type[torch.optim.Optimizer] | torch.optim.Optimizer,
    batch: Callable[[], Any],
    *,
    machine: Machine | str | os.PathLike[str] | None = None,
    device_bytes: int | None = None,
    host_bytes: int | None = None,
    folders: Sequence[str | os.PathLike[str]] = (),
    world_size: int = 1,
    hosts: int = 1,
    mesh: Mapping[str, int] | None = None,
    placement: Placement | Literal["auto"] = "auto",
    micro_batches: int = 1,
    expert_share: float | None = None,
    measure: bool = False,
    trace: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
    **prepare_arguments: Any,
) -> Plan:
    """Find the placement whose step is shortest, of those that fit; or say what a given one would do.

    The engine itself is simulated: on tensors without values, streams without threads and tiers without memory. Nothing
    is loaded and nothing is left. `prepare(placement="auto", plan=...)` does what the plan says.

    Arguments:
        model: on any device, as it would be prepared, or a function that makes one, which is called for the meta
            device. It stays as it is. With DTensors each rank has its part: `simulated_mesh(mesh)` gives a `DeviceMesh`
            of ranks that need not be there.
        optimizer: the class, which takes all parameters with its defaults, or an optimizer over the model's parameters.
        batch: makes one micro-batch, as the model takes it: a mapping of keyword arguments, a tuple of positional ones,
            or one value. What the model returns has a `loss`, or is the loss; else the mean of it stands for one.
        machine: what the step is timed for: a machine, its file, or the name of one that comes with the package; `None`
            for this one, which is probed once.
        device_bytes: bytes of the device of a rank; `None` for the machine's.
        host_bytes: bytes of the memory of a host; `None` for the machine's.
        folders: folders of the nvme tier; of a machine that has folders by its figures none need be named.
        world_size: how many ranks there are.
        hosts: on how many hosts they are.
        mesh: how many of them there are along each dimension, by the names that a `DeviceMesh` has for them, such as
            `{"dp_replicate": 16, "dp_shard": 8}`: copies of the state, each shared by neighbours. `None`: all of them
            share one copy.
        placement: one to be looked at; `"auto"` for the best one.
        micro_batches: how many of them a step has.
        expert_share: the part of the rows that a mask chooses, where a model makes it of values other than the experts
            that a router chooses. These get equal parts. `None`: such a mask is refused.
        measure: time each kind of operation for real, on this machine, once: for models whose operations are not what
            figures of machines expect.
        progress: is called with a line of words before each simulation of a search.
        trace: a file to which the planned step is written, for Perfetto.
        prepare_arguments: other arguments of `prepare`: precision, stage, units, options, ...

    Returns:
        The plan. It may say that nothing fits: by how much, on which tier, and what the smallest change is.

    Raises:
        ConfigError: an argument is wrong; the machine lacks a figure; or the model cannot be simulated, because its
            control flow depends on values.

    Source: docs/planner.md; the idea of a simulator that is the engine, and its accuracy, are there.
    """
    request = plan_request(
        Setup(made(model), optimizer, batch, micro_batches=micro_batches, hosts=hosts, share=expert_share),
        machine=machine_for(machine, folders),
        arguments=prepare_arguments,
        world_size=world_size,
        mesh=mesh,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        folders=folders,
    )
    trials = Trials(request, measures=measure)
    best = find_best(request, trials, progress) if isinstance(placement, str) else given(request, trials, placement)
    if trace is not None:
        trials.write_trace(best.trial, trace)
    return answer(request, trials, best)


def plan_here(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[], Any],
    arguments: Mapping[str, Any],
    *,
    machine: Machine,
    device: torch.device,
    grid: Grid,
) -> Plan:
    """Plan for a run that is about to be prepared on this machine, within the memory that is free on it.

    Arguments:
        model: the model; what it has on the device counts as free, since `prepare` moves it.
        optimizer: its optimizer.
        batch: makes one micro-batch. It is called on the user's side, and random numbers are afterwards as before.
        arguments: other arguments of `prepare`, without a placement.
        machine: this one.
        device: the one that computes.
        grid: the ranks.

    Raises:
        ConfigError: as for `plan`.
    """
    hosts = hosts_of(grid.world_size)
    device_bytes, host_bytes = _free_bytes(model, arguments, device, grid.world_size // hosts)
    devices = [] if device.type == "cpu" else [device]
    kind = "cuda" if device.type == "cpu" else device.type  # of no devices: torch wants to know it all the same
    with user_mode(), torch.random.fork_rng(devices, device_type=kind):
        return plan(
            model,
            optimizer,
            batch,
            machine=machine,
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            hosts=hosts,
            mesh=grid.sizes,
            **arguments,
        )


def _free_bytes(
    model: nn.Module, arguments: Mapping[str, Any], device: torch.device, ranks: int
) -> tuple[int | None, int | None]:
    """Return the bytes that a rank can have of its device, and all ranks of a host of its memory; `None` if unknown."""
    options = arguments.get("options") or Options()
    there = {id(each): each for each in [*model.parameters(), *model.buffers()] if each.device == device}
    own_bytes = sum(own_elements(each).nbytes for each in there.values())
    host, free = host_memory(options), free_device_memory(device)
    host_bytes = None if host is None else host.nbytes
    if shares_host_memory(device):
        return None, None if host_bytes is None else host_bytes + ranks * own_bytes
    limits = (None if free is None else free + own_bytes, options.device_bytes)
    return min((each for each in limits if each is not None), default=None), host_bytes


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
    lacking, rounding = best.lacking or Infeasible({}), f"{trial.choice.streamed:.0%} of what rests elsewhere"
    change = lacking.changes[0].words if lacking.changes else ""  # the smallest one
    lacks = tuple(Shortfall(tier, nbytes, change) for tier, nbytes in lacking.missing.items())
    # A device whose compiler does not know how may round otherwise than the host does.
    is_mixed = request.on_accelerator and trial.choice.streamed
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
        hosts=request.setup.hosts,
        mesh={} if grid == flat else grid.sizes,
        machine=machine.name,
        device=machine.device,
        machine_fingerprint=machine.fingerprint if machine.probed else {},
        model_fingerprint=model_fingerprint(request.setup.model),
        batch=_batch(request),
        tokens_per_s=program.tokens * grid.data_size / step_s if step_s else 0.0,
        limit_bytes=request.limits.bytes,
        kind_bytes=kind_bytes,
        waits_s=timing.waits_s,
        what_ifs=_what_ifs(request, trials, trial) if not lacks else (),
        why=_why(best),
        rounding_notes=(f"the device updates {rounding} (streamed_updates)",) if is_mixed else (),
        lacks=lacks,
    )


def _kind_bytes(trial: Trial) -> dict[str, dict[TierName, int]]:
    """Count the bytes of each kind at rest, and of activations at their peak."""
    budget, tier = trial.simulation.budget, trial.placement.activations or "device"
    found: dict[str, dict[TierName, int]] = {
        kind: {each: nbytes for each in TIERS if (nbytes := budget.on(Tier(each)).parts[kind])} for kind in KINDS
    }
    away = trial.peak_bytes.get(tier, 0) - budget.on(Tier(tier)).at_rest if tier != "device" else 0
    found["activations"] = {"device": trial.simulation.activation_bytes}
    if away > 0:
        found["activations"][tier] = away
    return found


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
    """List for each choice what the next best one would have cost."""
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
    """Write the percent on each tier, fastest tier first: "12% device, 88% cpu"."""
    there = {tier: f"{shares[Tier(tier)]:.0%}" for tier in TIERS if shares.get(Tier(tier), 0.0) > 0}
    return ", ".join(f"{share} {tier}" for tier, share in there.items() if share != "0%")


def _batch(request: PlanRequest) -> str:
    """Put names, dtypes and shapes of a micro-batch into words: "input_ids int64[4, 8]"."""
    leaves = []
    for path, leaf in tree_flatten_with_path(request.setup.batch())[0]:
        if isinstance(leaf, Tensor):
            name = ".".join(str(part.key) for part in path if isinstance(part, MappingKey))
            leaves.append(f"{name} {str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}".strip())
    count = request.setup.micro_batches
    return f"{count} of {', '.join(leaves)}" if count > 1 else ", ".join(leaves)


RESIDUALS = Path(__file__).with_name("residuals.json")
_LEAST_ROWS = 3
#: The part of normal ratios below the high end, and above the low end. For nine in ten between them 0.95 would do; past
#: ratios have longer tails, and with 0.97 nine in ten of them lie in the range of the others.
_INSIDE = 0.97


@dataclass(frozen=True)
class Residual:
    """A step that was predicted, then measured.

    Attributes:
        case: the model and where its state was.
        device: "cpu", "accelerator", or "simulated" for streams that sleep.
        on_files: whether state was in files.
        probed: whether the machine's rates were measured on it, and not taken from a data sheet.
        predicted_s: seconds of a step by the plan.
        measured_s: seconds of a step of the run.
    """

    case: str
    device: str
    on_files: bool
    probed: bool
    predicted_s: float
    measured_s: float


def stored() -> tuple[Residual, ...]:
    """Read the rows that come with the package."""
    return tuple(Residual(**row) for row in json.loads(RESIDUALS.read_text())["rows"])


def step_range(
    step_s: float, *, device: str, on_files: bool, probed: bool, rows: Iterable[Residual] | None = None
) -> tuple[float, float]:
    """Return the range that holds the measured step nine times in ten, by past steps of its class.

    The logarithms of measured / predicted are taken as normal, so that the next one lies within
    mean +- t * deviation * sqrt(1 + 1/n), with Student's t of n - 1: few rows give a wide range. A class of fewer than
    three rows takes those of the other storage too, then those of every device.

    Arguments:
        step_s: the predicted seconds of a step.
        device: the type of the device: "cpu", or an accelerator's.
        on_files: whether state is in files.
        probed: whether the machine's rates were measured on it.
        rows: past steps; `None` for those that come with the package.

    Returns:
        The low and the high end, which hold `step_s` too.

    Example:
        >>> low, high = step_range(1.0, device="cuda", on_files=False, probed=False)
        >>> low <= 1.0 < high
        True
    """
    kind = device if device in ("cpu", "simulated") else "accelerator"
    known = stored() if rows is None else tuple(rows)
    of_figures = [row for row in known if row.probed is probed and row.device != "simulated"]
    of_device = [row for row in known if row.probed is probed and row.device == kind]
    of_class = [row for row in of_device if row.on_files is on_files]
    chosen = next((each for each in (of_class, of_device, of_figures) if len(each) >= _LEAST_ROWS), known)
    low, high = _factors([log(row.measured_s / row.predicted_s) for row in chosen])
    return min(low, 1.0) * step_s, max(high, 1.0) * step_s


def _factors(logs: Sequence[float]) -> tuple[float, float]:
    """Return the factors between which the next measured / predicted lies."""
    free = len(logs) - 1
    z = NormalDist().inv_cdf(_INSIDE)
    # Student's t by its expansion in 1/free (Abramowitz and Stegun, 26.7.5): some percent too low at two.
    t = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * free**3)
    spread = t * stdev(logs) * sqrt(1 + 1 / len(logs))
    return exp(fmean(logs) - spread), exp(fmean(logs) + spread)
