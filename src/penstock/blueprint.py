"""The plan of everything that `prepare` will allocate, and the facts that ranks compare before."""

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from penstock import checks
from penstock.config import UNSAID, Options, Overlap, Placement, Precision
from penstock.engine.unit.first_values import INIT, Weights
from penstock.engine.unit.partition import UnitPolicy, UnitSpec, find_units
from penstock.engine.unit.plan import StoragePlan, UnitPlan, plan_units
from penstock.layout import ALIGNMENT_NUMEL
from penstock.optim import MuonAdamW
from penstock.rules.formats import COMPUTE_DTYPES, StateFormat
from penstock.rules.rule import Rule
from penstock.rules.select import NO_RULE, rule_for
from penstock.runtime.control_group import RankChecks
from penstock.runtime.topology import Grid, Reach
from penstock.tiers.staging import Sections, StagingPlan
from penstock.tiers.storage import SegmentPlan

# ----------------------------------------------------------------------------------------------------------------------
# The facts that ranks compare before `prepare` moves a byte. Ranks that differ would wait for each other for ever.
# ----------------------------------------------------------------------------------------------------------------------


#: Options that change only local work of a rank, and no collective.
_OWN = {
    "device_bytes",
    "host_bytes",
    "pinned_bytes",
    "update_threads",
    "streamed_updates",
    "whole_updates",
    "io_queue_depth",
    "checksums",
    "timeout_s",
}


def _tensors(model: nn.Module, groups: Mapping[nn.Parameter, int]) -> Iterator[tuple[str, str]]:
    """Describe each parameter and each buffer of a model."""
    for name, parameter in model.named_parameters():
        group = groups.get(parameter)
        trained = f"in param group {group}" if group is not None else "in no param group"
        frozen = "" if parameter.requires_grad else ", frozen"
        yield f"parameter '{name}'", f"{_shape(parameter)}, {trained}{frozen}"
    for name, buffer in model.named_buffers():
        yield f"buffer '{name}'", _shape(buffer)


def _shape(tensor: torch.Tensor) -> str:
    """Describe the dtype and the shape of a tensor."""
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _plain(value: Any) -> Any:
    """Convert a setting to JSON types. Mappings are sorted, since the order of tiers has no meaning."""
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in sorted(value, key=str)}
    return value if isinstance(value, str | int | float | bool | None) else str(value)


# ----------------------------------------------------------------------------------------------------------------------
# What `prepare` will allocate, and where: a value, drawn before any memory is taken.
#
# 1. Check the optimizer, the model and the request.
# 2. Find units and lay them out; plan the storages of each, and the buffers between them.
# 3. Compare that with the budgets, and with the available memory.
# ----------------------------------------------------------------------------------------------------------------------


#: Set in the environment, the same as `Options(debug_release=True)` for every `prepare`.
DEBUG_RELEASE = "PENSTOCK_DEBUG_RELEASE"
MASTER_DTYPES = {"remainder": torch.int16, "fp32": torch.float32, "none": None}


