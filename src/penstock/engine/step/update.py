"""Updates of tiles: by which rule, on the host or on the device, and the transfers for them."""

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
# Updates of tiles: the ranges that the rule updates, where it runs, and the transfers for it.
# ----------------------------------------------------------------------------------------------------------------------


#: For each slot with a gradient: the scalars of the rule for its group and step, and its own scalars afterwards.
Plan = dict[int, tuple[StepScalars, Scalars]]
#: The same for all parameters of one rule, group, step and scalars: a group is read once for all units.
KnownScalars = dict[Hashable, tuple[StepScalars, Scalars]]


@dataclass
class UpdateRun:
    """Neighbouring pieces that are updated in one pass: elements `start` to `stop` of the shard."""

    start: int
    stop: int
    step_scalars: StepScalars
    base: int = 0  # added to the index of an element in the shard: its number among all elements of the optimizer
    slot: int = field(default=0, compare=False)  # of the first piece


@dataclass
class TileUpdate:
    """The update of a tile range: where it runs, its passes, and once submitted, its event.

    Attributes:
        unit: the unit of the tiles.
        number: the number of the first tile in the shard.
        beside: the tier of the optimizer state, as updates see it: the device, or the host.
        runs: the ranges that are updated in one pass each, in order.
        scale: the factor of the gradient.
        complete: the event after which gradient, parameters and state are there, and may be overwritten.
        streamed: the device updates the tiles although their state rests on the host: it is copied up and down again.
        then: called after the update, where it runs.
        written: the event after which storages in memory hold the result. `DONE` if compute itself writes it: work that
            is submitted later follows compute.
        count: the number of tiles.
        in_place: compute itself updates the tiles, and reaches all of them where they rest.
        divisible: the host or the device may update the tiles (`UpdateSharing`).
        storages: the storages that the update works on, by name.
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
    divisible: bool = False
    storages: Mapping[str, Storage] = field(default_factory=dict)

    @property
    def runs_on(self) -> Tier:
        """The side that runs the update."""
        return Tier.DEVICE if self.streamed else self.beside


class Updater:
    """Plans the updates of tiles, and submits them.

    Arguments:
        context: shared by all components of the engine.
        groups: index of the param group of each trained parameter.
        firsts: number of the first element of each trained parameter among all elements of the optimizer.

    Attributes:
        steps: the number of updates of each trained parameter.
        scalars: the parameters' own scalars, if the rule has some.
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
        # For each side, the transfers of tiles that its updates cannot reach where they rest.
        self._streamers = {
            beside: TileStreamer(context.streams, ring, beside=beside)
            for beside, ring in context.staging.update.items()
        }
        self.steps: dict[nn.Parameter, int] = dict.fromkeys(groups, 0)
        self.scalars: dict[nn.Parameter, Scalars] = {}

    def plan(self, unit: Unit, slots: Iterable[int], known: KnownScalars) -> Plan:
        """Return the scalars of the next update of each slot, from its group as it is now."""
        plan: Plan = {}
        rule = unit.rule
        for index in sorted(slots):
            parameter = unit.spec.parameters[index]
            group, step = self._groups[parameter], self.steps[parameter] + 1
            scalars = self.scalars.get(parameter, {})
            key = id(rule), group, step, tuple(scalars.items()) if scalars else ()
            found = known.get(key)
            if found is None:
                step_scalars = rule.step_scalars(self._context.param_groups[group], step, scalars)
                found = known[key] = step_scalars, rule.advance(step_scalars)
            plan[index] = found
        return plan

    def check_groups(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise `ConfigError` for a group with an option that the rule does not honour."""
        for group in param_groups:
            self._context.rule.step_scalars(group, step=1)

    def complete(self, unit: Unit) -> Event:
        """Return the event after which the memory of a unit may be updated. Records have events of their own."""
        assert unit.trained is not None
        # After the write of the gradient, and after all reads of the storages that are written, as those of a save or a
        # gather (ordering rule 3).
        # site update.gradient_written, update.storage_free
        return all_of(
            [unit.trained.gradient.storage.memory.written, *[storage.memory.free for storage in unit.updated_storages]]
        )

    def tiles(self, unit: Unit, plan: Plan, scale: float, complete: Event, *, singly: bool = False) -> list[TileUpdate]:
        """List the tile ranges of a unit that are to be updated, in order.

        Arguments:
            unit: the unit.
            plan: the scalars of each of its slots with a gradient.
            scale: the factor of the gradient.
            complete: the event after which the unit may be updated.
            singly: on the host, one tile at a time: `allowed` is asked before each.
        """
        trained = unit.trained
        assert trained is not None
        all_step_scalars = {index: step_scalars for index, (step_scalars, _) in plan.items()}
        # See `UpdateRun.base`.
        parameters, own, slots = unit.spec.parameters, unit.own_range[0], unit.layout.slots
        bases = {index: self._firsts[parameters[index]] + own - slots[index].start for index in plan}
        updates: list[TileUpdate] = []
        number = 0
        while number < len(trained.tiles):
            segment, _ = trained.optimizer.tile(number)
            update = TileUpdate(unit, number, trained.update_tier(number), (), scale, complete)
            # The segment may have moved since it was planned: state on the device is updated there.
            update.streamed = segment.plan.streamed == "all" and update.beside is not Tier.DEVICE
            update.divisible = segment.plan.streamed == "some" and update.beside is not Tier.DEVICE
            update.storages = _storages(unit, number)
            if update.runs_on is Tier.DEVICE or not (singly or update.divisible):
                update.count, update.in_place = self._tile_range(update, update.runs_on)
            count = update.count
            update.runs = merge(
                unit.pieces(number, count) if count > 1 else trained.tiles[number], all_step_scalars, bases
            )
            if update.runs:
                updates.append(update)
            number += count
        return updates

    def _tile_range(self, tile: TileUpdate, on: Tier) -> TileRange:
        """Return the tile range that begins here and is updated in one call by the device, or by the host.

        A call costs the same for few elements as for many. A parameter that its rule updates as a whole is one tile.
        """
        if tile.unit.spec.whole_numel:
            return TileRange(1, in_place=False)
        tiles = self._streamers[on].range_at(tile.number, tile.storages)
        # Updates on the host run on their stream, never as part of compute.
        return tiles if on is Tier.DEVICE else tiles._replace(in_place=False)

    def taken_at_once(self, tile: TileUpdate) -> int:
        """Return the number of tiles, from this one on, that the device would update at once."""
        return self._tile_range(tile, Tier.DEVICE).tiles

    def submit(self, tiles: Iterable[TileUpdate], allowed: Callable[[], bool] | None = None) -> None:
        """Submit updates: in order on the host, in order on the device, both at the same time.

        Sets `written` of each. The storages do not know these events until `publish`.

        Arguments:
            tiles: the updates, of any units.
            allowed: called on the host before each tile is updated, once its gradient is there. False leaves the tile
                as it is. `None` updates all of them.
        """
        on_host: list[Callable[[], None]] = []
        on_device: list[Callable[[], None]] = []
        in_place: dict[tuple[Rule, str], list[TileUpdate]] = {}
        observer = self._context.streams.observer
        recorded = observer is not None and observer.is_traced
        for tile in tiles:
            # One call of the rule for all of these, so few launches: but not if `allowed` is to be asked for each. In a
            # trace there is one call for each unit.
            if tile.in_place and allowed is None:
                name = tile.unit.name if recorded else "on the device"
                in_place.setdefault((tile.unit.rule, name), []).append(tile)
            else:
                side = on_device if tile.runs_on is Tier.DEVICE else on_host
                side.append(partial(self._submit, tile, allowed))
        calls = [partial(self._update_in_place, group, Label("update", name)) for (_, name), group in in_place.items()]
        # Alternate, so that neither side waits until all work of the other is submitted.
        turns = [submit for pair in zip_longest(on_host, on_device) for submit in pair if submit is not None]
        # On a cpu a call of compute returns when its update is done: submit the tiles of the host before.
        for submit in [*turns, *calls] if self._context.streams.computes_on_host else [*calls, *turns]:
            submit()

    def _update_in_place(self, tiles: Sequence[TileUpdate], label: Label) -> None:
        """Update tiles that compute reaches where they rest, of any units, in one call of the rule."""
        update_slices: list[tuple[UpdateSlice, StepScalars]] = []
        nbytes = 0
        for tile in tiles:
            staged = self._streamers[tile.beside].bring(
                tile.number, tile.storages, after=tile.complete, label=NO_LABEL, count=tile.count
            )
            # Nothing is copied, but saves, gathers and moves on streams of their own may still read or write these
            # values, and compute does not follow those streams by itself (ordering rule 3).
            staged.ready.wait()  # site update.in_place_free
            update_slices += self._update_slices(tile, staged.views)
            nbytes += _touched(staged.views)
        (scale,), (rule,) = {tile.scale for tile in tiles}, {tile.unit.rule for tile in tiles}
        work = partial(rule.update_many, update_slices, scale, self._context.pool)
        self._context.streams.compute(work, label=label, nbytes=nbytes)

    def _submit(self, tile: TileUpdate, allowed: Callable[[], bool] | None) -> None:
        """Submit the copies of a tile to where it is updated, then its update, then the copies back.

        The first copies follow `complete`, and the last use of the ring's slot.
        """
        written, label = (MASTER, OPTIMIZER, SHADOW, PARAM), Label("update", tile.unit.name, tile=tile.number)
        # An update on the host computes checksums in its own pass; else the transfers do.
        sums = tile.runs_on is Tier.CPU and tile.unit.rule.sums
        staged = self._streamers[tile.runs_on].bring(
            tile.number, tile.storages, after=tile.complete, written=written, label=label, count=tile.count, sums=sums
        )
        work = partial(self._apply, tile, staged, allowed)
        # State on the device is updated by compute itself. The rest has two streams: streamed updates run on the device
        # beside compute, and beside the updates of the host.
        stream = None if tile.beside is Tier.DEVICE else DEVICE_UPDATE if tile.streamed else UPDATE
        tile.written = use_staged(self._context.streams, stream, staged, work)

    def publish(self, unit: Unit, tiles: Sequence[TileUpdate], *, goes_on: bool = False) -> None:
        """Record submitted updates in a unit's storages, and copy parameters from their staging to their storage.

        Arguments:
            unit: the unit of the tiles.
            tiles: all that were submitted together.
            goes_on: other tiles of the same step were published before: the storages wait for those as well.
        """
        trained = unit.trained
        assert trained is not None
        written = all_of(tile.written for tile in tiles)  # site update.tiles_written
        # site update.gradient_read
        trained.gradient.storage.note_read(written)  # the next micro-batch overwrites it after that (ordering rule 3)
        for storage in unit.updated_storages:
            # A write that is recorded stands for all writes before it, which these tiles have followed. They have not
            # followed the other tiles of the same step.
            # site update.written, update.earlier_tiles_written, update.later_tiles_written
            storage.note_write(all_of([storage.memory.written, written]) if goes_on else written)
        # After these records: the copy follows the last write of the staging, and records its own write in the storage
        # of the parameters.
        if any(trained.has_param_staging(tile.number) for tile in tiles):
            self._context.transfers.copy(trained.param_staging, unit.params, Label("publish", unit.name))

    def count(self, unit: Unit, plan: Plan) -> None:
        """Count an update of each parameter, once all tiles of its unit were submitted on all ranks."""
        for index, (_, scalars) in plan.items():
            self.steps[unit.spec.parameters[index]] += 1
            self.scalars[unit.spec.parameters[index]] = scalars
        # Each rank has updated its own shard of a replicated unit: the next gather fetches the other shards.
        unit.outdate_parts()

    def _apply(self, tile: TileUpdate, staged: StagedTile, allowed: Callable[[], bool] | None) -> None:
        """Update every run of a tile. Runs on the stream of the update."""
        updates = allowed is None or allowed()
        sums = RecordChecksums(record.buffer for record in staged.summed)
        if updates:
            update_slices = self._update_slices(tile, staged.views)
            tile.unit.rule.update_many(update_slices, tile.scale, self._context.pool, sums)
        for record in staged.summed:  # also without an update: the record is stored all the same
            record.check(sums)
        if updates and tile.then is not None:
            tile.then()

    def _update_slices(self, tile: TileUpdate, views: Mapping[str, Views]) -> Iterator[tuple[UpdateSlice, StepScalars]]:
        """Yield the views that the rule updates, for each run of a tile."""
        unit, trained = tile.unit, tile.unit.trained
        assert trained is not None
        first = tile.number * unit.params.segments[0].tile_numel  # the first element of the views in the shard
        (grad,) = views[GRAD]
        # The staging if there is one: the parameter is out of reach, and gets the same bits when it is published.
        (param,) = views[SHADOW] if SHADOW in views else views[PARAM]
        master = views[MASTER][0] if views[MASTER] else None
        states, scales = trained.fields.name(views[OPTIMIZER])
        for run in tile.runs:
            start, stop = run.start - first, run.stop - first
            shape = unit.layout.slots[run.slot].shape if unit.spec.whole_numel else ()
            if start == 0 and stop == len(param) and trained.fields.scales.count(None) == len(scales):
                # The run is all of it. Slicing would take as long as the update of a small unit.
                yield (
                    UpdateSlice(param, grad, master, states, first=run.base + run.start, shape=shape),
                    run.step_scalars,
                )
                continue
            part, blocks = slice(start, stop), slice(start // BLOCK_NUMEL, -(-stop // BLOCK_NUMEL))
            update_slice = UpdateSlice(
                param=param[part],
                grad=grad[part],
                master=None if master is None else master[part],
                # A state with another shape than its parameter is updated as a whole.
                states=tuple(state[part] if len(state) == len(param) else state for state in states),
                scales=tuple(None if scale is None else scale[blocks] for scale in scales),
                first=run.base + run.start,
                shape=shape,
            )
            yield update_slice, run.step_scalars


def use_staged(streams: Streams, stream: str | None, staged: StagedTile, work: Callable[[], None]) -> Event:
    """Do work on a tile once all of it is there, and put back what it wrote.

    Arguments:
        streams: where work runs beside compute.
        stream: the stream that does the work; `None` for compute.
        staged: the tile.
        work: reads and writes the views of the tile.

    Returns:
        The event after which storages in memory hold the result.
    """
    nbytes = _touched(staged.views)
    if stream is None:
        staged.ready.wait()  # site update.loaded_for_compute: the copies run on other streams (ordering rule 3)
        streams.compute(work, label=staged.label, nbytes=nbytes)
        used = DONE  # the copies back follow all work submitted to compute so far
    else:
        # site update.loaded
        used = streams.submit(stream, work, after=(staged.ready,), nbytes=nbytes, label=staged.label)
    return staged.put_back(used)


def join(tiles: Sequence[TileUpdate]) -> TileUpdate:
    """Make one tile range of neighbouring tiles of a unit."""
    runs: list[UpdateRun] = []
    for run in (run for tile in tiles for run in tile.runs):
        if runs and (runs[-1].stop, runs[-1].step_scalars, runs[-1].base) == (run.start, run.step_scalars, run.base):
            run = replace(run, start=runs.pop().start)
        runs.append(run)
    return replace(tiles[0], runs=runs, count=sum(tile.count for tile in tiles))


def _storages(unit: Unit, number: int) -> dict[str, Storage]:
    """Return the storages that the update of a tile works on, by name."""
    trained = unit.trained
    assert trained is not None
    storages = {GRAD: trained.gradient.storage, MASTER: trained.master, OPTIMIZER: trained.optimizer}
    return storages | ({SHADOW: trained.param_staging} if trained.has_param_staging(number) else {PARAM: unit.params})


def _touched(views: Mapping[str, Views]) -> int:
    """Return the bytes that an update reads (all values) and writes (all but the gradient)."""
    total = 0
    for storage, of_home in views.items():
        for values in of_home:
            total += values.nbytes if storage == GRAD else 2 * values.nbytes
    return total


def merge(
    pieces: Iterable[SlotPiece], all_step_scalars: Mapping[int, StepScalars], bases: Mapping[int, int]
) -> list[UpdateRun]:
    """Make the runs of the pieces whose slots are in `all_step_scalars`: neighbours with equal scalars become one run.

    A run includes the gap between two pieces, which holds zeros in every kind. Neighbours stay apart if the update
    would not keep these zeros, or if their elements are not numbered one after the other (`UpdateRun.base`).
    """
    runs: list[UpdateRun] = []
    goes_on = False  # no run may include a parameter without a gradient
    for piece in pieces:
        step_scalars = all_step_scalars.get(piece.slot)
        if step_scalars is not None:
            base, last = bases[piece.slot], runs[-1] if goes_on else None
            meets = last is not None and (last.stop == piece.start or step_scalars.keeps_zeros)
            if last is not None and meets and (last.step_scalars, last.base) == (step_scalars, base):
                last.stop = piece.stop
            else:
                runs.append(UpdateRun(piece.start, piece.stop, step_scalars, base, piece.slot))
        goes_on = step_scalars is not None
    return runs


# ----------------------------------------------------------------------------------------------------------------------
# The share of the host's tiles that the device updates: copied up, updated and copied down, beside compute.
#
# The updates of a step last as long as the slower side. Both sides go through the tiles in the same order, evenly
# mixed, so that units are finished one after the other, as forward needs them. The share of the device is stated or
# measured: if the host updates h elements in a second and the device d, transfers included, it is d / (h + d).
#
# Source: Maurya et al., "Deep Optimizer States: Towards Scalable Training of Transformer Models Using Interleaved
# Offloading", 2024.
# ----------------------------------------------------------------------------------------------------------------------


FIRST_SHARE = 0.25
#: The first step compiles kernels. The share that the others find last is kept: with a share that keeps changing no run
#: can be repeated, if the device rounds otherwise than the host (`rules.compiler.rounds_as_host`).
WARM_UP_STEPS, MEASURED_STEPS = 1, 4

log = logging.getLogger(__name__)


class UpdateSharing:
    """Divides the tiles whose state is not on the device between the host and the device.

    Arguments:
        share: the share of the device, or "auto" to measure which is best.
        streams: have the clock of the device.
        at_once: returns the number of tiles, from a given one on, that the device would update at once.

    Attributes:
        share: the present share of the device.
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

    def divide(self, tiles: Sequence[TileUpdate], *, forwards: bool = True) -> list[TileUpdate]:
        """Mark the tiles of a step that the device updates, and join neighbours to tile ranges.

        Arguments:
            tiles: the updates, in order.
            forwards: False if they will be submitted in the opposite order.

        Returns:
            All tiles, in the same order.
        """
        # The last race is read without a wait: the host would stand still for a measurement.
        race, self._race = self._race, None
        share = None if race is None else race.fair_share()
        if share is not None:
            self._steps_left -= 1
            if self._steps_left < MEASURED_STEPS:
                self.share = share
            if self._steps_left == 0:
                log.info("The device updates %.0f %% of the tiles whose optimizer state rests elsewhere.", 100 * share)
        divided: list[TileUpdate] = []
        number = passed = taken = 0
        while number < len(tiles):
            group = self._group(tiles, number)
            number += len(group)
            if group[0].divisible:
                passed += len(group)
                if self.share > 0 and taken + len(group) <= self.share * passed:
                    taken += len(group)
                    group = [join(group)] if len(group) > 1 else group
                    group[0].streamed = True
            divided += group
        if self._steps_left:
            self._clock = self._clock or self._streams.device_clock()
            self._race = _Race([tile for tile in divided[:: 1 if forwards else -1] if tile.divisible], self._clock)
        return divided

    def _group(self, tiles: Sequence[TileUpdate], number: int) -> list[TileUpdate]:
        """Return a tile, with the neighbours after it that the device would update at once with it."""
        group = [tiles[number]]
        count = self._at_once(group[0]) if group[0].divisible else 1
        for tile in tiles[number + 1 : number + count]:
            if tile.unit is not group[0].unit or tile.number != group[-1].number + 1:
                break
            group.append(tile)
        return group


class _Race:
    """A measurement of both sides in one step: from now until the last tile of each is updated."""

    def __init__(self, tiles: Sequence[TileUpdate], device: Clock) -> None:
        self._clocks = {False: Clock(), True: device}  # by `TileUpdate.streamed`
        self._began = Clock().mark()
        self._numels: dict[bool, int] = {}
        self._ends: dict[bool, Any] = {}
        for streamed in self._clocks:
            own = [tile for tile in tiles if tile.streamed is streamed]
            self._numels[streamed] = sum(run.stop - run.start for tile in own for run in tile.runs)
            if own:
                own[-1].then = partial(self._end, streamed)  # tiles of one side are updated as they are submitted

    def _end(self, streamed: bool) -> None:
        self._ends[streamed] = self._clocks[streamed].mark()

    def fair_share(self) -> float | None:
        """Return the share at which both sides would have ended together; `None` if one had no tile or is not over."""
        speeds = {}
        for streamed, mark in self._ends.items():
            end = self._clocks[streamed].seconds(mark)
            if end is None:
                return None
            speeds[streamed] = self._numels[streamed] / max(end - self._began, 1e-9)
        return speeds[True] / (speeds[True] + speeds[False]) if len(speeds) == 2 else None
