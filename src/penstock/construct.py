"""A blueprint becomes an engine: memory is taken and filled, parts are made and connected, the model is hooked.

1. Take the memory and files of every section, and move the model's parameters into them, unit by unit.
2. Make the parts of the engine, and connect them.
3. Hook the model, and hand over what the training loop holds.
"""

import contextlib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock._native import Pool
from penstock.blueprint import Blueprint
from penstock.config import Tier, parse_tier
from penstock.engine.engine import Engine, leave_to_parent
from penstock.engine.forward_backward.casts import AttributePatches, InputCasts
from penstock.engine.forward_backward.gather import Gatherer, QuantizedGather
from penstock.engine.forward_backward.guards import ModelGuards, retire
from penstock.engine.forward_backward.hooks import Hooks
from penstock.engine.forward_backward.saved_tensors import ActivationOffload
from penstock.engine.gradients.reduce import Reducer, ShardReduction
from penstock.engine.policy import Gradients, StepPolicy
from penstock.engine.state.access import StateAccess, as_state
from penstock.engine.state.averages import Averages
from penstock.engine.state.gathered import GatheredBlocks
from penstock.engine.state.loading import StateLoader
from penstock.engine.state.moving import StateOffloader
from penstock.engine.state.saving import StateSaver
from penstock.engine.step.averaging import Averaging
from penstock.engine.step.context import EngineContext, GradientScale, LossScale, SkippedSteps
from penstock.engine.step.step import Stepper
from penstock.engine.step.update import Updater, UpdateSharing
from penstock.engine.unit.assemble import fill_unit, make_unit, reads_of
from penstock.engine.unit.dtensor import replace_meta
from penstock.engine.unit.first_values import agreeing, align_buffers
from penstock.engine.unit.parameter import make_parameters
from penstock.engine.unit.unit import FrozenParameters, Unit
from penstock.inference import Inference
from penstock.layout import ALIGNMENT_NUMEL, round_up
from penstock.memory_budget import Supply
from penstock.optimizer import ModelZeroGrad, Optimizer
from penstock.runtime.collectives import Collectives
from penstock.runtime.control_group import ControlGroup
from penstock.runtime.finalizers import in_child
from penstock.runtime.host_memory import return_free_memory
from penstock.runtime.streams import Streams
from penstock.runtime.system import update_cores
from penstock.tiers.staging import Staging
from penstock.tiers.tier import Store
from penstock.tiers.transfer import TileStreamer, Transfers


def construct(
    blueprint: Blueprint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    ranks: Collectives,
    streams: Streams,
    control_group: ControlGroup,
    supply: Supply,
) -> tuple[Optimizer, "Lasting"]:
    """Build what a blueprint says: the optimizer that trains the model, and what lasts as long as it. Collective.

    Arguments:
        blueprint: drawn for this model and optimizer, on these ranks and streams.
        model: gives its parameters up to the engine.
        optimizer: gives its options and its state; `None` where nothing trains the model.
        ranks: all that train the model together. What fails leaves them to the caller, as it does the streams.
        streams: where work runs beside compute.
        control_group: the ranks as they agree on saves, and on nothing else: a thread of its own talks there.
        supply: memory, files and first values.
    """
    memory = _take_memory(blueprint, model, ranks, streams, supply, trains=optimizer is not None)
    # Collective, as what follows: ranks have met over what may fail on one of them alone, such as taking memory.
    align_buffers(model, ranks, streams.device)
    return_free_memory()  # the parameters' own memory, which the cells have replaced
    param_groups = [] if optimizer is None else optimizer.param_groups
    context = _make_context(blueprint, model, param_groups, memory, ranks, streams)
    lasting = _make_lasting(blueprint, context, control_group)
    engine = connect(blueprint, context, lasting)
    in_child(engine, leave_to_parent)
    prepared = Inference(engine) if optimizer is None else Optimizer(optimizer, engine)
    # Loops that clear gradients through the model mean ours, and do it at once.
    engine.planted.plant(model, "zero_grad", ModelZeroGrad(prepared, engine))
    # The parameters are in their homes, so what fails now cannot leave the model as it was: it is left empty.
    try:
        if optimizer is not None:
            take_over_state(optimizer, engine.access)
    except BaseException:
        engine.abandon()
        raise
    if optimizer is not None:
        retire(optimizer, engine.planted)
    return prepared, lasting


class _TakenMemory(NamedTuple):
    """Everything that was taken, with the parameters in it."""

    store: Store
    staging: Staging
    units: Sequence[Unit]
    pool: Pool


def _make_pool(blueprint: Blueprint, streams: Streams, *, trains: bool) -> Pool:
    """Start the threads of the host's updates, which write first values before."""
    cores = update_cores(streams.device).with_threads(blueprint.request.options.update_threads if trains else 1)
    return Pool(cores.count, sorted(cores.cores or ()))