@dataclass(frozen=True, kw_only=True)
class PrepareRequest:
    """The arguments of `prepare`, by the names and with the defaults that they have there."""

    stage: Literal[0, 1, 2, 3] = 3
    placement: Placement = Placement()  # noqa: RUF009 - a frozen value
    precision: Precision = UNSAID
    units: UnitPolicy = None
    max_grad_norm: float | None = None
    grad_accumulation_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    overlap: Overlap = "auto"
    master: Literal["remainder", "fp32", "none"] = "remainder"
    options: Options = Options()  # noqa: RUF009 - a frozen value
    weights: Weights | None = None

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of floating-point parameters while computing."""
        return COMPUTE_DTYPES[self.precision]

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype in which gradients are summed over ranks."""
        return self.reduce_dtype or self.compute_dtype

    @property
    def accumulation_dtype(self) -> torch.dtype:
        """The dtype in which micro-batches are summed, and gradients rest."""
        return self.grad_accumulation_dtype or self.sum_dtype

    @property
    def debug_release(self) -> bool:
        """True if every unit is released after each use, by the options or by the environment variable."""
        return self.options.debug_release or bool(os.environ.get(DEBUG_RELEASE))

    def storages(self, rule: Rule, reach: Reach) -> StoragePlan:
        """Return the tiers and the dtype of each kind of state.

        Arguments:
            rule: the arithmetic of the optimizer, with its states.
            reach: which tiers compute reads in place.
        """
        low_precision = self.compute_dtype != torch.float32
        master: Literal["remainder", "fp32", "none"] = "fp32" if self.compute_dtype == torch.float16 else self.master
        return StoragePlan(
            params=self.placement.home("params"),
            grads=self.placement.home("grads"),
            optimizer=self.placement.home("optimizer"),
            sharded_params=self.stage == 3,
            grad_dtype=self.accumulation_dtype,
            master_dtype=MASTER_DTYPES[master] if low_precision else None,
            tile_numel=self.options.tile_bytes // self.compute_dtype.itemsize // ALIGNMENT_NUMEL * ALIGNMENT_NUMEL,
            streamed=self.options.streamed_updates != 0 and not reach.aliases_host,
            streams_whole=self.options.whole_updates == "device" and not reach.aliases_host,
            # Without an optimizer no backward gathers units again.
            secondary=self.options.secondary_shard if rule is not NO_RULE else None,
        )


def request_for(model: nn.Module, **arguments: Any) -> PrepareRequest:
    """Check the arguments of `prepare` by themselves, and return them as a request.

    Arguments:
        model: the one to prepare.
        arguments: fields of `PrepareRequest`; `None` is the default.

    Raises:
        ConfigError: a value does not exist, or does not go with another one.
    """
    request = PrepareRequest(**{name: value for name, value in arguments.items() if value is not None})
    checks.check_features(
        request.stage, request.placement, request.precision, request.overlap, request.master, request.options
    )
    checks.check_dtypes(request.reduce_dtype, request.grad_accumulation_dtype)
    checks.check_clip(request.max_grad_norm, request.overlap)
    checks.check_loss_scale(request.precision, request.overlap, request.options)
    checks.check_model(model, has_values=request.weights is None)
    return request


