"""A unit's cells: planned from the request, then allocated and filled from the model's parameters."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.discover import UnitSpec
from penstock.engine.unit import Gradient, Trained, Unit
from penstock.kinds import GRAD, MASTER, PARAM, Tier
from penstock.layout import FlatLayout
from penstock.machine.collectives import Ranks
from penstock.machine.streams import Streams
from penstock.rules.master import split_master, write_master
from penstock.rules.rule import BLOCK_NUMEL, StateSpec
from penstock.tiers.store import CellPlan, Store


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
        replicated = not homes.sharded_params or ranks.shards == 1
        self._resident = replicated and (homes.params is Tier.DEVICE or streams.aliases_host)
        shard, whole = self.layout.shard_numel, self.layout.numel
        self._param = CellPlan(spec.name, PARAM, homes.params, spec.dtype, whole if replicated else shard)
        self._grad = self._master = self._shadow = None
        self._states: list[CellPlan] = []
        self._scales: list[CellPlan | None] = []
        if not spec.trainable:
            return
        self._grad = CellPlan(spec.name, GRAD, homes.grads, homes.grad_dtype, shard)
        if homes.master_dtype is not None and spec.dtype != torch.float32:
            self._master = CellPlan(spec.name, MASTER, homes.optimizer, homes.master_dtype, shard)
        if not in_reach(homes.params, homes.optimizer, streams):
            # The update cannot reach the parameters: it writes a copy beside its state, the other part of the master.
            self._shadow = CellPlan(spec.name, MASTER, homes.optimizer, spec.dtype, shard)
        for state in homes.states:
            self._states.append(CellPlan(spec.name, state.name, homes.optimizer, state.dtype, shard))
            scale, blocks = state.scale_name, shard // BLOCK_NUMEL
            self._scales.append(CellPlan(spec.name, scale, homes.optimizer, torch.float32, blocks) if scale else None)

    @property
    def full_bytes(self) -> int:
        """Bytes of the unit when it is gathered."""
        return self.layout.numel * self.spec.dtype.itemsize

    def cells(self) -> Iterator[CellPlan]:
        """Every cell."""
        found = (self._param, self._grad, self._master, self._shadow, *self._states, *self._scales)
        return (cell for cell in found if cell is not None)

    def build(self, index: int, store: Store) -> Unit:
        """Allocate the cells and fill them; the model's parameters give up their own memory. Collective."""
        spec, homes, layout = self.spec, self._homes, self.layout
        home = store.allocate(self._param)
        full = home
        if not self._resident:
            full = torch.empty(layout.numel, dtype=spec.dtype, device=self._streams.device)
            self._streams.retire(full)
        unit = Unit(spec, index, layout, rank=self._ranks.shard_rank, home=home, full=full, device=self._streams.device)
        if self._grad is not None:
            unit.trained = Trained(
                gradient=Gradient(store.allocate(self._grad)),
                master=store.allocate(self._master) if self._master else None,
                states=tuple(store.allocate(cell) for cell in self._states),
                scales=tuple(store.allocate(cell) if cell else None for cell in self._scales),
                shadow=store.allocate(self._shadow) if self._shadow else None,
                optimizer_tier=homes.optimizer,
                gradient_near=in_reach(homes.grads, homes.optimizer, self._streams),
                tiles=layout.tiles(unit.rank, homes.tile_numel),
            )
        for slot_index, parameter in enumerate(spec.parameters):
            self._fill(unit, slot_index, parameter.detach())
        unit.hide()
        unit.note_versions()
        return unit

    def _fill(self, unit: Unit, index: int, value: Tensor) -> None:
        """Put one parameter, the first rank's, into the home and this rank's part of it into the master."""
        slot = unit.layout.slots[index]
        flat = value.reshape(-1)
        if self._ranks.world_size > 1:
            flat = flat.to(self._streams.device, copy=True)
            self._ranks.broadcast(flat)
        if unit.replicated:
            remainder = self._master is not None and self._master.dtype == torch.int16
            rounded = split_master(flat.float())[0] if remainder else flat.to(unit.spec.dtype)
            unit.home[slot.start : slot.stop].copy_(rounded)
        overlap = unit.layout.overlap(slot, unit.rank)
        if overlap is None:
            return
        start, stop = overlap
        first = unit.own_range[0]
        part = slice(start - first, stop - first)
        mine = flat[start - slot.start : stop - slot.start]
        if unit.trained is None:
            unit.own[part].copy_(mine)
            return
        master = unit.trained.master
        written = unit.written[part]
        write_master(written, None if master is None else master[part], mine.float().to(written.device))
        if unit.trained.shadow is not None:
            unit.own[part].copy_(written)


def in_reach(tier: Tier, of: Tier, streams: Streams) -> bool:
    """Whether arithmetic beside one tier reads and writes the other directly."""
    return tier is of or streams.aliases_host
