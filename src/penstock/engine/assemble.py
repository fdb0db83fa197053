"""A unit's cells: planned from the request, then allocated and filled from the model's parameters."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from penstock.engine.discover import UnitSpec
from penstock.engine.unit import Fields, Gradient, Trained, Unit
from penstock.kinds import GRAD, MASTER, PARAM, Tier
from penstock.layout import FlatLayout
from penstock.machine.collectives import Ranks
from penstock.machine.streams import Streams
from penstock.rules.master import split_master, write_master
from penstock.rules.rule import BLOCK_NUMEL, StateSpec
from penstock.tiers.home import CellPlan, Home, MemoryHome
from penstock.tiers.pipeline import in_reach
from penstock.tiers.records import RecordLayout
from penstock.tiers.store import Store


@dataclass(frozen=True, kw_only=True)
class Homes:
    """Where the kinds of every unit live, and in what dtype.

    Attributes:
        sharded_params: parameters are sharded over ranks (stage 3), not replicated.
        master_dtype: int16 (remainder), float32 (full), or `None` where the parameter is its own master.
        states: the rule's states.
        tile_numel: elements of a tile.
    """

    params: Tier
    grads: Tier
    optimizer: Tier
    sharded_params: bool
    grad_dtype: torch.dtype
    master_dtype: torch.dtype | None
    states: tuple[StateSpec, ...]
    tile_numel: int


class UnitPlan:
    """The cells of one unit on this rank, before any memory is taken."""

    def __init__(self, spec: UnitSpec, homes: Homes, ranks: Ranks, streams: Streams) -> None:
        self.spec = spec
        self._homes = homes
        self._ranks = ranks
        self._streams = streams
        self.layout = FlatLayout.build(spec.names, [tuple(p.shape) for p in spec.parameters], ranks.shards)
        # A file holds every byte once, whatever the stage: what is replicated elsewhere is gathered from shards there.
        in_file = homes.params is Tier.NVME
        self._replicated = not in_file and (not homes.sharded_params or ranks.shards == 1)
        self._resident = self._replicated and (homes.params is Tier.DEVICE or streams.aliases_host)
        shard, whole = self.layout.shard_numel, self.layout.numel
        self.param = CellPlan(spec.name, PARAM, homes.params, spec.dtype, whole if self._replicated else shard)
        self.grad = CellPlan(spec.name, GRAD, homes.grads, homes.grad_dtype, shard) if spec.trainable else None
        self.optimizer: list[CellPlan] = []
        self.fields = self._plan_optimizer() if spec.trainable else None

    def _plan_optimizer(self) -> Fields:
        spec, homes, shard = self.spec, self._homes, self.layout.shard_numel

        def plan(kind: str, dtype: torch.dtype, grain: int = 1) -> int:
            self.optimizer.append(CellPlan(spec.name, kind, homes.optimizer, dtype, shard // grain, grain))
            return len(self.optimizer) - 1

        has_master = homes.master_dtype is not None and spec.dtype != torch.float32
        master = plan(MASTER, homes.master_dtype) if has_master and homes.master_dtype else None
        # Where the update cannot reach the parameters, it writes a copy beside its state, the other part of the master.
        # Tiles that come from or go to a file are brought to the update anyway, and the parameters with them.
        shadowed = Tier.NVME not in (homes.params, homes.optimizer) and not in_reach(
            homes.params, homes.optimizer, self._streams
        )
        shadow = plan(MASTER, spec.dtype) if shadowed else None
        states, scales = [], []
        for state in homes.states:
            states.append(plan(state.name, state.dtype))
            scale = state.scale_name
            scales.append(plan(scale, torch.float32, BLOCK_NUMEL) if scale else None)
        return Fields(master, shadow, tuple(states), tuple(scales))

    @property
    def full_bytes(self) -> int:
        """Bytes of the unit when it is gathered."""
        return self.layout.numel * self.spec.dtype.itemsize

    def cells(self) -> Iterator[CellPlan]:
        """Every cell."""
        yield self.param
        if self.grad is not None:
            yield self.grad
        yield from self.optimizer

    @cached_property
    def records(self) -> list[RecordLayout]:
        """What goes into files, in the order in which `build` makes the homes."""
        homes = [[self.param], [self.grad] if self.grad else [], self.optimizer]
        shard, tile = self.layout.shard_numel, self._homes.tile_numel
        return [RecordLayout(cells, shard, tile) for cells in homes if cells and cells[0].tier is Tier.NVME]

    def build(self, index: int, store: Store) -> Unit:
        """Allocate the cells and fill them; the model's parameters give up their own memory. Collective."""
        spec, layout = self.spec, self.layout
        shard, tile, rank = layout.shard_numel, self._homes.tile_numel, self._ranks.shard_rank
        params: Home
        if self._replicated:
            replica = store.allocate(self.param)
            start, stop = layout.shard_range(rank)
            params = MemoryHome([self.param], [replica[start:stop]], shard, tile)
        else:
            replica = None
            params = store.make_home([self.param], shard, tile)
        if self._resident:
            assert replica is not None
            full = replica
        else:
            full = torch.empty(layout.numel, dtype=spec.dtype, device=self._streams.device)
            self._streams.retire(full)
        unit = Unit(
            spec, index, layout, rank=rank, params=params, replica=replica, full=full, device=self._streams.device
        )
        if self.grad is not None and self.fields is not None:
            unit.trained = Trained(
                gradient=Gradient(store.make_home([self.grad], shard, tile)),
                optimizer=store.make_home(self.optimizer, shard, tile) if self.optimizer else None,
                fields=self.fields,
                optimizer_tier=self._homes.optimizer,
                tiles=layout.tiles(rank, tile),
            )
        self._fill(unit)
        unit.hide()
        unit.note_versions()
        return unit

    def _fill(self, unit: Unit) -> None:
        """Put the first rank's parameters into the home, and this rank's part of them into the master."""
        flats = [self._first_ranks(parameter.detach()) for parameter in unit.spec.parameters]
        master = unit.trained.fields.master if unit.trained else None
        remainder = master is not None and self.optimizer[master].dtype == torch.int16
        if unit.replica is not None:
            for slot, flat in zip(unit.layout.slots, flats, strict=True):
                rounded = split_master(flat.float())[0] if remainder else flat.to(unit.spec.dtype)
                unit.replica[slot.start : slot.stop].copy_(rounded)
        parts = unit.parts()
        first = unit.own_range[0]
        for begin, end, param, kinds in unit.visit(0, unit.layout.shard_numel, modify=True):
            for part in parts:
                start, stop = max(part.start, begin), min(part.stop, end)
                if start >= stop:
                    continue
                inside = slice(start - begin, stop - begin)
                offset = first - unit.layout.slots[part.slot].start
                value = flats[part.slot][start + offset : stop + offset]
                if unit.trained is None:
                    param[inside].copy_(value)
                    continue
                written = (param if kinds.shadow is None else kinds.shadow)[inside]
                rest = None if kinds.master is None else kinds.master[inside]
                write_master(written, rest, value.float().to(written.device))
                if kinds.shadow is not None:
                    param[inside].copy_(written)

    def _first_ranks(self, value: Tensor) -> Tensor:
        """The first rank's value, flat."""
        flat = value.reshape(-1)
        if self._ranks.world_size > 1:
            flat = flat.to(self._streams.device, copy=True)
            self._ranks.broadcast(flat)
        return flat
