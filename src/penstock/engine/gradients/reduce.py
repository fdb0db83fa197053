"""Gradients on their way home: reduced over ranks, measured, and put into their storage."""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock._native import Pool
from penstock.config import GRAD, ReduceFormat
from penstock.engine.step.context import EngineContext
from penstock.engine.step.step import measure_late, reached
from penstock.engine.unit.plan import UnitPlan
from penstock.engine.unit.unit import Unit, UnitGradient
from penstock.layout import FlatLayout, SlotPiece
from penstock.rules.formats import Ranges, deposit, deposit_part, deposit_parts, squared_norms
from penstock.rules.wire import WireFormat
from penstock.runtime.collectives import Hop
from penstock.runtime.host_memory import Words
from penstock.runtime.streams import COLLECTIVE, DEVICE_UPDATE, DONE, DOWNLOAD, Event, Streams, across, all_of
from penstock.runtime.system import compute_pool
from penstock.runtime.topology import Grid
from penstock.tiers.storage import Storage, buffer_home
from penstock.trace import Label

# ----------------------------------------------------------------------------------------------------------------------
# Device buffers for gradients on their way: a few of each size, reused in turn.
#
# Memory that is given back to the allocator and mapped again every step costs page faults on a cpu and fragmentation on
# a device, so buffers are kept.
# ----------------------------------------------------------------------------------------------------------------------


BUFFERS_OF_A_SIZE = 2  # one being filled by backward while the other is being reduced


