"""All-gathers of a unit's parameters ahead of use, exactly or in a wire format, and their release."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from penstock.config import PARAM, SECONDARY, GatherFormat, Tier
from penstock.engine.gradients.reduce import BUFFERS_OF_A_SIZE
from penstock.engine.step.context import EngineContext
from penstock.engine.unit.partition import UnitSpec
from penstock.engine.unit.plan import UnitPlan
from penstock.engine.unit.unit import Unit, UnitState, views_elsewhere
from penstock.rules.wire import WireFormat
from penstock.runtime.modes import user_records
from penstock.runtime.streams import COLLECTIVE, DONE, READ, UPLOAD, Event, Pending
from penstock.tiers.storage import Storage, buffer_storage
from penstock.trace import Label

# ----------------------------------------------------------------------------------------------------------------------
# All-gathers in a wire format: fewer bytes between ranks, and values that are rounded.
#
# Each rank packs its own shard, the all-gather moves packed shards, and each rank unpacks all of them, its own
# included. So every rank computes with the same values. Storages and master weights keep the exact values, and methods
# that read them return those: only forward and backward compute with rounded values.
#
# Source: G. Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023 (qwZ).
# ----------------------------------------------------------------------------------------------------------------------


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class QuantizedGather:
    """All-gathers in a wire format.

    Arguments:
        name: the wire format; `"exact"` for none.
    """

    def __init__(self, context: EngineContext, name: GatherFormat) -> None:
        self._context = context
        self._format = None if name == "exact" else WireFormat(name)
        self._free: dict[int, deque[tuple[Tensor, Event]]] = {}  # by size, each with the event of its last reader

    def carries(self, unit: Unit) -> bool:
        """Return True if gathers of this unit carry rounded values. It is the same on every rank."""
        return self._format is not None and unit.replica is None and is_packed(unit.spec, unit.layout.shards)

    def gather(self, unit: Unit) -> None:
        """Gather the shards of all ranks. The work follows `unit.event`, after which this rank's shard is there."""
        form, full, what = self._format, unit.gathered_buffer, unit.label
        assert form is not None, "gathers are exact"
        packed, free = self._take(form.packed_bytes(unit.layout.numel))
        start, stop = unit.own_range
        own, sent = full[start:stop], packed[form.packed_bytes(start) : form.packed_bytes(stop)]
        arrived = unit.event

        def exchange() -> Pending | None:
            form.pack(own, sent, self._context.pool)
            return self._context.ranks.all_gather(packed, sent, what)

        # `pack` reads this rank's shard, so it follows the upload. It overwrites the buffer, so it follows the unpack
        # of the gather before (ordering rule 3).
        gathered = self._context.streams.submit(
            COLLECTIVE,
            exchange,
            after=(arrived, free),  # site quantized_gather.uploaded, quantized_gather.buffer_free
            writes=(packed,),
            nbytes=packed.nbytes,
            label=Label("gather", unit.name, form.name),
        )
        self._context.ranks.submitted(gathered)
        # On the host a collective goes on after `submit` returns, and the caller must not wait for it here: another
        # stream unpacks. On a device both are work of one stream.
        unit.event = self._context.streams.submit(
            UPLOAD if self._context.streams.computes_on_host else COLLECTIVE,
            lambda: form.unpack(packed, full, self._context.pool),
            after=(gathered,),  # site quantized_gather.received
            writes=(full,),
            nbytes=unit.nbytes,
            label=Label("unpack", unit.name, form.name),
        )
        self._free[packed.nbytes].append((packed, unit.event))
        unit.is_rounded = True

    def clear(self) -> None:
        """Free the buffers. No gather is under way."""
        self._free.clear()

    def _take(self, nbytes: int) -> tuple[Tensor, Event]:
        """Return a buffer for packed shards, and the event after which it may be written."""
        free = self._free.setdefault(nbytes, deque())
        if free and (free[0][1].done() or len(free) >= BUFFERS_OF_A_SIZE):
            return free.popleft()
        return torch.empty(nbytes, dtype=torch.uint8, device=self._context.streams.device), DONE


