"""`prepare`: validates the request, plans the cells, and wires the parts of an engine. Only it knows them all.

1. Check everything that can be checked, before anything is allocated.
2. Find units and lay them out; plan every cell; hold the plan against the memory there is.
3. Allocate, and move the model's parameters into their cells, unit by unit.
4. Connect the parts and hook the model.
"""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from penstock import checks
from penstock._native import Pool
from penstock.accord import facts_of
from penstock.config import Options, Placement
from penstock.engine.engine import Engine, Origin
from penstock.engine.forked import leave_to_parent
from penstock.engine.passes.activations import Activations
from penstock.engine.passes.gather import Gatherer
from penstock.engine.passes.hooks import Hooks
from penstock.engine.passes.idioms import Idioms
from penstock.engine.passes.mixing import MixedProducts
from penstock.engine.passes.precision import InputCasts
from penstock.engine.passes.reduce import Reducer
from penstock.engine.passes.samples import BatchDim, check_batch_dim, check_blocks
from penstock.engine.passes.slices import SlicedBlock, sliced_blocks
from penstock.engine.state.access import Access, as_state
from penstock.engine.state.loading import Loader
from penstock.engine.state.moving import Mover
from penstock.engine.state.saving import Saver
from penstock.engine.units.alike import settle_buffers
from penstock.engine.units.assemble import Homes, UnitPlan, plan_units
from penstock.engine.units.discover import UnitPolicy, UnitSpec, find_units
from penstock.engine.units.membership import Membership
from penstock.engine.units.originals import replace_meta
from penstock.engine.units.source import INIT, Weights, agreeing, open_source
from penstock.engine.units.unit import Unit
from penstock.engine.updates.rig import Rig
from penstock.engine.updates.scale import GradientScale, LossScale
from penstock.engine.updates.sharing import Sharing
from penstock.engine.updates.skips import Skips
from penstock.engine.updates.step import Stepper
from penstock.engine.updates.update import Updater
from penstock.errors import CheckpointError, ConfigError
from penstock.kinds import COMPUTE_DTYPES, Overlap, Precision, Tier, parse_tier
from penstock.layout import ALIGNMENT_NUMEL, round_up
from penstock.machine.accelerator import streams_for
from penstock.machine.arena import return_free_memory
from penstock.machine.border import crossing
from penstock.machine.collectives import Ranks
from penstock.machine.council import DEFAULT_TIMEOUT_S, Facts
from penstock.machine.devices import check_apart, device_for, make_current, place_of
from penstock.machine.lifetime import in_child
from penstock.machine.streams import Streams
from penstock.machine.threads import update_cores
from penstock.optimizer import ModelZeroGrad, Optimizer
from penstock.rules.rule import Rule
from penstock.rules.select import rule_for
from penstock.rules.storage import StateFormat
from penstock.tiers.device import DeviceTier
from penstock.tiers.home import SectionPlan
from penstock.tiers.host import HostTier
from penstock.tiers.nvme import NvmeTier
from penstock.tiers.pipeline import Pipeline
from penstock.tiers.staging import Sections, Staging, StagingPlan
from penstock.tiers.store import Store, bytes_on
from penstock.tiers.transit import Transit

#: Set in the environment, the same as `Options(debug_release=True)` for every `prepare`.
DEBUG_RELEASE = "PENSTOCK_DEBUG_RELEASE"
MASTER_DTYPES = {"remainder": torch.int16, "fp32": torch.float32, "none": None}


