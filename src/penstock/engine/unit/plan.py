"""A unit's homes, planned from the request: which sections there will be, on which tiers. No memory is taken."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from penstock.config import GRAD, MASTER, OPTIMIZER, PARAM, SECONDARY, SHADOW, Tier
from penstock.engine.unit.partition import OwnerAssignment, UnitSpec, lay_out, state_numel
from penstock.engine.unit.unit import StateFields
from penstock.layout import FlatLayout, TierRange, least_divisor, part, split
from penstock.rules.rule import BLOCK_NUMEL, StateSpec
from penstock.runtime.topology import Grid, Reach
from penstock.tiers.storage import CellPlan, SegmentPlan, Streamed
from penstock.tiers.transfer import in_reach


@dataclass(frozen=True, kw_only=True)
class StoragePlan:
    """Where the kinds of every unit live, and in what dtype.

    Attributes:
        params, grads, optimizer: fractions of their bytes, by tier.
        sharded_params: whether parameters are sharded over ranks (stage 3), not replicated.
        grad_dtype: the dtype in which micro-batches are summed.
        master_dtype: int16 (remainder), float32 (full), or `None` where the parameter is its own master.
        tile_numel: elements of a tile, where no rule looks at whole parameters.
        streamed: whether the device may update tiles whose state rests elsewhere.
        streams_whole: whether it updates all of them where a rule looks at whole parameters.
        secondary: among how many ranks of a node the parts of a gathered unit are kept; `None` where none are.
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

    def keeps_master(self, spec: UnitSpec) -> bool:
        """Whether a unit has master weights beside its parameters."""
        return self.master_dtype is not None and spec.trainable and spec.dtype != torch.float32

    def streams(self, spec: UnitSpec) -> Streamed:
        """Say which tiles of a unit the device updates though their state rests elsewhere."""
        if spec.whole_numel:
            return "all" if self.streams_whole else "none"
        return "some" if self.streamed else "none"

    def tile_of(self, spec: UnitSpec) -> int:
        """Count the elements of a unit's tile: of one parameter, where its rule looks at whole ones."""
        return spec.whole_numel or self.tile_numel

    def optimizer_bytes(self, spec: UnitSpec) -> float:
        """Count the bytes of master weights and states of one element, or of the parameter where there are none."""
        nbytes = sum(kind.dtype.itemsize / kind.grain for kind in _optimizer_kinds(spec, self.tile_of(spec))[0])
        if self.master_dtype is not None and self.keeps_master(spec):
            nbytes += self.master_dtype.itemsize
        return nbytes or spec.dtype.itemsize


@dataclass(frozen=True)
class KindPlan:
    """One kind of a home: its name, dtype, and elements of the shard that one value belongs to."""

    name: str
    dtype: torch.dtype
    grain: int = 1


class TierSpans(NamedTuple):
    """Which tiles of a unit are on which tiers. Gradients and optimizer states are those of this rank."""

    params: Sequence[TierRange]
    grads: Sequence[TierRange] = ()
    optimizer: Sequence[TierRange] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitPlan:
    """The homes of one unit on this rank, before any memory is taken.

    Attributes:
        spec: the parameters.
        layout: where each of them is in the unit's flat buffer.
        homes: what was asked for, of every unit.
        replicated: whether every rank holds all parameters, not its shard alone.
        resident: whether compute reads the parameters where they rest.
        sections: what will be made, by home. Those of the parameters are of the whole unit where it is replicated.
        own_params: the sections of this rank's shard of the parameters.
        fields: which kind of the optimizer's home is what.
    """

    spec: UnitSpec
    layout: FlatLayout
    homes: StoragePlan
    replicated: bool
    resident: bool
    sections: Mapping[str, Sequence[SegmentPlan]]
    own_params: Sequence[SegmentPlan]
    fields: StateFields

    @property
    def shard_numel(self) -> int:
        """How many elements this rank's shard has."""
        return self.own_params[-1].stop

    @property
    def tile_numel(self) -> int:
        """How many elements a tile has."""
        return self.homes.tile_of(self.spec)

    @property
    def full_bytes(self) -> int:
        """Bytes of the unit when it is gathered."""
        return self.layout.numel * self.spec.dtype.itemsize

    @property
    def shard_sections(self) -> dict[str, Sequence[SegmentPlan]]:
        """The sections of this rank's shard."""
        return {**self.sections, PARAM: self.own_params}

    @property
    def beside(self) -> dict[str, Sequence[SegmentPlan]]:
        """The sections of what a trained unit has beside its parameters."""
        return {name: sections for name, sections in self.sections.items() if name not in (PARAM, SECONDARY)}

    def all_sections(self) -> Iterator[SegmentPlan]:
        """Yield every section, in the order in which `make_unit` makes them."""
        for sections in self.sections.values():
            yield from sections