def is_packed(spec: UnitSpec, shards: int) -> bool:
    """Return True if gathers of a sharded unit can carry rounded values: floats, and no scales of quantized weights."""
    return shards > 1 and spec.dtype in _DTYPES and not spec.is_beside_codes


def packed_bytes(plans: Iterable[UnitPlan], name: GatherFormat) -> int:
    """Return the device bytes of the buffers for packed shards, at most: a few buffers of each size."""
    if name == "exact":
        return 0
    form = WireFormat(name)
    sizes = {
        form.packed_bytes(plan.layout.numel)
        for plan in plans
        if not plan.replicated and is_packed(plan.spec, plan.layout.shards)
    }
    return BUFFERS_OF_A_SIZE * sum(sizes)


# ----------------------------------------------------------------------------------------------------------------------
# Gathers ahead of use, within a budget of bytes.
#
# The order of units is learned from the last forward and the last backward. It is a hint: another order costs speed and
# never changes the result.
#
# A gather begins with the copy of this rank's shard into the full buffer, from files or host memory. The all-gather of
# the other shards is issued by the program's own thread, at a point that is the same on every rank (ordering rule 4):
#
#   at once                              if no work of the host precedes it
#   when the unit before it is needed    if the shard is read from a file, or an update on the host may still run: the
#                                        thread that issues the collective waits for those
#   when the unit is needed              at the latest
#
# The choice depends on nothing that may differ between ranks, such as the completion of an event.
#
# A secondary shard of a gathered unit is kept until the next update, so that later gathers stay inside a node. After a
# gather in training each of the k ranks of a node keeps one k-th of the whole unit, as it was gathered, and backward's
# gather is among those k ranks. An evaluation keeps none and uses those that are there. Every rank keeps and uses the
# same ones, because they decide which ranks a gather is among.
#
# Source: G. Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023 (hpZ).
# ----------------------------------------------------------------------------------------------------------------------


_EMPTY = (UnitState.RELEASED, UnitState.OUTDATED)  # of valid values