@crossing
def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    stage: Literal[0, 1, 2, 3] = 3,
    placement: Placement | Literal["auto"] | None = None,
    precision: Precision = "bf16",
    units: UnitPolicy = None,
    mesh: DeviceMesh | None = None,
    max_grad_norm: float | None = None,
    grad_accumulation_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    overlap: Overlap = "auto",
    master: Literal["remainder", "fp32", "none"] = "remainder",
    unit_micro_batches: int = 1,
    batch_dim: BatchDim = 0,
    options: Options = Options(),  # noqa: B008 - a frozen value
    weights: Weights | None = None,
) -> Optimizer:
    """Shard and place the training state of a model, and return the optimizer that trains it.

    The model stays the same object; its parameters become views of buffers that are gathered for each use. Its first
    rank's parameters are taken over by every rank. Floating-point inputs of the model and of its units are cast to
    the compute dtype (`Options(cast_inputs=)`); buffers are moved to the device, are the first rank's too, and keep
    their dtype, as batch norms do as a whole: fp32.

    Arguments:
        model: any module with values, or on the meta device with `weights`. Its floating-point parameters take the
            compute dtype.
        optimizer: a stock torch optimizer over some or all of the model's parameters; state it has is taken over.
        stage: what is sharded over ranks: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters
            (Rajbhandari et al., "ZeRO", 2020).
        placement: home tier of each kind of state; `None` keeps everything on the device.
        precision: compute dtype. bf16 and fp16 keep an fp32 master of every trained parameter; fp16 scales the loss
            (`Options(initial_loss_scale=, dynamic_loss_scale=)`), so its backward is `optimizer.backward(loss)`.
        units: classes of the modules that are gathered together, or a predicate on (name, module); `None` takes each
            repeated block, and the rest of the model as one.
        mesh: a `DeviceMesh` of one dimension, or of two (replicate, shard) for hybrid sharding; `None` takes the
            default process group, or a single process. Its type of device is taken; which one of them, and which
            without a mesh: the one that the model lies on, else the one that the process group is bound to
            (`init_process_group(device_id=)`), else torch's current one if that is not the first, else number
            `LOCAL_RANK`. It becomes torch's current device.
        max_grad_norm: clip the gradient's norm over all ranks; `None` does not clip.
        grad_accumulation_dtype: dtype in which micro-batches are summed; `None` for `reduce_dtype`.
        reduce_dtype: dtype in which gradients are summed over ranks; `None` for the compute dtype.
        overlap: when updates run. `"none"`: inside `step`. `"forward"`: `step` returns at once, and the forward of each
            unit waits for that unit's update alone; parameters read NaN until then. `"auto"`: the same for parameters
            that are gathered for their use; those that rest where compute reads them are up to date when `step`
            returns. `"backward"`: the host updates a unit as soon as its gradient is reduced, and `step` ends with what
            is left; there can be no clipping, all micro-batches but the last must run under `no_sync`, and a gradient
            that is not finite, or a backward that fails, after updates have begun ends the optimizer. The result is
            the same, bit for bit.
        master: form of the fp32 master of bf16 parameters: the 16 bits that the parameter lacks, a full copy, or none:
            then every update rounds the parameter, as `Options(rounding=...)` says. fp16 always has a full copy.
        unit_micro_batches: each block is gathered once and runs this many slices of the batch, in forward and in
            backward, which saves the block's input alone and computes its forward again: parameters and gradients
            travel as for one large batch, activations are those of a slice.
        batch_dim: for `unit_micro_batches`, which dimension of the blocks' inputs is the batch; 1 for blocks that have
            the sequence first. A mapping says it for single arguments of the blocks, by name, `None` for those that
            every slice gets whole; others then have the batch in the dimension of the block's first argument.
        options: sizes and policies.
        weights: the parameters' first values, where the model does not have them (or has others): a folder or a file of
            safetensors, tensors by name, a function from a name to its tensor, or `"init"` for the modules' own
            initialisation. The model may be on the meta device: no rank ever holds more than one unit and its shards.

    Returns:
        A `penstock.Optimizer`, which is a `torch.optim.Optimizer` over the same param groups.

    Raises:
        ConfigError: the request cannot be met, or `weights` do not fit; nothing was allocated.
        CheckpointError: a file of weights cannot be read.
        MemoryBudgetError: a budget, or the host, is too small; nothing was allocated.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = prepare(model, torch.optim.AdamW(model.parameters()), precision="fp32")
        >>> optimizer.backward(model(torch.ones(1, 4)).sum())
        >>> optimizer.step().skipped
        False
    """
    checks.check_ranks(mesh)
    timeout_s = getattr(options, "timeout_s", DEFAULT_TIMEOUT_S)  # they are not checked yet
    ranks = Ranks.from_mesh(mesh, sharded=stage != 0, timeout_s=timeout_s)
    try:
        with ranks.council.together("prepare()", ConfigError) as facts:
            placement = checks.check_features(stage, placement, precision, overlap, master, unit_micro_batches, options)
            check_batch_dim(batch_dim)
            checks.check_dtypes(reduce_dtype, grad_accumulation_dtype)
            checks.check_clip(max_grad_norm, overlap)
            checks.check_loss_scale(precision, overlap, options)
            checks.check_model(model, has_values=weights is None)
            choice = device_for(model.parameters(), mesh)
            place = place_of(choice)
            facts["device"] = choice.device.type
        check_apart(ranks.council.collect(place), ranks.council.members)
        make_current(choice.device)
    except BaseException:
        ranks.close()
        raise
    device = choice.device
    compute_dtype = COMPUTE_DTYPES[precision]
    reduced = reduce_dtype or compute_dtype
    request = Request(
        stage=stage,
        placement=placement,
        compute_dtype=compute_dtype,
        reduce_dtype=reduced,
        accumulation_dtype=grad_accumulation_dtype or reduced,
        master=master,
        units=units,
        max_grad_norm=max_grad_norm,
        overlap=overlap,
        options=options,
        weights=weights,
        unit_micro_batches=unit_micro_batches,
        batch_dim=batch_dim,
    )
    streams = streams_for(device, debug_release=options.debug_release or bool(os.environ.get(DEBUG_RELEASE)))
    try:
        return build(model, optimizer, request, ranks, streams)
    except BaseException:
        ranks.close()
        streams.close()  # they have threads of their own
        raise


