"""Sums of gradients over the ranks that share them: exact, or in hops that carry codes.

Exact is one reduce-scatter. In a wire format each rank sends every other one its summands of that one's shard, packed,
and each sums in fp32 what it gets, in the order of the ranks. In nodes that happens twice:

    inside    to each rank of the node the slices of all shards that ranks of its place have, in any node: summed there
    across    to the rank of this place in each node its shard of these sums: summed there

So each value is rounded twice, whatever the number of ranks, and between nodes goes one sum of each node. A shard is
summed on one rank alone: there is nothing in which ranks could differ.

Source: G. Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023 (qgZ).
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.config import ReduceFormat
from penstock.engine.units.plan import UnitPlan
from penstock.engine.units.unit import Unit
from penstock.engine.updates.rig import Rig
from penstock.layout import FlatLayout
from penstock.machine.collectives import Hop
from penstock.machine.reach import Grid
from penstock.machine.streams import DONE, Event
from penstock.rules.wire import WireFormat

_FP32_BYTES = 4


class _Passing(NamedTuple):
    """What hops work in: codes to send and codes received, as bytes, and sums in fp32."""

    sent: Tensor
    received: Tensor
    sums: Tensor


class Sums:
    """Sums over the shard ranks.

    Arguments:
        dtype: in which gradients are summed; the dtype of both what is given and what comes out.
        name: of the format in which they go between ranks; `"exact"` for none.
    """

    def __init__(self, rig: Rig, dtype: torch.dtype, name: ReduceFormat) -> None:
        self.dtype = dtype
        self._ranks = rig.ranks
        self._streams = rig.streams
        self._pool = rig.pool
        self._format = None if name == "exact" else WireFormat(name)
        # Of the largest unit so far. Collectives alone use it, one after the other on their stream: none waits for it.
        self._memory: Tensor | None = None
        self._last: Event = DONE

    def make_room(self, unit: Unit) -> None:
        """Take what the sum of a unit passes, before it is submitted: memory is taken where compute takes its own."""
        if self._format is None:
            return
        nbytes = _bytes_of(self._format, self._ranks.grid, unit.layout.numel)
        if self._memory is None or self._memory.numel() < nbytes:
            if self._memory is not None:
                self._streams.give_up((self._memory,), until=self._last)
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=self._streams.device)

    def run(self, shard: Tensor, full: Tensor, layout: FlatLayout, what: str) -> None:
        """Sum a flat gradient over the shard ranks, as the work of the stream of collectives.

        Arguments:
            shard: filled with the sum of this rank's part, [n].
            full: this rank's summands, of all shards.
            layout: says which are whose.
            what: the unit's name, for messages.
        """
        if not layout.is_even:
            self._ranks.reduce_to_owners(shard, full, layout.cuts, what)
        elif self._format is None:
            self._ranks.reduce_scatter(shard, full, what)
        else:
            self._hop_twice(self._format, shard, full, what)

    def note(self, event: Event) -> None:
        """Note the event of the last sum that was submitted."""
        self._last = event

    def clear(self) -> None:
        """Give the memory back. All sums are over."""
        self._memory, self._last = None, DONE

    def _hop_twice(self, form: WireFormat, shard: Tensor, full: Tensor, what: str) -> None:
        grid = self._ranks.grid
        passing = self._passing(form, full.numel())
        # Shards by node and place: those of one place are for one rank of this node. As codes they are less to reorder.
        if grid.across > 1:
            form.pack(full, passing.received, self._pool)
            by_node = passing.received.view(grid.across, grid.inside, -1)
            passing.sent.view(grid.inside, grid.across, -1).copy_(by_node.transpose(0, 1))
        else:
            form.pack(full, passing.sent, self._pool)
        sums = passing.sums
        self._hop(form, sums, passing.sent, passing.received, "inside", what)
        if grid.across > 1:
            nbytes = form.packed_bytes(sums.numel())
            sent, received = passing.sent[:nbytes], passing.received[:nbytes]
            form.pack(sums, sent, self._pool)
            sums = sums[: shard.numel()]
            self._hop(form, sums, sent, received, "across", what)
        shard.copy_(sums)

    def _hop(self, form: WireFormat, sums: Tensor, sent: Tensor, received: Tensor, hop: Hop, what: str) -> None:
        """Exchange codes among some ranks, and sum what came."""
        self._ranks.all_to_all(received, sent, hop, what)
        for number, codes in enumerate(received.chunk(getattr(self._ranks.grid, hop))):
            form.unpack(codes, sums, self._pool, add=number > 0)

    def _passing(self, form: WireFormat, numel: int) -> _Passing:
        assert self._memory is not None, "no room was made"
        codes = form.packed_bytes(numel)
        sent, received = self._memory[:codes], self._memory[codes : 2 * codes]
        nbytes = _FP32_BYTES * (numel // self._ranks.grid.inside)
        return _Passing(sent, received, self._memory[2 * codes : 2 * codes + nbytes].view(torch.float32))


def summing_bytes(plans: Iterable[UnitPlan], name: ReduceFormat, grid: Grid) -> int:
    """Count the device bytes that sums pass, at most: what those of the largest unit do."""
    if name == "exact" or grid.shards < 2:
        return 0
    sizes: Sequence[int] = [plan.layout.numel for plan in plans if plan.spec.trainable]
    return max((_bytes_of(WireFormat(name), grid, numel) for numel in sizes), default=0)


def _bytes_of(form: WireFormat, grid: Grid, numel: int) -> int:
    return 2 * form.packed_bytes(numel) + _FP32_BYTES * (numel // grid.inside)
