"""The storages of units, planned from the request: their segments and tiers. No memory is taken."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

from penstock.config import GRAD, MASTER, OPTIMIZER, PARAM, SECONDARY, SHADOW, Tier
from penstock.engine.unit.partition import OwnerAssignment, UnitSpec, lay_out, state_numel
from penstock.engine.unit.unit import StateFields
from penstock.layout import FlatLayout, TierRange, least_divisor, part, split
from penstock.rules.rule import BLOCK_NUMEL, StateSpec
from penstock.runtime.topology import Grid, Reach
from penstock.tiers.storage import CellPlan, SegmentPlan, Streamed
from penstock.tiers.transfer import in_reach


@dataclass(frozen=True)
class KindPlan:
    """One kind of a storage: its name, its dtype, and how many elements of the shard share one value."""

    name: str
    dtype: torch.dtype
    grain: int = 1


@dataclass(frozen=True, kw_only=True)
class StoragePlan:
    """The tiers and dtypes of the kinds of every unit.

    Attributes:
        params, grads, optimizer: fractions of their bytes, by tier.
        sharded_params: True if parameters are sharded over ranks (stage 3), not replicated.
        grad_dtype: the dtype in which micro-batches are summed.
        master_dtype: int16 (remainder), float32 (full), or `None` where the parameter is its own master.
        tile_numel: elements of a tile, where no rule looks at whole parameters.
        streamed: True if the device may update tiles whose state is on another tier.
        streams_whole: True if it updates all of them where a rule looks at whole parameters.
        secondary: the number of ranks of a node that keep the parts of a gathered unit; `None` where none are kept.
    """

    params: Mapping[Tier, float]
    grads: Mapping[Tier, float]
    optimizer: Mapping[Tier, float]
    sharded_params: bool
    grad_dtype: torch.dtype
    master_dtype: torch.dtype | None
    tile_numel: int
    streamed: bool
    streams_whole: bool = False
    secondary: int | None = None

    def master_kinds(self, spec: UnitSpec) -> list[KindPlan]:
        """Return the kind of a unit's master weights, where it has some beside its parameters."""
        if self.master_dtype is None or not spec.trainable or spec.dtype == torch.float32:
            return []
        return [KindPlan(MASTER, self.master_dtype)]

    def streams(self, spec: UnitSpec) -> Streamed:
        """Return which tiles of a unit the device updates although their state is on another tier."""
        if spec.whole_numel:
            return "all" if self.streams_whole else "none"
        return "some" if self.streamed else "none"

    def tile_of(self, spec: UnitSpec) -> int:
        """Return the elements of a unit's tile: those of one parameter, where its rule looks at whole ones."""
        return spec.whole_numel or self.tile_numel

    def optimizer_bytes(self, spec: UnitSpec) -> float:
        """Return the bytes of master weights and states of one element, or of the parameter where there are none."""
        kinds = [*_optimizer_kinds(spec, self.tile_of(spec))[0], *self.master_kinds(spec)]
        return sum(kind.dtype.itemsize / kind.grain for kind in kinds) or spec.dtype.itemsize


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitPlan:
    """The storages of one unit on this rank, before any memory is taken.

    Attributes:
        spec: the parameters and modules.
        layout: the slots of the parameters in the unit's flat buffer.
        storages: the tiers and dtypes of every unit.
        replicated: True if every rank holds all parameters, not its shard alone.
        resident: True if compute reads the parameters in their storage.
        segments: the segments, by storage. Those of the parameters are of the whole unit where it is replicated.
        own_params: the segments of this rank's shard of the parameters.
        fields: the kinds of the optimizer's storage.
    """

    spec: UnitSpec
    layout: FlatLayout
    storages: StoragePlan
    replicated: bool
    resident: bool
    segments: Mapping[str, Sequence[SegmentPlan]]
    own_params: Sequence[SegmentPlan]
    fields: StateFields

    @property
    def shard_numel(self) -> int:
        """The number of elements of this rank's shard."""
        return self.own_params[-1].stop

    @property
    def tile_numel(self) -> int:
        """The number of elements of a tile."""
        return self.storages.tile_of(self.spec)

    @property
    def full_bytes(self) -> int:
        """Bytes of the unit when it is gathered."""
        return self.layout.numel * self.spec.dtype.itemsize

    @property
    def shard_segments(self) -> dict[str, Sequence[SegmentPlan]]:
        """The segments of this rank's shard."""
        return {**self.segments, PARAM: self.own_params}

    @property
    def beside(self) -> dict[str, Sequence[SegmentPlan]]:
        """The segments of a trained unit's storages beside its parameters."""
        return {name: segments for name, segments in self.segments.items() if name not in (PARAM, SECONDARY)}

    def all_segments(self) -> Iterator[SegmentPlan]:
        """Yield every segment, in the order in which `make_unit` makes them."""
        for segments in self.segments.values():
            yield from segments


