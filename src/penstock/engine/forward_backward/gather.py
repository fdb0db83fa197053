"""Gathering a unit's parameters, exactly or in fewer bytes."""

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
from penstock.tiers.storage import Storage, buffer_home
from penstock.trace import Label

# ----------------------------------------------------------------------------------------------------------------------
# Gathers that carry parameters in a wire format: fewer bytes between ranks, for values that are rounded on the way.
#
# Each rank packs its own shard, the packed shards go round, and each rank unpacks all of them, its own included: what
# compute reads is the same on every rank. Homes and masters keep their values, and so do looks at them: only forward
# and backward compute with what was carried.
#
# Source: G. Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023 (qwZ).
# ----------------------------------------------------------------------------------------------------------------------


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class QuantizedGather:
    """All-gathers in a wire format.

    Arguments:
        name: of the format; `"exact"` for none.
    """

    def __init__(self, context: EngineContext, name: GatherFormat) -> None:
        self._context = context
        self._format = None if name == "exact" else WireFormat(name)
        self._free: dict[int, deque[tuple[Tensor, Event]]] = {}  # buffers by size, each with what still uses it

    def carries(self, unit: Unit) -> bool:
        """Whether gathers of this unit carry rounded values: the same on every rank."""
        return self._format is not None and unit.replica is None and is_packed(unit.spec, unit.layout.shards)

    def gather(self, unit: Unit) -> None:
        """Gather what all ranks have of a unit, after `unit.event`, which this rank's part is there after."""
        form, full, what = self._format, unit.full, unit.label
        assert form is not None, "gathers are exact"
        packed, free = self._take(form.packed_bytes(unit.layout.numel))
        start, stop = unit.own_range
        own, sent = full[start:stop], packed[form.packed_bytes(start) : form.packed_bytes(stop)]
        arrived = unit.event

        def exchange() -> Pending | None:
            form.pack(own, sent, self._context.pool)
            return self._context.ranks.all_gather(packed, sent, what)

        # After the upload of this rank's part, and after what the buffer carried last was unpacked.
        gathered = self._context.streams.submit(
            COLLECTIVE,
            exchange,
            after=(arrived, free),  # site quantized_gather.uploaded, quantized_gather.buffer_free
            writes=(packed,),
            nbytes=packed.nbytes,
            label=Label("gather", unit.name, form.name),
        )
        self._context.ranks.submitted(gathered)
        # On the host the collective goes on beside its caller, who must not wait for it here; on a device both are work
        # of one stream.
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
        """Give the buffers' memory back. Nothing is being gathered."""
        self._free.clear()

    def _take(self, nbytes: int) -> tuple[Tensor, Event]:
        """Take a buffer for what is packed, and the event after which it may be written."""
        free = self._free.setdefault(nbytes, deque())
        if free and (free[0][1].done() or len(free) >= BUFFERS_OF_A_SIZE):
            return free.popleft()
        return torch.empty(nbytes, dtype=torch.uint8, device=self._context.streams.device), DONE


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


# ----------------------------------------------------------------------------------------------------------------------
# Making parameters usable, early enough, within a budget of bytes.
#
# The order of units is learned from the last forward and the last backward. It is a hint: another order costs speed,
# never correctness.
#
# A gather is started ahead of use: what this rank has is brought to the full buffer, from files or host memory. The
# collective that brings what other ranks have is issued by the thread of the program, at a place in the program that is
# the same on every rank:
#
#     at once                             where nothing of the host's goes before it
#     when the unit before it is needed   where files are read for it, or an update on the host goes on: that was
# started                                         earlier, and who issues the collective waits for it
#     when the unit is needed             at the latest
#
# Nothing that differs between ranks decides where: not whether an event is done, not whose memory is still in use.
#
# A secondary part of a gathered unit is kept until the next update, so that later gathers stay inside a node. After a
# gather in training each rank keeps one of k parts of the whole unit, k being the ranks of a node: together they have
# all of it, as it was gathered, and backward's gather is one among them. An evaluation keeps nothing; it takes what is
# kept. Every rank keeps and takes the same parts: they decide which ranks a gather is among.
#
# Source: G. Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023 (hpZ).
# ----------------------------------------------------------------------------------------------------------------------