def plan_units(
    specs: Sequence[UnitSpec],
    homes: StoragePlan,
    grid: Grid,
    reach: Reach,
    resting: Mapping[str, UnitPlan] | None = None,
) -> list[UnitPlan]:
    """Plan the homes of units on this rank. Kinds that are split between tiers are cut over all of them together.

    Arguments:
        specs: what belongs to each unit, in order.
        homes: where their kinds are to be.
        grid: how many shards there are, and which one is this rank's.
        reach: what compute reads where it rests.
        resting: by name, units whose parameters rest somewhere already, and stay there.
    """
    resting = resting or {}
    owners = OwnerAssignment(grid.shards)
    layouts = [resting[s.name].layout if s.name in resting else lay_out(s, grid.shards, owners) for s in specs]
    # A file holds every byte once, whatever the stage: what is replicated elsewhere is gathered from shards there.
    replicated = all(tier.is_memory for tier in homes.params) and (not homes.sharded_params or grid.shards == 1)
    tiles = [
        [_tiles(layout.shard_numel(rank), homes.tile_of(spec)) for rank in range(grid.shards)]
        for spec, layout in zip(specs, layouts, strict=True)
    ]
    trained = [index for index, spec in enumerate(specs) if spec.trainable]

    def cut(
        chosen: Sequence[int],
        fractions: Mapping[Tier, float],
        bytes_of: Callable[[UnitSpec], float],
        ranks: Sequence[int],
    ) -> dict[int, tuple[TierRange, ...]]:
        bytes_of_units = [bytes_of(specs[index]) for index in chosen]
        of_units = [[numel for rank in ranks for numel in tiles[index][rank]] for index in chosen]
        return dict(zip(chosen, split(of_units, fractions, bytes_of_units), strict=True))

    mine = [grid.shard_rank]

    new = [index for index, spec in enumerate(specs) if spec.name not in resting]
    params = cut(new, homes.params, lambda spec: spec.dtype.itemsize, range(grid.shards) if replicated else mine)
    for index, spec in enumerate(specs):
        if spec.name in resting:
            params[index] = tuple(TierRange(p.tier, p.start, p.stop) for p in resting[spec.name].sections[PARAM])
    grads = cut(trained, homes.grads, lambda spec: homes.grad_dtype.itemsize, mine)
    optimizer = cut(trained, homes.optimizer, homes.optimizer_bytes, mine)
    plans = []
    for i, (spec, layout) in enumerate(zip(specs, layouts, strict=True)):
        spans = TierSpans(params[i], grads.get(i, ()), optimizer.get(i, ()))
        own = part(params[i], *layout.shard_range(grid.shard_rank)) if replicated else tuple(params[i])
        in_place = len(params[i]) == 1 and in_reach(params[i][0].tier, Tier.DEVICE, reach) and reach.reads_in_place
        sections, fields = _plan_sections(spec, homes, spans, own, reach)
        if homes.secondary is not None and not replicated and not spec.persistent:
            sections[SECONDARY] = _secondary(spec, layout, homes, params[i])
        plans.append(
            UnitPlan(
                spec=spec,
                layout=layout,
                homes=homes,
                replicated=replicated,
                resident=replicated and in_place,
                sections=sections,
                own_params=_sections(PARAM, [KindPlan(PARAM, spec.dtype)], own, spec, homes),
                fields=fields,
            )
        )
    return plans