@dataclass(frozen=True, kw_only=True)
class Request:
    """A checked request."""

    stage: int
    placement: Placement
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    accumulation_dtype: torch.dtype
    master: Literal["remainder", "fp32", "none"]
    units: UnitPolicy
    max_grad_norm: float | None
    overlap: Overlap
    options: Options
    weights: Weights | None = None
    unit_micro_batches: int = 1
    batch_dim: BatchDim = 0

    def facts(self, model: nn.Module, layout: "_Layout", ranks: Ranks) -> Facts:
        """What has to be the same on every rank."""
        weights = self.weights if self.weights is None or self.weights == INIT else "given"
        return facts_of(
            model,
            layout.specs,
            layout.groups,
            placement=self.placement,
            options=self.options,
            mesh=f"{ranks.shards} shards, {ranks.replicas} copies",
            stage=self.stage,
            compute_dtype=self.compute_dtype,
            reduce_dtype=self.reduce_dtype,
            grad_accumulation_dtype=self.accumulation_dtype,
            master=self.master,
            max_grad_norm=self.max_grad_norm,
            overlap=self.overlap,
            unit_micro_batches=self.unit_micro_batches,
            batch_dim=str(self.batch_dim),
            weights=weights,
            optimizer=layout.rule.name,
        )

    def homes(self, rule: Rule, streams: Streams) -> Homes:
        """Where each kind lives."""
        low_precision = self.compute_dtype != torch.float32
        master: Literal["remainder", "fp32", "none"] = "fp32" if self.compute_dtype == torch.float16 else self.master
        return Homes(
            params=self.placement.home("params"),
            grads=self.placement.home("grads"),
            optimizer=self.placement.home("optimizer"),
            sharded_params=self.stage == 3,
            grad_dtype=self.accumulation_dtype,
            master_dtype=MASTER_DTYPES[master] if low_precision else None,
            states=rule.states,
            tile_numel=self.options.tile_bytes // self.compute_dtype.itemsize // ALIGNMENT_NUMEL * ALIGNMENT_NUMEL,
            streamed=self.options.streamed_updates != 0 and not streams.aliases_host,
        )


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """What phase 2 finds."""

    rule: Rule
    groups: Mapping[nn.Parameter, int]
    specs: Sequence[UnitSpec]
    blocks: Mapping[nn.Module, str]  # modules that are units, but for the model itself, by name
    plans: Sequence[UnitPlan]
    live_bytes: int
    streamed: bool
    plan_staging: Callable[[Sequence[Sections]], StagingPlan]
    staging_plan: StagingPlan
    sections: Sequence[SectionPlan]


