"""A unit's homes: planned from the request, then made and filled from the model's parameters."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from penstock.engine.units.discover import UnitSpec
from penstock.engine.units.source import Flat
from penstock.engine.units.unit import Fields, Gradient, Trained, Unit
from penstock.kinds import GRAD, MASTER, OPTIMIZER, PARAM, SHADOW, Tier
from penstock.layout import FlatLayout
from penstock.machine.collectives import Ranks
from penstock.machine.streams import Streams
from penstock.rules.master import split_master, write_master
from penstock.rules.rule import BLOCK_NUMEL, StateSpec
from penstock.split import Span, part, split
from penstock.tiers.home import CellPlan, Home, SectionPlan
from penstock.tiers.movement import in_reach
from penstock.tiers.store import Reservation


@dataclass(frozen=True, kw_only=True)
class Homes:
    """Where the kinds of every unit live, and in what dtype.

    Attributes:
        params, grads, optimizer: fractions of their bytes, by tier.
        sharded_params: parameters are sharded over ranks (stage 3), not replicated.
        master_dtype: int16 (remainder), float32 (full), or `None` where the parameter is its own master.
        states: the rule's states.
        tile_numel: elements of a tile.
        streamed: the device updates tiles whose state rests elsewhere.
    """

    params: Mapping[Tier, float]
    grads: Mapping[Tier, float]
    optimizer: Mapping[Tier, float]
    sharded_params: bool
    grad_dtype: torch.dtype
    master_dtype: torch.dtype | None
    states: tuple[StateSpec, ...]
    tile_numel: int
    streamed: bool

    def keeps_master(self, spec: UnitSpec) -> bool:
        """Whether a unit has master weights beside its parameters."""
        return self.master_dtype is not None and spec.trainable and spec.dtype != torch.float32

    def optimizer_bytes(self, spec: UnitSpec) -> float:
        """Bytes of master weights and states of one element, or of the parameter where there are none."""
        nbytes = sum(state.dtype.itemsize + (4 / BLOCK_NUMEL if state.scale_name else 0) for state in self.states)
        if self.master_dtype is not None and self.keeps_master(spec):
            nbytes += self.master_dtype.itemsize
        return nbytes or spec.dtype.itemsize


@dataclass(frozen=True)
class Kind:
    """One kind of a home: its name, dtype, and elements of the shard that one value belongs to."""

    name: str
    dtype: torch.dtype
    grain: int = 1


def plan_units(specs: Sequence[UnitSpec], homes: Homes, ranks: Ranks, streams: Streams) -> list["UnitPlan"]:
    """The homes of every unit on this rank; kinds that are split between tiers are cut over all units together."""
    layouts = [FlatLayout.build(s.names, [tuple(p.shape) for p in s.parameters], ranks.shards) for s in specs]
    # A file holds every byte once, whatever the stage: what is replicated elsewhere is gathered from shards there.
    replicated = all(tier.is_memory for tier in homes.params) and (not homes.sharded_params or ranks.shards == 1)
    tiles = [_tiles(layout.shard_numel, homes.tile_numel) for layout in layouts]
    trained = [index for index, spec in enumerate(specs) if spec.trainable]

    def cut(
        chosen: Sequence[int], fractions: Mapping[Tier, float], bytes_of: Callable[[UnitSpec], float], copies: int = 1
    ) -> dict[int, tuple[Span, ...]]:
        bytes_of_units = [bytes_of(specs[index]) for index in chosen]
        return dict(zip(chosen, split([tiles[i] * copies for i in chosen], fractions, bytes_of_units), strict=True))

    params = cut(range(len(specs)), homes.params, lambda spec: spec.dtype.itemsize, ranks.shards if replicated else 1)
    grads = cut(trained, homes.grads, lambda spec: homes.grad_dtype.itemsize)
    optimizer = cut(trained, homes.optimizer, homes.optimizer_bytes)
    return [
        UnitPlan(spec, layout, homes, ranks, streams, replicated, params[i], grads.get(i, ()), optimizer.get(i, ()))
        for i, (spec, layout) in enumerate(zip(specs, layouts, strict=True))
    ]


class UnitPlan:
    """The homes of one unit on this rank, before any memory is taken.

    Arguments:
        replicated: every rank holds all parameters, not its shard alone.
        params: where the parameters are: of the whole unit if they are replicated, else of this rank's shard.
        grads, optimizer: where those of this rank's shard are.

    Attributes:
        sections: by home.
        resident: compute reads the parameters where they rest.
    """

    def __init__(
        self,
        spec: UnitSpec,
        layout: FlatLayout,
        homes: Homes,
        ranks: Ranks,
        streams: Streams,
        replicated: bool,
        params: Sequence[Span],
        grads: Sequence[Span],
        optimizer: Sequence[Span],
    ) -> None:
        self.spec = spec
        self.layout = layout
        self.homes = homes
        self._ranks = ranks
        self._streams = streams
        self.replicated = replicated
        in_place = len(params) == 1 and in_reach(params[0].tier, Tier.DEVICE, streams) and streams.reads_in_place
        self.resident = replicated and in_place
        self._own_params = part(params, *layout.shard_range(ranks.shard_rank)) if replicated else tuple(params)
        self.sections = {PARAM: self._plan(PARAM, [Kind(PARAM, spec.dtype)], params)}
        self.fields = Fields((), ())
        if spec.trainable:
            self.sections[GRAD] = self._plan(GRAD, [Kind(GRAD, homes.grad_dtype)], grads)
            self._plan_optimizer(optimizer)

    def _plan_optimizer(self, optimizer: Sequence[Span]) -> None:
        spec, homes = self.spec, self.homes
        master = [Kind(MASTER, homes.master_dtype)] if homes.master_dtype and homes.keeps_master(spec) else []
        kinds: list[Kind] = []

        def add(kind: Kind) -> int:
            kinds.append(kind)
            return len(kinds) - 1

        states, scales = [], []
        for state in homes.states:
            states.append(add(Kind(state.name, state.dtype)))
            scale = state.scale_name
            scales.append(add(Kind(scale, torch.float32, BLOCK_NUMEL)) if scale else None)
        self.fields = Fields(tuple(states), tuple(scales))
        self.sections[MASTER] = self._plan(MASTER, master, optimizer)
        self.sections[OPTIMIZER] = self._plan(OPTIMIZER, kinds, optimizer)
        self.sections[SHADOW] = [
            section
            for update in optimizer
            for param in self._own_params
            if max(update.start, param.start) < min(update.stop, param.stop)
            for section in self._plan(
                SHADOW,
                [Kind(MASTER, spec.dtype)] if self._needs_shadow(param.tier, update.tier) else [],
                [Span(update.tier, max(update.start, param.start), min(update.stop, param.stop))],
            )
        ]

    def _needs_shadow(self, params: Tier, optimizer: Tier) -> bool:
        """Where the update cannot reach the parameters, it writes a copy beside its state, the master's other part.

        Tiles that come from or go to a file are brought to the update anyway, and the parameters with them.
        """
        return params.is_memory and optimizer.is_memory and not in_reach(params, optimizer, self._streams)

    def _plan(self, home: str, kinds: Sequence[Kind], spans: Iterable[Span]) -> list[SectionPlan]:
        return [
            SectionPlan(
                home,
                tier,
                tuple(
                    CellPlan(self.spec.name, k.name, tier, k.dtype, (stop - start) // k.grain, k.grain) for k in kinds
                ),
                start,
                stop - start,
                self.homes.tile_numel,
                # The host updates what rests there, and the device gets the parameters or their shadow alone.
                copied=self.homes.streamed or home not in (MASTER, OPTIMIZER),
            )
            for tier, start, stop in spans
        ]

    @property
    def full_bytes(self) -> int:
        """Bytes of the unit when it is gathered."""
        return self.layout.numel * self.spec.dtype.itemsize

    @property
    def shard_sections(self) -> dict[str, list[SectionPlan]]:
        """The sections of this rank's shard."""
        return {**self.sections, PARAM: self._plan(PARAM, [Kind(PARAM, self.spec.dtype)], self._own_params)}

    def all_sections(self) -> Iterator[SectionPlan]:
        """Every section, in the order in which `build` makes them."""
        for sections in self.sections.values():
            yield from sections

    def build(self, index: int, reserved: Reservation) -> Unit:
        """Make the homes, empty."""
        spec, layout, device = self.spec, self.layout, self._streams.device
        homes = {name: Home([reserved.make(plan) for plan in plans]) for name, plans in self.sections.items()}
        whole = homes[PARAM]
        if self.resident:
            (full,) = whole.sections[0].tensors
        else:
            full = self._streams.make_buffer(layout.numel, spec.dtype)
            self._streams.retire(full)
        unit = Unit(
            spec,
            index,
            layout,
            rank=self._ranks.shard_rank,
            params=whole.part(*layout.shard_range(self._ranks.shard_rank)) if self.replicated else whole,
            replica=whole if self.replicated else None,
            full=full,
            resident=self.resident,
            device=device,
        )
        if spec.trainable:
            unit.trained = Trained(
                gradient=Gradient(homes[GRAD]),
                master=homes[MASTER],
                optimizer=homes[OPTIMIZER],
                shadow=homes[SHADOW],
                fields=self.fields,
                tiles=layout.tiles(self._ranks.shard_rank, self.homes.tile_numel),
            )
        return unit

    def fill(self, unit: Unit, flats: Sequence[Flat]) -> None:
        """Put parameters into the home, and this rank's part of them into the master; their own memory goes."""
        remainder = self.homes.master_dtype == torch.int16 and self.homes.keeps_master(unit.spec)
        if unit.replica is not None:
            for slot, flat in zip(unit.layout.slots, flats, strict=True):
                for start, stop, (values,) in unit.replica.visit(slot.start, slot.stop, modify=True):
                    value = flat.read(start - slot.start, stop - slot.start)
                    values.copy_(split_master(value.float())[0] if remainder else value)
        parts = unit.parts()
        first = unit.own_range[0]
        for begin, end, weights in unit.visit(0, unit.layout.shard_numel, modify=True):
            for index, start, stop in parts:
                start, stop = max(start, begin), min(stop, end)
                if start >= stop:
                    continue
                inside = slice(start - begin, stop - begin)
                offset = first - unit.layout.slots[index].start
                value = flats[index].read(start + offset, stop + offset)
                if unit.trained is None:
                    weights.param[inside].copy_(value)
                    continue
                written = (weights.param if weights.shadow is None else weights.shadow)[inside]
                rest = None if weights.master is None else weights.master[inside]
                write_master(written, rest, value.float().to(written.device))
                if weights.shadow is not None:
                    weights.param[inside].copy_(written)
        unit.hide()
        unit.note_versions()


def _tiles(numel: int, tile_numel: int) -> list[int]:
    whole, rest = divmod(numel, tile_numel)
    return [tile_numel] * whole + ([rest] if rest else [])
