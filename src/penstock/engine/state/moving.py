"""Offload and reload: storage moves between tiers while training goes on.

1. Allocate the new storage of all units.
2. Copy.
3. Exchange the storages, on every rank or on none, and free the old ones.

A move that is not waited for exchanges the storages at once: the new ones hold the events of their copies. Training
goes on with state on any tier: a tile is updated where its optimizer states are, and its other kinds are copied there.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.config import GRAD, MASTER, OPTIMIZER, PARAM, SECONDARY, SHADOW, Tier
from penstock.engine.forward_backward.gather import Gatherer
from penstock.engine.gradients.reduce import Reducer
from penstock.engine.state.access import failing_as_a_whole
from penstock.engine.step.context import EngineContext
from penstock.engine.unit.plan import UnitPlan
from penstock.engine.unit.unit import Unit, UnitState
from penstock.runtime.streams import DONE, DOWNLOAD, READ, UPDATE, UPLOAD, WRITE, Event, FailedEvent, all_of
from penstock.tiers.staging import Buffers, Sections, StagingPlan, transit_ring
from penstock.tiers.storage import MemorySegment, Ring, Segment, SegmentPlan, Storage
from penstock.tiers.tier import Reservation
from penstock.tiers.transfer import Transfers
from penstock.trace import Label

#: The planned segments of one unit's storages, by name.
Wanted = Mapping[str, Sequence[SegmentPlan]]

#: The streams that copies of moves run on.
_OF_COPIES = (READ, UPLOAD, DOWNLOAD, UPDATE, WRITE)


@dataclass
class _Move:
    """The new storages of one unit.

    Attributes:
        stale: True if the shards of other ranks have to be gathered before the parameters are used.
    """

    unit: Unit
    storages: dict[str, Storage]
    stale: bool = False

    def finish(self) -> Exception | None:
        """Wait until everything has arrived or failed; return the first error."""
        failure: Exception | None = None
        for storage in self.storages.values():
            try:
                # Each, also behind one that failed: memory lives until the last copy into it is over (ordering rule 1).
                storage.written.synchronize()  # site offload.arrived
            except Exception as error:
                failure = failure or error
        return failure

    def left(self) -> list[Segment]:
        """List the old segments of the unit that are freed after the move."""
        return [
            s
            for name, storage in self.storages.items()
            for s in self.unit.storages[name].segments
            if s not in storage.segments
        ]


class StateOffloader:
    """Move the storage of all units between tiers.

    Arguments:
        plans: the storage that the placement asks for, for each unit.
        gatherer: keeps the parameters of units that are in use.
        reducer: keeps gradients that are not reduced yet.
        plan_staging: plans the buffers that given storages need.
    """

    def __init__(
        self,
        context: EngineContext,
        plans: Sequence[UnitPlan],
        gatherer: Gatherer,
        reducer: Reducer,
        *,
        plan_staging: Callable[[Sequence[Sections]], StagingPlan],
    ) -> None:
        self._context = context
        self._plans = dict(zip(context.units, plans, strict=True))
        self._gatherer = gatherer
        self._reducer = reducer
        self._plan_staging = plan_staging
        self._keep = False  # the memory of the last offload, for the next one
        self._cleaned: Event = DONE  # the old storage of the last move was freed by a thread
        self._clean_up: Callable[[], None] | None = None  # frees it, as long as no thread does

    def offload(self, storages: Collection[str], to: Tier, *, pin: bool, wait: bool, keep: bool) -> None:
        """Move storages to the cpu or the nvme tier. Those that are there stay as they are. Collective.

        Precondition: no update is under way, and gradients have arrived.

        Arguments:
            storages: the names of the storages: param, grad, master, optimizer.
            to: the tier that they move to.
            pin: page-lock the host memory.
            wait: return when the move is done. Else the state is in flight, and its old memory is freed once it has
                arrived.
            keep: have the reload keep the memory and the files that this allocates, for the next offload.

        Raises:
            MemoryBudgetError, NvmeError: there is no room for it, or a transfer failed that was waited for. Nothing has
                moved, on any rank.
        """
        self._gatherer.drop_unused()
        self._reducer.release_memory()
        if PARAM in storages:
            for unit in self._context.units:
                if not unit.holding.is_held:
                    self._gatherer.forget(unit)
        self._gatherer.release_memory()
        wanted = {unit: self._offloaded(unit, storages, to) for unit in self._context.units}
        if any(_parts_from_staging(unit, plans, storages, to) for unit, plans in wanted.items()):
            # Parameter staging joins parameters and optimizer states of two tiers. After the move tiles are copied
            # instead. The staging of all units goes, as they share allocations.
            for unit in self._context.units:
                if unit.trained is not None:
                    wanted[unit][SHADOW] = [replace(plan, cells=()) for plan in unit.storages[SHADOW].plans]
        self._keep = keep
        if not keep:
            self.finish()  # the clean-up of the last reload may still keep memory
            self._context.store.give_back_kept()
        self._move(wanted, pin=pin, wait=wait)

    def reload(self, *, wait: bool) -> None:
        """Move every storage to the tier of the placement. Collective. Needs and raises the same as `offload`."""
        self._gatherer.drop_unused()
        self._reducer.release_memory()
        self._move({unit: plan.segments for unit, plan in self._plans.items()}, pin=True, wait=wait, back=True)
        # Not within a backward: pinning memory may wait for device work that later work completes (ordering rule 5).
        self._context.staging.take()

    @property
    def is_away(self) -> bool:
        """True if a storage is not where the placement wants it."""
        return any(
            unit.storages[n].plans != tuple(p) for unit, plan in self._plans.items() for n, p in plan.segments.items()
        )

    def finish(self) -> None:
        """Wait until the old storage of the last move is freed, or free what is left of it."""
        self._cleaned.synchronize()  # site offload.cleaned_up
        if self._clean_up is not None:
            self._clean_up()
            self._clean_up = None

    def _move(self, wanted: Mapping[Unit, Wanted], *, pin: bool, wait: bool, back: bool = False) -> None:
        self.finish()  # else the memory of two moves would be allocated at once
        changes = {
            unit: {name: plans for name, plans in storages.items() if tuple(plans) != unit.storages[name].plans}
            for unit, storages in wanted.items()
        }
        changes = {unit: storages for unit, storages in changes.items() if storages}
        if changes:
            self._exchange(changes, pin=pin, wait=wait, back=back)
            self._context.staging.replan()
            self._gatherer.show_resident(self._context.units, wait=wait)

    def _exchange(self, changes: Mapping[Unit, Wanted], *, pin: bool, wait: bool, back: bool) -> None:
        new = [plan for unit, storages in changes.items() for plan in self._new_segments(unit, storages)]
        old = [plan for unit, storages in changes.items() for name in storages for plan in unit.storages[name].plans]
        transit = transit_ring([*old, *new])
        ring, buffers, moves = Ring(), Buffers(self._context.store), list[_Move]()
        verb = "reload_states()" if back else "offload_states()"
        with contextlib.ExitStack() as undo:
            undo.callback(self._take_back_lent, changes)  # undone in reverse: after the last copy into it
            # 1. No rank copies before all have allocated: else some would move, and the others would not.
            with self._context.ranks.control_group.together(verb):
                reserved = self._context.store.reserve(
                    [*new, *transit.segments()], pin=pin, apart=self._away(new), keep=self._keep
                )
                undo.callback(reserved.cancel)
                moves += [_Move(unit, self._make(unit, storages, reserved)) for unit, storages in changes.items()]
                ring.fill(buffers.make_slots(transit, reserved))
            # If the rest fails, memory lives until its copies end (ordering rule 1): those that storages know, and one
            # that an interrupt came to before its event was noted.
            undo.callback(self._context.streams.drain, _OF_COPIES)
            undo.callback(_wait, moves, ring)
            transfers = Transfers(self._context.streams, ring)  # 2.
            for move in moves:
                self._copy_unit(move, transfers)
            if wait:
                self._context.ranks.control_group.agree(_wait(moves, ring))  # all exchange the storages, or none does
            ring.forget()  # else later reads would use its records, and updates behind the clean-up wait for those
            # Before the exchange: after an interrupt the staging is planned again at its next use.
            self._context.staging.give_back(self._plan_now)
            undo.pop_all()
        with failing_as_a_whole(self._context.units, verb, moves=True):
            left = [segment for move in moves for segment in self._commit(move)]  # 3.
        # Compute has read the old segments, and copies of them may still run on other streams than the one that their
        # memory belongs to (ordering rule 1).
        written = [storage.memory.written for move in moves for storage in move.storages.values()]
        # site offload.old_memory_unused
        over = all_of(_Settled(event) for event in (self._context.streams.now(), ring.free, *written))

        def clean_up() -> None:
            over.synchronize()  # site offload.clean_up
            ring.drop()
            buffers.free()
            while left:  # one by one: after an interrupt the next move frees the rest
                # Only a reload keeps memory: an offload that follows another one frees it.
                self._context.store.free(left[-1], keep=back)
                left.pop()
            self._context.streams.return_free_memory()

        self._clean_up = clean_up
        if wait:
            self.finish()
            self._gatherer.drop_unused()  # old segments had views of gathered buffers
        else:
            # A host thread waits for all that still uses the old segments. Updates on the host queue up behind it.
            # site offload.clean_up_queued
            self._cleaned = self._context.streams.submit(UPDATE, clean_up, after=(over,))
            self._clean_up = None

    def _plan_now(self) -> StagingPlan:
        """Plan the buffers that tiles pass, which depend on the tiers of the storages."""
        return self._plan_staging(
            [{name: storage.plans for name, storage in unit.shard_storages.items()} for unit in self._context.units]
        )

    def _offloaded(self, unit: Unit, storages: Collection[str], to: Tier) -> dict[str, Sequence[SegmentPlan]]:
        """Plan the segments of a unit's named storages on a tier."""
        wanted: dict[str, Sequence[SegmentPlan]] = {}
        named = {*storages, SECONDARY} if PARAM in storages else set(storages)
        for name in named & unit.storages.keys():
            plans: Sequence[SegmentPlan] = unit.storages[name].plans
            if name == PARAM and not to.is_memory:
                plans = unit.params.plans  # files hold shards
            elif name == PARAM and unit.replica is None:
                plans = self._plans[unit].segments[PARAM]
            there = to if name != SECONDARY or to.is_memory else Tier.CPU  # backward reads it: files would be slower
            wanted[name] = [plan if plan.tier is there or not plan.cells else plan.on(there) for plan in plans]
        return wanted

    def _new_segments(self, unit: Unit, storages: Wanted) -> Iterator[SegmentPlan]:
        """Yield the segments that need memory or space of their own."""
        for name, plans in storages.items():
            if not (name == PARAM and self._becomes_resident(unit, plans)):
                yield from (plan for plan in plans if plan.cells and plan not in unit.storages[name].plans)

    def _away(self, segments: Collection[SegmentPlan]) -> Collection[SegmentPlan]:
        """Return those of the new segments that the next reload frees."""
        return set(segments).difference(*(plans for plan in self._plans.values() for plans in plan.segments.values()))

    def _becomes_resident(self, unit: Unit, params: Sequence[SegmentPlan]) -> bool:
        return self._plans[unit].resident and list(params) == list(self._plans[unit].segments[PARAM])

    def _make(self, unit: Unit, storages: Wanted, reserved: Reservation) -> dict[str, Storage]:
        """Make the new storages of a unit. Segments that stay are shared with the old ones."""
        made = {}
        for name, plans in storages.items():
            here = {segment.plan: segment for segment in unit.storages[name].segments}
            if name == PARAM and self._becomes_resident(unit, plans):
                # The gathered buffer itself: views of it that autograd saved stay valid.
                made[name] = Storage([MemorySegment(plans[0], [self._gatherer.lend(unit)])])
            else:
                unset = self._writes_all(unit, name)
                made[name] = Storage([here.get(plan) or reserved.make(plan, unset=unset) for plan in plans])
        return made

    def _writes_all(self, unit: Unit, name: str) -> bool:
        """Return True if the copy to a new storage is known to write every element of it."""
        if name == PARAM:
            return not self._plans[unit].replicated
        if name == GRAD:
            assert unit.trained is not None
            gradient = unit.trained.gradient
            return bool(gradient.held) and gradient.storage is unit.storages[GRAD] and _is_whole(gradient.storage)
        return name in (MASTER, OPTIMIZER) and _is_whole(unit.storages[name])

    def _take_back_lent(self, units: Collection[Unit]) -> None:
        for unit in units:
            self._gatherer.release(unit)

    def _copy_unit(self, move: _Move, transfers: Transfers) -> None:
        """Submit the copies of a unit. A copy that cannot be submitted becomes a failed write of its storage."""
        # Parameter staging last: it is copied from the parameters.
        for name in (PARAM, SECONDARY, GRAD, MASTER, OPTIMIZER, SHADOW):
            if name in move.storages:
                try:
                    self._copy_storage(move, name, move.storages[name], transfers)
                except Exception as error:
                    move.storages[name].note_write(FailedEvent(error))

    def _copy_storage(self, move: _Move, name: str, new: Storage, transfers: Transfers) -> None:
        unit, label = move.unit, Label("move", move.unit.name, name)
        if name == PARAM:
            self._copy_params(move, new, transfers, label)
        elif name == GRAD:
            assert unit.trained is not None
            if unit.trained.gradient.held:
                transfers.copy(unit.trained.gradient.storage, new, label)
        elif name == SHADOW:
            params = self._own_part(unit, move.storages[PARAM]) if PARAM in move.storages else unit.params
            transfers.copy(params, new, label)  # follows the last write of the parameters (ordering rule 3)
        elif name != SECONDARY or not unit.other_shards_outdated:  # an outdated secondary shard has no values
            transfers.copy(unit.storages[name], new, label)

    def _copy_params(self, move: _Move, new: Storage, transfers: Transfers, label: Label) -> None:
        unit = move.unit
        if unit.holding.unit_state is UnitState.GATHERED and unit.allocated and self._becomes_resident(unit, new.plans):
            return  # the gathered buffer has the values
        becomes_replica = self._becomes_replica(unit, new)
        if becomes_replica == (unit.replica is not None):
            transfers.copy(unit.storages[PARAM], new, label)
        else:
            move.stale = becomes_replica and unit.layout.shards > 1
            transfers.copy(unit.params, self._own_part(unit, new), label)

    def _becomes_replica(self, unit: Unit, params: Storage) -> bool:
        return self._plans[unit].replicated and not params.in_files

    def _own_part(self, unit: Unit, params: Storage) -> Storage:
        """Return the storage of this rank's shard within the new storage of the parameters."""
        return params.part(*unit.own_range) if self._becomes_replica(unit, params) else params

    def _commit(self, move: _Move) -> list[Segment]:
        """Put the new storages in the place of the old ones. Return the segments to free."""
        unit, left = move.unit, move.left()
        for segment in left:
            self._context.store.leave(segment)
        for name, storage in move.storages.items():
            if name != PARAM:
                unit.exchange(name, storage)
        if PARAM in move.storages:
            params = move.storages[PARAM]
            if self._becomes_resident(unit, params.plans):
                self._gatherer.become_storage(unit)
                self._context.store.enter(params.segments[0], None)
            elif unit.resident:
                self._gatherer.leave_storage(unit, moved=params.memory.written)
            unit.replica = params if self._becomes_replica(unit, params) else None
            unit.params = self._own_part(unit, params)
            unit.other_shards_outdated = unit.other_shards_outdated or move.stale
        return left


