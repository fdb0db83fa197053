"""From a blueprint to an engine.

1. Allocate the memory and files of every segment, and move the model's parameters into them, unit by unit.
2. Make the components of the engine, and connect them.
3. Hook the model, and return the optimizer for the training loop.
"""

import contextlib
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from penstock._native import Pool
from penstock.blueprint import Blueprint
from penstock.config import Tier, parse_tier
from penstock.engine.engine import Engine, leave_to_parent
from penstock.engine.forward_backward.casts import AttributePatches, InputCasts
from penstock.engine.forward_backward.gather import Gatherer, QuantizedGather
from penstock.engine.forward_backward.guards import ModelGuards, disable_original_optimizer
from penstock.engine.forward_backward.hooks import Hooks
from penstock.engine.forward_backward.saved_tensors import ActivationOffload
from penstock.engine.gradients.reduce import Reducer, ShardReduction
from penstock.engine.policy import Gradients, StepPolicy
from penstock.engine.state.access import StateAccess, as_state
from penstock.engine.state.gathered import GatheredBlocks
from penstock.engine.state.loading import StateLoader
from penstock.engine.state.moving import StateOffloader
from penstock.engine.state.saving import StateSaver
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
from penstock.memory_budget import Resources
from penstock.optimizer import ModelZeroGrad, Optimizer
from penstock.runtime.collectives import Collectives
from penstock.runtime.control_group import ControlGroup
from penstock.runtime.finalizers import in_child
from penstock.runtime.host_memory import return_free_memory
from penstock.runtime.streams import Streams
from penstock.runtime.system import update_cores
from penstock.tiers.staging import Staging
from penstock.tiers.tier import Store
from penstock.tiers.transfer import Transfers


def construct(
    blueprint: Blueprint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    ranks: Collectives,
    streams: Streams,
    control_group: ControlGroup,
    resources: Resources,
) -> tuple[Optimizer, Engine]:
    """Build a blueprint; return the optimizer that trains the model, and its engine. Collective.

    Arguments:
        blueprint: drawn for this model and optimizer, on these ranks and streams.
        model: the model. Its parameters move into the engine's storages.
        optimizer: the source of options and state; `None` for inference.
        ranks: all ranks that train the model. After a failure the caller closes them, and the streams.
        streams: where work runs beside compute.
        control_group: a group for agreements on saves alone, which a thread of its own uses.
        resources: memory, files and first values.
    """
    context = _take_memory(blueprint, model, optimizer, ranks, streams, resources)
    # Collective, as all that follows: ranks have agreed that no rank failed to allocate.
    align_buffers(model, ranks, streams.device)
    return_free_memory()  # the parameters' own memory, which segments have replaced
    engine = _make_engine(blueprint, context, control_group)
    connect(blueprint, engine)
    in_child(engine, leave_to_parent)
    prepared = Inference(engine) if optimizer is None else Optimizer(optimizer, engine)
    # `model.zero_grad()` clears the gradients of the engine, at once.
    engine.patches.plant(model, "zero_grad", ModelZeroGrad(prepared, engine))
    # The parameters are in their storages: a failure from here on leaves the model empty.
    try:
        if optimizer is not None:
            take_over_state(optimizer, engine.access)
    except BaseException:
        engine.abandon()
        raise
    if optimizer is not None:
        disable_original_optimizer(optimizer, engine.patches)
    return prepared, engine


def _make_pool(blueprint: Blueprint, streams: Streams, *, trains: bool) -> Pool:
    """Start the threads of the host's updates."""
    cores = update_cores(streams.device).with_threads(blueprint.request.options.update_threads if trains else 1)
    return Pool(cores.count, sorted(cores.cores or ()))


