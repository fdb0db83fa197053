"""The update of a unit, and who runs which part of it."""

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any, Literal

from torch import nn

from penstock.config import GRAD, MASTER, OPTIMIZER, PARAM, SHADOW, Tier
from penstock.engine.step.context import EngineContext
from penstock.engine.unit.unit import Unit
from penstock.layout import SlotPiece
from penstock.rules.rule import BLOCK_NUMEL, RecordChecksums, Rule, Scalars, StepScalars, UpdateSlice
from penstock.runtime.hardware import Clock
from penstock.runtime.streams import DEVICE_UPDATE, DONE, UPDATE, Event, Streams, all_of
from penstock.tiers.storage import Storage, Views
from penstock.tiers.transfer import StagedTile, TileRange, TileStreamer
from penstock.trace import NO_LABEL, Label

# ----------------------------------------------------------------------------------------------------------------------
# Updates of tiles: what the rule is applied to, where, and what moves for it.
# ----------------------------------------------------------------------------------------------------------------------


#: For each slot that has a gradient: what the rule reads of its group and step, and its scalars afterwards.
Plan = dict[int, tuple[StepScalars, Scalars]]
#: The same of parameters of one rule, group and step, and with the same scalars: a group is read once for all units.
KnownScalars = dict[Hashable, tuple[StepScalars, Scalars]]


@dataclass
class UpdateRun:
    """Neighbouring pieces that are updated in one pass: elements `start` to `stop` of the shard."""

    start: int
    stop: int
    hyper: StepScalars
    base: int = 0  # what added to an element's index in the shard numbers it among all elements of the optimizer
    slot: int = field(default=0, compare=False)  # of the first piece


@dataclass
class TileUpdate:
    """One tile's update, or a stretch's: where it runs, what of it in which passes, and once submitted, its event.

    Attributes:
        unit: the one that it belongs to.
        number: the tile's number in the shard, or that of the stretch's first.
        beside: the tier where its state rests, as far as updates care: the device, or the host.
        runs: what is updated in one pass each, in order.
        scale: what the gradient is multiplied with.
        complete: the event after which gradient, parameters and state are there, and may be overwritten.
        streamed: whether the device updates it though its state rests on the host: it comes up for that and goes down.
        then: what is called where the update runs, after it.
        written: the event after which what it wrote is in those homes that are memory. `DONE` where compute itself has
            written it: whatever is submitted later follows compute.
        count: how many tiles the stretch has.
        in_place: whether compute itself updates it, and reaches all of it where it rests.
        homes: those that it works on, by name.
        divisible: whether it may be the device's or the host's, as the share of each wants it.
    """

    unit: Unit
    number: int
    beside: Tier
    runs: Sequence[UpdateRun]
    scale: float
    complete: Event
    streamed: bool = False
    then: Callable[[], None] | None = None
    written: Event = DONE
    count: int = 1
    in_place: bool = False
    divisible: bool = True
    homes: Mapping[str, Storage] = field(default_factory=dict)

    @property
    def runs_on(self) -> Tier:
        """Which side updates it."""
        return Tier.DEVICE if self.streamed else self.beside


