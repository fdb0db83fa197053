"""What a step consists of, as the bound wants to know it: counted in a simulation with all state on the device."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import ceil

from penstock.config import GRAD, MASTER, OPTIMIZER, Tier
from penstock.planner.candidates import Choice
from penstock.planner.cost import machine_costs
from penstock.planner.machine import Machine
from penstock.planner.simulation.engine_internals import (
    LEAST_FILE_SLOTS,
    RING_BYTES,
    ROOT,
    Blueprint,
    Grid,
    Reach,
    UnitPlan,
    gradient_bytes,
    packed_bytes,
)
from penstock.planner.simulation.program import OF_MODEL, Collective, Program, WorkKind
from penstock.planner.simulation.simulate import BACKWARD, FORWARD, Simulation
from penstock.planner.workload import Load


def load_of(simulation: Simulation, choice: Choice, machine: Machine, grid: Grid, *, micro_batches: int) -> Load:
    """Count what a step consists of, wherever the state is.

    Arguments:
        simulation: of this choice, with all state on the device.
        choice: what is not a matter of degree.
        machine: says how long compute takes.
        grid: the ranks.
        micro_batches: how many a step has.
    """
    program, blueprint = simulation.program, simulation.blueprint
    trained = [plan for plan in blueprint.units if plan.spec.trainable]
    frozen = [plan for plan in blueprint.units if not plan.spec.trainable]
    own, grads = _own(trained), _kind(trained, GRAD)
    optimizer = _kind(trained, MASTER) + _kind(trained, OPTIMIZER)
    # Of several micro-batches only the first one gathers what stays gathered between uses.
    gathered = _own(plan for plan in blueprint.units if micro_batches == 1 or not plan.spec.persistent)
    # What is around all others stays from forward through backward. Where ranks have copies, each brings its own whole:
    # but for the first forward, which has from the others what they have updated.
    again = sum(cell.nbytes for plan in blueprint.units if not _stays(plan) for cell in _param_cells(plan))
    passes = {phase: simulation.phases[phase] for phase in (FORWARD, BACKWARD)}
    seconds = {phase: _seconds(program, items, machine) / len(items) for phase, items in passes.items()}
    held_back = blueprint.request.stage <= 1 and grid.world_size > 1
    return Load(
        params_bytes=sum(cell.nbytes for plan in trained for cell in _param_cells(plan)),
        frozen_bytes=sum(cell.nbytes for plan in frozen for cell in _param_cells(plan)),
        own_params_bytes=own,
        grads_bytes=grads,
        optimizer_bytes=optimizer,
        update_bytes=2 * own + grads + 2 * optimizer,
        reduced_bytes=sum(plan.shard_numel for plan in trained) * blueprint.request.sum_dtype.itemsize,
        reductions=1 if held_back else micro_batches,
        micro_batches=micro_batches,
        forward_s=seconds[FORWARD],
        backward_s=seconds[BACKWARD],
        forward_gathered_bytes=gathered,
        backward_gathered_bytes=again,
        ahead_bytes=min(gathered, blueprint.request.options.prefetch_bytes + _largest(blueprint.units)),
        kept_bytes=_ring_bytes(blueprint.request.options.tile_bytes, own, own + grads + optimizer),
        activations=choice.activations,
        activation_peak_bytes={"device": _more(simulation, Tier.DEVICE), "cpu": _more(simulation, Tier.CPU)},
        passing_bytes={
            "device": _passing(blueprint),
            "cpu": blueprint.request.options.tile_bytes * _PASSING_TILES,
        },
        forward_collectives=_collectives(program, passes[FORWARD][-1:]),
        backward_collectives=_collectives(program, passes[BACKWARD][-1:]),
        streamed=choice.streamed,
        rule=program.rule,
        ranks=grid.shards,
        copies=grid.replicas if grid.shards > 1 else 1,
        ranks_of_host=program.world_size // program.hosts if program.hosts else 0,
        sharded=frozenset(_sharded(blueprint.request.stage)),
    )


# How many tiles buffers beside rings of files have in all.
_PASSING_TILES = 64


def _ring_bytes(tile_bytes: int, params_bytes: int, state_bytes: int) -> int:
    """Count what the two rings of files hold at most: one of updates, and one of gathers and gradients."""
    record = ceil(tile_bytes * state_bytes / max(params_bytes, 1))
    return 2 * max(RING_BYTES, LEAST_FILE_SLOTS * record)


def _stays(plan: UnitPlan) -> bool:
    """Whether a unit is still gathered when backward comes to it."""
    return plan.spec.persistent or plan.spec.name.split(".")[0] == ROOT


def _own(plans: Iterable[UnitPlan]) -> int:
    """Count the bytes of this rank's shard of parameters."""
    return sum(plan.shard_numel * plan.spec.dtype.itemsize for plan in plans)


def _kind(plans: Iterable[UnitPlan], storage: str) -> int:
    return sum(cell.nbytes for plan in plans for segment in plan.segments.get(storage, ()) for cell in segment.cells)


def _param_cells(plan: UnitPlan):  # type: ignore[no-untyped-def] # of cells
    return [cell for segment in plan.segments["param"] for cell in segment.cells]


def _largest(plans: Sequence[UnitPlan]) -> int:
    return max((plan.full_bytes for plan in plans), default=0)


def _passing(blueprint: Blueprint) -> int:
    """Count the device bytes of buffers that there are where state rests elsewhere."""
    full = [plan.full_bytes for plan in blueprint.units]
    gathered = min(sum(full), max(full, default=0) + blueprint.request.options.prefetch_bytes)
    gathered += packed_bytes(blueprint.units, blueprint.request.options.gather_format)
    return gathered + gradient_bytes(replace(blueprint, reach=Reach(aliases_host=False, reads_in_place=False)))


def _more(simulation: Simulation, tier: Tier) -> int:
    """Count what was on a tier beside what rests there: activations."""
    return max(0, simulation.program.peak_bytes.get(tier.value, 0) - simulation.budget.on(tier).at_rest)


def _seconds(program: Program, passes: Sequence[range], machine: Machine) -> float:
    """Sum up what compute takes in some passes."""
    costs = machine_costs(machine)
    known: dict[int, float] = {}
    total = 0.0
    for items in passes:
        for item in (program.items[number] for number in items):
            if item.kind is WorkKind.COMPUTE:
                if item.index not in known:
                    known[item.index] = costs.segment(program, item.index).seconds
                total += known[item.index]
            elif item.kind is WorkKind.SUBMIT and program.jobs[item.index].stream == OF_MODEL:
                # Compute waits for it at once. On a host it takes none of the cores, which the bound counts too.
                job = program.jobs[item.index]
                total += costs.job(job, program).seconds if program.back_end == "accelerator" else 0.0
    return total


def _collectives(program: Program, passes: Sequence[range]) -> tuple[Collective, ...]:
    """List the collectives of some passes."""
    return tuple(
        collective
        for items in passes
        for item in (program.items[number] for number in items)
        if item.kind is WorkKind.SUBMIT and program.jobs[item.index].stream != OF_MODEL
        for collective in program.jobs[item.index].collectives
        if collective.ranks > 1
    )


def _sharded(stage: int) -> set[str]:
    """Name the kinds that ZeRO shards in a stage."""
    kinds = {1: ("optimizer",), 2: ("optimizer", "grads"), 3: ("optimizer", "grads", "params")}
    return set(kinds.get(stage, ()))