def _take_memory(
    blueprint: Blueprint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    ranks: Collectives,
    streams: Streams,
    resources: Resources,
) -> EngineContext:
    """Allocate the memory and files of every segment, and move the parameters there. A failure frees all of it."""
    request, trains = blueprint.request, optimizer is not None
    with (
        contextlib.ExitStack() as undo,
        contextlib.closing(resources.source(model, request, ranks, streams.device, undo)) as source,
    ):
        store = Store(resources.tiers(request, streams.device))
        undo.callback(store.close)  # undone last: parameters drop views of its memory before
        with ranks.control_group.together("prepare()"):  # else the other ranks would wait for this one's parameters
            reserved = store.reserve(blueprint.segments)
        pool = _make_pool(blueprint, streams, trains=trains)
        undo.callback(pool.close)
        with agreeing(request.weights, ranks):
            undo.callback(replace_meta(model))
        specs, plans = blueprint.specs, blueprint.units
        # They remember dtype and device, so they are made before the first one loses its memory.
        parameters = [make_parameters(plan.spec.parameters, plan.layout, ranks.divided, ranks.rank) for plan in plans]
        units: list[Unit] = []
        filled: list[Unit] = []  # units whose parameters have no memory of their own any more
        undo.callback(empty_parameters, filled)
        rank = ranks.shard_rank
        # Closed before ranks meet: a rank that fails tells those that wait for it in the next unit.
        with agreeing(request.weights, ranks), contextlib.closing(source.units(specs)) as coming:
            source.expect(specs, [reads_of(plan.layout, rank, replicated=plan.replicated) for plan in plans])
            for number, flats in coming:
                # Values may come in any order. Units are made in their own, in which allocations hand out memory.
                while len(units) <= number:
                    index = len(units)
                    units.append(make_unit(plans[index], index, parameters[index], rank, streams, reserved))
                fill_unit(units[number], flats)
                filled.append(units[number])  # from here on a failure leaves its parameters empty
                del flats  # before the values of the next unit come
        staging = Staging(store)
        staging.give_back(lambda: blueprint.staging)
        staging.take(reserved)
        undo.pop_all()  # nothing can fail any more
    return EngineContext(
        model=model,
        units=units,
        ranks=ranks,
        streams=streams,
        pool=pool,
        store=store,
        staging=staging,
        transfers=Transfers(streams, staging.transit, staging.landing),
        rule=blueprint.rule,
        gradient_scale=_make_gradient_scale(blueprint, ranks, trains=trains),
        param_groups=[] if optimizer is None else optimizer.param_groups,
    )


def _make_gradient_scale(blueprint: Blueprint, ranks: Collectives, *, trains: bool) -> GradientScale:
    """Make the scale of gradients, with a loss scale in fp16."""
    options = blueprint.request.options
    # Without an optimizer the graph has the loss scale of the model that is trained.
    scales_loss = blueprint.request.compute_dtype == torch.float16 and trains
    loss_scale = LossScale(options.initial_loss_scale, dynamic=options.dynamic_loss_scale) if scales_loss else None
    return GradientScale(1 / ranks.data_size if options.reduce_op == "mean" else 1.0, loss_scale)


def _make_engine(blueprint: Blueprint, context: EngineContext, save_group: ControlGroup) -> Engine:
    """Make the components of an engine that do not depend on its units."""
    request, options = blueprint.request, blueprint.request.options
    packing = QuantizedGather(context, options.gather_format)
    return Engine(
        context=context,
        gatherer=Gatherer(context, packing, live_budget=blueprint.live_bytes, prefetch_budget=options.prefetch_bytes),
        reducer=Reducer(
            context,
            ShardReduction(context, request.sum_dtype, options.reduce_format),
            accumulation_dtype=request.accumulation_dtype,
            agrees=request.overlap == "backward",
            may_hold_back=request.stage <= 1 and context.ranks.data_size > 1,
        ),
        activations=_make_activations(blueprint, context),
        skips=SkippedSteps(
            options.max_skipped_steps,
            at_once=options.on_nonfinite == "raise",
            loss_scale=context.gradient_scale.loss,
        ),
        save_group=save_group,
    )