class Updater:
    """Plans the updates of tiles, and submits them.

    Arguments:
        context: what every part of the engine works with.
        groups: index of the optimizer's param group of each trained parameter.
        firsts: number of each trained parameter's first element among all elements of the optimizer.

    Attributes:
        steps: how often each trained parameter was updated.
        scalars: the parameters' own scalars, where the rule has some.
    """

    def __init__(
        self,
        context: EngineContext,
        *,
        groups: Mapping[nn.Parameter, int],
        firsts: Mapping[nn.Parameter, int],
    ) -> None:
        self._context = context
        self._groups = groups
        self._firsts = firsts
        # For each side: brings the tiles that its updates cannot reach where they rest.
        self._pipelines = {
            beside: TileStreamer(context.streams, ring, beside=beside)
            for beside, ring in context.staging.update.items()
        }
        self.steps: dict[nn.Parameter, int] = dict.fromkeys(groups, 0)
        self.scalars: dict[nn.Parameter, Scalars] = {}

    def plan(self, unit: Unit, slots: Iterable[int], known: KnownScalars) -> Plan:
        """Say what the next step does to each slot, with its group as it is now: a scheduler may change it later."""
        plan: Plan = {}
        rule = unit.rule
        for index in sorted(slots):
            parameter = unit.spec.parameters[index]
            group, step = self._groups[parameter], self.steps[parameter] + 1
            scalars = self.scalars.get(parameter, {})
            key = id(rule), group, step, tuple(scalars.items()) if scalars else ()
            found = known.get(key)
            if found is None:
                hyper = rule.hyper(self._context.param_groups[group], step, scalars)
                found = known[key] = hyper, rule.advance(hyper)
            plan[index] = found
        return plan

    def check_groups(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise `ConfigError` for a group that asks for what the rule does not honour."""
        for group in param_groups:
            self._context.rule.hyper(group, step=1)

    def complete(self, unit: Unit) -> Event:
        """Give the event after which a unit may be updated, as far as memory goes: records know their own."""
        assert unit.trained is not None
        # A gradient that is not there yet would be half an old one. What a save or a gather still copies would be half
        # a new state: every home that is written has to be free of reads, too.
        # site update.gradient_written, update.storage_free
        return all_of([unit.trained.gradient.home.memory.written, *[home.memory.free for home in unit.updated_homes]])

    def tiles(self, unit: Unit, plan: Plan, scale: float, complete: Event, *, singly: bool = False) -> list[TileUpdate]:
        """List what is to be done for a unit once it is complete, in forward order.

        Arguments:
            unit: the one that is updated.
            plan: what is done to each of its slots that has a gradient.
            scale: what the gradient is multiplied with.
            complete: the event after which the unit may be updated.
            singly: whether the host is asked before each tile, so that each one is an update of its own there.
        """
        trained = unit.trained
        assert trained is not None
        hypers = {index: hyper for index, (hyper, _) in plan.items()}
        # What, added to an index in the shard, numbers each slot's elements among all of the optimizer.
        parameters, own, slots = unit.spec.parameters, unit.own_range[0], unit.layout.slots
        bases = {index: self._firsts[parameters[index]] + own - slots[index].start for index in plan}
        updates: list[TileUpdate] = []
        number = 0
        while number < len(trained.tiles):
            section, _ = trained.optimizer.tile(number)
            update = TileUpdate(unit, number, trained.update_tier(number), (), scale, complete)
            # The section may have moved since it was planned: what rests on the device is updated there.
            update.streamed = section.plan.streamed == "all" and update.beside is not Tier.DEVICE
            update.divisible = section.plan.streamed == "some"
            update.homes = _homes(unit, number)
            if update.runs_on is Tier.DEVICE or not (singly or update.divisible):
                update.count, update.in_place = self._stretch(update, update.runs_on)
            count = update.count
            update.runs = merge(unit.pieces(number, count) if count > 1 else trained.tiles[number], hypers, bases)
            if update.runs:
                updates.append(update)
            number += count
        return updates

    def _stretch(self, tile: TileUpdate, on: Tier) -> TileRange:
        """Say how many tiles from this one on are updated at once by the device, or by the host.

        Each call costs the same for few elements as for many. A parameter that is looked at as a whole is one tile.
        """
        if tile.unit.spec.whole_numel:
            return TileRange(1, in_place=False)
        stretch = self._pipelines[on].stretch(tile.number, tile.homes)
        # What the host updates is work of its stream, and never compute's.
        return stretch if on is Tier.DEVICE else stretch._replace(in_place=False)

    def taken_at_once(self, tile: TileUpdate) -> int:
        """Count the tiles from this one on that the device takes at once, if it is to update what the host would."""
        return self._stretch(tile, Tier.DEVICE).tiles

    def submit(self, tiles: Iterable[TileUpdate], allowed: Callable[[], bool] | None = None) -> None:
        """Submit the updates of tiles: in order on the host, in order on the device, both at the same time.

        Afterwards each has the event of its writes. The homes do not know them until `publish`.

        Arguments:
            tiles: what is updated, of any units.
            allowed: asked on the host before each tile, once its gradient is there; a tile that is not stays as it is.
                `None` lets all be updated.
        """
        on_host: list[Callable[[], None]] = []
        on_device: list[Callable[[], None]] = []
        in_place: dict[tuple[Rule, str], list[TileUpdate]] = {}
        observer = self._context.streams.observer
        recorded = observer is not None and observer.is_traced
        for tile in tiles:
            # These go in one call of the rule, before which nobody could be asked for each tile: what is small in each
            # unit is a launch together. A trace tells units apart.
            if tile.in_place and allowed is None:
                name = tile.unit.name if recorded else "on the device"
                in_place.setdefault((tile.unit.rule, name), []).append(tile)
            else:
                side = on_device if tile.runs_on is Tier.DEVICE else on_host
                side.append(partial(self._submit, tile, allowed))
        calls = [partial(self._update_in_place, group, Label("update", name)) for (_, name), group in in_place.items()]
        # Neither side waits until all of the other's work is submitted.
        turns = [submit for pair in zip_longest(on_host, on_device) for submit in pair if submit is not None]
        # On a cpu the calls of compute itself end when all of it is updated: the host's tiles are on their way before.
        for submit in [*turns, *calls] if self._context.streams.computes_on_host else [*calls, *turns]:
            submit()

    def _update_in_place(self, tiles: Sequence[TileUpdate], label: Label) -> None:
        """Have compute itself update what is in its reach: in one call of the rule, whatever units it is of."""
        segments: list[tuple[UpdateSlice, StepScalars]] = []
        nbytes = 0
        for tile in tiles:
            brought = self._pipelines[tile.beside].bring(
                tile.number, tile.homes, after=tile.complete, label=NO_LABEL, count=tile.count
            )
            # Nothing has to be brought, but a save or a gather may still read what compute is about to write, and a
            # move still be bringing it: streams of their own, which compute does not follow by itself.
            brought.ready.wait()  # site update.in_place_free
            segments += self._segments(tile, brought.views)
            nbytes += _touched(brought.views)
        (scale,), (rule,) = {tile.scale for tile in tiles}, {tile.unit.rule for tile in tiles}
        work = partial(rule.update_many, segments, scale, self._context.pool)
        self._context.streams.compute(work, label=label, nbytes=nbytes)

    def _submit(self, tile: TileUpdate, allowed: Callable[[], bool] | None) -> None:
        """Bring one tile to where it is updated, update it, and put it back: each follows the one before by its event.

        What brings it follows `complete`, and the last use of the slot that it passes; the update follows that; what
        puts it back follows the update.
        """
        written, label = (MASTER, OPTIMIZER, SHADOW, PARAM), Label("update", tile.unit.name, tile=tile.number)
        # What a pass of the host touches anyway is summed by it, and not by those who move it.
        sums = tile.runs_on is Tier.CPU and tile.unit.rule.sums
        brought = self._pipelines[tile.runs_on].bring(
            tile.number, tile.homes, after=tile.complete, written=written, label=label, count=tile.count, sums=sums
        )
        work = partial(self._apply, tile, brought, allowed)
        # Compute itself updates what is on the device. Two streams for the rest: the device's own updates run beside
        # those of the host, and beside compute.
        stream = None if tile.beside is Tier.DEVICE else DEVICE_UPDATE if tile.streamed else UPDATE
        tile.written = use_staged(self._context.streams, stream, brought, work)

    def publish(self, unit: Unit, tiles: Sequence[TileUpdate], *, goes_on: bool = False) -> None:
        """Have a unit's homes wait for tiles that were submitted, and take their shadows to where parameters rest.

        Arguments:
            unit: the one that the tiles belong to.
            tiles: all that were submitted together.
            goes_on: whether other tiles of the same step were published before: the homes wait for those as well.
        """
        trained = unit.trained
        assert trained is not None
        written = all_of(tile.written for tile in tiles)  # site update.tiles_written
        # site update.gradient_read
        trained.gradient.home.note_read(written)  # the next micro-batch's would else be written over what updates read
        for home in unit.updated_homes:
            # Whoever needs the new values asks the home. A write that is noted stands for all before it, which these
            # tiles have followed; the other tiles of the same step they have not.
            # site update.written, update.earlier_tiles_written, update.later_tiles_written
            home.note_write(all_of([home.memory.written, written]) if goes_on else written)
        # After the notes: the copy follows the shadow's last write, which must be these tiles. It notes in the home of
        # the parameters what it writes there.
        if any(trained.is_shadowed(tile.number) for tile in tiles):
            self._context.movement.copy(trained.shadow, unit.params, Label("publish", unit.name))

    def count(self, unit: Unit, plan: Plan) -> None:
        """Count a step of each parameter: all tiles of its unit were submitted, on this rank and on the others."""
        for index, (_, scalars) in plan.items():
            self.steps[unit.spec.parameters[index]] += 1
            self.scalars[unit.spec.parameters[index]] = scalars
        # Each rank has updated its own shard of a replicated unit: the next gather fetches the others, on every rank.
        unit.outdate_parts()

    def _apply(self, tile: TileUpdate, brought: StagedTile, allowed: Callable[[], bool] | None) -> None:
        """Update every run of a tile, as the work of a stream, once all of it is there."""
        updates = allowed is None or allowed()
        sums = RecordChecksums(record.buffer for record in brought.summed)
        if updates:
            segments = self._segments(tile, brought.views)
            tile.unit.rule.update_many(segments, tile.scale, self._context.pool, sums)
        for record in brought.summed:  # what has stayed as it was is put back all the same
            record.check(sums)
        if updates and tile.then is not None:
            tile.then()

    def _segments(self, tile: TileUpdate, views: Mapping[str, Views]) -> Iterator[tuple[UpdateSlice, StepScalars]]:
        """Yield what the rule works on in each run of a tile: views of its values, as they were brought."""
        unit, trained = tile.unit, tile.unit.trained
        assert trained is not None
        first = tile.number * unit.params.sections[0].tile_numel  # where the values begin in the shard
        (grad,) = views[GRAD]
        # The shadow where there is one: the parameter is out of reach, and gets the same bits when it is published.
        (param,) = views[SHADOW] if SHADOW in views else views[PARAM]
        master = views[MASTER][0] if views[MASTER] else None
        states, scales = trained.fields.name(views[OPTIMIZER])
        for run in tile.runs:
            start, stop = run.start - first, run.stop - first
            shape = unit.layout.slots[run.slot].shape if unit.spec.whole_numel else ()
            if start == 0 and stop == len(param) and trained.fields.scales.count(None) == len(scales):
                # All of it: views of the same elements would take as long as the update of a small unit.
                yield UpdateSlice(param, grad, master, states, first=run.base + run.start, shape=shape), run.hyper
                continue
            part, blocks = slice(start, stop), slice(start // BLOCK_NUMEL, -(-stop // BLOCK_NUMEL))
            segment = UpdateSlice(
                param=param[part],
                grad=grad[part],
                master=None if master is None else master[part],
                # A state of another shape than its parameter has all of its values in the tile.
                states=tuple(state[part] if len(state) == len(param) else state for state in states),
                scales=tuple(None if scale is None else scale[blocks] for scale in scales),
                first=run.base + run.start,
                shape=shape,
            )
            yield segment, run.hyper


def use_staged(streams: Streams, stream: str | None, staged: StagedTile, work: Callable[[], None]) -> Event:
    """Do work on a tile once all of it is there, and put back what it wrote.

    Arguments:
        streams: where work runs beside compute.
        stream: the one that does the work; `None` for compute itself.
        staged: the tile.
        work: reads and writes its views.

    Returns:
        The event after which what was written is in those homes that are memory.
    """
    nbytes = _touched(staged.views)
    if stream is None:
        staged.ready.wait()  # site update.loaded_for_compute: else it computes with what the slot held before
        streams.compute(work, label=staged.label, nbytes=nbytes)
        used = DONE  # what puts it back follows all that compute was given
    else:
        # site update.loaded
        used = streams.submit(stream, work, after=(staged.ready,), nbytes=nbytes, label=staged.label)
    # After the work, or what was brought would be put back. The slot is free once it has arrived: another tile's values
    # would else be written over it on its way.
    return staged.put_back(used)


def join(tiles: Sequence[TileUpdate]) -> TileUpdate:
    """Make one stretch of neighbouring tiles of a unit."""
    runs: list[UpdateRun] = []
    for run in (run for tile in tiles for run in tile.runs):
        if runs and (runs[-1].stop, runs[-1].hyper, runs[-1].base) == (run.start, run.hyper, run.base):
            run = replace(run, start=runs.pop().start)
        runs.append(run)
    return replace(tiles[0], runs=runs, count=sum(tile.count for tile in tiles))


def _homes(unit: Unit, number: int) -> dict[str, Storage]:
    """List the homes that the update of a tile works on, by name."""
    trained = unit.trained
    assert trained is not None
    homes = {GRAD: trained.gradient.home, MASTER: trained.master, OPTIMIZER: trained.optimizer}
    return homes | ({SHADOW: trained.shadow} if trained.is_shadowed(number) else {PARAM: unit.params})


def _touched(views: Mapping[str, Views]) -> int:
    """Count the bytes that an update of values, by home, reads (all) and writes (all but the gradient)."""
    total = 0
    for home, of_home in views.items():
        for values in of_home:
            total += values.nbytes if home == GRAD else 2 * values.nbytes
    return total


def merge(pieces: Iterable[SlotPiece], hypers: Mapping[int, StepScalars], bases: Mapping[int, int]) -> list[UpdateRun]:
    """Make the runs of those pieces whose slots are in `hypers`; neighbours with equal scalars become one.

    A run takes in the gap between two pieces, which holds zeros in every kind. Where the update would not keep them,
    and where neighbours are not numbered one after the other (`bases`, see `UpdateRun`), they stay apart.
    """
    runs: list[UpdateRun] = []
    goes_on = False  # a parameter without a gradient, which no run may reach across, is not touched
    for piece in pieces:
        hyper = hypers.get(piece.slot)
        if hyper is not None:
            base, last = bases[piece.slot], runs[-1] if goes_on else None
            meets = last is not None and (last.stop == piece.start or hyper.keeps_zeros)
            if last is not None and meets and (last.hyper, last.base) == (hyper, base):
                last.stop = piece.stop
            else:
                runs.append(UpdateRun(piece.start, piece.stop, hyper, base, piece.slot))
        goes_on = hyper is not None
    return runs


# ----------------------------------------------------------------------------------------------------------------------
# Which of the host's tiles the device updates: up, update, down, through spare memory and beside compute.
#
# A step's updates last as long as the slower side. Both sides work through the tiles in the same order, mixed evenly,
# so that units are finished one after the other, as forward wants them. Which share the device takes is stated, or
# measured: if in a second the host updates h elements and the device d, links included, the device's share is d / (h +
# d).
#
# Source: Maurya et al., "Deep Optimizer States: Towards Scalable Training of Transformer Models Using Interleaved
# Offloading", 2024.
# ----------------------------------------------------------------------------------------------------------------------


FIRST_SHARE = 0.25
#: The first step compiles kernels. What the others find last is kept: a share that never rests is a run that nobody can
#: repeat, where the device rounds otherwise than the host (`rules.compiler.rounds_as_host`).
WARM_UP_STEPS, MEASURED_STEPS = 1, 4

log = logging.getLogger(__name__)


class UpdateSharing:
    """Divides the tiles whose state rests off the device between the host and the device.

    Arguments:
        share: the device's part of them, or "auto" to measure which is best.
        streams: those of the device, whose clock is asked.
        at_once: tells how many tiles from a given one on the device takes at once.

    Attributes:
        share: the device's part of them as it is now.
    """

    def __init__(
        self,
        share: float | Literal["auto"],
        streams: Streams,
        at_once: Callable[[TileUpdate], int],
    ) -> None:
        self._streams = streams
        self._at_once = at_once
        self.share = FIRST_SHARE if share == "auto" else share
        self._steps_left = WARM_UP_STEPS + MEASURED_STEPS if share == "auto" else 0
        self._clock: Clock | None = None
        self._race: _Race | None = None

    def divide(self, tiles: Sequence[TileUpdate]) -> list[TileUpdate]:
        """Mark those tiles of a step that are to be streamed through the device, and join them to stretches.

        Returns:
            All tiles, in the same order.
        """
        # The race of the step before is asked, and not waited for: the host would stand still for a measurement.
        if self._race is not None:
            self._learn(self._race.fair_share())
        divided: list[TileUpdate] = []
        number = passed = taken = 0
        while number < len(tiles):
            first = tiles[number]
            group = self._group(tiles, number) if _is_divided(first) else [first]
            number += len(group)
            if _is_divided(first):
                passed += len(group)
                if self.share > 0 and taken + len(group) <= self.share * passed:
                    taken += len(group)
                    group = [join(group)] if len(group) > 1 else group
                    group[0].streamed = True
            divided += group
        if self._steps_left:
            self._clock = self._clock or self._streams.device_clock()
            self._race = _Race([tile for tile in divided if _is_divided(tile)], self._clock)
        return divided

    def _group(self, tiles: Sequence[TileUpdate], number: int) -> list[TileUpdate]:
        """List the neighbouring tiles from one on that the device takes at once."""
        group = [tiles[number]]
        for tile in tiles[number + 1 : number + self._at_once(group[0])]:
            if tile.unit is not group[0].unit or tile.number != group[-1].number + 1:
                break
            group.append(tile)
        return group

    def _learn(self, share: float | None) -> None:
        """Take up the share at which both sides would have ended together, unless that is not known yet."""
        self._race = None
        if share is None:
            return
        self._steps_left -= 1
        if self._steps_left < MEASURED_STEPS:
            self.share = share
        if self._steps_left == 0:
            log.info("The device updates %.0f %% of the tiles whose optimizer state rests elsewhere.", 100 * share)


def _is_divided(tile: TileUpdate) -> bool:
    """Whether a tile is one of those that both sides may update."""
    return tile.divisible and tile.beside is Tier.CPU


class _Race:
    """The two sides of one step: from now until the last tile of each is updated."""

    def __init__(self, tiles: Sequence[TileUpdate], device: Clock) -> None:
        self._clocks = {False: Clock(), True: device}  # by `streamed`, as the others
        self._began = Clock().mark()
        self._numels: dict[bool, int] = {}
        self._ends: dict[bool, Any] = {}
        for streamed in self._clocks:
            own = [tile for tile in tiles if tile.streamed is streamed]
            self._numels[streamed] = sum(run.stop - run.start for tile in own for run in tile.runs)
            if own:
                own[-1].then = partial(self._end, streamed)  # the last: tiles of one side are updated in order

    def _end(self, streamed: bool) -> None:
        self._ends[streamed] = self._clocks[streamed].mark()

    def fair_share(self) -> float | None:
        """Compute the share at which both sides would have ended together; `None` if one did nothing or is not over."""
        speeds = {}
        for streamed, mark in self._ends.items():
            end = self._clocks[streamed].seconds(mark)
            if end is None:
                return None
            speeds[streamed] = self._numels[streamed] / max(end - self._began, 1e-9)
        return speeds[True] / (speeds[True] + speeds[False]) if len(speeds) == 2 else None
