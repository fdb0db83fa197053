"""Gradients from autograd to their storage: collected, reduced over ranks, measured, accumulated."""

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
from penstock.tiers.storage import Storage, buffer_storage
from penstock.trace import Label

# ----------------------------------------------------------------------------------------------------------------------
# Device buffers for gradients in transfer: a few of each size, reused in turn.
#
# Freeing a buffer and allocating it again in every step costs page faults on a cpu and fragmentation on a device, so
# buffers are kept.
# ----------------------------------------------------------------------------------------------------------------------


BUFFERS_OF_A_SIZE = 2  # one being filled by backward while the other is being reduced


class BufferRing:
    """Flat device buffers, allocated and returned. A returned buffer is reused after its event (ordering rule 1)."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._free: dict[tuple[int, torch.dtype], deque[tuple[Tensor, Event]]] = {}
        self._allocated: dict[tuple[int, torch.dtype], int] = {}

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a 1-D buffer with undefined contents."""
        key = (numel, dtype)
        free = self._free.setdefault(key, deque())
        self._allocated[key] = self._allocated.get(key, 0) + 1
        # Prefer an idle buffer; allocate another only while the ring is not full.
        if free and (free[0][1].done() or len(free) + self._allocated[key] > BUFFERS_OF_A_SIZE):
            buffer, event = free.popleft()
            # site reduce.buffer_free
            event.wait()  # a collective or a copy of an earlier gradient may still read the buffer (ordering rule 3)
        else:
            buffer = torch.empty(numel, dtype=dtype, device=self._streams.device)
        self._streams.allocate(buffer)
        return buffer

    def give_back(self, buffer: Tensor, event: Event) -> None:
        """Return a buffer to the ring. Work on it is over after `event`."""
        key = (buffer.numel(), buffer.dtype)
        self._allocated[key] -= 1
        self._free.setdefault(key, deque()).append((buffer, event))

    @property
    def nbytes(self) -> int:
        """Size of the buffers in the ring."""
        return sum(b.numel() * b.element_size() for ring in self._free.values() for b, _ in ring)

    def clear(self) -> None:
        """Free every returned buffer. Precondition: work on them is over."""
        self._free.clear()


# ----------------------------------------------------------------------------------------------------------------------
# Sums of gradients over the shard ranks: exact, or quantized in one or two hops.
#
# Exact is one reduce-scatter. In a wire format each rank quantizes its summands and sends to every other rank those of
# its shard. Each rank sums in fp32 what it receives, in the order of the ranks. With several nodes there are two hops:
#
#     inside    each rank of a node receives the summands of the shards at its place in every node, and sums them
#     across    each rank receives from the ranks at its place in the other nodes the sums of its shard, and sums them
#
# So each value is rounded twice, for any number of ranks, and one sum per node crosses between nodes. A shard is summed
# by one rank alone, so ranks cannot disagree about it.
#
# Source: G. Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023 (qgZ).
# ----------------------------------------------------------------------------------------------------------------------


_FP32_BYTES = 4