@dataclass(eq=False)
class Gatherer:
    """Gathers and releases units.

    Attributes:
        packing: gathers in a wire format.
        live_budget: how many bytes all full buffers may take for a gather ahead of use to begin. A unit that is needed
            is always gathered. Memory that is kept only for views elsewhere does not count.
        prefetch_budget: how many bytes the buffers of gathers ahead of use may take.
        announce: called once, before the first gather of a sharded unit; `None` if there is nothing to call. It may
            raise: nothing of the gather has begun then.
        live_bytes, peak_live_bytes: the bytes of all full buffers now, and at most so far.
    """

    context: EngineContext
    packing: QuantizedGather
    live_budget: int
    prefetch_budget: int
    announce: Callable[[], None] | None = None
    live_bytes: int = 0
    peak_live_bytes: int = 0
    #: Units that are gathered ahead of use, in order, with the bytes that each takes.
    _ahead: dict[Unit, int] = field(default_factory=dict)
    #: The sum of those: computed at each use of a unit, it would cost the square of their number.
    _ahead_bytes: int = 0
    #: Units whose gather has begun and whose collective is still to be issued.
    _in_part: set[Unit] = field(default_factory=set)
    #: Units that the host has updated since their last gather: that update may still run.
    _updated: set[Unit] = field(default_factory=set)
    #: Units by the address of their full buffer's storage.
    _buffers: dict[int, Unit] = field(default_factory=dict)
    #: Released units whose buffer has memory for views elsewhere alone. A dict, for its order.
    _lingering: dict[Unit, None] = field(default_factory=dict)
    #: Units that are gathered exactly for a `gathered` block, while other gathers carry rounded values.
    _exact: set[Unit] = field(default_factory=set)

    def owner_of(self, tensor: Tensor) -> Unit | None:
        """Find the unit whose full buffer a tensor is a view of, among those that are released after use."""
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()._cdata
        unit = self._buffers.get(storage)
        is_its = unit is not None and not unit.resident and unit.gathered_buffer.untyped_storage()._cdata == storage
        return unit if is_its else None

    def acquire(self, unit: Unit) -> None:
        """Make the unit's parameters usable by compute that is issued from here on."""
        # The unit may be gathered, and another stream of compute has waited for it (ordering rule 2).
        self.context.streams.follow_current_stream()
        if unit.holding.unit_state in _EMPTY:
            self._make_room(unit)
            self._start(unit)
        if unit.holding.unit_state is UnitState.GATHERING:
            if unit in self._in_part:
                self._gather_rest(unit)  # at the latest here: every rank uses its units in this order
            unit.event.wait()  # site gather.over: compute reads the buffer after the work that fills it
            unit.point_to()
            unit.holding.become(UnitState.GATHERED)
            self._ahead_bytes -= self._ahead.pop(unit, 0)
            self._updated.discard(unit)
        unit.params.written.check()  # a unit that stayed gathered must not outlive a failed step

    def acquire_exact(self, unit: Unit) -> None:
        """Make the unit's parameters usable with the exact values of its storage."""
        if self.packing.carries(unit) and unit not in self._exact:
            if unit.holding.unit_state not in _EMPTY and unit not in self._in_part:
                self.acquire(unit)  # the gather under way ends before the next one fills the same memory
                unit.holding.become(UnitState.OUTDATED)
            self._exact.add(unit)
        self.acquire(unit)

    def prefetch(self, upcoming: Iterable[Unit]) -> None:
        """Start to gather the units that come next, in order, as many as the budgets allow."""
        soonest = next(iter(self._ahead), None)
        for unit in upcoming:
            if unit.holding.unit_state not in _EMPTY:
                continue
            nbytes = 0 if unit.resident else unit.nbytes
            if self._ahead_bytes + nbytes > self.prefetch_budget or self._live_bytes_with(unit) > self.live_budget:
                break
            self._start(unit)
            self._ahead[unit] = nbytes
            self._ahead_bytes += nbytes
            # `submit` blocks until the host's reads and updates that a collective follows are over: issue it later.
            if unit in self._in_part and not self._follows_host(unit):
                self._gather_rest(unit)
        if soonest in self._in_part:  # an earlier call has begun its gather
            self._gather_rest(soonest)

    def release(self, unit: Unit) -> None:
        """Free the full buffer and make the parameters placeholders.

        Nothing happens to resident and persistent units, nor to a unit that has a holder.
        """
        if unit.is_released_after_use and not unit.holding.is_held:
            self._retire(unit)
        elif unit in self._exact and not unit.holding.blocks:
            # The unit stays gathered. The next forward computes with the rounded values of a new gather.
            self._exact.discard(unit)
            if unit.holding.unit_state is UnitState.GATHERED:
                unit.holding.become(UnitState.OUTDATED)
                if unit.holding.is_held:  # its holder does not acquire it again
                    self.acquire(unit)

    def drop_unused(self) -> None:
        """Drop gathers ahead of use that were not used, and free buffers that were kept for views that are gone."""
        for unit in list(self._ahead):
            self._drop(unit)
        for unit in [unit for unit in self._lingering if not views_elsewhere(unit.gathered_buffer)]:
            self._free(unit)

    def outdate(self, unit: Unit) -> None:
        """Mark a gathered unit as outdated, because an update writes its storage. The next use gathers it again."""
        assert not unit.holding.is_held, f"unit '{unit.name}' is updated while it is in use"
        assert unit not in self._ahead, f"unit '{unit.name}' is updated while it is gathered"
        unit.recorded.outdate()
        if unit.trained and any(segment.tier is not Tier.DEVICE for segment in unit.trained.optimizer.segments):
            self._updated.add(unit)  # the update may still run when the unit is gathered ahead
        if unit.resident or unit.spec.persistent:
            if unit.holding.unit_state is UnitState.GATHERED:
                unit.holding.become(UnitState.OUTDATED)
        else:
            self._retire(unit)

    def show_resident(self, units: Iterable[Unit], *, wait: bool) -> None:
        """Update resident parameters to point at their new values, or unset them until their unit is used.

        Arguments:
            units: any units. Only resident ones are changed.
            wait: wait for the updates of all of them; otherwise parameters that are not up to date are unset.
        """
        for unit in units:
            if unit.resident:
                # Without waiting, no unit that needs a collective: ranks would issue those in different orders.
                if wait or (unit.params.written.done() and not unit.other_shards_outdated):
                    self.acquire(unit)
                elif unit.holding.unit_state is not UnitState.GATHERED:  # a gathered one is in use
                    unit.unset()

    def forget(self, unit: Unit) -> None:
        """Free the buffer of a unit that is not in use, also if it is persistent."""
        if not unit.resident:
            self._retire(unit)

    def release_memory(self) -> None:
        """Free buffers that are kept between gathers. No gather is under way."""
        self.packing.clear()

    def lend(self, unit: Unit) -> Tensor:
        """Return the full buffer, with memory, so that it can become the storage of the parameters."""
        if not (unit.resident or unit.allocated):
            self._allocate(unit)
            unit.holding.become(UnitState.OUTDATED)
        return unit.gathered_buffer

    def become_storage(self, unit: Unit) -> None:
        """Make the full buffer, which holds the parameters, their storage: the unit is resident from now on."""
        assert unit.holding.unit_state is not UnitState.GATHERING
        assert unit.allocated, f"unit '{unit.name}' has no memory to become a storage"
        self.live_bytes -= unit.nbytes
        self._lingering.pop(unit, None)
        unit.resident = True

    def leave_storage(self, unit: Unit, *, moved: Event) -> None:
        """Gather the unit for each use from now on: its parameters have moved out of the full buffer.

        Arguments:
            unit: a resident unit. If it has a holder, it stays gathered until it is released.
            moved: the event of the copy from the full buffer to the new storage.
        """
        if unit.is_whole:
            unit.note_versions()  # writes to these parameters went to their storage
        before, in_use = unit.gathered_buffer, unit.holding.is_held
        resizable, recorded = before.untyped_storage().resizable(), unit.recorded.is_alive
        if recorded:  # the graph has views of this memory, and nothing announces its backward
            unit.recorded.keep(before if resizable else before.clone())
            unit.recorded.is_new = in_use
        unit.resident = False
        self.live_bytes += unit.nbytes
        if resizable and not recorded and (in_use or moved.done()):
            # Keep the same torch storage: views that autograd saved read the values of the next gather. The copies to
            # the new storage may still read it: `_retire` waits for them before the memory is freed (ordering rule 1).
            unit.event = moved
        else:  # a part of an allocation, or still read by the copies: its memory goes with the old storage
            unit.event = DONE
            unit.gathered_buffer = self.context.streams.make_buffer(before.numel(), before.dtype)
            if in_use:
                unit.gathered_buffer.copy_(before)
                unit.point_to()
        if not in_use:
            self._retire(unit)

    def _make_room(self, unit: Unit) -> None:
        """Drop gathers ahead of use, the last one first, until another unit fits into the budget."""
        excess = self._live_bytes_with(unit) - self.live_budget
        for other in reversed([u for u in self._ahead if not (u.resident or u.spec.persistent)]):
            if excess <= 0:
                return
            excess -= other.nbytes
            self._drop(other)

    def _live_bytes_with(self, unit: Unit) -> int:
        """Return the bytes of all full buffers once a unit is gathered as well.

        Buffers that are kept for views elsewhere do not count: those views may differ between ranks, and all ranks must
        gather the same units ahead (ordering rule 4).
        """
        left = sum(other.nbytes for other in self._lingering)
        has_memory = unit.resident or (unit.allocated and unit not in self._lingering)
        return self.live_bytes - left + (0 if has_memory else unit.nbytes)

    def _follows_host(self, unit: Unit) -> bool:
        """Return True if work of the host may precede the collective of its gather.

        The answer depends on the history of the unit, which is the same on all ranks, and on no event.
        """
        return unit.params.in_files or unit in self._updated

    def _drop(self, unit: Unit) -> None:
        """Drop a gather ahead of use; finish it instead if the unit is resident or persistent."""
        if unit.resident or unit.spec.persistent:
            self.acquire(unit)
        else:
            self._ahead_bytes -= self._ahead.pop(unit)
            self._retire(unit)

    def _retire(self, unit: Unit) -> None:
        """Make the parameters placeholders, and free the full buffer.

        A buffer of which views exist elsewhere keeps its memory. A recorded graph or the user of a `gathered` block
        keeps the values, and the unit gets another buffer. Any other view (a custom function may keep one for its
        backward) reads NaN until the next gather fills the same memory. Only if autograd itself may have saved views is
        the memory freed until that gather.
        """
        recorded, holding = unit.recorded, unit.holding
        self._in_part.discard(unit)  # its collective was issued on no rank
        self._exact.discard(unit)
        if not unit.allocated:
            if recorded.shown is not None and not recorded.is_alive:
                recorded.forget()
                unit.unset()
            return
        try:
            # site release.gather_over
            unit.event.wait()  # a copy may still use the memory, which others get once it is freed (ordering rule 1)
        except Exception:  # the gather failed, which was raised where it was needed; other parts of it may still run
            for part in unit.event.parts():
                with contextlib.suppress(Exception):
                    part.synchronize()  # site release.failed_gather_over
            holding.empty_views()
        was_gathered = holding.unit_state is UnitState.GATHERED
        holding.become(UnitState.OUTDATED)  # first: wherever an interrupt stops this, the next use gathers again
        if recorded.is_alive:
            if recorded.is_new and was_gathered:
                recorded.keep(unit.gathered_buffer)
                self._replace_full(unit)
            assert recorded.shown is not None
            unit.point_to(recorded.shown)
        else:
            recorded.forget()
            unit.unset()
        if views_elsewhere(unit.gathered_buffer) and (
            holding.shown or not unit.gathered_buffer.untyped_storage().resizable()
        ):
            self._replace_full(unit)
        holding.note_emptied()
        if views_elsewhere(unit.gathered_buffer) and not holding.empties_views:
            self.context.streams.poison(unit.gathered_buffer)
            self._lingering[unit] = None
        else:
            self._free(unit)

    def _allocate(self, unit: Unit) -> None:
        self.context.streams.allocate(unit.gathered_buffer)
        self.live_bytes += unit.nbytes
        self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes)

    def _free(self, unit: Unit) -> None:
        self._lingering.pop(unit, None)
        unit.holding.become(UnitState.RELEASED)  # first: an interrupt leaves no unit that counts on memory it lost
        self.live_bytes -= unit.nbytes
        self.context.streams.deallocate(unit.gathered_buffer)

    def _replace_full(self, unit: Unit) -> None:
        """Leave the memory of the full buffer to its views, and give the unit another buffer without memory."""
        self._buffers.pop(unit.gathered_buffer.untyped_storage()._cdata, None)
        self.context.streams.transfer_to_compute(unit.gathered_buffer)
        buffer = self.context.streams.make_buffer(unit.gathered_buffer.numel(), unit.gathered_buffer.dtype)
        buffer.untyped_storage().resize_(0)
        unit.gathered_buffer = buffer

    def _start(self, unit: Unit) -> None:
        """Start a gather: bring this rank's shard of the unit. The collective for the other shards may follow later."""
        is_shared = unit.other_shards_outdated if unit.replica is not None else self.context.ranks.shards > 1
        # Not for a replica whose other shards are outdated: forwards of different kinds may gather that one.
        if is_shared and unit.replica is None and self.announce is not None:
            announce, self.announce = self.announce, None
            announce()
        try:
            # Compute reads a resident unit in its storage, so it follows the last write of that (ordering rule 3).
            unit.event = unit.params.written if unit.resident else self._fill(unit)
            unit.holding.become(UnitState.GATHERING)
        except BaseException:
            # An interrupt may come after a copy was submitted and before its event is recorded. Wait for the copy here:
            # the next user of this memory could not (ordering rule 1).
            self.context.streams.drain((READ, UPLOAD))
            raise
        if is_shared:
            self._in_part.add(unit)

    def _fill(self, unit: Unit) -> Event:
        """Allocate the full buffer and copy this rank's shard into it, or the whole unit from a replica."""
        if not unit.allocated:
            self._allocate(unit)
        self._lingering.pop(unit, None)
        self._buffers[unit.gathered_buffer.untyped_storage()._cdata] = unit
        replica = unit.replica
        if replica is not None and not unit.other_shards_outdated:
            return self.context.transfers.copy(
                replica, buffer_storage(unit.gathered_buffer), Label("gather", unit.name)
            )
        # The storage orders the copy after the last update, and the next update after the copy (ordering rule 6).
        source, start, stop = self._source(unit)
        return self.context.transfers.copy(
            source, buffer_storage(unit.gathered_buffer[start:stop]), Label("gather", unit.name)
        )

    def _source(self, unit: Unit) -> tuple[Storage, int, int]:
        """Return the storage that a gather begins with on this rank, and its range in the full buffer."""
        secondary = unit.secondary
        # No secondary shard is there, or it is from before the last update, or it may be rounded.
        if secondary is None or unit.other_shards_outdated or unit in self._exact:
            return unit.params, *unit.own_range
        return secondary, *_range_of(unit, secondary)

    def _gather_rest(self, unit: Unit) -> None:
        """Gather the shards of other ranks. The caller waits for this rank's shard if work of the host brings it."""
        inside = self._source(unit)[0] is unit.secondary  # the ranks of a node have all of the unit together
        exact = unit in self._exact
        if not (inside or exact) and self.packing.carries(unit):
            self.packing.gather(unit)
        else:
            self._all_gather(unit, inside=inside)
        if not (inside or exact):
            self._keep(unit)
        self._in_part.remove(unit)

    def _keep(self, unit: Unit) -> None:
        """Keep this rank's secondary shard of what is gathered after `unit.event`, if a backward may follow."""
        # A reentrant checkpoint runs its forward without gradients: `training` tells that a backward may follow.
        if unit.secondary is None or not (self.context.model.training or user_records()):
            return
        start, stop = _range_of(unit, unit.secondary)
        unit.other_shards_outdated = False
        # The copy becomes the event of the buffer, which is released after it (ordering rule 1).
        gathered = buffer_storage(unit.gathered_buffer[start:stop], written=unit.event)  # site gather.secondary_source
        unit.event = self.context.transfers.copy(gathered, unit.secondary, Label("save", unit.name, SECONDARY))

    def _all_gather(self, unit: Unit, *, inside: bool) -> None:
        """Gather the shards of other ranks as they are: inside this rank's node, or of all ranks."""
        _, start, stop = self._source(unit)
        full, own, layout, what = unit.gathered_buffer, unit.gathered_buffer[start:stop], unit.layout, unit.label
        # The collective reads this rank's shard, so it follows the upload (ordering rule 3).
        event = unit.event = self.context.streams.submit(
            COLLECTIVE,
            lambda: (
                self.context.ranks.all_gather(full, own, what, inside=inside)
                if layout.is_even
                else self.context.ranks.broadcast_shards(full, layout.cuts, what)
            ),
            after=(unit.event,),  # site gather.uploaded
            nbytes=unit.nbytes,
            label=Label("gather", unit.name),
        )
        unit.is_rounded = inside and self.packing.carries(unit)  # secondary shards are kept as they were gathered
        self.context.ranks.submitted(event)  # the program's next collectives follow it, on every rank
        if unit.replica is not None:  # the shards of all ranks are written back to it
            unit.other_shards_outdated = False
            if not unit.resident:
                # site gather.replica_source
                storage, label = buffer_storage(full, written=event), Label("save", unit.name, PARAM)
                # The copy becomes the event of the buffer, which is released after it (ordering rule 1).
                unit.event = self.context.transfers.copy(storage, unit.replica, label)


def _range_of(unit: Unit, secondary: Storage) -> tuple[int, int]:
    """Return the range of the full buffer that this rank keeps: the one of its index in its node."""
    place = unit.rank % (unit.layout.numel // secondary.stop)
    return place * secondary.stop, (place + 1) * secondary.stop