def _take_memory(
    blueprint: Blueprint, model: nn.Module, ranks: Collectives, streams: Streams, supply: Supply, *, trains: bool
) -> _TakenMemory:
    """Take the memory and files of every section, and move the parameters there. What fails gives all of it back."""
    request = blueprint.request
    with (
        contextlib.ExitStack() as undo,
        contextlib.closing(supply.source(model, request, ranks, streams.device, undo)) as source,
    ):
        store = Store(supply.tiers(request, streams.device))
        undo.callback(store.close)  # what is noted later is undone first: parameters let go of its memory before
        with ranks.control_group.together("prepare()"):  # the other ranks would wait for this one's parameters
            reserved = store.reserve(blueprint.sections)
        pool = _make_pool(blueprint, streams, trains=trains)
        undo.callback(pool.close)
        with agreeing(request.weights, ranks):
            undo.callback(replace_meta(model))
        specs, plans = blueprint.specs, blueprint.units
        # Noted before the first of them gives up its memory: what dtype and device each of them had.
        parameters = [make_parameters(plan.spec.parameters, plan.layout, ranks.divided, ranks.rank) for plan in plans]
        units: list[Unit] = []
        filled: list[Unit] = []  # whose parameters have given up their own memory
        undo.callback(empty_parameters, filled)
        rank = ranks.shard_rank
        # Closed before ranks meet: one that fails tells others who wait for it in the next unit.
        with agreeing(request.weights, ranks), contextlib.closing(source.units(specs)) as coming:
            source.expect(specs, [reads_of(plan.layout, rank, replicated=plan.replicated) for plan in plans])
            for number, flats in coming:
                # Units come as their values do, and are made in their own order: slabs hand out their memory in it.
                while len(units) <= number:
                    index = len(units)
                    units.append(make_unit(plans[index], index, parameters[index], rank, streams, reserved))
                fill_unit(units[number], flats, pool)
                filled.append(units[number])  # from here on what fails leaves its parameters empty
                del flats  # before the next unit's come
        staging = Staging(store)
        staging.give_back(lambda: blueprint.staging)
        staging.take(reserved)
        undo.pop_all()  # all of it is there, and stays
    return _TakenMemory(store, staging, units, pool)


def _make_context(
    blueprint: Blueprint,
    model: nn.Module,
    param_groups: Sequence[dict[str, Any]],
    memory: _TakenMemory,
    ranks: Collectives,
    streams: Streams,
) -> EngineContext:
    """Put together what every component of the engine works with."""
    request, options, trains = blueprint.request, blueprint.request.options, bool(param_groups)
    scales_loss = request.compute_dtype == torch.float16 and trains  # else a graph has the scale of who trains in it
    loss_scale = LossScale(options.initial_loss_scale, dynamic=options.dynamic_loss_scale) if scales_loss else None
    gradient_scale = GradientScale(1 / ranks.data_size if options.reduce_op == "mean" else 1.0, loss_scale)
    return EngineContext(
        model=model,
        units=memory.units,
        ranks=ranks,
        streams=streams,
        pool=memory.pool,
        store=memory.store,
        staging=memory.staging,
        movement=Transfers(streams, memory.staging.transit, memory.staging.landing),
        rule=blueprint.rule,
        gradient_scale=gradient_scale,
        param_groups=param_groups,
    )


class Lasting(NamedTuple):
    """The parts of an engine that do not know which units there are: they last where units change."""

    gatherer: Gatherer
    reducer: Reducer
    activations: ActivationOffload | None
    skips: SkippedSteps
    control_group: ControlGroup
    planted: AttributePatches


def _make_lasting(blueprint: Blueprint, context: EngineContext, control_group: ControlGroup) -> Lasting:
    """Make what gathers and reduces units, whichever they are."""
    request, options = blueprint.request, blueprint.request.options
    packing = QuantizedGather(context, options.gather_format)
    gatherer = Gatherer(context, packing, live_budget=blueprint.live_bytes, prefetch_budget=options.prefetch_bytes)
    reducer = Reducer(
        context,
        ShardReduction(context, request.reduce_dtype, options.reduce_format),
        accumulation_dtype=request.accumulation_dtype,
        agrees=request.overlap == "backward",
        may_hold_back=request.stage <= 1 and context.ranks.data_size > 1,
    )
    at_once = options.on_nonfinite == "raise"
    skips = SkippedSteps(options.max_skipped_steps, at_once=at_once, loss_scale=context.gradient_scale.loss)
    activations = activations_for(blueprint, context)
    return Lasting(gatherer, reducer, activations, skips, control_group, AttributePatches())


