"""Gradients on their way home: reduced over ranks, measured, and put into their storage."""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from penstock._native import Pool
from penstock.config import GRAD, ReduceFormat
from penstock.engine.step.context import EngineContext
from penstock.engine.step.step import measure_late, reached
from penstock.engine.unit.plan import UnitPlan
from penstock.engine.unit.unit import Unit, UnitGradient
from penstock.layout import FlatLayout, SlotPiece
from penstock.rules.formats import Ranges, deposit, deposit_part, deposit_parts, squared_norm, squared_norms
from penstock.rules.wire import WireFormat
from penstock.runtime.collectives import Hop
from penstock.runtime.host_memory import Words
from penstock.runtime.streams import COLLECTIVE, DEVICE_UPDATE, DONE, DOWNLOAD, Event, Streams, across, all_of
from penstock.runtime.system import compute_pool
from penstock.runtime.topology import Grid
from penstock.tiers.storage import Storage, buffer_home
from penstock.tiers.transfer import Transfers
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

    def forget(self, buffer: Tensor) -> None:
        """Count a leased buffer as gone: it does not come back, and another may be made in its place."""
        self._leased[buffer.numel(), buffer.dtype] -= 1

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


class _HopBuffers(NamedTuple):
    """What hops work in: codes to send and codes received, as bytes, and sums in fp32."""

    sent: Tensor
    received: Tensor
    sums: Tensor