class ShardReduction:
    """Sums of flat gradients over the shard ranks.

    Arguments:
        dtype: the reduce dtype, of the summands and of the sum.
        name: the format in which summands are sent; `"exact"` for none.
    """

    def __init__(self, context: EngineContext, dtype: torch.dtype, name: ReduceFormat) -> None:
        self.dtype = dtype
        self._context = context
        self._name = name
        self._format = None if name == "exact" else WireFormat(name)
        # Used on the stream of collectives alone, by one collective after the other.
        self._memory: Tensor | None = None

    def make_room(self) -> None:
        """Allocate the buffer of quantized sums, before the first of them is submitted, on compute's stream."""
        if self._format is not None and self._memory is None:
            nbytes = summing_bytes(self._context.units, self._name, self._context.ranks.grid)
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=self._context.streams.device)

    def run(self, shard: Tensor, full: Tensor, layout: FlatLayout, what: str) -> None:
        """Sum a flat gradient over the shard ranks. Runs on the stream of collectives. Collective.

        Arguments:
            shard: receives the sum of this rank's shard, [n].
            full: this rank's summands, of all shards.
            layout: the ranges of the shards.
            what: the unit's name, for messages.
        """
        if not layout.is_even:
            self._context.ranks.reduce_to_owners(shard, full, layout.cuts, what)
        elif self._format is None:
            self._context.ranks.reduce_scatter(shard, full, what)
        else:
            self._hop_twice(self._format, shard, full, what)

    def clear(self) -> None:
        """Free the buffer. Precondition: all sums are over."""
        self._memory = None

    def _hop_twice(self, form: WireFormat, shard: Tensor, full: Tensor, what: str) -> None:
        assert self._memory is not None, "no room was made"
        grid, nbytes = self._context.ranks.grid, form.packed_bytes(full.numel())
        sent, received, rest = self._memory[:nbytes], self._memory[nbytes : 2 * nbytes], self._memory[2 * nbytes :]
        sums = rest[: _FP32_BYTES * (full.numel() // grid.inside)].view(torch.float32)
        # Shards are ordered by node, then by place. One rank of this node needs those of one place, from all nodes.
        # Reorder them after quantization: there are fewer bytes then.
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
        """Exchange quantized summands among the ranks of a hop, and sum them."""
        self._context.ranks.all_to_all(received, sent, hop, what)
        for number, codes in enumerate(received.chunk(getattr(self._context.ranks.grid, hop))):
            form.unpack(codes, sums, self._context.pool, add=number > 0)


def summing_bytes(units: Iterable[UnitPlan | Unit], name: ReduceFormat, grid: Grid) -> int:
    """Return the size of the buffer of quantized sums: codes sent and received, and fp32 sums, of the largest unit."""
    if name == "exact" or grid.shards < 2:
        return 0
    numel = max((unit.layout.numel for unit in units if unit.spec.trainable), default=0)
    return 2 * WireFormat(name).packed_bytes(numel) + _FP32_BYTES * (numel // grid.inside)


# ----------------------------------------------------------------------------------------------------------------------
# Gradient sinks: from a reduced gradient to its storage.
#
#     direct             compute reaches the storage: the reduction itself writes or adds the gradient there
#     copy               the first micro-batch, where compute does not reach the storage
#     host accumulate    later micro-batches, where the storage is one piece of host memory: each tile is copied to the
#                        host and added there
#     device accumulate  later micro-batches, where the storage is in files or on several tiers: its values are copied
#                        to the device, added to, and copied back
#
# Norms are those of the values that the storage holds in the end.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReducedGradient:
    """The result of a reduction: this rank's shard of a unit's gradient.

    Attributes:
        gradient: the state of the unit's gradient.
        storage: the storage that receives the values.
        values: the shard, in the reduce dtype.
        parts: the range of each slot in it.
        adds: the storage holds earlier micro-batches, to which this one is added.
        stale: ranges of the storage with values from before `zero_grad`, while other slots hold earlier micro-batches.
        norms: the squared norm of each part; `None` where it was not taken yet.
        label: the name of its transfers in traces.
    """

    gradient: UnitGradient
    storage: Storage
    values: Tensor
    parts: Sequence[SlotPiece]
    adds: bool
    stale: Ranges
    norms: Sequence[float | Tensor] | None
    label: Label

    @property
    def ranges(self) -> Ranges:
        """The range of each slot: first element, and one past the last."""
        return [(start, stop) for _, start, stop in self.parts]


class GradientSinks:
    """Writes reduced gradients to their storage, by one of the four sinks above.

    Arguments:
        buffers: device memory for sums.
        compute_pool: threads for work of compute's own thread.
        dtype: the accumulation dtype, which the storages have.
        agrees: ranks exchange whether a gradient is finite, as soon as it is reduced.
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

    def values(self, storage: Storage) -> Tensor | None:
        """Return the values of a storage if compute reaches them, else `None`."""
        if storage not in self._values:
            self._values[storage] = reached(storage, self._context.streams)
        return self._values[storage]

    def clear(self) -> None:
        """Forget all storages, which are about to move or to be freed."""
        self._values.clear()

    def receive(self, reduced: ReducedGradient) -> None:
        """Measure the gradient, and write it if compute reaches the storage. Runs on the stream of collectives."""
        gradient, values = reduced.gradient, self.values(reduced.storage)
        if values is not None:
            _clear(values, reduced.stale)
            gradient.flawed = None  # set while the storage was out of reach; the norms measured here replace it
            norms = deposit_parts(values, reduced.values, reduced.ranges, add=reduced.adds, pool=self._compute_pool)
            gradient.measure(reduced.parts, norms)
            return
        if not reduced.adds:  # else the sum is measured where it is added
            rounded = reduced.norms or squared_norms(
                reduced.values.to(self._dtype), reduced.ranges, pool=self._compute_pool
            )
            gradient.measure(reduced.parts, rounded)
        if self._agrees:
            gradient.flawed = _flaw(reduced.values, gradient.flawed if reduced.adds else None)

    def send_to_storage(self, reduced: ReducedGradient, received: Event) -> Event:
        """Submit the transfer to the storage; return the event after which the buffer of the reduced values is free."""
        storage = reduced.storage
        if self.values(storage) is not None:
            # The step, updates and the next micro-batch wait for the storage's last write (ordering rule 3).
            storage.note_write(received)  # site reduce.written_in_place
            return received
        if not reduced.adds:
            # The copy reads the buffer, so it follows the collective that fills it (ordering rule 3).
            # site reduce.first_received
            source = buffer_storage(reduced.values, written=received)
            return self._context.transfers.copy(source, storage, reduced.label)
        # A part that is cut between two segments in memory is added on the device too: it has to be measured whole.
        add = self._add_on_device if len(storage.segments) > 1 or storage.in_files else self._add_on_host
        return add(reduced, received)

    def _add_on_host(self, reduced: ReducedGradient, received: Event) -> Event:
        """Add to a storage in one piece of host memory: a tile is copied while the one before is added."""
        ((storage,),) = (segment.tensors for segment in reduced.storage.segments)
        pool = self._context.pool

        def add(start: int, landed: Tensor) -> None:
            if start == 0:  # before the first addition: tiles run in order
                _clear(storage, reduced.stale)
            deposit(storage[start : start + landed.numel()], landed, add=True, pool=pool)
            if start + landed.numel() == storage.numel():  # the last tile
                reduced.gradient.measure(reduced.parts, squared_norms(storage, reduced.ranges, pool=pool))

        # A read-modify-write: it follows the collective, which makes the summands, and all reads and writes of the
        # storage by an earlier micro-batch, an update or a move (ordering rule 3).
        after = all_of([received, reduced.storage.memory.free])  # site host_sum.received, host_sum.storage_free
        values = reduced.values[: storage.numel()]
        added = self._context.transfers.land(values, add, after=after, label=reduced.label)
        reduced.storage.note_write(added)  # site host_sum.written: the next micro-batch and the update follow the sum
        return added

    def _add_on_device(self, reduced: ReducedGradient, received: Event) -> Event:
        """Copy the values of a storage in files or on several tiers to the device, add, and copy the sum back."""
        streams, transfers, pool = self._context.streams, self._context.transfers, self._context.pool
        total = self._buffers.allocate(reduced.values.numel(), self._dtype)
        loaded = transfers.copy(reduced.storage, buffer_storage(total), reduced.label)

        def add() -> None:
            _clear(total, reduced.stale)
            norms = deposit_parts(total, reduced.values, reduced.ranges, add=True, pool=pool)
            reduced.gradient.measure(reduced.parts, norms)

        # Not on the stream of collectives: the thread that issues a collective waits on the host for what it follows,
        # and this follows a read of a file. It follows both summands (ordering rule 3).
        nbytes = 2 * total.nbytes + reduced.values.nbytes  # read and written
        # site device_sum.received, device_sum.loaded
        added = streams.submit(DEVICE_UPDATE, add, after=(received, loaded), nbytes=nbytes, label=reduced.label)
        # site device_sum.added
        saved = transfers.copy(buffer_storage(total, written=added), reduced.storage, reduced.label)
        self._buffers.give_back(total, saved)  # the copy back reads it last
        return saved


def _clear(storage: Tensor, stale: Ranges) -> None:
    """Zero ranges with values from before `zero_grad`."""
    for start, stop in stale:
        storage[start:stop] = 0


def _flaw(values: Tensor, before: Tensor | None) -> Tensor:
    """Return 1 if this micro-batch, or one before it, is not finite, else 0, on the device."""
    flaw = torch.linalg.vector_norm(values, math.inf).isfinite().logical_not().float().view(1)
    return flaw if before is None else torch.maximum(before, flaw)


# ----------------------------------------------------------------------------------------------------------------------
# Gradients from autograd: collected, reduced over ranks, accumulated over micro-batches, measured.
#
#     autograd -> pending (whole unit, reduce dtype) -> reduced (this rank's shard) -> storage (accumulation dtype)
#
# At world size 1, where compute reaches the storage, a gradient is written there straight from autograd. Nothing here
# makes the host wait for the device (ordering rule 5). A norm is that of a part, a slot's range of the shard, of the
# values that the storage holds in the end: it does not depend on the sink, the placement or the tile size.
# ----------------------------------------------------------------------------------------------------------------------


class Reducer:
    """Collects, reduces and accumulates the gradients of all units.

    Arguments:
        sums: the sums over shard ranks.
        accumulation_dtype: the dtype in which micro-batches are summed, which the storages have.
        agrees: ranks exchange whether a gradient is finite, as soon as it is reduced.
        may_hold_back: whole gradients may stay on this rank until a later micro-batch is reduced (stages 0 and 1).

    Attributes:
        has_peers: True if gradients are reduced over ranks.
        changes: a count of changes to gradients. A cache of values that depend on gradients compares it.
        accumulates: True inside `held_back`: another micro-batch follows.
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
        self._pool = compute_pool(streams.device, otherwise=context.pool)  # used by compute's own thread
        self._sums = sums
        self._reduce_dtype = sums.dtype
        self._accumulation_dtype = accumulation_dtype
        self.has_peers = ranks.data_size > 1
        # The pass that writes on the host measures at no cost. On a device a norm is a kernel of its own.
        self._measures_late = not streams.computes_on_host
        # The collected values are those that the storage will hold: the pass that collects them may measure them.
        self._measures_collected = not (self._measures_late or self.has_peers) and sums.dtype == accumulation_dtype
        self.buffers = BufferRing(streams)
        self._told = Words(streams.device)
        if agrees and not streams.aliases_host:
            self._told.place(0)  # now: pinning memory inside a backward may block work that it waits for
        self._agrees = agrees and ranks.world_size > 1
        self._may_hold_back = may_hold_back
        self._sinks = GradientSinks(context, self.buffers, self._pool, dtype=accumulation_dtype, agrees=self._agrees)
        self.changes = 0
        self.accumulates = False

    @property
    def _synchronizing(self) -> bool:
        return not (self.accumulates and self._may_hold_back)

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Sum micro-batches inside a `with` block on this rank, where allowed; the next one outside reduces them."""
        before = self.accumulates
        self.accumulates = True
        try:
            yield
        finally:
            self.accumulates = before

    def holds_back(self) -> bool:
        """Return True if a gradient was not reduced yet."""
        return any(gradient.due or gradient.pending is not None for gradient in self._gradients())

    def expect(self, unit: Unit) -> None:
        """Note that backward has reached a unit on every rank, so this rank reduces it even if it has no gradient."""
        if self.has_peers and unit.trained is not None and unit.wants_gradient:
            unit.trained.gradient.due = True  # else the other ranks wait in their collective (ordering rule 4)

    def add(self, unit: Unit, slot_index: int, grad: Tensor) -> None:
        """Add a gradient from autograd: to its storage where compute reaches that, else to the flat gradient."""
        assert unit.trained is not None
        self.changes += 1
        # Autograd returns a gradient on the stream that its parameter was used on (ordering rule 2).
        self._streams.follow_current_stream()
        gradient = unit.trained.gradient
        slot = unit.layout.slots[slot_index]
        start, stop = slot.start, slot.start + slot.numel
        flat = grad if grad.is_contiguous() else grad.reshape(-1)
        storage = None  # the values of the storage, if they may be written here with the bits that reducing would give
        if not self.has_peers and self._reduce_dtype in (flat.dtype, torch.float32):
            storage = self._sinks.values(gradient.storage)
        if storage is not None:
            # Copies of a move may still write the storage (ordering rule 3).
            gradient.storage.memory.written.wait()  # site reduce.storage_moved
            target, held, measures = storage, slot_index in gradient.present, not self._measures_late
        else:
            target, held = self._collected(gradient, unit.layout.numel), slot_index in gradient.arrived
            measures = self._measures_collected
        norm = None
        if measures:
            norm = deposit_part(target, start, stop, flat, add=held, pool=self._pool)
        else:
            into, flat = target[start:stop], flat.view(-1)
            into.add_(flat) if held else into.copy_(flat)
        if storage is None:
            gradient.arrived[slot_index] = norm
            return
        if norm is None:
            gradient.unmeasured.add(slot_index)
        else:
            gradient.squared_norms[slot_index] = norm
        gradient.present.add(slot_index)
        gradient.held.add(slot_index)

    def flush(self, unit: Unit) -> None:
        """Reduce the flat gradient of a unit whose backward is over, and submit its transfer to the storage."""
        gradient = unit.trained.gradient if unit.trained else None
        if gradient is None or not (gradient.due or gradient.pending is not None) or not self._synchronizing:
            return
        self.changes += 1
        # Autograd may have written gradients on another stream of compute: make the current one follow it.
        self._streams.follow_current_stream()
        pending = self._collected(gradient, unit.layout.numel)
        self._clear_the_rest(unit, gradient)
        gradient.pending, gradient.due = None, False
        gradient.present |= gradient.arrived.keys()
        arrived, gradient.arrived = gradient.arrived, {}

        full = pending
        if pending.dtype != self._reduce_dtype:
            full = self.buffers.allocate(unit.layout.numel, self._reduce_dtype)
            full.copy_(pending)
            self.buffers.give_back(pending, DONE)  # read and next written by compute alone
        sharded = self._ranks.shards > 1
        values = self.buffers.allocate(unit.shard_numel, self._reduce_dtype) if sharded else full
        reduced = self._begin(unit, gradient, values, arrived)
        flaws = gradient.flaws = None
        if self._agrees and not self.accumulates:
            flaws = gradient.flaws = torch.empty(1, dtype=torch.float32, device=self._streams.device)
        if sharded:
            self._sums.make_room()

        def communicate() -> None:
            # On one stream, and issued before `submit` returns: the same order on every rank (ordering rule 4).
            if sharded:
                self._sums.run(reduced.values, full, unit.layout, unit.label)
            self._ranks.all_reduce_replicas(reduced.values, unit.label)
            self._sinks.receive(reduced)
            if flaws is not None:  # here, in the program's order (ordering rule 4): sinks measure their sums later
                flaws.copy_(self._flaws(gradient) if gradient.flawed is None else gradient.flawed)
                self._ranks.agree(flaws)

        # If the reduction writes the storage, it follows the updates that read it (ordering rule 3).
        free = DONE if self._sinks.values(reduced.storage) is None else reduced.storage.memory.free
        received = self._streams.submit(
            COLLECTIVE,
            communicate,
            after=(free,),  # site reduce.storage_free
            writes=(reduced.values,) if sharded else (),
            nbytes=full.numel() * full.element_size(),
            label=Label("reduce", unit.name),
        )
        self._ranks.submitted(received)  # the next collective of the program follows it
        sent = self._sinks.send_to_storage(reduced, received)
        # The last reader of the flat gradient is the collective, that of the shard its transfer (ordering rule 1).
        self.buffers.give_back(full, received if sharded else sent)
        if sharded:
            self.buffers.give_back(reduced.values, sent)

    def _begin(
        self, unit: Unit, gradient: UnitGradient, values: Tensor, arrived: Mapping[int, float | Tensor | None]
    ) -> ReducedGradient:
        """Describe the result of a reduction, and note that the storage holds a gradient of every slot from now on."""
        parts, adds = unit.parts(), bool(gradient.held)
        stale = [(start, stop) for index, start, stop in parts if adds and index not in gradient.held]
        gradient.held = set(range(len(unit.layout.slots)))
        norms = [norm for index, _, _ in parts if (norm := arrived.get(index)) is not None]
        known = norms if len(norms) == len(parts) else None
        label = Label("save", unit.name, GRAD)
        return ReducedGradient(gradient, gradient.storage, values, parts, adds, stale, known, label)

    def tell_host(self, unit: Unit) -> None:
        """Copy to the host whether a gradient is finite: reading it later from the device would wait for compute."""
        assert unit.trained is not None
        gradient = unit.trained.gradient
        measure_late([unit], self._streams)
        if self._streams.aliases_host:
            return
        agreed = gradient.flaws if self._agrees else None
        told = self._told.place(unit.index)  # free: the flag of the last step was read before this gradient was written

        def tell() -> None:
            # Into pinned memory: a copy to pageable memory would make the host wait (ordering rule 5).
            across(told, self._flaws(gradient) if agreed is None else agreed)()

        gradient.flaws = told
        storage = gradient.storage
        heard = self._streams.submit(
            DOWNLOAD,
            tell,
            after=(storage.memory.written,),  # site reduce.norm_measured: the flag is that of the final values
            writes=(told,),
            nbytes=told.element_size(),
            label=Label("tell", unit.name),
        )
        # site reduce.norm_told
        storage.note_write(heard)  # a wait for the gradient is then a wait for the flag too (ordering rule 5)
        if agreed is not None:  # the collective and the copy may still use its memory (ordering rule 1)
            self._streams.keep_alive((agreed,), until=heard)

    def close(self) -> None:
        """Free every buffer. Precondition: work on them is over."""
        self._sinks.clear()
        self.buffers.clear()
        self._sums.clear()
        self._told.close()

    def drop_pending(self) -> None:
        """Drop the flat gradients of a backward that failed."""
        for gradient in self._gradients():
            if gradient.pending is not None and not gradient.rests:
                self.buffers.give_back(gradient.pending, DONE)  # no collective has read it
            gradient.pending, gradient.rests, gradient.due = None, False, False
            gradient.arrived = {}

    def release_memory(self) -> None:
        """Free the buffers, before storages move. Flat gradients that were not reduced yet are kept in host memory."""
        measure_late(self._context.units, self._streams)  # compute may not reach the next storage
        self._sinks.clear()
        for gradient in self._gradients():
            if not (gradient.pending is None or gradient.rests or self._streams.aliases_host):
                rests = gradient.pending.to("cpu", copy=True)
                self.buffers.give_back(gradient.pending, DONE)
                gradient.pending, gradient.rests = rests, True
        self.buffers.clear()
        self._sums.clear()

    def _collected(self, gradient: UnitGradient, numel: int) -> Tensor:
        """Return the flat gradient being collected, on the device: a new one, or the one kept in host memory."""
        if gradient.pending is None:
            dtype = self._reduce_dtype if self._synchronizing else self._accumulation_dtype
            gradient.pending = self.buffers.allocate(numel, dtype)
        if gradient.rests:
            buffer = self.buffers.allocate(numel, gradient.pending.dtype)
            gradient.pending, gradient.rests = buffer.copy_(gradient.pending), False
        return gradient.pending

    def zero(self) -> None:
        """Drop every gradient and each `.grad`. Storages keep their memory; the next gradient overwrites them."""
        self.changes += 1
        self.drop_pending()
        for unit in self._context.units:
            for parameter in unit.parameters:
                parameter.drop_gradient()
            if unit.trained:
                storage = unit.trained.gradient.storage
                # Raises the error of work that failed. What still runs measures into the object that is dropped here.
                storage.memory.written.synchronize()  # site reduce.over_before_zero
                unit.trained.gradient = UnitGradient(storage)

    def forget(self, unit: Unit, index: int) -> None:
        """Drop the gradient of one slot: it counts as absent, whatever its storage holds."""
        assert unit.trained is not None
        self.changes += 1
        gradient = unit.trained.gradient
        for slots in (gradient.present, gradient.held, gradient.unmeasured):
            slots.discard(index)
        gradient.arrived.pop(index, None)
        gradient.squared_norms.pop(index, None)

    def _flaws(self, gradient: UnitGradient) -> Tensor:
        """Return 1 if this rank's part of the gradient is not finite, else 0, on the device."""
        device = self._streams.device
        norms = [torch.as_tensor(norm, dtype=torch.float64, device=device) for norm in gradient.squared_norms.values()]
        if not norms:
            return torch.zeros(1, dtype=torch.float32, device=device)
        return torch.stack(norms).isfinite().all().logical_not().float().view(1)

    def _clear_the_rest(self, unit: Unit, gradient: UnitGradient) -> None:
        """Zero the slots without a gradient on this rank, which other ranks may have, and the gaps between slots."""
        assert gradient.pending is not None
        for start, stop in unit.layout.gaps():
            gradient.pending[start:stop] = 0
        for index, slot in enumerate(unit.layout.slots):
            if index not in gradient.arrived:
                gradient.pending[slot.start : slot.stop] = 0

    def _gradients(self) -> list[UnitGradient]:
        return [trained.gradient for _, trained in self._context.trained]