def _parts_from_staging(unit: Unit, wanted: Wanted, storages: Collection[str], to: Tier) -> bool:
    """Return True if a move separates a unit's parameter staging from its other state, or moves the staging itself."""
    if unit.trained is None:
        return False
    moves = any(tuple(wanted[name]) != unit.storages[name].plans for name in wanted.keys() - {GRAD})
    param_staging = unit.storages[SHADOW].plans
    return moves or (MASTER in storages and any(plan.cells and plan.tier is not to for plan in param_staging))


def _is_whole(storage: Storage) -> bool:
    """Return True if all segments of a storage have the same kinds, at least one."""
    kinds = {tuple((cell.kind, cell.dtype) for cell in segment.plan.cells) for segment in storage.segments}
    return len(kinds) == 1 and () not in kinds


class _Settled(Event):
    """The end of work, failed or not. Users of its result check for its error themselves."""

    def __init__(self, event: Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.wait()  # site offload.ended_for_compute

    def synchronize(self) -> None:
        with contextlib.suppress(Exception):
            self._event.synchronize()  # site offload.ended

    def done(self) -> bool:
        return self._event.done()

    def check(self) -> None:
        pass


def _wait(moves: Sequence[_Move], ring: Ring) -> Exception | None:
    """Wait until no copy is under way. Return the first error."""
    failures = [move.finish() for move in moves]
    ring.drop()
    return next(filter(None, failures), None)