class ShardReduction:
    """Sums over the shard ranks.

    Arguments:
        dtype: in which gradients are summed; the dtype of both what is given and what comes out.
        name: of the format in which they go between ranks; `"exact"` for none.
    """

    def __init__(self, context: EngineContext, dtype: torch.dtype, name: ReduceFormat) -> None:
        self.dtype = dtype
        self._context = context
        self._format = None if name == "exact" else WireFormat(name)
        # Of the largest unit so far. Collectives alone use it, one after the other on their stream: none waits for it.
        self._memory: Tensor | None = None
        self._last: Event = DONE

    def make_room(self, unit: Unit) -> None:
        """Take what the sum of a unit passes, before it is submitted: memory is taken where compute takes its own."""
        if self._format is None:
            return
        nbytes = _bytes_of(self._format, self._context.ranks.grid, unit.layout.numel)
        if self._memory is None or self._memory.numel() < nbytes:
            if self._memory is not None:
                self._context.streams.give_up((self._memory,), until=self._last)
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

    def note(self, event: Event) -> None:
        """Note the event of the last sum that was submitted."""
        self._last = event

    def clear(self) -> None:
        """Give the memory back. All sums are over."""
        self._memory, self._last = None, DONE

    def _hop_twice(self, form: WireFormat, shard: Tensor, full: Tensor, what: str) -> None:
        grid = self._context.ranks.grid
        passing = self._passing(form, full.numel())
        # Shards by node and place: those of one place are for one rank of this node. As codes they are less to reorder.
        if grid.across > 1:
            form.pack(full, passing.received, self._context.pool)
            by_node = passing.received.view(grid.across, grid.inside, -1)
            passing.sent.view(grid.inside, grid.across, -1).copy_(by_node.transpose(0, 1))
        else:
            form.pack(full, passing.sent, self._context.pool)
        sums = passing.sums
        self._hop(form, sums, passing.sent, passing.received, "inside", what)
        if grid.across > 1:
            nbytes = form.packed_bytes(sums.numel())
            sent, received = passing.sent[:nbytes], passing.received[:nbytes]
            form.pack(sums, sent, self._context.pool)
            sums = sums[: shard.numel()]
            self._hop(form, sums, sent, received, "across", what)
        shard.copy_(sums)

    def _hop(self, form: WireFormat, sums: Tensor, sent: Tensor, received: Tensor, hop: Hop, what: str) -> None:
        """Exchange codes among some ranks, and sum what came."""
        self._context.ranks.all_to_all(received, sent, hop, what)
        for number, codes in enumerate(received.chunk(getattr(self._context.ranks.grid, hop))):
            form.unpack(codes, sums, self._context.pool, add=number > 0)

    def _passing(self, form: WireFormat, numel: int) -> _HopBuffers:
        assert self._memory is not None, "no room was made"
        codes = form.packed_bytes(numel)
        sent, received = self._memory[:codes], self._memory[codes : 2 * codes]
        nbytes = _FP32_BYTES * (numel // self._context.ranks.grid.inside)
        return _HopBuffers(sent, received, self._memory[2 * codes : 2 * codes + nbytes].view(torch.float32))


def summing_bytes(plans: Iterable[UnitPlan], name: ReduceFormat, grid: Grid) -> int:
    """Count the device bytes that sums pass, at most: what those of the largest unit do."""
    if name == "exact" or grid.shards < 2:
        return 0
    sizes: Sequence[int] = [plan.layout.numel for plan in plans if plan.spec.trainable]
    return max((_bytes_of(WireFormat(name), grid, numel) for numel in sizes), default=0)


def _bytes_of(form: WireFormat, grid: Grid, numel: int) -> int:
    return 2 * form.packed_bytes(numel) + _FP32_BYTES * (numel // grid.inside)


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
        unit: the unit's name.
        values: the shard, in the reduce dtype.
        parts: what each slot has of it.
        adds: whether the home holds earlier micro-batches, to which it is added.
        stale: the ranges of the home that a step before has left, where other slots hold a gradient of this one.
        norms: the squared norm of each part, where it is known already.
    """

    unit: str
    values: Tensor
    parts: Sequence[SlotPiece]
    adds: bool
    stale: Ranges
    norms: Sequence[float | Tensor] | None = None

    @property
    def ranges(self) -> Ranges:
        """What each slot has of it, as first element and one past the last."""
        return [(start, stop) for _, start, stop in self.parts]

    @property
    def label(self) -> Label:
        """What traces call its way home."""
        return Label("save", self.unit, GRAD)


@dataclass(frozen=True)
class SinkContext:
    """What routes are made of.

    Attributes:
        pool: the threads of what runs on the host beside compute.
        compute_pool: those of what compute's own thread does.
        dtype: the homes' own, in which micro-batches are summed.
        agrees: whether ranks tell each other if a gradient is finite, as soon as it is reduced.
    """

    streams: Streams
    movement: Transfers
    pool: Pool
    compute_pool: Pool
    buffers: BufferRing
    dtype: torch.dtype
    agrees: bool


class GradientSink(ABC):
    """How gradients get to one home.

    Attributes:
        values: the home's values, where compute reaches them.
        free: the event that a reduction follows, where it writes the home.
    """

    values: Tensor | None = None
    free: Event = DONE

    def __init__(self, home: Storage, means: SinkContext) -> None:
        self._home = home
        self._means = means

    @abstractmethod
    def receive(self, gradient: UnitGradient, reduced: ReducedGradient) -> None:
        """Do what belongs to the reduction itself, on its stream: write what is in reach, and measure."""

    @abstractmethod
    def send_home(self, gradient: UnitGradient, reduced: ReducedGradient, received: Event) -> Event:
        """Bring what was received home; return the event after which the reduced values are not needed any more."""


class DirectSink(GradientSink):
    """Compute reaches the home."""

    def __init__(self, home: Storage, means: SinkContext, values: Tensor) -> None:
        super().__init__(home, means)
        self.values = values

    @property
    def free(self) -> Event:  # type: ignore[override]
        """The home may have moved, and an update may read it."""
        return self._home.memory.free

    def receive(self, gradient: UnitGradient, reduced: ReducedGradient) -> None:
        """Write or add the gradient, and measure the sum in the same pass."""
        assert self.values is not None
        _clear(self.values, reduced.stale)
        gradient.flawed = None  # from when the home was elsewhere: the norms measured here say it from now on
        norms = deposit_parts(
            self.values, reduced.values, reduced.ranges, add=reduced.adds, pool=self._means.compute_pool
        )
        gradient.measure(reduced.parts, norms)

    def send_home(self, gradient: UnitGradient, reduced: ReducedGradient, received: Event) -> Event:
        """Note the write: it is home already."""
        # The step, updates and the next micro-batch ask the home. None of them knows of the collective that wrote it.
        self._home.note_write(received)  # site reduce.written_in_place
        return received


class TransferSink(GradientSink):
    """Compute does not reach the home: the first micro-batch goes there as a whole, later ones are added."""

    def receive(self, gradient: UnitGradient, reduced: ReducedGradient) -> None:
        """Measure the first micro-batch; of later ones, whose sum is measured at home, say whether they are finite."""
        if not reduced.adds:
            norms = reduced.norms
            if norms is None:
                rounded = reduced.values.to(self._means.dtype)
                norms = squared_norms(rounded, reduced.ranges, pool=self._means.compute_pool)
            gradient.measure(reduced.parts, norms)
        if self._means.agrees:
            gradient.flawed = _flaw(reduced.values, gradient.flawed if reduced.adds else None)

    def send_home(self, gradient: UnitGradient, reduced: ReducedGradient, received: Event) -> Event:
        """Copy the first micro-batch, or add a later one."""
        if reduced.adds:
            return self._add(gradient, reduced, received)
        # After the collective: else what the buffer held before would go home in place of the sum.
        # site reduce.first_received
        return self._means.movement.copy(buffer_home(reduced.values, written=received), self._home, reduced.label)

    @abstractmethod
    def _add(self, gradient: UnitGradient, reduced: ReducedGradient, received: Event) -> Event:
        """Add a later micro-batch, and measure the sum."""


class HostAccumulateSink(TransferSink):
    """A home in one piece of host memory: gradients come down once, in the dtype that they were reduced in."""

    def _add(self, gradient: UnitGradient, reduced: ReducedGradient, received: Event) -> Event:
        """Add tile by tile: while one is added the next one comes down."""
        ((home,),) = (section.tensors for section in self._home.sections)
        pool = self._means.pool

        def add(start: int, landed: Tensor) -> None:
            if start == 0:  # tiles run in order: zeroed later, the stale ranges would lose what was added to them
                _clear(home, reduced.stale)
            deposit(home[start : start + landed.numel()], landed, add=True, pool=pool)
            if start + landed.numel() == home.numel():  # the last: they run in order
                gradient.measure(reduced.parts, squared_norms(home, reduced.ranges, pool=pool))

        # Not before the collective has made the values, nor while an earlier micro-batch still lands in the home or an
        # update or a move still reads it.
        after = all_of([received, self._home.memory.free])  # site host_sum.received, host_sum.storage_free
        added = self._means.movement.land(reduced.values[: home.numel()], add, after=after, label=reduced.label)
        self._home.note_write(added)  # site host_sum.written: the next micro-batch and the update come after the sum
        return added


class DeviceAccumulateSink(TransferSink):
    """A home in files or on several tiers. Of homes in memory only those on a cut are: they must be measured whole."""

    def _add(self, gradient: UnitGradient, reduced: ReducedGradient, received: Event) -> Event:
        """Bring up what the home holds, add, and put the sum back."""
        means = self._means
        total = means.buffers.lease(reduced.values.numel(), means.dtype)
        brought = means.movement.copy(self._home, buffer_home(total), reduced.label)

        def add() -> None:
            _clear(total, reduced.stale)  # else the sum would hold what a step before has left
            norms = deposit_parts(total, reduced.values, reduced.ranges, add=True, pool=means.pool)
            gradient.measure(reduced.parts, norms)

        # On a stream beside that of collectives: whoever issues one waits on the host for what it follows, and this
        # follows a read of a file. Not before both are there: else half of the sum is missing.
        nbytes = 2 * total.nbytes + reduced.values.nbytes  # read and written
        # site device_sum.received, device_sum.loaded
        added = means.streams.submit(DEVICE_UPDATE, add, after=(received, brought), nbytes=nbytes, label=reduced.label)
        # site device_sum.added
        saved = means.movement.copy(buffer_home(total, written=added), self._home, reduced.label)
        means.buffers.give_back(total, saved)  # the copy home reads it last
        return saved


def route_to(home: Storage, means: SinkContext) -> GradientSink:
    """Choose the route to a home."""
    values = reached(home, means.streams)
    if values is not None:
        return DirectSink(home, means, values)
    return (DeviceAccumulateSink if len(home.sections) > 1 or home.in_files else HostAccumulateSink)(home, means)


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
        self._ranks = ranks
        self._streams = streams
        self._pool = compute_pool(streams.device, otherwise=context.pool)  # compute's own thread does all that is here
        self._sums = sums
        self._reduce_dtype = sums.dtype
        self._accumulation_dtype = accumulation_dtype
        # On the host the pass that writes measures for nothing; on a device the norm would be kernels of its own.
        self._measures_late = not streams.computes_on_host
        self._straight = ranks.data_size == 1
        # What is collected is what will be at home, bit for bit: the pass that collects it measures for nothing.
        self._measures_collected = self._straight and streams.computes_on_host and sums.dtype == accumulation_dtype
        self.buffers = BufferRing(streams.device, streams)
        self._told = Words(streams.device)
        if agrees and not streams.aliases_host:
            self._told.place(0)  # not later, within a backward: to pin memory there may block what it waits for
        self._agrees = agrees and ranks.world_size > 1
        self._may_hold_back = may_hold_back
        self._means = SinkContext(
            streams, context.movement, context.pool, self._pool, self.buffers, accumulation_dtype, self._agrees
        )
        self._routes: dict[Unit, tuple[Storage, GradientSink]] = {}
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

    def holds_back(self, units: Sequence[Unit]) -> bool:
        """Whether a gradient waits to be reduced."""
        return any(gradient.due or gradient.pending is not None for gradient in _gradients(units))

    @property
    def has_peers(self) -> bool:
        """Whether gradients are reduced over ranks."""
        return self._ranks.data_size > 1

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
        values = self._route(unit, gradient.home).values if self._straight else None
        if values is not None and self._reduce_dtype in (flat.dtype, torch.float32):  # else reducing would round
            # Where the home has just moved, copies may still write it: they would undo what is written here.
            gradient.home.memory.written.wait()  # site reduce.storage_moved
            held = slot_index in gradient.present
            if not self._measures_late:
                norm = deposit_part(values, start, stop, flat, add=held, pool=self._pool)
                gradient.squared_norms[slot_index] = norm
            else:
                target, flat = values[start:stop], flat.view(-1)
                target.add_(flat) if held else target.copy_(flat)
                gradient.unmeasured.add(slot_index)
            gradient.present.add(slot_index)
            gradient.held.add(slot_index)
            return
        pending, held = self._collected(unit, gradient), slot_index in gradient.arrived
        if self._measures_collected:
            norm = deposit_part(pending, start, stop, flat, add=held, pool=self._pool)
            gradient.arrived[slot_index] = norm
            return
        target, flat = pending[start:stop], flat.view(-1)
        target.add_(flat) if held else target.copy_(flat)
        gradient.arrived[slot_index] = None

    def flush(self, unit: Unit) -> None:
        """Reduce what is pending of a unit whose backward is over, and send it home."""
        gradient = unit.trained.gradient if unit.trained else None
        if gradient is None or not (gradient.due or gradient.pending is not None) or not self._synchronizing:
            return
        self.changes += 1
        # Autograd may have left gradients on another stream of compute: this one follows that, and the reduction this.
        self._streams.here()
        pending = self._collected(unit, gradient)
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
        reduced = self._begin(unit, gradient, self._shard_of(unit) if sharded else full, arrived)
        route = self._route(unit, gradient.home)
        flaws = gradient.flaws = self._no_flaws() if self._agrees and not self.accumulates else None
        if sharded:
            self._sums.make_room(unit)

        def communicate() -> None:
            # On one stream, and issued before `submit` returns: every rank issues its collectives in this order.
            if sharded:
                self._sums.run(reduced.values, full, unit.layout, unit.label)
            self._ranks.all_reduce_replicas(reduced.values, unit.label)
            route.receive(gradient, reduced)
            if flaws is not None:  # now, in the program's order: the sum of micro-batches is measured when it is home
                flaws.copy_(self._flaws(gradient) if gradient.flawed is None else gradient.flawed)
                self._ranks.agree(flaws)

        received = self._streams.submit(
            COLLECTIVE,
            communicate,
            after=(route.free,),  # site reduce.storage_free: an update may still read the home that this writes
            writes=(reduced.values,) if sharded else (),
            nbytes=full.numel() * full.element_size(),
            label=Label("reduce", unit.name),
        )
        self._ranks.submitted(received)  # what the program issues next comes after it
        self._sums.note(received)
        sent = route.send_home(gradient, reduced, received)
        # Each buffer after its last reader: the whole gradient after the collective, the shard after the way home.
        self.buffers.give_back(full, received if sharded else sent)
        if sharded:
            self.buffers.give_back(reduced.values, sent)

    def _shard_of(self, unit: Unit) -> Tensor:
        """Lease a buffer for this rank's shard of a unit's gradient."""
        return self.buffers.lease(unit.shard_numel, self._reduce_dtype)

    def _begin(
        self, unit: Unit, gradient: UnitGradient, values: Tensor, arrived: Mapping[int, float | Tensor | None]
    ) -> ReducedGradient:
        """Describe what a reduction will leave in `values`; from now on the home holds a gradient of every slot."""
        parts, adds = unit.parts(), bool(gradient.held)
        stale = [(start, stop) for index, start, stop in parts if adds and index not in gradient.held]
        gradient.held = set(range(len(unit.layout.slots)))
        norms = [norm for index, _, _ in parts if (norm := arrived.get(index)) is not None]
        return ReducedGradient(unit.name, values, parts, adds, stale, norms if len(norms) == len(parts) else None)

    def _route(self, unit: Unit, home: Storage) -> GradientSink:
        """Find the route to a unit's home: chosen when it is first seen, and again when it has moved."""
        known = self._routes.get(unit)
        if known is None or known[0] is not home:
            known = self._routes[unit] = home, route_to(home, self._means)
        return known[1]

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
        self._routes.clear()
        self.buffers.clear()
        self._sums.clear()
        self._told.close()

    def drop_pending(self, units: Sequence[Unit]) -> None:
        """Forget what a backward that failed has collected."""
        for gradient in _gradients(units):
            if gradient.pending is not None and not gradient.rests:
                self.buffers.give_back(gradient.pending, DONE)  # no collective was begun on it
            gradient.pending, gradient.rests, gradient.due = None, False, False
            gradient.arrived = {}

    def rest(self, units: Sequence[Unit]) -> None:
        """Give the memory of buffers back. What was not reduced yet waits in host memory for the next gradient.

        Homes may move from here on, so what was not measured is.
        """
        measure_late(units, self._streams)  # the next home may be out of reach of the pass that measures
        self._routes.clear()  # they would keep the memory of homes that are left
        for gradient in _gradients(units):
            if not (gradient.pending is None or gradient.rests or self._streams.aliases_host):
                self.buffers.forget(gradient.pending)
                gradient.pending, gradient.rests = gradient.pending.to("cpu", copy=True), True
        self.buffers.clear()
        self._sums.clear()

    def _collected(self, unit: Unit, gradient: UnitGradient) -> Tensor:
        """Give the flat gradient that is being collected, on the device: a new one, or what rested in host memory."""
        if gradient.pending is None:
            dtype = self._reduce_dtype if self._synchronizing else self._accumulation_dtype
            gradient.pending = self.buffers.lease(unit.layout.numel, dtype)
        if gradient.rests:
            buffer = self.buffers.lease(gradient.pending.numel(), gradient.pending.dtype)
            gradient.pending, gradient.rests = buffer.copy_(gradient.pending), False
        return gradient.pending

    def zero(self, units: Sequence[Unit]) -> None:
        """Forget every gradient, and each `.grad`. Homes keep their memory and are overwritten by the next one."""
        self.changes += 1
        self.drop_pending(units)
        for unit in units:
            for parameter in unit.parameters:
                parameter.drop_gradient()
            if unit.trained:
                gradient = unit.trained.gradient
                # site reduce.over_before_zero
                gradient.home.memory.written.synchronize()  # work under way must not write into what comes next
                gradient.present = set()
                gradient.squared_norms, gradient.unmeasured = {}, set()
                gradient.held = set()
                gradient.flaws = gradient.flawed = None

    def forget(self, unit: Unit, index: int) -> None:
        """Forget the gradient of one slot: it counts as absent, whatever its home holds there."""
        assert unit.trained is not None
        self.changes += 1
        gradient = unit.trained.gradient
        for slots in (gradient.present, gradient.held, gradient.unmeasured):
            slots.discard(index)
        gradient.arrived.pop(index, None)
        gradient.squared_norms.pop(index, None)

    def squared_norm(self, values: Tensor) -> float | Tensor:
        """Take the squared norm of values, in the way that every gradient's is taken."""
        return squared_norm(values, pool=self._pool)

    def _flaws(self, gradient: UnitGradient) -> Tensor:
        """Tell whether this rank's part of the gradient is not finite: 0 or 1, on the device."""
        device = self._streams.device
        norms = [torch.as_tensor(norm, dtype=torch.float64, device=device) for norm in gradient.squared_norms.values()]
        if not norms:
            return self._no_flaws()
        return torch.stack(norms).isfinite().all().logical_not().float().view(1)

    def _no_flaws(self) -> Tensor:
        return torch.zeros(1, dtype=torch.float32, device=self._streams.device)

    def _clear_the_rest(self, unit: Unit, gradient: UnitGradient) -> None:
        """Zero what no gradient arrived for: other ranks may have one."""
        assert gradient.pending is not None
        for start, stop in unit.layout.gaps():
            gradient.pending[start:stop] = 0
        for index, slot in enumerate(unit.layout.slots):
            if index not in gradient.arrived:
                gradient.pending[slot.start : slot.stop] = 0


def _gradients(units: Sequence[Unit]) -> list[UnitGradient]:
    return [unit.trained.gradient for unit in units if unit.trained]
