"""Gradients from autograd to their home: collected, reduced over ranks, summed over micro-batches, measured.

    autograd -> pending (device, whole unit, reduce dtype) -> reduced (this rank's shard) -> home (accumulation dtype)

At world size 1, where compute reaches the home, a gradient goes there straight from autograd. Nothing here makes the
host wait for the device. Norms are taken part by part (a slot's part in the shard) of what the home holds in the end,
so they do not depend on the path, the placement or the tile size. The way home is `engine/passes/routes.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from penstock.engine.passes.buffers import BufferRing
from penstock.engine.passes.routes import Means, Reduced, Route, route_to
from penstock.engine.passes.sums import Sums
from penstock.engine.units.gradient import Gradient
from penstock.engine.units.norms import measure_late
from penstock.engine.units.unit import Unit
from penstock.engine.updates.rig import Rig
from penstock.machine.arena import Words
from penstock.machine.openmp import compute_pool
from penstock.machine.streams import COLLECTIVE, DONE, DOWNLOAD, across
from penstock.rules.deposit import deposit_part, squared_norm
from penstock.tiers.home import Home
from penstock.tiers.movement import Movement
from penstock.trace import Label


class Reducer:
    """Takes every gradient of the engine's units.

    Arguments:
        movement: brings reduced gradients to their homes, where compute does not reach those.
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
        rig: Rig,
        movement: Movement,
        sums: Sums,
        *,
        accumulation_dtype: torch.dtype,
        agrees: bool,
        may_hold_back: bool,
    ) -> None:
        ranks, streams = rig.ranks, rig.streams
        self._ranks = ranks
        self._streams = streams
        self._pool = compute_pool(streams.device, otherwise=rig.pool)  # compute's own thread does all that is here
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
        self._means = Means(streams, movement, rig.pool, self._pool, self.buffers, accumulation_dtype, self._agrees)
        self._routes: dict[Unit, tuple[Home, Route]] = {}
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
        self, unit: Unit, gradient: Gradient, values: Tensor, arrived: Mapping[int, float | Tensor | None]
    ) -> Reduced:
        """Describe what a reduction will leave in `values`; from now on the home holds a gradient of every slot."""
        parts, adds = unit.parts(), bool(gradient.held)
        stale = [(start, stop) for index, start, stop in parts if adds and index not in gradient.held]
        gradient.held = set(range(len(unit.layout.slots)))
        norms = [norm for index, _, _ in parts if (norm := arrived.get(index)) is not None]
        return Reduced(unit.name, values, parts, adds, stale, norms if len(norms) == len(parts) else None)

    def _route(self, unit: Unit, home: Home) -> Route:
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

    def _collected(self, unit: Unit, gradient: Gradient) -> Tensor:
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

    def _flaws(self, gradient: Gradient) -> Tensor:
        """Tell whether this rank's part of the gradient is not finite: 0 or 1, on the device."""
        device = self._streams.device
        norms = [torch.as_tensor(norm, dtype=torch.float64, device=device) for norm in gradient.squared_norms.values()]
        if not norms:
            return self._no_flaws()
        return torch.stack(norms).isfinite().all().logical_not().float().view(1)

    def _no_flaws(self) -> Tensor:
        return torch.zeros(1, dtype=torch.float32, device=self._streams.device)

    def _clear_the_rest(self, unit: Unit, gradient: Gradient) -> None:
        """Zero what no gradient arrived for: other ranks may have one."""
        assert gradient.pending is not None
        for start, stop in unit.layout.gaps():
            gradient.pending[start:stop] = 0
        for index, slot in enumerate(unit.layout.slots):
            if index not in gradient.arrived:
                gradient.pending[slot.start : slot.stop] = 0


def _gradients(units: Sequence[Unit]) -> list[Gradient]:
    return [unit.trained.gradient for unit in units if unit.trained]
