"""Homes that move: state is taken off the device, or out of host memory, for a while, and brought back.

A move makes new sections on the other tier, copies, exchanges the sections of the home, and frees the old ones, unit by
unit: whatever fails, the state of each unit is whole, in the old place or in the new one. Training goes on from
wherever the state is: tiles are updated where their optimizer states are, and what they need is brought to them.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from penstock.engine.assemble import UnitPlan
from penstock.engine.gather import Gatherer
from penstock.engine.reduce import Reducer
from penstock.engine.staging import Buffers, Staging, StagingPlan, transit_slots
from penstock.engine.unit import Unit
from penstock.kinds import GRAD, MASTER, OPTIMIZER, PARAM, SHADOW, Tier
from penstock.machine.streams import DONE, UPDATE, Event, Streams, all_of
from penstock.tiers.home import Home, MemorySection, Section, SectionPlan
from penstock.tiers.ring import Ring
from penstock.tiers.store import Reservation, Store
from penstock.tiers.tier import Slab
from penstock.tiers.transit import Transit

#: Where the homes of one unit are to be, by name.
Wanted = Mapping[str, Sequence[SectionPlan]]

#: A section that is left behind, and what it is made of.
Left = tuple[Section, Slab | None]


@dataclass
class _Move:
    """One unit's way: its new homes, and what fills them.

    Attributes:
        weights: events of param, shadow, master and optimizer.
        gradient: event of the gradient.
        stale: the parameters of other ranks have to come from them.
    """

    unit: Unit
    homes: dict[str, Home] = field(default_factory=dict)
    weights: list[Event] = field(default_factory=list)
    gradient: Event = DONE
    stale: bool = False

    @property
    def events(self) -> list[Event]:
        """All of them."""
        return [*self.weights, self.gradient]

    def finish(self) -> None:
        """Wait until everything has arrived; raise the first error of what has not."""
        failure: Exception | None = None
        for wait in [event.synchronize for event in self.events] + [home.settle for home in self.homes.values()]:
            try:
                wait()
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def new_sections(self) -> list[Section]:
        """Those that were made for it."""
        return [
            s for name, home in self.homes.items() for s in home.sections if s not in self.unit.homes[name].sections
        ]

    def old_sections(self) -> list[Section]:
        """Those that it leaves."""
        return [
            s for name, home in self.homes.items() for s in self.unit.homes[name].sections if s not in home.sections
        ]


class Mover:
    """Moves the homes of all units between tiers.

    Arguments:
        plans: what the placement asks for, of each unit.
        in_use: whether compute may read a unit's parameters now.
        reduce_dtype: of gradients on their way.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        plans: Sequence[UnitPlan],
        store: Store,
        streams: Streams,
        gatherer: Gatherer,
        reducer: Reducer,
        staging: Staging,
        *,
        in_use: Callable[[Unit], bool],
        reduce_dtype: torch.dtype,
    ) -> None:
        self._units = units
        self._plans = dict(zip(units, plans, strict=True))
        self._store = store
        self._streams = streams
        self._gatherer = gatherer
        self._reducer = reducer
        self._staging = staging
        self._in_use = in_use
        self._reduce_dtype = reduce_dtype
        self._cleaned: Event = DONE  # what the last move left is given back

    def offload(self, homes: Collection[str], to: Tier, *, pin: bool, wait: bool) -> None:
        """Move homes to the cpu or the nvme tier. What is there already stays as it is. Updates are over.

        Arguments:
            homes: by name: param, grad, master, optimizer.
            to: the tier.
            pin: page-lock the host memory.
            wait: return when it is done; else the state is in flight, and its old memory goes once it has arrived.

        Raises:
            MemoryBudgetError, NvmeError: there is no room for it, and nothing has changed; or a transfer failed.
        """
        self._gatherer.drop_unused()
        self._reducer.rest(self._units)
        if PARAM in homes:
            for unit in self._units:
                if not self._in_use(unit):
                    self._gatherer.forget(unit)
        self._move({unit: _offloaded(unit, homes, to) for unit in self._units}, pin=pin, wait=wait)
        self._replan()

    def reload(self, *, wait: bool) -> None:
        """Move every home to where the placement wants it. Updates are over."""
        self._gatherer.drop_unused()
        self._move({unit: plan.sections for unit, plan in self._plans.items()}, pin=True, wait=wait)
        self._replan()
        self._staging.take()  # not later, within a backward: to pin memory there may block what it waits for
        self._gatherer.show_resident(self._units, wait=wait)

    def _move(self, wanted: Mapping[Unit, Wanted], *, pin: bool, wait: bool) -> None:
        self._cleaned.synchronize()
        changes = {
            unit: {name: plans for name, plans in homes.items() if tuple(plans) != unit.homes[name].plans}
            for unit, homes in wanted.items()
        }
        new = [plan for unit, homes in changes.items() for plan in self._new_sections(unit, homes)]
        old = [plan for unit, homes in changes.items() for name in homes for plan in unit.homes[name].plans]
        reserved = self._store.reserve(new, pin=pin)
        buffers = Buffers(self._store)
        ring = Ring()
        ring.fill(buffers.make_slots(transit_slots([*old, *new])))
        transit = Transit(self._streams, ring)
        moves = [_Move(unit) for unit, homes in changes.items() if homes]
        try:
            for move in moves:
                self._start(move, changes[move.unit], reserved, transit)
        except BaseException:  # no memory on the device: nothing counts yet
            self._undo(moves)
            reserved.close()
            ring.drop()
            buffers.free()
            raise
        if wait:
            self._finish(moves)
            ring.drop()
            buffers.free()
            self._streams.return_free_memory()
            return
        left = [each for move in moves for each in self._commit(move)]
        events = [event for move in moves for event in move.events]

        def clean_up() -> None:
            ring.drop()
            buffers.free()
            self._free(left)

        self._cleaned = self._streams.submit(UPDATE, clean_up, after=events)

    def _finish(self, moves: Sequence[_Move]) -> None:
        """Wait for each move, and let it count. A unit whose move failed stays where it was."""
        failure: Exception | None = None
        for move in moves:
            try:
                move.finish()
            except Exception as error:
                failure = failure or error
                self._undo([move])
            else:
                self._free(self._commit(move))
        if failure is not None:
            raise failure

    def _undo(self, moves: Sequence[_Move]) -> None:
        """Leave units where they are."""
        for move in moves:
            with contextlib.suppress(Exception):
                move.finish()
            self._free([(section, self._store.leave(section)) for section in move.new_sections()])
            self._gatherer.take_back(move.unit)

    def _replan(self) -> None:
        """The buffers through which tiles pass depend on where the homes are."""
        units = [{name: home.plans for name, home in unit.shard_homes.items()} for unit in self._units]
        self._staging.replan(StagingPlan(units, self._reduce_dtype, self._streams))

    def _new_sections(self, unit: Unit, homes: Wanted) -> Iterator[SectionPlan]:
        """The sections that need memory or space of their own."""
        for name, plans in homes.items():
            if not (name == PARAM and self._becomes_resident(unit, plans)):
                yield from (plan for plan in plans if plan.cells and plan not in unit.homes[name].plans)

    def _becomes_resident(self, unit: Unit, params: Sequence[SectionPlan]) -> bool:
        return self._plans[unit].resident and list(params) == list(self._plans[unit].sections[PARAM])

    def _start(self, move: _Move, homes: Wanted, reserved: Reservation, transit: Transit) -> None:
        """Make the new homes of a unit and submit the copies into them."""
        unit = move.unit
        for name in (PARAM, GRAD, MASTER, OPTIMIZER, SHADOW):  # the shadow last: it is a copy of the parameters
            if name not in homes:
                continue
            here = {section.plan: section for section in unit.homes[name].sections}
            if name == PARAM and self._becomes_resident(unit, homes[name]):
                new = Home([self._lend_full(unit, homes[name][0])])
            else:
                new = Home([here.get(plan) or reserved.make(plan) for plan in homes[name]])
            move.homes[name] = new
            if name == GRAD:
                assert unit.trained is not None
                gradient = unit.trained.gradient
                if gradient.held:
                    move.gradient = transit.copy(
                        gradient.home, new, after=gradient.ready, what=f"move {unit.name} grad"
                    )
            elif name == PARAM:
                move.weights.append(self._copy_params(move, new, transit))
            elif name == SHADOW:
                params = self._own_part(unit, move.homes[PARAM]) if PARAM in move.homes else unit.params
                move.weights.append(
                    transit.copy(params, new, after=all_of(move.weights), what=f"move {unit.name} shadow")
                )
            else:
                move.weights.append(transit.copy(unit.homes[name], new, after=DONE, what=f"move {unit.name} {name}"))

    def _lend_full(self, unit: Unit, plan: SectionPlan) -> Section:
        """The full buffer as the home of a resident unit: views of it that autograd saved stay good."""
        section = MemorySection(plan, [self._gatherer.lend(unit)])
        self._store.enter(section, None)
        return section

    def _copy_params(self, move: _Move, new: Home, transit: Transit) -> Event:
        unit = move.unit
        if unit.leased and self._becomes_resident(unit, new.plans):
            return DONE  # it is gathered, so the values are there
        becomes_replica = self._becomes_replica(unit, new)
        if becomes_replica == (unit.replica is not None):
            return transit.copy(unit.homes[PARAM], new, after=DONE, what=f"move {unit.name} param")
        move.stale = becomes_replica and unit.layout.shards > 1
        return transit.copy(unit.params, self._own_part(unit, new), after=DONE, what=f"move {unit.name} param")

    def _becomes_replica(self, unit: Unit, params: Home) -> bool:
        return self._plans[unit].replicated and not params.in_files

    def _own_part(self, unit: Unit, params: Home) -> Home:
        """The shard of this rank, of the new home of the parameters."""
        return params.part(*unit.own_range) if self._becomes_replica(unit, params) else params

    def _commit(self, move: _Move) -> list[Left]:
        """Let the new homes count; returns what is left behind."""
        unit = move.unit
        left = [(section, self._store.leave(section)) for section in move.old_sections()]
        if PARAM in move.homes:
            params = move.homes.pop(PARAM)
            if self._becomes_resident(unit, params.plans):
                self._gatherer.settle(unit)
            elif unit.resident:
                self._gatherer.unsettle(unit, in_use=self._in_use(unit))
            unit.replica = params if self._becomes_replica(unit, params) else None
            unit.params = self._own_part(unit, params)
            unit.stale = unit.stale or move.stale
        for name, home in move.homes.items():
            unit.exchange(name, home)
        if move.weights:
            unit.published = all_of(move.weights)
            if unit.trained is not None:
                unit.trained.updated = unit.published
        if GRAD in move.homes and unit.trained is not None:
            unit.trained.gradient.ready = move.gradient
        return left

    def _free(self, left: Sequence[Left]) -> None:
        for section, slab in left:
            self._store.free(section, slab)


def _offloaded(unit: Unit, homes: Collection[str], to: Tier) -> Wanted:
    """Where the homes of a unit are once some of them are on a tier."""
    wanted: dict[str, Sequence[SectionPlan]] = {}
    for name in set(homes) & unit.homes.keys():
        home = unit.params if name == PARAM and to is Tier.NVME else unit.homes[name]  # files hold shards
        wanted[name] = [plan if plan.tier is to or not plan.cells else plan.on(to) for plan in home.plans]
    if unit.trained is not None and any(
        tuple(wanted[name]) != unit.homes[name].plans for name in wanted.keys() - {GRAD}
    ):
        # It stands between a home of the parameters and one of the optimizer. Tiles are brought instead.
        wanted[SHADOW] = [replace(plan, cells=()) for plan in unit.homes[SHADOW].plans]
    return wanted