def connect(blueprint: Blueprint, context: EngineContext, lasting: Lasting) -> Engine:
    """Make the parts of the engine that know its units, each of those that it needs, and hook the model. Collective."""
    request, options, model = blueprint.request, blueprint.request.options, context.model
    gatherer, reducer = lasting.gatherer, lasting.reducer
    for unit in context.units:
        if unit.resident:
            gatherer.acquire(unit)  # on every rank, in this order: it may gather what other ranks have
    updater, stepper = _make_updates(blueprint, context)
    computing = {spec.anchors[0] for spec in blueprint.specs if spec.dtype == request.compute_dtype}
    casts = InputCasts(request.compute_dtype, options.cast_inputs, computing, context.streams.device)
    # Before the hooks, some of which are of trained parameters.
    frozen = [] if context.trains else [FrozenParameters(context.units)]
    hooks = Hooks(
        context, gatherer, reducer, casts, stepper if request.overlap == "backward" else None, lasting.activations
    )
    planted = AttributePatches()
    casts.let_products_mix(model, planted)
    idioms = ModelGuards(model, context.units, hooks, planted, lasting.planted)
    access = StateAccess(context, gatherer, reducer, updater)
    in_time = request.overlap not in ("forward", "backward")
    return Engine(
        context=context,
        gatherer=gatherer,
        reducer=reducer,
        hooks=hooks,
        updater=updater,
        stepper=stepper,
        skips=lasting.skips,
        access=access,
        blocks=GatheredBlocks(context, gatherer, access, hooks.forward.watch_saved),
        mover=StateOffloader(context, blueprint.units, gatherer, reducer, plan_staging=blueprint.plan_staging),
        saver=StateSaver(context, access, lasting.control_group),
        loader=StateLoader(context, access, gatherer, reducer, updater),
        averages=Averages(context, access, gatherer, hooks.backward, Averaging(context)),
        gradients=Gradients(context, hooks, reducer, stepper, access),
        policy=StepPolicy(context, gatherer, hooks, stepper, lasting.skips, request.max_grad_norm, waits=in_time),
        restore_model=partial(restore, [idioms, planted, *frozen]),
        planted=lasting.planted,
    )


def _make_updates(blueprint: Blueprint, context: EngineContext) -> tuple[Updater, Stepper]:
    """Make what updates tiles, and what decides on steps."""
    request, options, streams = blueprint.request, blueprint.request.options, context.streams
    trained = {p: blueprint.groups[p] for unit in context.units if unit.trained for p in unit.spec.parameters}
    updater = Updater(
        context,
        groups=trained,
        firsts=number_elements(p for p in context.model.parameters() if p in trained),
        pipelines={
            beside: TileStreamer(streams, ring, beside=beside) for beside, ring in context.staging.update.items()
        },
    )
    streamed = blueprint.homes.streamed
    stepper = Stepper(
        context,
        updater,
        sharing=UpdateSharing(options.streamed_updates, streams, updater.taken_at_once) if streamed else None,
        overlaps=request.overlap != "none",
        begins=request.overlap == "backward",
    )
    return updater, stepper


def activations_for(blueprint: Blueprint, context: EngineContext) -> ActivationOffload | None:
    """Make what takes saved tensors off the device, where the request asks for it."""
    request = blueprint.request
    if request.placement.activations is None:
        return None
    tier = parse_tier(request.placement.activations, what="activations")
    if tier is Tier.DEVICE:
        return None
    folders = len(request.placement.nvme_folders())
    return ActivationOffload(context, tier, tile_bytes=request.options.tile_bytes, folders=folders)


def restore(attached: Iterable[ModelGuards | AttributePatches | FrozenParameters]) -> None:
    """Undo what was set on the model beside its parameters and hooks, and on the optimizer that was given."""
    for part in attached:
        part.remove()


def empty_parameters(units: Iterable[Unit]) -> None:
    """Leave parameters empty whose values were in cells that are given up: placeholders would read as NaN for ever."""
    for unit in units:
        for parameter in unit.parameters:
            parameter.leave(None)


def number_elements(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, int]:
    """Number each parameter's first element among all of them, whatever unit, shard or tile it is in."""
    firsts, cursor = {}, 0
    for parameter in parameters:
        firsts[parameter] = cursor
        cursor += round_up(parameter.numel(), ALIGNMENT_NUMEL)
    return firsts


def take_over_state(optimizer: torch.optim.Optimizer, access: StateAccess) -> None:
    """Continue where an optimizer that has made steps left off; its own copy of the state is dropped."""
    initial = {
        parameter: group["initial_accumulator_value"]
        for group in optimizer.param_groups
        if "initial_accumulator_value" in group
        for parameter in group["params"]
    }
    for parameter in access.steps():
        for name, value in optimizer.state.pop(parameter, {}).items():  # one at a time: no second copy of all of it
            if isinstance(value, Tensor) and value.is_meta and parameter in initial:
                # Adagrad makes its state when it is made: of a model on the meta device, without a value.
                access.set_state(parameter, name, torch.full(value.shape, initial[parameter], device="cpu"))
            elif value is not None:  # SGD's momentum before the first update
                access.set_state(parameter, name, as_state(value))