def connect(blueprint: Blueprint, engine: Engine) -> None:
    """Make the components of an engine that depend on its units, and hook the model. Collective."""
    request, options, context = blueprint.request, blueprint.request.options, engine.context
    gatherer, reducer, activations = engine.gatherer, engine.reducer, engine.activations
    for unit in context.units:
        if unit.resident:
            gatherer.acquire(unit)  # may be collective: on every rank in one order (ordering rule 4)
    engine.updater, engine.stepper = updater, stepper = _make_updates(blueprint, context)
    computing = {spec.hooked_modules[0] for spec in blueprint.specs if spec.dtype == request.compute_dtype}
    casts = InputCasts(request.compute_dtype, options.cast_inputs, computing, context.streams.device)
    # Before the hooks: which of them are registered depends on `requires_grad`.
    frozen = [] if context.trains else [FrozenParameters(context.units)]
    early = stepper if request.overlap == "backward" else None
    engine.hooks = hooks = Hooks(context, gatherer, reducer, casts, early, activations)
    patches = AttributePatches()
    casts.let_products_mix(context.model, patches)
    idioms = ModelGuards(context.model, context.units, hooks, patches, engine.patches)
    engine.restore_model = partial(restore, [idioms, patches, *frozen])
    engine.access = access = StateAccess(context, gatherer, reducer, updater)
    engine.blocks = GatheredBlocks(context, gatherer, access, hooks.forward.watch_saved)
    engine.offloader = StateOffloader(context, blueprint.units, gatherer, reducer, plan_staging=blueprint.plan_staging)
    engine.saver = StateSaver(context, access, engine.save_group)
    engine.loader = StateLoader(context, access, gatherer, reducer, updater)
    engine.gradients = Gradients(context, hooks, reducer, stepper, access)
    in_time = request.overlap not in ("forward", "backward")
    engine.policy = StepPolicy(context, gatherer, hooks, stepper, engine.skips, request.max_grad_norm, waits=in_time)


def _make_updates(blueprint: Blueprint, context: EngineContext) -> tuple[Updater, Stepper]:
    """Make the updater of tiles, and the stepper, which decides on steps."""
    request, options, streams = blueprint.request, blueprint.request.options, context.streams
    trained = {p: blueprint.groups[p] for unit in context.units if unit.trained for p in unit.spec.parameters}
    updater = Updater(
        context,
        groups=trained,
        firsts=number_elements(p for p in context.model.parameters() if p in trained),
    )
    streamed = blueprint.storages.streamed
    stepper = Stepper(
        context,
        updater,
        sharing=UpdateSharing(options.streamed_updates, streams, updater.taken_at_once) if streamed else None,
        overlap=request.overlap,
    )
    return updater, stepper


def _make_activations(blueprint: Blueprint, context: EngineContext) -> ActivationOffload | None:
    """Make the component that offloads saved tensors; `None` where the request asks for none."""
    request = blueprint.request
    if request.placement.activations is None:
        return None
    tier = parse_tier(request.placement.activations, what="activations")
    if tier is Tier.DEVICE:
        return None
    folders = len(request.placement.nvme_folders())
    return ActivationOffload(context, tier, tile_bytes=request.options.tile_bytes, folders=folders)


def restore(attached: Iterable[ModelGuards | AttributePatches | FrozenParameters]) -> None:
    """Undo changes of the model beside parameters and hooks."""
    for part in attached:
        part.remove()


def empty_parameters(units: Iterable[Unit]) -> None:
    """Set parameters to empty tensors where their storages are freed. Released placeholders would read as NaN."""
    for unit in units:
        for parameter in unit.parameters:
            parameter.leave(None)


def number_elements(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, int]:
    """Number each parameter's first element among all parameters, independent of units, shards and tiles."""
    firsts, cursor = {}, 0
    for parameter in parameters:
        firsts[parameter] = cursor
        cursor += round_up(parameter.numel(), ALIGNMENT_NUMEL)
    return firsts


def take_over_state(optimizer: torch.optim.Optimizer, access: StateAccess) -> None:
    """Move the state of an optimizer that has made steps into the engine. Its own copy is dropped."""
    initial = {
        parameter: group["initial_accumulator_value"]
        for group in optimizer.param_groups
        if "initial_accumulator_value" in group
        for parameter in group["params"]
    }
    for parameter in access.steps():
        for name, value in optimizer.state.pop(parameter, {}).items():  # one at a time: never two copies of all state
            if isinstance(value, Tensor) and value.is_meta and parameter in initial:
                # Adagrad makes its state in its constructor: on the meta device without a value.
                access.set_state(parameter, name, torch.full(value.shape, initial[parameter], device="cpu"))
            elif value is not None:  # SGD's momentum before the first update
                access.set_state(parameter, name, as_state(value))