class BufferRing:
    """Flat device buffers, leased and returned. A returned buffer is used again once its event is waited for."""

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self._device = device
        self._streams = streams
        self._free: dict[tuple[int, torch.dtype], deque[tuple[Tensor, Event]]] = {}
        self._leased: dict[tuple[int, torch.dtype], int] = {}

    def lease(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Lease a 1-D buffer with undefined contents."""
        key = (numel, dtype)
        free = self._free.setdefault(key, deque())
        self._leased[key] = self._leased.get(key, 0) + 1
        # Prefer one that is idle; make another only while the ring is not full.
        if free and (free[0][1].done() or len(free) + self._leased[key] > BUFFERS_OF_A_SIZE):
            buffer, event = free.popleft()
            # site reduce.buffer_free
            event.wait()  # else compute overwrites what a collective or a copy of the last gradient still reads
        else:
            buffer = torch.empty(numel, dtype=dtype, device=self._device)
        self._streams.lease(buffer)
        return buffer

    def give_back(self, buffer: Tensor, event: Event) -> None:
        """Return a buffer, which is used again after `event`: work on it is over then."""
        key = (buffer.numel(), buffer.dtype)
        self._leased[key] -= 1
        self._free.setdefault(key, deque()).append((buffer, event))

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that are kept for reuse."""
        return sum(b.numel() * b.element_size() for ring in self._free.values() for b, _ in ring)

    def clear(self) -> None:
        """Drop every returned buffer. Gradients are there, so work on them is over."""
        self._free.clear()


# ----------------------------------------------------------------------------------------------------------------------
# Sums of gradients over the ranks that share them: exact, or in hops that carry codes.
#
# Exact is one reduce-scatter. In a wire format each rank sends every other one its summands of that one's shard,
# packed, and each sums in fp32 what it gets, in the order of the ranks. In nodes that happens twice:
#
#     inside    to each rank of the node the slices of all shards that ranks of its place have, in any node: summed
# there     across    to the rank of this place in each node its shard of these sums: summed there
#
# So each value is rounded twice, whatever the number of ranks, and between nodes goes one sum of each node. A shard is
# summed on one rank alone: there is nothing in which ranks could differ.
#
# Source: G. Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023 (qgZ).
# ----------------------------------------------------------------------------------------------------------------------


_FP32_BYTES = 4


class ShardReduction:
    """Sums over the shard ranks.

    Arguments:
        dtype: in which gradients are summed; the dtype of both what is given and what comes out.
        name: of the format in which they go between ranks; `"exact"` for none.
    """

    def __init__(self, context: EngineContext, dtype: torch.dtype, name: ReduceFormat) -> None:
        self.dtype = dtype
        self._context = context
        self._name = name
        self._format = None if name == "exact" else WireFormat(name)
        # Collectives alone use it, one after the other on their stream: none waits for it.
        self._memory: Tensor | None = None

    def make_room(self) -> None:
        """Take what sums pass, before the first is submitted: memory is taken where compute takes its own."""
        if self._format is not None and self._memory is None:
            nbytes = summing_bytes(self._context.units, self._name, self._context.ranks.grid)
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=self._context.streams.device)

    def run(self, shard: Tensor, full: Tensor, layout: FlatLayout, what: str) -> None:
        """Sum a flat gradient over the shard ranks, as the work of the stream of collectives.

        Arguments:
            shard: filled with the sum of this rank's part, [n].
            full: this rank's summands, of all shards.
            layout: says which are whose.
            what: the unit's name, for messages.
        """
        if not layout.is_even:
            self._context.ranks.reduce_to_owners(shard, full, layout.cuts, what)
        elif self._format is None:
            self._context.ranks.reduce_scatter(shard, full, what)
        else:
            self._hop_twice(self._format, shard, full, what)

    def clear(self) -> None:
        """Give the memory back. All sums are over."""
        self._memory = None

    def _hop_twice(self, form: WireFormat, shard: Tensor, full: Tensor, what: str) -> None:
        assert self._memory is not None, "no room was made"
        grid, nbytes = self._context.ranks.grid, form.packed_bytes(full.numel())
        sent, received, rest = self._memory[:nbytes], self._memory[nbytes : 2 * nbytes], self._memory[2 * nbytes :]
        sums = rest[: _FP32_BYTES * (full.numel() // grid.inside)].view(torch.float32)
        # Shards by node and place: those of one place are for one rank of this node. As codes they are less to reorder.
        if grid.across > 1:
            form.pack(full, received, self._context.pool)
            by_node = received.view(grid.across, grid.inside, -1)
            sent.view(grid.inside, grid.across, -1).copy_(by_node.transpose(0, 1))
        else:
            form.pack(full, sent, self._context.pool)
        self._hop(form, sums, sent, received, "inside", what)
        if grid.across > 1:
            nbytes = form.packed_bytes(sums.numel())
            form.pack(sums, sent[:nbytes], self._context.pool)
            sums = sums[: shard.numel()]
            self._hop(form, sums, sent[:nbytes], received[:nbytes], "across", what)
        shard.copy_(sums)

    def _hop(self, form: WireFormat, sums: Tensor, sent: Tensor, received: Tensor, hop: Hop, what: str) -> None:
        """Exchange codes among some ranks, and sum what came."""
        self._context.ranks.all_to_all(received, sent, hop, what)
        for number, codes in enumerate(received.chunk(getattr(self._context.ranks.grid, hop))):
            form.unpack(codes, sums, self._context.pool, add=number > 0)


def summing_bytes(units: Iterable[UnitPlan | Unit], name: ReduceFormat, grid: Grid) -> int:
    """Count the device bytes that sums pass: codes sent and received, and sums in fp32, of the largest unit."""
    if name == "exact" or grid.shards < 2:
        return 0
    numel = max((unit.layout.numel for unit in units if unit.spec.trainable), default=0)
    return 2 * WireFormat(name).packed_bytes(numel) + _FP32_BYTES * (numel // grid.inside)


# ----------------------------------------------------------------------------------------------------------------------
# Three routes of a reduced gradient to its home.
#
#     in place    compute reaches the home: the gradient is written or added there where it was reduced
#     as a whole  the first micro-batch of a home out of reach: one copy
#     added       the later ones: down to the host and added there tile by tile, or, where the home is in files or on
#                 several tiers, what it holds comes up, is added to, and goes back
#
# Which of them a home takes is decided once, when it is first seen. Norms are taken of what the home holds in the end.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReducedGradient:
    """What comes out of a reduction: this rank's shard of a unit's gradient.

    Attributes:
        gradient: what is known of the unit's gradient.
        home: where the values go.
        values: the shard, in the reduce dtype.
        parts: what each slot has of it.
        adds: whether the home holds earlier micro-batches, to which it is added.
        stale: the ranges of the home that a step before has left, where other slots hold a gradient of this one.
        norms: the squared norm of each part, where it is known already.
        label: what traces call its way home.
    """

    gradient: UnitGradient
    home: Storage
    values: Tensor
    parts: Sequence[SlotPiece]
    adds: bool
    stale: Ranges
    norms: Sequence[float | Tensor] | None
    label: Label

    @property
    def ranges(self) -> Ranges:
        """What each slot has of it, as first element and one past the last."""
        return [(start, stop) for _, start, stop in self.parts]


class GradientSinks:
    """The ways of reduced gradients to their homes.

    Arguments:
        buffers: device memory for sums of homes out of reach.
        compute_pool: the threads of what compute's own thread does.
        dtype: the homes' own, in which micro-batches are summed.
        agrees: whether ranks tell each other if a gradient is finite, as soon as it is reduced.
    """

    def __init__(
        self, context: EngineContext, buffers: BufferRing, compute_pool: Pool, *, dtype: torch.dtype, agrees: bool
    ) -> None:
        self._context = context
        self._buffers = buffers
        self._compute_pool = compute_pool
        self._dtype = dtype
        self._agrees = agrees
        self._values: dict[Storage, Tensor | None] = {}

    def values(self, home: Storage) -> Tensor | None:
        """Return the values of a home, where compute reaches them: found out once."""
        if home not in self._values:
            self._values[home] = reached(home, self._context.streams)
        return self._values[home]

    def clear(self) -> None:
        """Let go of the homes, which move or end."""
        self._values.clear()

    def receive(self, reduced: ReducedGradient) -> None:
        """Do what belongs to the reduction itself, on its stream: write what is in reach, and measure."""
        gradient, values = reduced.gradient, self.values(reduced.home)
        if values is not None:
            _clear(values, reduced.stale)
            gradient.flawed = None  # from when the home was elsewhere: the norms measured here say it from now on
            norms = deposit_parts(values, reduced.values, reduced.ranges, add=reduced.adds, pool=self._compute_pool)
            gradient.measure(reduced.parts, norms)
            return
        if not reduced.adds:  # else the sum is measured at home
            rounded = reduced.norms or squared_norms(
                reduced.values.to(self._dtype), reduced.ranges, pool=self._compute_pool
            )
            gradient.measure(reduced.parts, rounded)
        if self._agrees:
            gradient.flawed = _flaw(reduced.values, gradient.flawed if reduced.adds else None)

    def send_home(self, reduced: ReducedGradient, received: Event) -> Event:
        """Bring what was received home; return the event after which the reduced values are not needed any more."""
        home = reduced.home
        if self.values(home) is not None:
            # The step, updates and the next micro-batch ask the home. None of them knows of the collective that wrote
            # it.
            home.note_write(received)  # site reduce.written_in_place
            return received
        if not reduced.adds:
            # After the collective: else what the buffer held before would go home in place of the sum.
            # site reduce.first_received
            return self._context.movement.copy(buffer_home(reduced.values, written=received), home, reduced.label)
        # Of homes in memory only those on a cut are added to on the device: they must be measured whole.
        add = self._add_on_device if len(home.sections) > 1 or home.in_files else self._add_on_host
        return add(reduced, received)

    def _add_on_host(self, reduced: ReducedGradient, received: Event) -> Event:
        """Add to a home in one piece of host memory, tile by tile: while one is added the next one comes down."""
        ((home,),) = (section.tensors for section in reduced.home.sections)
        pool = self._context.pool

        def add(start: int, landed: Tensor) -> None:
            if start == 0:  # tiles run in order: zeroed later, the stale ranges would lose what was added to them
                _clear(home, reduced.stale)
            deposit(home[start : start + landed.numel()], landed, add=True, pool=pool)
            if start + landed.numel() == home.numel():  # the last: they run in order
                reduced.gradient.measure(reduced.parts, squared_norms(home, reduced.ranges, pool=pool))

        # Not before the collective has made the values, nor while an earlier micro-batch still lands in the home or an
        # update or a move still reads it.
        after = all_of([received, reduced.home.memory.free])  # site host_sum.received, host_sum.storage_free
        values = reduced.values[: home.numel()]
        added = self._context.movement.land(values, add, after=after, label=reduced.label)
        reduced.home.note_write(added)  # site host_sum.written: the next micro-batch and the update come after the sum
        return added

    def _add_on_device(self, reduced: ReducedGradient, received: Event) -> Event:
        """Bring up what a home holds in files or on several tiers, add, and put the sum back."""
        streams, movement, pool = self._context.streams, self._context.movement, self._context.pool
        total = self._buffers.lease(reduced.values.numel(), self._dtype)
        brought = movement.copy(reduced.home, buffer_home(total), reduced.label)

        def add() -> None:
            _clear(total, reduced.stale)  # else the sum would hold what a step before has left
            norms = deposit_parts(total, reduced.values, reduced.ranges, add=True, pool=pool)
            reduced.gradient.measure(reduced.parts, norms)

        # On a stream beside that of collectives: whoever issues one waits on the host for what it follows, and this
        # follows a read of a file. Not before both are there: else half of the sum is missing.
        nbytes = 2 * total.nbytes + reduced.values.nbytes  # read and written
        # site device_sum.received, device_sum.loaded
        added = streams.submit(DEVICE_UPDATE, add, after=(received, brought), nbytes=nbytes, label=reduced.label)
        # site device_sum.added
        saved = movement.copy(buffer_home(total, written=added), reduced.home, reduced.label)
        self._buffers.give_back(total, saved)  # the copy home reads it last
        return saved


def _clear(home: Tensor, stale: Ranges) -> None:
    """Zero what a step before has left, where some slots hold a gradient of this one already."""
    for start, stop in stale:
        home[start:stop] = 0


def _flaw(values: Tensor, before: Tensor | None) -> Tensor:
    """Say whether this micro-batch, or one before it, is not finite: 0 or 1. On the device."""
    flaw = torch.linalg.vector_norm(values, math.inf).isfinite().logical_not().float().view(1)
    return flaw if before is None else torch.maximum(before, flaw)


# ----------------------------------------------------------------------------------------------------------------------
# Gradients from autograd to their home: collected, reduced over ranks, summed over micro-batches, measured.
#
#     autograd -> pending (device, whole unit, reduce dtype) -> reduced (this rank's shard) -> home (accumulation dtype)
#
# At world size 1, where compute reaches the home, a gradient goes there straight from autograd. Nothing here makes the
# host wait for the device. Norms are taken part by part (a slot's part in the shard) of what the home holds in the end,
# so they do not depend on the path, the placement or the tile size. The way home is `engine/gradients/reduce.py`.
# ----------------------------------------------------------------------------------------------------------------------


class Reducer:
    """Takes every gradient of the engine's units.

    Arguments:
        sums: sums gradients over shards.
        accumulation_dtype: the dtype in which micro-batches are summed, the homes' own.
        agrees: whether ranks tell each other if a gradient is finite, as soon as it is reduced.
        may_hold_back: whether whole gradients may stay on this rank until a later micro-batch is reduced (stages 0
            and 1).

    Attributes:
        has_peers: whether gradients are reduced over ranks.
        changes: counts what has changed gradients: whoever keeps something about them asks whether it has.
    """

    def __init__(
        self,
        context: EngineContext,
        sums: ShardReduction,
        *,
        accumulation_dtype: torch.dtype,
        agrees: bool,
        may_hold_back: bool,
    ) -> None:
        ranks, streams = context.ranks, context.streams
        self._context = context
        self._ranks = ranks
        self._streams = streams
        self._pool = compute_pool(streams.device, otherwise=context.pool)  # compute's own thread does all that is here
        self._sums = sums
        self._reduce_dtype = sums.dtype
        self._accumulation_dtype = accumulation_dtype
        self.has_peers = ranks.data_size > 1
        # On the host the pass that writes measures for nothing; on a device the norm would be kernels of its own.
        self._measures_late = not streams.computes_on_host
        # What is collected is what will be at home, bit for bit: the pass that collects it measures for nothing.
        self._measures_collected = not (self._measures_late or self.has_peers) and sums.dtype == accumulation_dtype
        self.buffers = BufferRing(streams.device, streams)
        self._told = Words(streams.device)
        if agrees and not streams.aliases_host:
            self._told.place(0)  # not later, within a backward: to pin memory there may block what it waits for
        self._agrees = agrees and ranks.world_size > 1
        self._may_hold_back = may_hold_back
        self._sinks = GradientSinks(context, self.buffers, self._pool, dtype=accumulation_dtype, agrees=self._agrees)
        self.changes = 0
        self.accumulates = False  # inside `held_back`: another micro-batch follows

    @property
    def _synchronizing(self) -> bool:
        return not (self.accumulates and self._may_hold_back)

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Sum micro-batches inside on this rank, and reduce them with the next one outside, where that is allowed."""
        before = self.accumulates
        self.accumulates = True
        try:
            yield
        finally:
            self.accumulates = before

    def holds_back(self) -> bool:
        """Whether a gradient waits to be reduced."""
        return any(gradient.due or gradient.pending is not None for gradient in self._gradients())

    def expect(self, unit: Unit) -> None:
        """Have a unit reduced that backward has come to on every rank, also where this rank has no gradient."""
        if self.has_peers and unit.trained is not None and unit.wants_gradient:
            unit.trained.gradient.due = True  # a rank that stayed out would leave the others in their collective

    def add(self, unit: Unit, slot_index: int, grad: Tensor) -> None:
        """Add a gradient that autograd has finished: to its home where that is in reach, else to the flat gradient."""
        assert unit.trained is not None
        self.changes += 1
        self._streams.here()  # autograd hands over each gradient on the stream that its parameter was used on
        gradient = unit.trained.gradient
        slot = unit.layout.slots[slot_index]
        start, stop = slot.start, slot.start + slot.numel
        flat = grad if grad.is_contiguous() else grad.reshape(-1)
        home = None  # in reach of compute, and with the bits that reducing would give
        if not self.has_peers and self._reduce_dtype in (flat.dtype, torch.float32):
            home = self._sinks.values(gradient.home)
        if home is not None:
            # Where the home has just moved, copies may still write it: they would undo what is written here.
            gradient.home.memory.written.wait()  # site reduce.storage_moved
            target, held, measures = home, slot_index in gradient.present, not self._measures_late
        else:
            target, held = self._collected(gradient, unit.layout.numel), slot_index in gradient.arrived
            measures = self._measures_collected
        norm = None
        if measures:
            norm = deposit_part(target, start, stop, flat, add=held, pool=self._pool)
        else:
            into, flat = target[start:stop], flat.view(-1)
            into.add_(flat) if held else into.copy_(flat)
        if home is None:
            gradient.arrived[slot_index] = norm
            return
        if norm is None:
            gradient.unmeasured.add(slot_index)
        else:
            gradient.squared_norms[slot_index] = norm
        gradient.present.add(slot_index)
        gradient.held.add(slot_index)

    def flush(self, unit: Unit) -> None:
        """Reduce what is pending of a unit whose backward is over, and send it home."""
        gradient = unit.trained.gradient if unit.trained else None
        if gradient is None or not (gradient.due or gradient.pending is not None) or not self._synchronizing:
            return
        self.changes += 1
        # Autograd may have left gradients on another stream of compute: this one follows that, and the reduction this.
        self._streams.here()
        pending = self._collected(gradient, unit.layout.numel)
        self._clear_the_rest(unit, gradient)
        gradient.pending, gradient.due = None, False
        gradient.present |= gradient.arrived.keys()
        arrived, gradient.arrived = gradient.arrived, {}

        full = pending
        if pending.dtype != self._reduce_dtype:
            full = self.buffers.lease(unit.layout.numel, self._reduce_dtype)
            full.copy_(pending)
            self.buffers.give_back(pending, DONE)  # compute alone has read it, and compute fills it next
        sharded = self._ranks.shards > 1
        values = self.buffers.lease(unit.shard_numel, self._reduce_dtype) if sharded else full
        reduced = self._begin(unit, gradient, values, arrived)
        flaws = gradient.flaws = None
        if self._agrees and not self.accumulates:
            flaws = gradient.flaws = torch.empty(1, dtype=torch.float32, device=self._streams.device)
        if sharded:
            self._sums.make_room()

        def communicate() -> None:
            # On one stream, and issued before `submit` returns: every rank issues its collectives in this order.
            if sharded:
                self._sums.run(reduced.values, full, unit.layout, unit.label)
            self._ranks.all_reduce_replicas(reduced.values, unit.label)
            self._sinks.receive(reduced)
            if flaws is not None:  # now, in the program's order: the sum of micro-batches is measured when it is home
                flaws.copy_(self._flaws(gradient) if gradient.flawed is None else gradient.flawed)
                self._ranks.agree(flaws)

        # Where it writes the home, which an update may still read.
        free = DONE if self._sinks.values(reduced.home) is None else reduced.home.memory.free
        received = self._streams.submit(
            COLLECTIVE,
            communicate,
            after=(free,),  # site reduce.storage_free
            writes=(reduced.values,) if sharded else (),
            nbytes=full.numel() * full.element_size(),
            label=Label("reduce", unit.name),
        )
        self._ranks.submitted(received)  # what the program issues next comes after it
        sent = self._sinks.send_home(reduced, received)
        # Each buffer after its last reader: the whole gradient after the collective, the shard after the way home.
        self.buffers.give_back(full, received if sharded else sent)
        if sharded:
            self.buffers.give_back(reduced.values, sent)

    def _begin(
        self, unit: Unit, gradient: UnitGradient, values: Tensor, arrived: Mapping[int, float | Tensor | None]
    ) -> ReducedGradient:
        """Describe what a reduction will leave in `values`; from now on the home holds a gradient of every slot."""
        parts, adds = unit.parts(), bool(gradient.held)
        stale = [(start, stop) for index, start, stop in parts if adds and index not in gradient.held]
        gradient.held = set(range(len(unit.layout.slots)))
        norms = [norm for index, _, _ in parts if (norm := arrived.get(index)) is not None]
        known = norms if len(norms) == len(parts) else None
        label = Label("save", unit.name, GRAD)
        return ReducedGradient(gradient, gradient.home, values, parts, adds, stale, known, label)

    def tell_host(self, unit: Unit) -> None:
        """Have the host know whether a gradient is finite: to ask a device for it later would wait for compute."""
        assert unit.trained is not None
        gradient = unit.trained.gradient
        measure_late([unit], self._streams)
        if self._streams.aliases_host:
            return
        agreed = gradient.flaws if self._agrees else None
        told = self._told.place(unit.index)  # free: what was told last was asked before this gradient took its home

        def tell() -> None:
            # A word of pinned memory: into any other, the device would copy only while the host waits for it.
            across(told, self._flaws(gradient) if agreed is None else agreed)()

        gradient.flaws = told
        home = gradient.home
        heard = self._streams.submit(
            DOWNLOAD,
            tell,
            after=(home.memory.written,),  # site reduce.norm_measured: the norms are taken of what the home holds then
            writes=(told,),
            nbytes=told.element_size(),
            label=Label("tell", unit.name),
        )
        # site reduce.norm_told
        home.note_write(heard)  # whoever waits for the gradient may ask the host, which knows only after the copy
        if agreed is not None:  # ranks may not have agreed yet: the copy reads its memory later
            self._streams.give_up((agreed,), until=heard)

    def close(self) -> None:
        """Give every buffer back. Work on them is over."""
        self._sinks.clear()
        self.buffers.clear()
        self._sums.clear()
        self._told.close()

    def drop_pending(self) -> None:
        """Forget what a backward that failed has collected."""
        for gradient in self._gradients():
            if gradient.pending is not None and not gradient.rests:
                self.buffers.give_back(gradient.pending, DONE)  # no collective was begun on it
            gradient.pending, gradient.rests, gradient.due = None, False, False
            gradient.arrived = {}

    def rest(self) -> None:
        """Give the memory of buffers back. What was not reduced yet waits in host memory for the next gradient.

        Homes may move from here on, so what was not measured is.
        """
        measure_late(self._context.units, self._streams)  # the next home may be out of reach of the pass that measures
        self._sinks.clear()  # they would keep the memory of homes that are left
        for gradient in self._gradients():
            if not (gradient.pending is None or gradient.rests or self._streams.aliases_host):
                rests = gradient.pending.to("cpu", copy=True)
                self.buffers.give_back(gradient.pending, DONE)
                gradient.pending, gradient.rests = rests, True
        self.buffers.clear()
        self._sums.clear()

    def _collected(self, gradient: UnitGradient, numel: int) -> Tensor:
        """Return the flat gradient being collected, on the device: a new one, or the one that rested in host memory."""
        if gradient.pending is None:
            dtype = self._reduce_dtype if self._synchronizing else self._accumulation_dtype
            gradient.pending = self.buffers.lease(numel, dtype)
        if gradient.rests:
            buffer = self.buffers.lease(numel, gradient.pending.dtype)
            gradient.pending, gradient.rests = buffer.copy_(gradient.pending), False
        return gradient.pending

    def zero(self) -> None:
        """Forget every gradient, and each `.grad`. Homes keep their memory and are overwritten by the next one."""
        self.changes += 1
        self.drop_pending()
        for unit in self._context.units:
            for parameter in unit.parameters:
                parameter.drop_gradient()
            if unit.trained:
                home = unit.trained.gradient.home
                home.memory.written.synchronize()  # site reduce.over_before_zero: work must not write into what is next
                unit.trained.gradient = UnitGradient(home)

    def forget(self, unit: Unit, index: int) -> None:
        """Forget the gradient of one slot: it counts as absent, whatever its home holds there."""
        assert unit.trained is not None
        self.changes += 1
        gradient = unit.trained.gradient
        for slots in (gradient.present, gradient.held, gradient.unmeasured):
            slots.discard(index)
        gradient.arrived.pop(index, None)
        gradient.squared_norms.pop(index, None)

    def _flaws(self, gradient: UnitGradient) -> Tensor:
        """Tell whether this rank's part of the gradient is not finite: 0 or 1, on the device."""
        norms = [0.0, *gradient.squared_norms.values()]
        told = [torch.as_tensor(norm, dtype=torch.float64, device=self._streams.device) for norm in norms]
        return torch.stack(told).isfinite().all().logical_not().float().view(1)

    def _clear_the_rest(self, unit: Unit, gradient: UnitGradient) -> None:
        """Zero what no gradient arrived for: other ranks may have one."""
        assert gradient.pending is not None
        for start, stop in unit.layout.gaps():
            gradient.pending[start:stop] = 0
        for index, slot in enumerate(unit.layout.slots):
            if index not in gradient.arrived:
                gradient.pending[slot.start : slot.stop] = 0

    def _gradients(self) -> list[UnitGradient]:
        return [trained.gradient for _, trained in self._context.trained]