@dataclass(frozen=True, kw_only=True, eq=False)
class Blueprint:
    """The segments of an engine on this rank: those of units, and those of the buffers between them.

    Nothing of it is taken yet. It knows the model's parameters, and not their values.

    Attributes:
        request: the arguments of `prepare`.
        rule: the arithmetic of the optimizer.
        groups: the number of each parameter's param group.
        storages: the tiers and the dtype of each kind of state.
        units: the plan of each unit, in order.
        live_bytes: the most bytes of gathered units at once, as far as the order of use allows that.
        grid: the number of shards, and this rank's.
        reach: which tiers compute reads in place.
    """

    request: PrepareRequest
    rule: Rule
    groups: Mapping[nn.Parameter, int]
    storages: StoragePlan
    units: Sequence[UnitPlan]
    live_bytes: int
    grid: Grid
    reach: Reach

    def plan_staging(self, units: Sequence[Sections]) -> StagingPlan:
        """Plan the buffers that units with the given storages need. Storages may move later."""
        return StagingPlan(units, reduce_dtype=self.request.sum_dtype, reach=self.reach)

    @cached_property
    def staging(self) -> StagingPlan:
        """The buffers that the storages of this blueprint need."""
        return self.plan_staging([plan.shard_segments for plan in self.units])

    @property
    def specs(self) -> list[UnitSpec]:
        """The parameters of each unit."""
        return [plan.spec for plan in self.units]

    @property
    def segments(self) -> list[SegmentPlan]:
        """Every segment, in the order in which they are made."""
        return [*(segment for plan in self.units for segment in plan.all_segments()), *self.staging.segments()]

    @cached_property
    def gathered_bytes(self) -> int:
        """The most device bytes of gathered units at once, beside resident ones.

        Those in use, and those ahead of their use within the budgets.
        """
        all_of_them = sum(plan.full_bytes for plan in self.units if not plan.resident)
        ahead = min(self.live_bytes, self.least_gathered_bytes + self.request.options.prefetch_bytes)
        return min(all_of_them, max(self.least_gathered_bytes, ahead))

    @cached_property
    def least_gathered_bytes(self) -> int:
        """The most device bytes of gathered units at once, if none is gathered ahead of its use."""
        gathered = [(plan.spec, 0 if plan.resident else plan.full_bytes) for plan in self.units]
        kept = sum(nbytes for spec, nbytes in gathered if spec.persistent)
        return kept + checks.most_needed([(s, 0 if s.persistent else nbytes) for s, nbytes in gathered])[0]

    def rank_checks(self, model: nn.Module) -> RankChecks:
        """List the settings that must be the same on every rank, for a comparison before any rank takes memory.

        Folders, and options that change only local work, may differ.

        Returns:
            The settings first, then the parameters and buffers in the model's order, then the units: each by a name
            that a message can show.
        """
        request, grid = self.request, self.grid
        settings: dict[str, object] = {
            "mesh": f"{grid.shards} shards, {grid.replicas} copies, tp {grid.tp}",
            "stage": request.stage,
            "compute_dtype": request.compute_dtype,
            "reduce_dtype": request.sum_dtype,
            "grad_accumulation_dtype": request.accumulation_dtype,
            "master": request.master,
            "max_grad_norm": request.max_grad_norm,
            "overlap": request.overlap,
            # Paths may differ. Collectives depend on whether weights are given.
            "weights": request.weights if request.weights is None or request.weights == INIT else "given",
            "optimizer": self.rule.name,
        }
        for kind in ("params", "grads", "optimizer", "activations"):
            settings[f"Placement({kind}=)"] = getattr(request.placement, kind)
        for option in dataclasses.fields(Options):
            if option.name not in _OWN:
                settings[f"Options({option.name}=)"] = getattr(request.options, option.name)
        return {
            **{name: _plain(value) for name, value in settings.items()},
            **dict(_tensors(model, self.groups)),
            **{f"unit '{s.name}'": f"{len(s.names)} parameters: {', '.join(s.names)}" for s in self.specs},
        }


def rules_of(
    optimizer: torch.optim.Optimizer | None, options: Options
) -> tuple[Rule, dict[nn.Parameter, int], dict[nn.Parameter, Rule]]:
    """Return the rule of an optimizer, and by parameter the number of its group and the part of the rule for it."""
    if optimizer is None:
        return NO_RULE, {}, {}
    rule = rule_for(optimizer, StateFormat(options.state_dtype, options.rounding, options.rounding_seed))
    groups = {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    return rule, groups, {p: rule.part(group) for group in optimizer.param_groups for p in group["params"]}


def draw_blueprint(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, request: PrepareRequest, grid: Grid, reach: Reach
) -> Blueprint:
    """Plan everything that an engine has on this rank. Takes no memory and issues no collective.

    Arguments:
        model: the model; its parameters may be on the meta device.
        optimizer: the optimizer of its parameters; `None` for inference.
        request: the arguments of `prepare`, checked by themselves.
        grid: the number of shards, and this rank's.
        reach: which tiers compute reads in place.

    Raises:
        ConfigError: model, optimizer and request do not go together.
        MemoryBudgetError: a budget is too small.
    """
    options = request.options
    rule, groups, rules = rules_of(optimizer, options)
    if isinstance(optimizer, MuonAdamW):
        optimizer.check(model)
    checks.check_ownership(model, groups)
    checks.check_no_gradients(model)
    specs = find_units(
        model,
        request.units,
        rules=rules if optimizer is not None else None,
        compute_dtype=request.compute_dtype,
        persistent_bytes=options.persistent_bytes,
    )
    storages = request.storages(rule, reach)
    units = plan_units(specs, storages, grid, reach)
    checks.check_whole(model, rules, specs, options, grid)
    checks.check_nodes(options, grid.shards, gathers=not all(spec.persistent for spec in specs))
    return Blueprint(
        request=request,
        rule=rule,
        groups=groups,
        storages=storages,
        units=units,
        live_bytes=checks.check_live_bytes(units, options),
        grid=grid,
        reach=reach,
    )