def plan_units(
    specs: Sequence[UnitSpec],
    storages: StoragePlan,
    grid: Grid,
    reach: Reach,
    resting: Mapping[str, UnitPlan] | None = None,
) -> list[UnitPlan]:
    """Plan the storages of units on this rank. A kind that is split between tiers is cut over all units together.

    Arguments:
        specs: the parameters and modules of each unit, in order.
        storages: the tiers and dtypes of their kinds.
        grid: the number of shards, and this rank's.
        reach: the memory that compute reads in place.
        resting: by name, units whose parameters are in their storage already, and stay there.
    """
    resting = resting or {}
    owners = OwnerAssignment(grid.shards)
    layouts = [resting[s.name].layout if s.name in resting else lay_out(s, grid.shards, owners) for s in specs]
    # Files hold every byte once, whatever the stage: parameters in files are sharded, and gathered from their shards.
    replicated = all(tier.is_memory for tier in storages.params) and (not storages.sharded_params or grid.shards == 1)
    tiles = [
        [_tiles(layout.shard_numel(rank), storages.tile_of(spec)) for rank in range(grid.shards)]
        for spec, layout in zip(specs, layouts, strict=True)
    ]
    trained = [index for index, spec in enumerate(specs) if spec.trainable]
    own_rank = [grid.shard_rank]

    def cut(
        chosen: Sequence[int],
        fractions: Mapping[Tier, float],
        bytes_of: Callable[[UnitSpec], float],
        ranks: Sequence[int] = own_rank,
    ) -> dict[int, tuple[TierRange, ...]]:
        bytes_of_units = [bytes_of(specs[index]) for index in chosen]
        of_units = [[numel for rank in ranks for numel in tiles[index][rank]] for index in chosen]
        return dict(zip(chosen, split(of_units, fractions, bytes_of_units), strict=True))

    new = [index for index, spec in enumerate(specs) if spec.name not in resting]
    params = cut(new, storages.params, lambda spec: spec.dtype.itemsize, range(grid.shards) if replicated else own_rank)
    for index, spec in enumerate(specs):
        if spec.name in resting:
            params[index] = tuple(TierRange(p.tier, p.start, p.stop) for p in resting[spec.name].segments[PARAM])
    grads = cut(trained, storages.grads, lambda spec: storages.grad_dtype.itemsize)
    optimizer = cut(trained, storages.optimizer, storages.optimizer_bytes)
    plans = []
    for i, (spec, layout) in enumerate(zip(specs, layouts, strict=True)):
        own = part(params[i], *layout.shard_range(grid.shard_rank)) if replicated else tuple(params[i])
        in_place = len(params[i]) == 1 and in_reach(params[i][0].tier, Tier.DEVICE, reach) and reach.reads_in_place
        make = partial(_segments, spec=spec, storages=storages)
        segments: dict[str, Sequence[SegmentPlan]] = {PARAM: make(PARAM, params[i])}
        kinds, fields = _optimizer_kinds(spec, storages.tile_of(spec))
        if spec.trainable:
            segments[GRAD] = make(GRAD, grads[i], [KindPlan(GRAD, storages.grad_dtype)])
            segments[MASTER] = make(MASTER, optimizer[i], storages.master_kinds(spec))
            segments[OPTIMIZER] = make(OPTIMIZER, optimizer[i], kinds)
            segments[SHADOW] = _shadow(spec, storages, optimizer[i], own, reach)
        if storages.secondary is not None and not replicated and not spec.persistent:
            segments[SECONDARY] = _secondary(spec, layout, storages, params[i])
        plans.append(
            UnitPlan(
                spec=spec,
                layout=layout,
                storages=storages,
                replicated=replicated,
                resident=replicated and in_place,
                segments=segments,
                own_params=make(PARAM, own),
                fields=fields,
            )
        )
    return plans


