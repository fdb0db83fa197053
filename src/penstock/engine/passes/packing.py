"""Gathers that carry parameters in a wire format: fewer bytes between ranks, for values that are rounded on the way.

Each rank packs its own shard, the packed shards go round, and each rank unpacks all of them, its own included: what
compute reads is the same on every rank. Homes and masters keep their values, and so do looks at them: only forward and
backward compute with what was carried.

Source: G. Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023 (qwZ).
"""

from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from penstock.config import GatherFormat
from penstock.engine.passes.buffers import BUFFERS_OF_A_SIZE
from penstock.engine.units.discover import UnitSpec
from penstock.engine.units.plan import UnitPlan
from penstock.engine.units.unit import Unit
from penstock.engine.updates.rig import Rig
from penstock.machine.streams import COLLECTIVE, DONE, UPLOAD, Event, Pending
from penstock.rules.wire import WireFormat
from penstock.trace import Label

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Packing:
    """All-gathers in a wire format.

    Arguments:
        name: of the format; `"exact"` for none.
    """

    def __init__(self, rig: Rig, name: GatherFormat) -> None:
        self._ranks = rig.ranks
        self._streams = rig.streams
        self._pool = rig.pool
        self._format = None if name == "exact" else WireFormat(name)
        self._free: dict[int, deque[tuple[Tensor, Event]]] = {}  # buffers by size, each with what still uses it

    def carries(self, unit: Unit) -> bool:
        """Whether gathers of this unit carry rounded values: the same on every rank."""
        return self._format is not None and unit.replica is None and is_packed(unit.spec, unit.layout.shards)

    def gather(self, unit: Unit) -> None:
        """Gather what all ranks have of a unit, after `unit.event`, which this rank's part is there after."""
        form, full, what = self._formatted, unit.full, unit.label
        packed, free = self._take(form.packed_bytes(unit.layout.numel))
        start, stop = unit.own_range
        own, sent = full[start:stop], packed[form.packed_bytes(start) : form.packed_bytes(stop)]
        arrived = unit.event

        def exchange() -> Pending | None:
            form.pack(own, sent, self._pool)
            return self._ranks.all_gather(packed, sent, what)

        # After the upload of this rank's part, and after what the buffer carried last was unpacked.
        gathered = self._streams.submit(
            COLLECTIVE,
            exchange,
            after=(arrived, free),  # site quantized_gather.uploaded, quantized_gather.buffer_free
            writes=(packed,),
            nbytes=packed.nbytes,
            label=Label("gather", unit.name, form.name),
        )
        self._ranks.submitted(gathered)
        # On the host the collective goes on beside its caller, who must not wait for it here; on a device both are work
        # of one stream.
        unit.event = self._streams.submit(
            UPLOAD if self._streams.computes_on_host else COLLECTIVE,
            lambda: form.unpack(packed, full, self._pool),
            after=(gathered,),  # site quantized_gather.received
            writes=(full,),
            nbytes=unit.nbytes,
            label=Label("unpack", unit.name, form.name),
        )
        self._free[packed.nbytes].append((packed, unit.event))
        unit.is_rounded = True

    def round(self, unit: Unit) -> None:
        """Give a full buffer that holds the home's values those that a gather would carry. Compute does it."""
        form, full = self._formatted, unit.full
        numel = unit.shard_numel

        def work() -> None:
            packed = torch.empty(form.packed_bytes(numel), dtype=torch.uint8, device=full.device)
            for start in range(0, full.numel(), numel):
                form.pack(full[start : start + numel], packed, self._pool)
                form.unpack(packed, full[start : start + numel], self._pool)

        self._streams.compute(work, label=Label("unpack", unit.name, form.name), nbytes=2 * unit.nbytes)
        unit.is_rounded = True

    def clear(self) -> None:
        """Give the buffers' memory back. Nothing is being gathered."""
        self._free.clear()

    @property
    def _formatted(self) -> WireFormat:
        assert self._format is not None, "gathers are exact"
        return self._format

    def _take(self, nbytes: int) -> tuple[Tensor, Event]:
        """Take a buffer for what is packed, and the event after which it may be written."""
        free = self._free.setdefault(nbytes, deque())
        if free and (free[0][1].done() or len(free) >= BUFFERS_OF_A_SIZE):
            return free.popleft()
        return torch.empty(nbytes, dtype=torch.uint8, device=self._streams.device), DONE


def is_packed(spec: UnitSpec, shards: int) -> bool:
    """Whether gathers of a sharded unit can carry rounded values: of floats that are not what codes are counted in."""
    return shards > 1 and spec.dtype in _DTYPES and not spec.is_beside_codes


def packed_bytes(plans: Iterable[UnitPlan], name: GatherFormat) -> int:
    """Count the device bytes of the buffers for what is packed, at most: a few of each size."""
    if name == "exact":
        return 0
    form = WireFormat(name)
    sizes = {
        form.packed_bytes(plan.layout.numel)
        for plan in plans
        if not plan.replicated and is_packed(plan.spec, plan.layout.shards)
    }
    return BUFFERS_OF_A_SIZE * sum(sizes)