def _plan_sections(
    spec: UnitSpec, homes: StoragePlan, spans: TierSpans, own_params: Sequence[TierRange], reach: Reach
) -> tuple[dict[str, Sequence[SegmentPlan]], StateFields]:
    """Plan the sections of a unit by home, in the order in which they will be made, and the optimizer's kinds."""
    sections: dict[str, Sequence[SegmentPlan]] = {
        PARAM: _sections(PARAM, [KindPlan(PARAM, spec.dtype)], spans.params, spec, homes)
    }
    if not spec.trainable:
        return sections, StateFields((), ())
    master = [KindPlan(MASTER, homes.master_dtype)] if homes.master_dtype and homes.keeps_master(spec) else []
    kinds, fields = _optimizer_kinds(spec, homes.tile_of(spec))
    sections[GRAD] = _sections(GRAD, [KindPlan(GRAD, homes.grad_dtype)], spans.grads, spec, homes)
    sections[MASTER] = _sections(MASTER, master, spans.optimizer, spec, homes)
    sections[OPTIMIZER] = _sections(OPTIMIZER, kinds, spans.optimizer, spec, homes)
    sections[SHADOW] = [
        section
        for update in spans.optimizer
        for param in own_params
        if max(update.start, param.start) < min(update.stop, param.stop)
        for section in _sections(
            SHADOW,
            [KindPlan(MASTER, spec.dtype)]
            if _needs_shadow(param.tier, update.tier, homes.streams(spec), reach)
            else [],
            [TierRange(update.tier, max(update.start, param.start), min(update.stop, param.stop))],
            spec,
            homes,
        )
    ]
    return sections, fields


def _secondary(
    spec: UnitSpec, layout: FlatLayout, homes: StoragePlan, params: Sequence[TierRange]
) -> list[SegmentPlan]:
    """Plan where this rank's part of a gathered unit rests: on the device, where its parameters do, else on the cpu."""
    assert homes.secondary is not None
    tier = Tier.DEVICE if all(span.tier is Tier.DEVICE for span in params) else Tier.CPU
    span = TierRange(tier, 0, layout.numel // homes.secondary)
    return _sections(SECONDARY, [KindPlan(SECONDARY, spec.dtype)], [span], spec, homes)


def _optimizer_kinds(spec: UnitSpec, tile_numel: int) -> tuple[list[KindPlan], StateFields]:
    """List the kinds of the optimizer's home: each state, followed by its scales where it has some."""
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
    """Say how many elements of a shard one value of a state stands for.

    A state of another shape than its parameter's has equally many values in each tile, which is one parameter: as many
    as are needed, and as divide a tile.
    """
    if not spec.whole_numel:
        return 1
    assert spec.rule is not None
    needed = max(state_numel(spec.rule, state.name, p) for p in spec.parameters)
    return 1 if needed >= spec.parameters[0].numel() else tile_numel // least_divisor(tile_numel, needed)


def _needs_shadow(params: Tier, optimizer: Tier, streamed: Streamed, reach: Reach) -> bool:
    """Whether the update cannot reach the parameters, and writes a copy beside its state, the master's other part.

    Tiles that come from or go to a file are brought to the update anyway, and the parameters with them. A device that
    updates every tile has what rests there.
    """
    if streamed == "all" and params is Tier.DEVICE:
        return False
    return params.is_memory and optimizer.is_memory and not in_reach(params, optimizer, reach)


def _sections(
    home: str, kinds: Iterable[KindPlan], spans: Iterable[TierRange], spec: UnitSpec, homes: StoragePlan
) -> list[SegmentPlan]:
    """Plan the sections of one home: one for each span of tiles that are on one tier."""
    kinds = list(kinds)
    return [
        SegmentPlan(
            home,
            tier,
            tuple(CellPlan(spec.name, k.name, tier, k.dtype, -(-(stop - start) // k.grain), k.grain) for k in kinds),
            start,
            stop - start,
            homes.tile_of(spec),
            # The host updates what rests there, and the device gets the parameters or their shadow alone.
            copied=homes.streams(spec) != "none" or home not in (MASTER, OPTIMIZER),
            streamed=homes.streams(spec),
        )
        for tier, start, stop in spans
    ]


def _tiles(numel: int, tile_numel: int) -> list[int]:
    whole, rest = divmod(numel, tile_numel)
    return [tile_numel] * whole + ([rest] if rest else [])