_EMPTY = (UnitState.RELEASED, UnitState.OUTDATED)  # of values that count


@dataclass(eq=False)
class Gatherer:
    """Gathers and releases units.

    Attributes:
        packing: gathers the shards of other ranks where values are rounded on the way.
        prefetch_budget: how many bytes the full buffers take at most that are being filled ahead of use.
        live_budget: how much full buffers may take at once for gathers ahead of use. A unit that is needed is always
            gathered. Memory of released units that others have views of does not count.
        announce: called once, before the first gather of a unit that is gathered for each use; `None` where there is
            nothing to call. It may raise: nothing of the gather has begun then.
    """

    context: EngineContext
    packing: QuantizedGather
    live_budget: int
    prefetch_budget: int
    announce: Callable[[], None] | None = None
    live_bytes: int = 0
    peak_live_bytes: int = 0
    #: Gathered ahead of use, in order, with the bytes of memory that each takes.
    _ahead: dict[Unit, int] = field(default_factory=dict)
    #: Of them all: a sum at every use of a unit would grow with the square of their number.
    _ahead_bytes: int = 0
    #: Being gathered, and the collective for the shards of other ranks is still to come.
    _in_part: set[Unit] = field(default_factory=set)
    #: Updated on the host since they were gathered last: that update may still run.
    _updated: set[Unit] = field(default_factory=set)
    #: By the address of the full buffer's storage.
    _buffers: dict[int, Unit] = field(default_factory=dict)
    #: Released, while views of the buffer exist elsewhere.
    _lingering: dict[Unit, None] = field(default_factory=dict)
    #: Of the units whose gathers carry rounded values: gathered for a block, with exact values.
    _exact: set[Unit] = field(default_factory=set)

    def owner_of(self, tensor: Tensor) -> Unit | None:
        """Find the unit whose full buffer a tensor is a view of, among those that are released after use."""
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()._cdata
        unit = self._buffers.get(storage)
        is_its = unit is not None and not unit.resident and unit.full.untyped_storage()._cdata == storage
        return unit if is_its else None

    def acquire(self, unit: Unit) -> None:
        """Make the unit's parameters usable by compute issued from here on."""
        self.context.streams.here()  # it may be gathered already, and another stream of compute has waited for that
        if unit.holding.residency in _EMPTY:
            self._make_room(unit)
            self._start(unit)
        if unit.holding.residency is UnitState.GATHERING:
            if unit in self._in_part:
                self._gather_rest(unit)  # at the latest here: every rank comes to its units in this order
            unit.event.wait()  # site gather.over: else compute reads what an upload or a collective has not filled yet
            unit.expose()
            unit.holding.become(UnitState.GATHERED)
            self._ahead_bytes -= self._ahead.pop(unit, 0)
            self._updated.discard(unit)
        unit.params.written.check()  # what stays gathered must not outlive a step that failed

    def acquire_exact(self, unit: Unit) -> None:
        """Make the unit's parameters usable with the values of its home, also where gathers carry rounded ones."""
        if self.packing.carries(unit) and unit not in self._exact:
            if unit.holding.residency not in _EMPTY and unit not in self._in_part:
                self.acquire(unit)  # what fills the memory now comes before what fills it next
                unit.holding.become(UnitState.OUTDATED)
            self._exact.add(unit)
        self.acquire(unit)

    def prefetch(self, upcoming: Iterable[Unit]) -> None:
        """Start gathering the units that come next, as many as the budgets allow, in order."""
        soonest = next(iter(self._ahead), None)
        for unit in upcoming:
            if unit.holding.residency not in _EMPTY:
                continue
            nbytes = 0 if unit.resident else unit.nbytes
            if self._ahead_bytes + nbytes > self.prefetch_budget or self._live_bytes_with(unit) > self.live_budget:
                break
            self._start(unit)
            self._ahead[unit] = nbytes
            self._ahead_bytes += nbytes
            # A collective that follows a read or an update of the host would block its caller here: it comes later.
            if unit in self._in_part and not self._follows_host(unit):
                self._gather_rest(unit)
        if soonest in self._in_part:  # an earlier call has started it
            self._gather_rest(soonest)

    def release(self, unit: Unit) -> None:
        """Give the full buffer's memory back; the parameters become placeholders.

        Resident and persistent units keep theirs, and so does a unit that anybody holds.
        """
        if unit.is_released_after_use and not unit.holding.is_held:
            self._retire(unit)
        elif unit in self._exact and not unit.holding.blocks:
            # It stays gathered, and what computes with it next gets what a gather carries.
            self._exact.discard(unit)
            if unit.holding.residency is UnitState.GATHERED:
                unit.holding.become(UnitState.OUTDATED)
                if unit.holding.is_held:  # and does not ask again
                    self.acquire(unit)

    def drop_unused(self) -> None:
        """Take back what was gathered ahead and not used, and what others have no views of any longer."""
        for unit in list(self._ahead):
            self._drop(unit)
        for unit in [unit for unit in self._lingering if not views_elsewhere(unit.full)]:
            self._free(unit)

    def outdate(self, unit: Unit) -> None:
        """Have a unit that an update has written gathered anew: what its buffer holds is from before."""
        assert not unit.holding.is_held, f"unit '{unit.name}' is updated while it is in use"
        assert unit not in self._ahead, f"unit '{unit.name}' is updated while it is gathered"
        unit.recorded.outdate()
        if unit.trained and any(section.tier is not Tier.DEVICE for section in unit.trained.optimizer.sections):
            self._updated.add(unit)  # the host may still be at it when the unit is gathered ahead
        if unit.resident or unit.spec.persistent:
            if unit.holding.residency is UnitState.GATHERED:
                unit.holding.become(UnitState.OUTDATED)
        else:
            self._retire(unit)

    def show_resident(self, units: Iterable[Unit], *, wait: bool) -> None:
        """Let resident parameters show their new values after updates, or refuse to be read until their unit is used.

        Arguments:
            units: all units; those that are resident are shown.
            wait: whether to wait for the updates of all of them; else those that are not up to date yet are hidden.
        """
        for unit in units:
            if unit.resident:
                # Not what other ranks' parts have to be gathered for: ranks would do so in different orders.
                if wait or (unit.params.written.done() and not unit.stale):
                    self.acquire(unit)
                elif unit.holding.residency is not UnitState.GATHERED:  # else it is in use
                    unit.hide()

    def forget(self, unit: Unit) -> None:
        """Give the memory of a unit that is not in use back, also where it would be kept for the next use."""
        if not unit.resident:
            self._retire(unit)

    def rest(self) -> None:
        """Give the memory of buffers back that are used between gathers. Nothing is being gathered."""
        self.packing.clear()

    def lend(self, unit: Unit) -> Tensor:
        """Give the full buffer, with memory, to become the home of the parameters."""
        if not (unit.resident or unit.leased):
            self._lease(unit)
            unit.holding.become(UnitState.OUTDATED)
        return unit.full

    def become_home(self, unit: Unit) -> None:
        """Make the full buffer, which now holds the parameters, their home: the unit is resident."""
        assert unit.holding.residency is not UnitState.GATHERING
        assert unit.leased, f"unit '{unit.name}' has no memory to become a home"
        self.live_bytes -= unit.nbytes
        self._lingering.pop(unit, None)
        unit.resident = True

    def leave_home(self, unit: Unit, *, moved: Event) -> None:
        """Gather the unit for each use from now on: its parameters no longer rest where compute reads them.

        Arguments:
            unit: a resident one. Where compute may read its parameters now, they stay gathered until they are released.
            moved: the event after which they have been copied from the full buffer.
        """
        if unit.is_whole:
            unit.note_versions()  # what was written was written to the home
        before, in_use = unit.full, unit.holding.is_held
        resizable, recorded = before.untyped_storage().resizable(), unit.recorded.is_alive
        if recorded:  # its views are of this memory, and nothing announces its backward
            unit.recorded.keep(before if resizable else before.clone())
            unit.recorded.is_new = in_use
        unit.resident = False
        self.live_bytes += unit.nbytes
        if resizable and not recorded and (in_use or moved.done()):
            # The same storage, so that what autograd saved sees the next gather. The copies to the new home still read
            # it: `_retire` has compute wait for them before the memory goes.
            unit.event = moved
        else:  # a part of a slab, or still being copied: its memory goes with the home
            unit.event = DONE
            unit.full = self.context.streams.make_buffer(before.numel(), before.dtype)
            if in_use:
                unit.full.copy_(before)
                unit.expose()
        if not in_use:
            self._retire(unit)

    def _make_room(self, unit: Unit) -> None:
        """Keep what was gathered ahead within the budget when another unit is needed first: the last goes first."""
        excess = self._live_bytes_with(unit) - self.live_budget
        for other in reversed([u for u in self._ahead if not (u.resident or u.spec.persistent)]):
            if excess <= 0:
                return
            excess -= other.nbytes
            self._drop(other)

    def _live_bytes_with(self, unit: Unit) -> int:
        """Count the bytes of full buffers once a unit is gathered as well.

        Buffers that are kept for views of others alone are left out. Who still has some may differ between ranks, and
        so would what they gather ahead, and the order of that among their reductions.
        """
        left = sum(other.nbytes for other in self._lingering)
        has_memory = unit.resident or (unit.leased and unit not in self._lingering)
        return self.live_bytes - left + (0 if has_memory else unit.nbytes)

    def _follows_host(self, unit: Unit) -> bool:
        """Whether work of the host may go before the collective of its gather.

        Asked of what all ranks have done to the unit, not of events: on some ranks there may be nothing to wait for.
        """
        return unit.params.in_files or unit in self._updated

    def _drop(self, unit: Unit) -> None:
        """Take back a gather ahead of use; that of a resident or persistent unit, whose memory stays, is finished."""
        if unit.resident or unit.spec.persistent:
            self.acquire(unit)
        else:
            self._ahead_bytes -= self._ahead.pop(unit)
            self._retire(unit)

    def _retire(self, unit: Unit) -> None:
        """Take the parameters out of the full buffer, and give its memory back.

        Memory that others still have views of is not taken from under them. What a recorded graph or a user of a
        `gathered` block may have kept is theirs, as it is, and the unit gets another buffer. Any other view reads NaN
        until the next gather fills the same memory: a custom function may have kept one for its backward. Only where
        autograd itself may have saved views does their memory go all the same, until that gather.
        """
        recorded, holding = unit.recorded, unit.holding
        self._in_part.discard(unit)  # on no rank was its collective issued
        self._exact.discard(unit)
        if not unit.leased:
            if recorded.shown is not None and not recorded.is_alive:
                recorded.forget()
                unit.hide()
            return
        try:
            # site release.gather_over
            unit.event.wait()  # a copy that still fills or reads the memory would meet whoever has it next
        except Exception:  # of a gather that failed: whoever needed it was told; other parts of it may go on
            for part in unit.event.parts():
                with contextlib.suppress(Exception):
                    part.synchronize()  # site release.failed_gather_over
            holding.note_failed_fill()
        if recorded.is_alive:
            if recorded.is_new and holding.residency is UnitState.GATHERED:
                recorded.keep(unit.full)
                self._replace_full(unit)
            assert recorded.shown is not None
            unit.expose(recorded.shown)
        else:
            recorded.forget()
            unit.hide()
        if views_elsewhere(unit.full) and (holding.shown or not unit.full.untyped_storage().resizable()):
            self._replace_full(unit)
        holding.note_emptied()
        if views_elsewhere(unit.full) and not holding.empties_views:
            self.context.streams.spoil(unit.full)
            holding.become(UnitState.OUTDATED)
            self._lingering[unit] = None
        else:
            self._free(unit)

    def _lease(self, unit: Unit) -> None:
        self.context.streams.lease(unit.full)
        self.live_bytes += unit.nbytes
        self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes)

    def _free(self, unit: Unit) -> None:
        self._lingering.pop(unit, None)
        self.context.streams.retire(unit.full)
        unit.holding.become(UnitState.RELEASED)
        self.live_bytes -= unit.nbytes

    def _replace_full(self, unit: Unit) -> None:
        """Leave the full buffer's memory to those who have views of it."""
        self._buffers.pop(unit.full.untyped_storage()._cdata, None)
        self.context.streams.hand_over(unit.full)
        buffer = self.context.streams.make_buffer(unit.full.numel(), unit.full.dtype)
        buffer.untyped_storage().resize_(0)
        unit.full = buffer

    def _start(self, unit: Unit) -> None:
        """Start to bring what this rank has of a unit; what other ranks have may still have to come."""
        is_shared = unit.stale if unit.replica is not None else self.context.ranks.shards > 1
        # Of a replica that is stale the next forward gathers, whichever it is: one of another kind may meet it.
        if is_shared and unit.replica is None and self.announce is not None:
            announce, self.announce = self.announce, None
            announce()
        try:
            # A resident unit is read where it rests: compute has to follow the last write of that memory alone.
            unit.event = unit.params.written if unit.resident else self._fill(unit)
            unit.holding.become(UnitState.GATHERING)
        except BaseException:
            # An interrupt may come when a copy is under way and its event is not noted: the next one to have this
            # memory would wait for nothing, and meet it.
            self.context.streams.drain((READ, UPLOAD))
            raise
        if is_shared:
            self._in_part.add(unit)

    def _fill(self, unit: Unit) -> Event:
        """Lease the full buffer and bring to it what this rank has of the unit, which may be all."""
        if not unit.leased:
            self._lease(unit)
        self._lingering.pop(unit, None)
        self._buffers[unit.full.untyped_storage()._cdata] = unit
        replica = unit.replica
        if replica is not None and not unit.stale:
            return self.context.movement.copy(replica, buffer_home(unit.full), Label("gather", unit.name))
        # The copy follows the last update of the home, and the home has the next one wait until this has read it.
        source, start, stop = self._source(unit)
        return self.context.movement.copy(source, buffer_home(unit.full[start:stop]), Label("gather", unit.name))

    def _source(self, unit: Unit) -> tuple[Storage, int, int]:
        """Return what of this rank's a gather begins with, and its range in the flat buffer."""
        secondary = unit.secondary
        # Else nothing is kept, or the unit is gathered as its homes have it, where other gathers carry rounded values.
        if secondary is None or unit.stale or unit in self._exact:
            return unit.params, *unit.own_range
        return secondary, *_range_of(unit, secondary)

    def _gather_rest(self, unit: Unit) -> None:
        """Gather what other ranks have. Where this rank's part still comes from the host, the caller waits for it."""
        inside = self._source(unit)[0] is unit.secondary  # the ranks of a node have all of it together
        exact = unit in self._exact
        if not (inside or exact) and self.packing.carries(unit):
            self.packing.gather(unit)
        else:
            self._all_gather(unit, inside=inside)
        if not (inside or exact):
            self._keep(unit)
        self._in_part.remove(unit)

    def _keep(self, unit: Unit) -> None:
        """Keep this rank's secondary part of what is gathered after `unit.event`, where a backward may follow."""
        # Reentrant checkpoints run forward without gradients, in a model that trains.
        if unit.secondary is None or not (self.context.model.training or user_records()):
            return
        start, stop = _range_of(unit, unit.secondary)
        unit.stale = False
        # The buffer is released after this copy: else later gathers would get what the memory holds next.
        gathered = buffer_home(unit.full[start:stop], written=unit.event)  # site gather.secondary_source
        unit.event = self.context.movement.copy(gathered, unit.secondary, Label("save", unit.name, SECONDARY))

    def _all_gather(self, unit: Unit, *, inside: bool) -> None:
        """Gather what other ranks have, as it is; of this rank's node, or all."""
        _, start, stop = self._source(unit)
        full, own, layout, what = unit.full, unit.full[start:stop], unit.layout, unit.label
        # After the upload of this rank's part: else every other rank is sent what the memory held before.
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
        unit.is_rounded = inside and self.packing.carries(unit)  # what is kept is as it was gathered
        self.context.ranks.submitted(event)  # what the program issues next comes after it, on every rank
        if unit.replica is not None:  # it must hold every rank's part again
            unit.stale = False
            if not unit.resident:
                # site gather.replica_source
                home, label = buffer_home(full, written=event), Label("save", unit.name, PARAM)
                # The buffer is released after this copy: else the replica would get what the memory holds next.
                unit.event = self.context.movement.copy(home, unit.replica, label)


def _range_of(unit: Unit, secondary: Storage) -> tuple[int, int]:
    """Say which part of the flat buffer is kept on this rank: that of its place in its node."""
    place = unit.rank % (unit.layout.numel // secondary.stop)
    return place * secondary.stop, (place + 1) * secondary.stop
