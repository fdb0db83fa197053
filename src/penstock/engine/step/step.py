"""One optimizer step: measured, decided, updated."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.config import Overlap, Tier
from penstock.engine.step.context import EngineContext
from penstock.engine.step.update import KnownScalars, Plan, TileUpdate, Updater, UpdateSharing
from penstock.engine.unit.unit import Unit, UnitGradient
from penstock.errors import EngineError
from penstock.layout import SlotPiece
from penstock.rules.formats import squared_norms_of
from penstock.rules.rule import fp32
from penstock.runtime.streams import Event, FailedEvent, Streams, all_of
from penstock.tiers.storage import Storage
from penstock.tiers.transfer import in_reach

# ----------------------------------------------------------------------------------------------------------------------
# Squared norms that were left for later: of what compute has put into gradients' homes, of many parts together.
#
# A kernel of a device costs its launch, however little it reads. So a gradient that goes straight into a home there is
# one kernel, and its norm is taken when somebody asks: of the last micro-batch alone, of all units' parts in one go.
# ----------------------------------------------------------------------------------------------------------------------


def measure_late(units: Iterable[Unit], streams: Streams) -> None:
    """Take the norms of the parts of gradients that were not measured on their way. Waits for nothing.

    Compute has written these homes itself, and takes the norms after that.
    """
    late: list[tuple[UnitGradient, SlotPiece]] = []
    values = []
    for unit in units:
        if unit.trained is None or not unit.trained.gradient.unmeasured:
            continue
        gradient = unit.trained.gradient
        home = reached(gradient.home, streams)
        # A home that has moved away would be read before its copy is there: who moves one has it measured first.
        assert home is not None, "gradients are measured before their home moves"
        for part in unit.parts():
            if part.slot in gradient.unmeasured:
                late.append((gradient, part))
                values.append(home[part.start : part.stop])
    for (gradient, part), norm in zip(late, squared_norms_of(values), strict=True):
        gradient.measure([part], [norm])


def reached(home: Storage, streams: Streams) -> Tensor | None:
    """Return the values of a home of one kind, if compute reaches all of them in one piece, else `None`."""
    section, *others = home.sections
    if others or not in_reach(section.tier, Tier.DEVICE, streams.reach):
        return None
    (values,) = section.tensors
    return values


# ----------------------------------------------------------------------------------------------------------------------
# One optimizer step.
#
# 1. Wait for the gradients; sum their squared norms over ranks, and which parameters got one: one all-reduce.
# 2. Decide: a norm that is not finite skips the step, and nothing changes.
# 3. Update each tile where its optimizer state lives: one fused pass that unscales, clips, updates and writes the
# param.
# 4. Publish what was written beside its home.
#
# With `overlap="backward"` phase 3 begins in backward, unit by unit, for the tiles that the host updates. What decides
# there is whether the gradients so far are finite, agreed by all ranks.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepResult:
    """What one `step` did.

    Attributes:
        grad_norm: norm of the gradient before clipping, over all ranks, as fp32; NaN when it is not finite.
        skipped: nothing was updated, because the norm was not finite.
        loss_scale: loss scale of this step; 1 without fp16.
        loss: what the closure returned; `None` without one.
    """

    grad_norm: float
    skipped: bool
    loss_scale: float
    loss: Any = None


@dataclass(frozen=True)
class GradientMeasure:
    """The gradient of a step over all ranks: the same values on every rank.

    Attributes:
        grad_norm: its norm before clipping, as fp32; NaN where a part of it is not finite.
        present: for each unit the slots that got a gradient on any rank.
        squared_norms: for each slot of each trained unit, in their order, what its home holds over all ranks.
        flawed: names of the parameters whose gradient is not finite.
    """

    grad_norm: float
    present: Mapping[Unit, frozenset[int]]
    squared_norms: Sequence[float] = ()
    flawed: Sequence[str] = ()


@dataclass(frozen=True)
class _Begun:
    """A unit whose update began in backward.

    Attributes:
        plan: what was done to each slot, which the step must not find changed.
        tiles: those that the host updates, which were submitted.
        complete: the event that they followed, and that the others follow as well.
    """

    plan: Plan
    tiles: Sequence[TileUpdate]
    complete: Event


@dataclass
class _Early:
    """What began in one backward.

    Attributes:
        units: what began, in the order in which it did.
        flawed: whether a gradient was not finite; from then on nothing is updated.
        applied: whether a tile was updated.
    """

    units: dict[Unit, _Begun] = field(default_factory=dict)
    flawed: bool = False
    applied: bool = False

    def may_update(self, gradient: UnitGradient) -> bool:
        """Return True if all gradients so far are finite. Asked on the stream of updates, once this one is there."""
        # Without a lock: tiles ask one after the other, in the order of their stream, and whoever reads these flags has
        # waited for the last of them. A flaw that was found stays: nothing after it is updated, on any rank.
        self.flawed = self.flawed or not gradient.is_finite()
        self.applied = self.applied or not self.flawed
        return not self.flawed


class Stepper:
    """Decides on steps, and has every tile updated.

    Arguments:
        updater: plans and submits the updates of tiles.
        sharing: which of the host's tiles the device updates; `None` for none of them.
        context: what every part of the engine works with.
        overlap: as in `prepare`: with `"none"` every update is over when `update` returns; with `"backward"` updates
            begin there.
    """

    def __init__(
        self,
        context: EngineContext,
        updater: Updater,
        *,
        sharing: UpdateSharing | None,
        overlap: Overlap,
    ) -> None:
        self._units = context.trained
        self._context = context
        self._updater = updater
        self._sharing = sharing
        self._overlaps = overlap != "none"
        self._begins = overlap == "backward"
        self._forwards = False  # whether the last update went through the units in their order
        self._early = _Early()

    def measure(self) -> GradientMeasure:
        """Wait for the gradients, and sum their norms and which parameters got one over ranks (phase 1). Collective.

        Raises:
            Exception: what has failed by now, on the rank where it did.
            EngineError: on the other ranks.
        """
        failure: Exception | None = None
        for unit, trained in self._units:  # all, also after a failure: their collectives come before the one here
            try:
                for home in unit.homes.values():  # of an earlier update or move that has failed by now
                    home.written.check()
                # The host decides on its norm, which the same work has measured: before that it is the norm of another
                # gradient, or of half of this one.
                trained.gradient.home.memory.written.synchronize()  # site step.gradient_measured
            except Exception as error:
                failure = failure or error
        try:  # after the waits: these read the homes themselves
            measure_late(self._context.units if failure is None else [], self._context.streams)
        except Exception as error:
            failure = error
        # What has failed is not raised yet: the other ranks are about to wait for this one in the all-reduce, and would
        # stay there until their timeout.
        squares: list[float | Tensor] = []  # of every slot
        flags: list[float] = []
        for unit, trained in self._units:
            gradient = trained.gradient
            # What other ranks have alike counts once; what is not finite, everywhere: 0 times it is NaN.
            for parameter in unit.parameters:
                square = gradient.squared_norms.get(parameter.index, 0.0)
                squares.append(square if parameter.counts else square * 0.0)
                flags.append(float(parameter.index in gradient.present))
        norms = _on_host(squares)
        if self._context.ranks.world_size > 1:
            report = self._context.ranks.report(failure)
            # One message for all of it: each all-reduce is a wait for the slowest rank.
            numbers = [*norms, *flags, *report, *self._context.ranks.sequel.digest()]
            # Waits for the device: the host decides on it.
            *summed, digest, digest_squared = self._context.ranks.sum_numbers(numbers, self._context.streams.device)
            # Replicas have the same gradient, and each has added its norm.
            norms = [norm / self._context.ranks.replicas for norm in summed[: len(norms)]]
            flags = summed[len(norms) :]
            # From here on every rank has the same numbers, so all of them raise, or none does.
            try:
                self._context.ranks.check_reports(flags[-len(report) :], failure)
            except Exception as error:
                self._fail(error)  # on every rank: a close that gathers parameters would wait for the others
                raise
            # Before anything is updated: ranks that ran different units have gathered and reduced each other's.
            self._context.ranks.sequel.check([digest, digest_squared])
        elif failure is not None:
            raise failure
        counts = iter(flags)
        present = {unit: frozenset(p.index for p in unit.parameters if next(counts) > 0) for unit, _ in self._units}
        names = [name for unit, _ in self._units for name in unit.spec.names]
        flawed = [name for name, norm in zip(names, norms, strict=True) if not math.isfinite(norm)]
        # The exact sum, rounded once: the same for every order, in whatever units the parameters are. As fp32 it is the
        # same, too, for devices that sum the squares of a part in an order of their own.
        total = math.nan if flawed else math.fsum(norms)
        return GradientMeasure(_as_fp32(math.sqrt(total) * self._context.gradient_scale.size), present, norms, flawed)

    def update(self, measure: GradientMeasure, max_grad_norm: float | None) -> None:
        """Have every tile updated, and publish what was written beside its home (phases 3 and 4).

        Units are updated in order, which forward waits for them in. Where it does not wait, every other step goes
        backwards: it begins with the tiles that the rings still hold.

        Raises:
            EngineError: a group changed after the update of a parameter of it began in backward.
        """
        scale = self._context.gradient_scale.value
        if max_grad_norm is not None:  # as torch.nn.utils.clip_grad_norm_
            scale *= min(1.0, max_grad_norm / (measure.grad_norm + 1e-6))
        groups, known = self._context.param_groups, KnownScalars()
        plans = {unit: self._updater.plan(unit, slots, known) for unit, slots in measure.present.items() if slots}
        written = [self._context.rule.advance_group(group) for group in groups]  # the same on every rank
        self._forwards = self._overlaps or not self._forwards
        # After the plans, which may refuse a group: what began is then still there to be given up.
        begun = self._take_early().units
        try:  # from here on nothing is refused
            self._check_groups_kept(begun, plans)
            left = [tile for unit, plan in plans.items() for tile in self._rest(unit, plan, scale, begun.get(unit))]
            if self._sharing is not None:
                left = self._sharing.divide(left)
            tiles: dict[Unit, list[TileUpdate]] = {unit: [] for unit in plans}
            for tile in left:
                tiles[tile.unit].append(tile)
            self._updater.submit(left if self._forwards else left[::-1])
            # Once all are submitted, which gives them their events, and before any forward: it would find homes whose
            # last write is that of the step before, and gather parameters that are half updated.
            for unit, plan in plans.items():
                self._updater.publish(unit, tiles[unit], goes_on=unit in begun)
                self._updater.count(unit, plan)
            for group, values in zip(groups, written, strict=True):
                group.update(values)
            if not self._overlaps:
                for _, trained in self._units:
                    # As promised: nothing of this step goes on beside what the user's thread does next. Files may still
                    # be written: nobody is kept from them, and records know their own events.
                    trained.optimizer.memory.written.synchronize()  # site step.updates_over
        except BaseException as error:  # an interrupt too: some tiles are of this step and others of the last
            self._fail(error)
            raise

    # Updates that begin in backward

    def begin(self, unit: Unit) -> None:
        """Update a unit, all of whose gradients are on their way home: no other will come before the step.

        The device's own tiles wait for the step: they would take time from backward. Parameters that rest elsewhere get
        their new values now, which the unit's backward needs no longer.
        """
        trained = unit.trained
        assert trained is not None
        plan = self._updater.plan(unit, range(len(unit.layout.slots)), KnownScalars())
        # Taken now, before the homes hear of these updates: the tiles that are left for the step follow the same, and
        # would else wait for tiles that have nothing to do with theirs.
        complete = self._updater.complete(unit)
        tiles = self._updater.tiles(unit, plan, self._context.gradient_scale.value, complete, singly=True)
        begun = _Begun(plan, [tile for tile in tiles if tile.runs_on is not Tier.DEVICE], complete)
        self._early.units[unit] = begun  # before anything is submitted: what fails in between has begun
        if not begun.tiles:
            return
        try:
            # `may_update` of this backward's own notes: the next one has others, while tiles of this one still ask.
            self._updater.submit(begun.tiles, allowed=partial(self._early.may_update, trained.gradient))
            # At once: the unit is released next, and its next gather has to follow these writes.
            self._updater.publish(unit, begun.tiles)
        except BaseException as error:
            self._fail(error)
            raise

    def check(self, unit: Unit) -> None:
        """Refuse that backward comes back to a unit whose update has begun: its values are those of after the step.

        Raises:
            EngineError: names the unit. The state is that of no step from here on.
        """
        if unit in self._early.units:
            error = EngineError(
                f"Backward came back to unit '{unit.name}' after its update began: in a second backward before step(), "
                "or for a parameter that several checkpointed segments share. Run all micro-batches but the last under "
                "no_sync(), or use overlap='forward'. Close the optimizer: this step is not whole."
            )
            self._fail(error)
            raise error

    def abandon(self) -> None:
        """Give up what began in a backward that has failed, or that no step follows: it cannot be taken back."""
        if self._early.units:
            self._fail(
                EngineError(
                    "Updates had begun in a backward that failed, or that no step() followed: the state is that of no "
                    "step. Close the optimizer and go back to a checkpoint; with overlap='forward' backward changes "
                    "nothing."
                )
            )

    @property
    def is_open(self) -> bool:
        """Whether updates that began in backward wait for the step."""
        return bool(self._early.units)

    def skip(self) -> None:
        """Leave everything as it is, because the norm is not finite. Collective.

        Raises:
            EngineError: some units were updated before the first gradient that is not finite.
        """
        early = self._take_early()
        failure: Exception | None = None
        try:
            for unit in early.units:
                assert unit.trained is not None
                # Until then it is open whether any of its tiles was updated: `may_update` says so in `applied`.
                unit.trained.optimizer.memory.written.synchronize()  # site step.early_updates_over
        except Exception as error:
            failure = error
        if early.applied:
            failure = failure or EngineError(
                "A gradient is not finite, and units whose gradients came before it in backward are updated already: "
                "the state is that of no step. Close the optimizer and go back to a checkpoint; overlap='forward' skips"
                " such steps whole."
            )
        # A rank whose shards had no tile to update could go on; where another one's had, none can. They meet only where
        # updates begin in backward, which is the same on every rank: a rank that met alone would wait for its timeout.
        try:
            if self._begins and self._context.ranks.world_size > 1:
                self._context.ranks.control_group.agree(failure)
            elif failure is not None:
                raise failure
        except Exception as error:
            self._fail(error)
            raise

    def _take_early(self) -> _Early:
        """Take what began in the last backward. The next one begins anew, also while tiles of this one are updated."""
        early, self._early = self._early, _Early()
        return early

    def _check_groups_kept(self, begun: Mapping[Unit, _Begun], plans: Mapping[Unit, Plan]) -> None:
        """Refuse options that changed since backward: some tiles of a unit were updated with those of before."""
        for unit, as_begun in begun.items():
            if plans.get(unit) != as_begun.plan:
                raise EngineError(
                    f"The options of a param group changed after the update of unit '{unit.name}' began in backward. "
                    "Change learning rates after step(), or use overlap='forward'. Close the optimizer: this step is "
                    "not whole."
                )

    def _rest(self, unit: Unit, plan: Plan, scale: float, begun: _Begun | None) -> list[TileUpdate]:
        """List the tiles of a unit that are left to be updated, those that did not begin in backward."""
        if begun is None:
            return self._updater.tiles(unit, plan, scale, self._updater.complete(unit))
        # As the homes were before the tiles that are done, for which the others need not wait. A save that began since
        # then still reads the values that the others are about to overwrite: its reads, too.
        # site step.rest_complete, step.rest_reads
        complete = all_of([begun.complete, *(home.read for home in unit.updated_homes)])
        tiles = self._updater.tiles(unit, plan, scale, complete, singly=True)
        done = {tile.number for tile in begun.tiles}
        return [tile for tile in tiles if tile.number not in done]

    def _fail(self, error: BaseException) -> None:
        """Have whoever asks for any unit get an error: they are not whole, here or on another rank."""
        self._early = _Early()  # nothing of it is finished by a step any more
        if not isinstance(error, Exception):  # an interrupt is over once it was raised
            error = EngineError("An update was interrupted: its values are not whole. Close the optimizer.")
        # All units, not those alone that this rank knows to be torn: which those are differs between ranks, and one
        # that gathered another unit would wait there for ranks that raise.
        for unit, _ in self._units:
            for home in unit.updated_homes:
                home.note_write(FailedEvent(error))


def _as_fp32(value: float) -> float:
    """Round a value to fp32, where that has room for it."""
    rounded = fp32(value)
    return rounded if math.isfinite(rounded) else value


def _on_host(numbers: Sequence[float | Tensor]) -> list[float]:
    """Bring numbers to the host, in order: those of the device together, with one wait for it."""
    on_device = [number for number in numbers if isinstance(number, Tensor)]
    read = iter(torch.stack(on_device).tolist() if on_device else [])
    return [next(read) if isinstance(number, Tensor) else float(number) for number in numbers]
