"""Buffers through which tiles pass: planned with the cells, allocated with them. None is larger than a tile.

accumulation   a tile of a gradient that is added to its home on the cpu tier
update         the ring of the update: what it cannot reach where it rests, a buffer for each such home of a unit
transit        the ring of gathers and gradients that come from files or go there
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.assemble import Homes, UnitPlan
from penstock.kinds import STAGING, Tier
from penstock.layout import ALIGNMENT_NUMEL
from penstock.machine.streams import Streams
from penstock.tiers.home import CellPlan
from penstock.tiers.pipeline import GRAD_AREA, OPTIMIZER_AREA, PARAM_AREA, Slot, in_reach
from penstock.tiers.records import RecordLayout
from penstock.tiers.store import Store

# Of two slots, one is filled while the other is used. Files come and go at a pace of their own and want more in flight:
# as many tiles as these bytes hold, within limits.
MEMORY_SLOTS = 2
LEAST_FILE_SLOTS, MOST_FILE_SLOTS, RING_BYTES = 4, 32, 256 << 20


@dataclass(frozen=True)
class Staging:
    """The buffers."""

    accumulation: Tensor | None
    update: Sequence[Slot]
    transit: Sequence[Tensor]


class StagingPlan:
    """Which buffers there will be.

    Arguments:
        plans: the units.
        homes: where their kinds live.
        reduce_dtype: of gradients on their way.
    """

    def __init__(self, plans: Sequence[UnitPlan], homes: Homes, reduce_dtype: torch.dtype, streams: Streams) -> None:
        trained = [plan for plan in plans if plan.spec.trainable]
        beside = Tier.DEVICE if homes.optimizer is Tier.DEVICE else Tier.CPU
        tile = min(homes.tile_numel, max((plan.layout.shard_numel for plan in plans), default=ALIGNMENT_NUMEL))

        self._accumulation: CellPlan | None = None
        if homes.grads is Tier.CPU and not in_reach(homes.grads, Tier.DEVICE, streams):
            self._accumulation = CellPlan("(accumulation)", STAGING, homes.grads, reduce_dtype, tile)

        areas: dict[str, int] = {}
        for plan in trained:
            parts = {GRAD_AREA: [plan.grad] if plan.grad else [], OPTIMIZER_AREA: plan.optimizer}
            if plan.fields is not None and plan.fields.shadow is None:
                parts[PARAM_AREA] = [plan.param]
            for area, cells in parts.items():
                if cells and not in_reach(cells[0].tier, beside, streams):
                    areas[area] = max(areas.get(area, 0), _tile_bytes(cells, tile))
        tiers = {GRAD_AREA: homes.grads, PARAM_AREA: homes.params, OPTIMIZER_AREA: homes.optimizer}
        files = {area for area in areas if tiers[area] is Tier.NVME}
        count = _slots(sum(areas.values())) if files else MEMORY_SLOTS
        near = Tier.CPU if streams.aliases_host else beside  # files want pages, which that tier hands out
        self._near = [_buffers("update", number, near, areas) for number in range(count)]
        # What an update on a device takes from a file goes through the host.
        bounces = beside is Tier.DEVICE and not streams.aliases_host
        bounced = {area: nbytes for area, nbytes in areas.items() if area in files} if bounces else {}
        self._host = [_buffers("file", number, Tier.CPU, bounced) for number in range(count)]

        passing = [plan.param for plan in plans if homes.params is Tier.NVME]
        passing += [plan.grad for plan in trained if plan.grad and homes.grads is Tier.NVME]
        nbytes = max((_tile_bytes([cell], tile) for cell in passing), default=0)
        self._transit = [
            CellPlan(f"(transit {number})", STAGING, Tier.CPU, torch.uint8, nbytes)
            for number in range(_slots(nbytes) if nbytes else 0)
        ]

    def cells(self) -> Iterator[CellPlan]:
        """Every buffer."""
        if self._accumulation is not None:
            yield self._accumulation
        for buffers in (*self._near, *self._host):
            yield from buffers.values()
        yield from self._transit

    def build(self, store: Store) -> Staging:
        """Allocate them."""
        slots = []
        for near, host in zip(self._near, self._host, strict=True):
            buffers = {area: store.allocate(cell) for area, cell in near.items()}
            slots.append(Slot(buffers, {area: store.allocate(cell) for area, cell in host.items()} or buffers))
        return Staging(
            accumulation=None if self._accumulation is None else store.allocate(self._accumulation),
            update=[slot for slot in slots if slot.near],
            transit=[store.allocate(cell) for cell in self._transit],
        )


def _tile_bytes(cells: Sequence[CellPlan], tile: int) -> int:
    """Bytes of a tile of some kinds, in a record or one after the other."""
    return RecordLayout(cells, tile, tile).record_bytes(tile)


def _slots(nbytes: int) -> int:
    return max(LEAST_FILE_SLOTS, min(MOST_FILE_SLOTS, RING_BYTES // max(nbytes, 1)))


def _buffers(name: str, number: int, tier: Tier, areas: Mapping[str, int]) -> dict[str, CellPlan]:
    return {
        area: CellPlan(f"({name} {number}, {area})", STAGING, tier, torch.uint8, nbytes)
        for area, nbytes in areas.items()
    }