def _lay_out(
    model: nn.Module, optimizer: torch.optim.Optimizer, request: Request, ranks: Ranks, streams: Streams
) -> _Layout:
    """Phase 2, on this rank alone."""
    options = request.options
    rule = rule_for(optimizer, StateFormat(options.state_dtype, options.rounding, options.rounding_seed))
    groups = {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    checks.check_ownership(model, groups)
    checks.check_no_gradients(model)
    specs = find_units(
        model,
        request.units,
        owned=groups.keys(),
        compute_dtype=request.compute_dtype,
        persistent_bytes=options.persistent_bytes,
    )
    blocks = {spec.anchors[0]: spec.name for spec in specs if spec.anchors[0] is not model}
    if request.unit_micro_batches > 1:
        check_blocks(blocks, request.batch_dim)
    homes = request.homes(rule, streams)
    plans = plan_units(specs, homes, ranks, streams)
    live_bytes = checks.check_live_bytes([(plan.spec, plan.full_bytes) for plan in plans], options)
    plan_staging = partial(StagingPlan, reduce_dtype=request.reduce_dtype, streams=streams, streamed=homes.streamed)
    staging_plan = plan_staging([plan.shard_sections for plan in plans])
    sections = [*(section for plan in plans for section in plan.all_sections()), *staging_plan.sections()]
    rings = bytes_on(list(staging_plan.sections()), Tier.CPU)
    copied = bytes_on([section for section in sections if section.copied], Tier.CPU)
    checks.check_host_memory(bytes_on(sections, Tier.CPU), copied, rings, streams.device, options)
    return _Layout(
        rule=rule,
        groups=groups,
        specs=specs,
        blocks=blocks,
        plans=plans,
        live_bytes=live_bytes,
        streamed=homes.streamed,
        plan_staging=plan_staging,
        staging_plan=staging_plan,
        sections=sections,
    )


@crossing
def build(
    model: nn.Module, optimizer: torch.optim.Optimizer, request: Request, ranks: Ranks, streams: Streams
) -> Optimizer:
    """Phases 2 to 4, for given ranks and streams."""
    options = request.options
    with ranks.council.together("prepare()", ConfigError) as facts:  # before any other collective
        layout = _lay_out(model, optimizer, request, ranks, streams)
        if ranks.world_size > 1:
            facts.update(request.facts(model, layout, ranks))
    rule, groups, specs, plans = layout.rule, layout.groups, layout.specs, layout.plans
    warn_of_unowned(model, groups)
    # Now, when all ranks are here and nothing has moved: one that dies later leaves none waiting for a group.
    of_saves = ranks.council.another(error=CheckpointError, advice="Checkpoints that were whole before still are. ")

    with (
        contextlib.ExitStack() as undo,
        contextlib.closing(open_source(model, request.weights, ranks, streams.device, undo)) as source,
    ):
        folders = request.placement.nvme_folders()
        store = Store(
            [
                DeviceTier(streams.device),
                HostTier(streams.device, options.pinned_bytes, tile_bytes=options.tile_bytes),
                NvmeTier(folders, queue_depth=options.io_queue_depth, checksums=options.checksums),
            ]
        )
        undo.callback(store.close)
        with ranks.council.together("prepare()"):  # the other ranks would wait for this one's parameters
            reserved = store.reserve(layout.sections)
        with agreeing(request.weights, ranks):
            undo.callback(replace_meta(model))
        origins = {p: Origin(p.dtype, p.device) for spec in specs for p in spec.parameters}
        units: list[Unit] = []
        filled: list[Unit] = []  # whose parameters have given up their own memory
        undo.callback(empty_parameters, filled, origins)
        with agreeing(request.weights, ranks):
            for number, flats in source.units(specs):
                while len(units) <= number:
                    units.append(plans[len(units)].build(len(units), reserved))
                plans[number].fill(units[number], flats)
                filled.append(units[number])
                del flats  # before the next unit's come
        staging = Staging(store)
        staging.replan(layout.staging_plan)
        staging.take(reserved)
        undo.pop_all()
    settle_buffers(model, ranks, streams.device)
    return_free_memory()  # the parameters' own memory, which the cells have replaced

    cores = update_cores(streams.device).with_threads(options.update_threads)
    pool = Pool(cores.count, sorted(cores.cores or ()))
    scales_loss = request.compute_dtype == torch.float16
    loss_scale = LossScale(options.initial_loss_scale, dynamic=options.dynamic_loss_scale) if scales_loss else None
    gradient_scale = GradientScale(1 / ranks.world_size if options.reduce_op == "mean" else 1.0, loss_scale)
    trained = {p: groups[p] for unit in units if unit.trained for p in unit.spec.parameters}
    rig = Rig(model, units, ranks, streams, pool, rule, gradient_scale, optimizer.param_groups)
    transit = Transit(streams, staging.transit, staging.landing)
    gatherer = Gatherer(rig, transit, live_bytes=layout.live_bytes, prefetch_bytes=options.prefetch_bytes)
    for unit in units:
        if unit.resident:
            gatherer.acquire(unit)
    begins = request.overlap == "backward"
    reducer = Reducer(
        rig,
        transit,
        staging.landing,
        reduce_dtype=request.reduce_dtype,
        accumulation_dtype=request.accumulation_dtype,
        collects_fp32=request.unit_micro_batches > 1,
        agrees=begins,
        may_hold_back=request.stage <= 1 and ranks.world_size > 1,
    )
    updater = Updater(
        rig,
        groups=trained,
        firsts=number_elements(p for p in model.parameters() if p in trained),
        pipelines={beside: Pipeline(streams, ring, beside=beside) for beside, ring in staging.update.items()},
        transit=transit,
    )
    stepper = Stepper(
        rig,
        updater,
        sharing=Sharing(options.streamed_updates, streams, updater.taken_at_once) if layout.streamed else None,
        overlaps=request.overlap != "none",
        begins=begins,
    )
    computing = {spec.anchors[0] for spec in specs if spec.dtype == request.compute_dtype}
    casts = InputCasts(request.compute_dtype, options.cast_inputs, computing, streams.device)
    membership = Membership(model, units)
    activations = activations_for(request, streams, store, units)
    hooks = Hooks(rig, gatherer, reducer, casts, membership, stepper if begins else None, activations)
    mixing = casts.where_products_mix(model)
    sliced = sliced_blocks(layout.blocks, request.unit_micro_batches, request.batch_dim)
    mover = Mover(rig, plans, store, gatherer, reducer, staging, in_use=hooks.in_use, plan_staging=layout.plan_staging)
    access = Access(rig, gatherer, reducer, updater, hooks.watch_saved)
    saver = Saver(rig, access, of_saves)
    loader = Loader(rig, access, gatherer, reducer, updater)
    engine = Engine(
        rig=rig,
        store=store,
        gatherer=gatherer,
        reducer=reducer,
        stepper=stepper,
        updater=updater,
        hooks=hooks,
        membership=membership,
        access=access,
        skips=Skips(options.max_skipped_steps, at_once=options.on_nonfinite == "raise", loss_scale=loss_scale),
        mover=mover,
        saver=saver,
        loader=loader,
        overlap=request.overlap,
        options=options,
        origins=origins,
        frozen={p for p in origins if not p.requires_grad},
        restore_model=partial(restore, model, [*sliced, *mixing, Idioms(model, units)]),
    )
    in_child(engine, leave_to_parent)
    prepared = Optimizer(optimizer, engine, request.max_grad_norm)
    # Loops that clear gradients through the model mean ours: parameters have none of their own.
    model.zero_grad = ModelZeroGrad(prepared, engine)  # type: ignore[method-assign]
    try:
        take_over_state(optimizer, access, trained)
    except BaseException:
        engine.abandon()
        raise
    return prepared


def activations_for(request: Request, streams: Streams, store: Store, units: Sequence[Unit]) -> Activations | None:
    """What takes saved tensors off the device, where the request asks for it."""
    if request.placement.activations is None:
        return None
    tier = parse_tier(request.placement.activations, what="activations")
    if tier is Tier.DEVICE:
        return None
    return Activations(
        streams,
        store,
        tier,
        tile_bytes=request.options.tile_bytes,
        folders=len(request.placement.nvme_folders()),
        kept=lambda: [unit.full for unit in units],
    )


def restore(model: nn.Module, attached: Iterable[SlicedBlock | MixedProducts | Idioms]) -> None:
    """Undo what was set on the model beside its parameters and hooks."""
    model.__dict__.pop("zero_grad", None)
    for part in attached:
        part.remove()


def empty_parameters(units: Iterable[Unit], origins: Mapping[nn.Parameter, Origin]) -> None:
    """What was moved into cells that are given up is gone. Empty parameters say so, where placeholders would be NaN."""
    for unit in units:
        for parameter in unit.spec.parameters:
            parameter.data = origins[parameter].empty()


def warn_of_unowned(model: nn.Module, owned: Mapping[nn.Parameter, int]) -> None:
    """One warning that names the trainable parameters which the optimizer does not own."""
    names = checks.unowned(model, owned)
    if names:
        warnings.warn(
            f"The optimizer does not own {len(names)} trainable parameters: {', '.join(names)}. They are kept, never "
            "updated, and their gradients are dropped.",
            stacklevel=6,
        )


def number_elements(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, int]:
    """The number of each parameter's first element among all of them, whatever unit, shard or tile it is in."""
    firsts, cursor = {}, 0
    for parameter in parameters:
        firsts[parameter] = cursor
        cursor += round_up(parameter.numel(), ALIGNMENT_NUMEL)
    return firsts


def take_over_state(optimizer: torch.optim.Optimizer, access: Access, trained: Mapping[nn.Parameter, int]) -> None:
    """Continue where an optimizer that has made steps left off; its own copy of the state is dropped."""
    for parameter in trained:
        for name, value in optimizer.state.pop(parameter, {}).items():
            if value is not None:  # SGD's momentum before the first update
                access.set_state(parameter, name, as_state(value))