def _shadow(
    spec: UnitSpec, storages: StoragePlan, optimizer: Sequence[TierRange], params: Sequence[TierRange], reach: Reach
) -> list[SegmentPlan]:
    """Plan the parameter staging of this rank's shard: empty where the update reaches the parameters."""
    segments = []
    for update, param in product(optimizer, params):
        start, stop = max(update.start, param.start), min(update.stop, param.stop)
        if start < stop:
            needed = _needs_param_staging(param.tier, update.tier, storages.streams(spec), reach)
            kinds = [KindPlan(MASTER, spec.dtype)] if needed else []
            segments += _segments(SHADOW, [TierRange(update.tier, start, stop)], kinds, spec=spec, storages=storages)
    return segments


def _secondary(
    spec: UnitSpec, layout: FlatLayout, storages: StoragePlan, params: Sequence[TierRange]
) -> list[SegmentPlan]:
    """Plan this rank's part of a gathered unit: on the device if its parameters are there, else on the cpu."""
    assert storages.secondary is not None
    tier = Tier.DEVICE if all(span.tier is Tier.DEVICE for span in params) else Tier.CPU
    span = TierRange(tier, 0, layout.numel // storages.secondary)
    return _segments(SECONDARY, [span], spec=spec, storages=storages)


def _optimizer_kinds(spec: UnitSpec, tile_numel: int) -> tuple[list[KindPlan], StateFields]:
    """List the kinds of the optimizer's storage: each state, followed by its scales where it has some."""
    kinds: list[KindPlan] = []
    states: list[int] = []
    scales: list[int | None] = []
    for state in spec.rule.states if spec.rule is not None else ():
        states.append(len(kinds))
        kinds.append(KindPlan(state.name, state.dtype, _grain(spec, state, tile_numel)))
        scales.append(len(kinds) if state.scale_name else None)
        kinds += [KindPlan(state.scale_name, torch.float32, BLOCK_NUMEL)] if state.scale_name else []
    return kinds, StateFields(tuple(states), tuple(scales))


def _grain(spec: UnitSpec, state: StateSpec, tile_numel: int) -> int:
    """Return how many elements of a shard share one value of a state.

    A state of another shape than its parameter has the same number of values in each tile, which is one parameter: the
    least number that is enough and divides a tile.
    """
    if not spec.whole_numel:
        return 1
    assert spec.rule is not None
    needed = max(state_numel(spec.rule, state.name, p) for p in spec.parameters)
    return 1 if needed >= spec.parameters[0].numel() else tile_numel // least_divisor(tile_numel, needed)


def _needs_param_staging(params: Tier, optimizer: Tier, streamed: Streamed, reach: Reach) -> bool:
    """Return True if the update cannot reach the parameters, and writes their staging beside its state.

    Tiles in files are copied for the update anyway, and the parameters with them. A device that updates every tile
    reaches the parameters that are on it.
    """
    if streamed == "all" and params is Tier.DEVICE:
        return False
    return params.is_memory and optimizer.is_memory and not in_reach(params, optimizer, reach)


def _segments(
    storage: str,
    spans: Iterable[TierRange],
    kinds: Sequence[KindPlan] | None = None,
    *,
    spec: UnitSpec,
    storages: StoragePlan,
) -> list[SegmentPlan]:
    """Plan the segments of one storage: one for each range of tiles on one tier.

    Arguments:
        storage: the name of the storage.
        spans: its tiles.
        kinds: its kinds; `None` for values of the unit's dtype under the storage's name.
        spec: the unit.
        storages: the tiers and dtypes of every unit.
    """
    kinds = [KindPlan(storage, spec.dtype)] if kinds is None else kinds
    return [
        SegmentPlan(
            storage,
            tier,
            tuple(CellPlan(spec.name, k.name, tier, k.dtype, -(-(stop - start) // k.grain), k.grain) for k in kinds),
            start,
            stop - start,
            storages.tile_of(spec),
            # The host updates tiles on its tiers, and the device gets the parameters or their staging alone.
            copied=storages.streams(spec) != "none" or storage not in (MASTER, OPTIMIZER),
            streamed=storages.streams(spec),
        )
        for tier, start, stop in spans
    ]


def _tiles(numel: int, tile_numel: int) -> list[int]:
    return [min(tile_numel, numel - start) for start in range(0, numel, tile_numel)]
