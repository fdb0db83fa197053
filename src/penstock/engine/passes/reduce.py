"""Gradients from autograd to their home: collected, reduced over ranks, summed over micro-batches, measured.

    autograd -> pending (device, whole unit, reduce dtype) -> reduced (this rank's shard) -> home (accumulation dtype)

At world size 1, where compute reaches the home, a gradient goes there straight from autograd. Nothing here makes the
host wait for the device. Norms are taken part by part (a slot's part in the shard) of what the home holds in the end,
so they do not depend on the path, the placement or the tile size.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from penstock.engine.passes.buffers import BufferRing
from penstock.engine.units.norms import measure_late
from penstock.engine.units.unit import Gradient, Part, Unit, reached
from penstock.engine.updates.rig import Rig
from penstock.machine.arena import Words
from penstock.machine.streams import COLLECTIVE, DEVICE_UPDATE, DONE, DOWNLOAD, UPDATE, Event, across, all_of
from penstock.rules.deposit import Ranges, deposit, deposit_parts, squared_norm, squared_norms
from penstock.tiers.home import MemorySection
from penstock.tiers.ring import Ring
from penstock.tiers.transit import LANDING, Transit, buffer_home


class Reducer:
    """Takes every gradient of the engine's units.

    Arguments:
        transit: brings reduced gradients to their homes, where compute does not reach those.
        landing: host buffers of a tile, through which later micro-batches reach homes on the cpu tier where compute
            does not.
        reduce_dtype: dtype in which gradients are summed over ranks.
        accumulation_dtype: dtype in which micro-batches are summed, the homes' own.
        collects_fp32: gradients are summed in fp32 until they are reduced, because a parameter gets several in one
            backward.
        agrees: ranks tell each other whether a gradient is finite, as soon as it is reduced.
        may_hold_back: whole gradients may stay on this rank until a later micro-batch is reduced (stages 0 and 1).
    """

    def __init__(
        self,
        rig: Rig,
        transit: Transit,
        landing: Ring,
        *,
        reduce_dtype: torch.dtype,
        accumulation_dtype: torch.dtype,
        collects_fp32: bool,
        agrees: bool,
        may_hold_back: bool,
    ) -> None:
        ranks, streams = rig.ranks, rig.streams
        self._ranks = ranks
        self._streams = streams
        self._transit = transit
        self._landing = landing
        self._pool = rig.pool
        self._reduce_dtype = reduce_dtype
        self._accumulation_dtype = accumulation_dtype
        # On the host the pass that writes measures for nothing; on a device the norm would be kernels of its own.
        self._measures_late = streams.device.type != "cpu"
        self._straight = ranks.world_size == 1 and not collects_fp32
        self._collects_fp32 = collects_fp32
        self.buffers = BufferRing(streams.device, streams)
        self._told = Words(streams.device)
        if agrees and not streams.aliases_host:
            self._told.place(0)  # not later, within a backward: to pin memory there may block what it waits for
        self._agrees = agrees and ranks.world_size > 1
        self._may_hold_back = may_hold_back
        self.accumulates = False  # inside `held_back`: another micro-batch follows

    @property
    def _synchronizing(self) -> bool:
        return not (self.accumulates and self._may_hold_back)

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Micro-batches inside are summed on this rank and reduced with the next one outside, where that is allowed."""
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
        return self._ranks.world_size > 1

    def expect(self, unit: Unit) -> None:
        """Backward has come to the unit on every rank: it will be reduced, also where this rank has no gradient."""
        if self.has_peers and unit.trained is not None and unit.wants_gradient:
            unit.trained.gradient.due = True

    def add(self, unit: Unit, slot_index: int, grad: Tensor) -> None:
        """Autograd finished one gradient of the unit."""
        assert unit.trained is not None
        self._streams.here()  # autograd hands over each gradient on the stream that its parameter was used on
        gradient = unit.trained.gradient
        slot = unit.layout.slots[slot_index]
        flat = grad.reshape(-1)
        values = reached(gradient.home, self._streams) if self._straight else None
        if values is not None and self._reduce_dtype in (flat.dtype, torch.float32):  # else reducing would round
            gradient.ready.wait()  # the home may have moved
            target, held = values[slot.start : slot.stop], slot_index in gradient.present
            if not self._measures_late:
                gradient.squared_norms[slot_index] = deposit(target, flat, add=held, pool=self._pool)
            else:
                target.add_(flat) if held else target.copy_(flat)
                gradient.unmeasured.add(slot_index)
            gradient.present.add(slot_index)
            gradient.held.add(slot_index)
            return
        target = self._collected(unit, gradient)[slot.start : slot.stop]
        if slot_index in gradient.arrived:
            target.add_(flat)
        else:
            target.copy_(flat)
        gradient.arrived.add(slot_index)

    def flush(self, unit: Unit) -> None:
        """The unit's backward is over: reduce what is pending and settle it in its home."""
        gradient = unit.trained.gradient if unit.trained else None
        if gradient is None or not (gradient.due or gradient.pending is not None) or not self._synchronizing:
            return
        self._streams.here()
        pending = self._collected(unit, gradient)
        self._clear_the_rest(unit, gradient)
        gradient.pending, gradient.due = None, False
        gradient.present |= gradient.arrived
        gradient.arrived = set()
        add = bool(gradient.held)
        stale = [(start, stop) for index, start, stop in unit.parts() if add and index not in gradient.held]
        gradient.held = set(range(len(unit.layout.slots)))

        full = pending
        if pending.dtype != self._reduce_dtype:
            full = self.buffers.lease(unit.layout.numel, self._reduce_dtype)
            full.copy_(pending)
        sharded = self._ranks.shards > 1
        reduced = self.buffers.lease(unit.layout.shard_numel, self._reduce_dtype) if sharded else full
        parts = unit.parts()
        ranges = _ranges(parts)
        values, before = reached(gradient.home, self._streams), gradient.ready
        home_free = before if values is not None else DONE

        named = unit.label
        flaws = gradient.flaws = self._no_flaws() if self._agrees and not self.accumulates else None

        def communicate() -> None:
            if sharded:
                self._ranks.reduce_scatter(reduced, full, named)
            self._ranks.all_reduce_replicas(reduced, named)
            if values is not None:
                _clear(values, stale)
                gradient.flawed = None  # of a home that was elsewhere
                gradient.measure(parts, deposit_parts(values, reduced, ranges, add=add, pool=self._pool))
            elif not add:
                gradient.measure(parts, squared_norms(reduced.to(self._accumulation_dtype), ranges, pool=self._pool))
            if self._agrees and values is None:
                gradient.flawed = _flaw(reduced, gradient.flawed if add else None)
            if flaws is not None:  # now, in the program's order: the sum of micro-batches is measured when it is home
                flaws.copy_(self._flaws(gradient) if gradient.flawed is None else gradient.flawed)
                self._ranks.agree(flaws)

        writes = (reduced,) if sharded else ()
        event = self._streams.submit(
            COLLECTIVE,
            communicate,
            after=(home_free,),
            writes=writes,
            nbytes=full.numel() * full.element_size(),
            what=f"reduce {unit.name}",
        )
        self._ranks.submitted(event)
        what = f"save {unit.name} grad"
        if full is not pending:
            self.buffers.give_back(pending, DONE)
        if values is not None:
            gradient.ready = event
        elif add and (len(gradient.home.sections) > 1 or gradient.home.in_files):
            gradient.ready = self._add_on_device(gradient, reduced, parts, stale, event, what)
        else:
            settled = all_of([event, before])
            if add:
                gradient.ready = self._add_on_host(gradient, reduced, parts, stale, settled, what)
            else:
                gradient.ready = self._transit.copy(buffer_home(reduced), gradient.home, after=settled, what=what)
        self.buffers.give_back(full, event if sharded else gradient.ready)
        if sharded:
            self.buffers.give_back(reduced, gradient.ready)

    def tell_host(self, unit: Unit) -> None:
        """Have the host know whether the ready gradient is finite: to ask a device for it would wait for compute."""
        assert unit.trained is not None
        gradient = unit.trained.gradient
        measure_late([unit], self._streams)
        if self._streams.aliases_host:
            return
        agreed = gradient.flaws if self._agrees else None
        told = self._told.place(unit.index)  # free: what was told last was asked before this gradient took its home

        def tell() -> None:
            across(told, self._flaws(gradient) if agreed is None else agreed)()

        gradient.flaws = told
        gradient.ready = self._streams.submit(
            DOWNLOAD,
            tell,
            after=(gradient.ready,),
            writes=(told,),
            nbytes=told.element_size(),
            what=f"tell {unit.name}",
        )
        if agreed is not None:  # ranks may not have agreed yet
            self._streams.give_up((agreed,), until=gradient.ready)

    def close(self) -> None:
        """Give every buffer back. Work on them is over."""
        self.buffers.clear()
        self._told.close()

    def drop_pending(self, units: Sequence[Unit]) -> None:
        """Forget what a backward that failed has collected."""
        for gradient in _gradients(units):
            if gradient.pending is not None and not gradient.rests:
                self.buffers.give_back(gradient.pending, DONE)
            gradient.pending, gradient.rests, gradient.due = None, False, False
            gradient.arrived = set()

    def rest(self, units: Sequence[Unit]) -> None:
        """Give the memory of buffers back. What was not reduced yet waits in host memory for the next gradient.

        Homes may move from here on, so what was not measured is.
        """
        measure_late(units, self._streams)
        for gradient in _gradients(units):
            if not (gradient.pending is None or gradient.rests or self._streams.aliases_host):
                self.buffers.forget(gradient.pending)
                gradient.pending, gradient.rests = gradient.pending.to("cpu", copy=True), True
        self.buffers.clear()

    def _collected(self, unit: Unit, gradient: Gradient) -> Tensor:
        """The flat gradient that is being collected, on the device: a new one, or what rested."""
        if gradient.pending is None:
            dtype = self._reduce_dtype if self._synchronizing else self._accumulation_dtype
            if self._collects_fp32:
                dtype = torch.float32
            gradient.pending = self.buffers.lease(unit.layout.numel, dtype)
        if gradient.rests:
            buffer = self.buffers.lease(gradient.pending.numel(), gradient.pending.dtype)
            gradient.pending, gradient.rests = buffer.copy_(gradient.pending), False
        return gradient.pending

    def zero(self, units: Sequence[Unit]) -> None:
        """Forget every gradient. Homes keep their memory and are overwritten by the next one."""
        self.drop_pending(units)
        for unit in units:
            if unit.trained:
                gradient = unit.trained.gradient
                gradient.ready.synchronize()  # work under way must not write into what comes next
                gradient.present = set()
                gradient.squared_norms, gradient.unmeasured = {}, set()
                gradient.held = set()
                gradient.flaws = gradient.flawed = None

    def squared_norm(self, values: Tensor) -> float | Tensor:
        """The squared norm as every gradient's is taken."""
        return squared_norm(values, pool=self._pool)

    def _add_on_host(
        self, gradient: Gradient, reduced: Tensor, parts: Sequence[Part], stale: Ranges, after: Event, what: str
    ) -> Event:
        """A later micro-batch of a home on the cpu tier: down once in the reduced dtype, added there tile by tile.

        While one tile is added the next one comes down.
        """
        (section,) = gradient.home.sections
        assert isinstance(section, MemorySection)
        (home,) = section.tensors

        def add(start: int, landed: Tensor) -> None:
            if start == 0:
                _clear(home, stale)
            deposit(home[start : start + landed.numel()], landed, add=True, pool=self._pool)
            if start + landed.numel() == home.numel():  # the last: they run in order
                gradient.measure(parts, squared_norms(home, _ranges(parts), pool=self._pool))

        start, itemsize = 0, reduced.element_size()
        added: list[Event] = []
        while start < home.numel():
            slot = self._landing.take()
            buffer = slot.near[LANDING]
            source = reduced[start : start + buffer.numel() // itemsize]
            landed = buffer[: source.numel() * itemsize].view(reduced.dtype)
            copied = self._streams.submit(
                DOWNLOAD,
                across(landed, source),
                after=(after, slot.free),
                writes=(landed,),
                nbytes=source.numel() * itemsize,
                what=what,
            )
            slot.free = self._streams.submit(UPDATE, partial(add, start, landed), after=(copied,), what=what)
            added.append(slot.free)
            start += source.numel()
        return all_of(added)

    def _add_on_device(
        self, gradient: Gradient, reduced: Tensor, parts: Sequence[Part], stale: Ranges, after: Event, what: str
    ) -> Event:
        """A later micro-batch of a home in files or on several tiers: what it holds comes up, is added to, goes back.

        Of homes in memory only those on a cut are on several tiers: their parts must be measured whole.
        """
        total = self.buffers.lease(reduced.numel(), self._accumulation_dtype)
        brought = self._transit.copy(gradient.home, buffer_home(total), after=gradient.ready, what=what)

        def add() -> None:
            _clear(total, stale)
            norms = deposit_parts(total, reduced, _ranges(parts), add=True, pool=self._pool)
            gradient.measure(parts, norms)

        # Beside collectives: the thread that issues one waits for what it follows, here a file perhaps.
        added = self._streams.submit(DEVICE_UPDATE, add, after=(after, brought), what=what)
        saved = self._transit.copy(buffer_home(total), gradient.home, after=added, what=what)
        self.buffers.give_back(total, saved)
        return saved

    def _flaws(self, gradient: Gradient) -> Tensor:
        """Whether this rank's part of the gradient is not finite: 0 or 1."""
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


def _clear(home: Tensor, stale: Ranges) -> None:
    """Zero what a step before has left, where some slots hold a gradient of this one already."""
    for start, stop in stale:
        home[start:stop] = 0


def _flaw(reduced: Tensor, before: Tensor | None) -> Tensor:
    """Whether this micro-batch, or one before it, is not finite: 0 or 1. On the device."""
    flaw = torch.linalg.vector_norm(reduced, math.inf).isfinite().logical_not().float().view(1)
    return flaw if before is None else torch.maximum(before, flaw)


def _ranges(parts: Sequence[Part]) -> list[tuple[int, int]]:
    return [(start, stop) for _, start, stop in parts]


def _gradients(units: Sequence[Unit]) -> list[Gradient]:
    return [unit.trained.gradient for unit in units if unit.trained]
