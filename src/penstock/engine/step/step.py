"""One optimizer step: the norm of the gradient, the decision, the updates."""

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
# Norms that are taken late: of gradients that compute has written to their storage, of many parts at once.
#
# A kernel on a device costs its launch, however little it reads. So the write of a gradient is one kernel, and its norm
# is taken when it is needed: after the last micro-batch, of the parts of all units in one launch.
# ----------------------------------------------------------------------------------------------------------------------


def measure_late(units: Iterable[Unit], streams: Streams) -> None:
    """Take the norms of the parts of gradients that were not measured when they were written. Waits for nothing.

    Compute has written these storages itself, so the norms follow on its stream.
    """
    late: list[tuple[UnitGradient, SlotPiece]] = []
    values = []
    for unit in units:
        if unit.trained is None or not unit.trained.gradient.unmeasured:
            continue
        gradient = unit.trained.gradient
        storage = reached(gradient.storage, streams)
        # The copy of a move may still write a storage that has moved: it is measured before.
        assert storage is not None, "gradients are measured before their storage moves"
        for part in unit.parts():
            if part.slot in gradient.unmeasured:
                late.append((gradient, part))
                values.append(storage[part.start : part.stop])
    for (gradient, part), norm in zip(late, squared_norms_of(values), strict=True):
        gradient.measure([part], [norm])


def reached(storage: Storage, streams: Streams) -> Tensor | None:
    """Return the values of a storage of one kind if compute reaches all of them in one piece, else `None`."""
    segment, *others = storage.segments
    if others or not in_reach(segment.tier, Tier.DEVICE, streams.reach):
        return None
    (values,) = segment.tensors
    return values


# ----------------------------------------------------------------------------------------------------------------------
# One optimizer step.
#
# 1. Wait for the gradients. Sum their squared norms over ranks, and which parameters have one: one all-reduce.
# 2. Decide: a norm that is not finite skips the step, and nothing changes.
# 3. Update each tile where its optimizer state is: one fused pass that unscales, clips, updates and writes parameters.
# 4. Publish parameters that were written to staging.
#
# With `overlap="backward"` phase 3 begins in backward, unit by unit, for the tiles that the host updates. They are
# updated if all gradients so far are finite on all ranks.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepResult:
    """The result of one `step`.

    Attributes:
        grad_norm: norm of the gradient before clipping, over all ranks, as fp32; NaN if it is not finite.
        skipped: nothing was updated, because the norm was not finite.
        loss_scale: loss scale of this step; 1 without fp16.
        loss: the return value of the closure; `None` without one.
    """

    grad_norm: float
    skipped: bool
    loss_scale: float
    loss: Any = None


@dataclass(frozen=True)
class GradientMeasure:
    """The gradient of a step over all ranks: the same values on every rank.

    Attributes:
        grad_norm: its norm before clipping, as fp32; NaN if a part of it is not finite.
        present: for each unit the slots that have a gradient on any rank.
        squared_norms: of the values in storage over all ranks, for each slot of each trained unit, in their order.
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
        plan: the plan of its update, which the step compares.
        tiles: the submitted ones, which the host updates.
        complete: the event that they follow, as the others will.
    """

    plan: Plan
    tiles: Sequence[TileUpdate]
    complete: Event


@dataclass
class _Early:
    """Updates that began in one backward.

    Attributes:
        units: the units, in the order in which their updates began.
        flawed: True once a gradient was not finite; from then on nothing is updated.
        applied: True once a tile was updated.
    """

    units: dict[Unit, _Begun] = field(default_factory=dict)
    flawed: bool = False
    applied: bool = False

    def may_update(self, gradient: UnitGradient) -> bool:
        """Return True if all gradients so far are finite. Runs on the stream of updates, after this one is written."""
        # Without a lock: calls come one after the other, in the order of the stream, and the step waits for the last of
        # them before it reads the flags. After a flaw nothing is updated, on any rank.
        self.flawed = self.flawed or not gradient.is_finite()
        self.applied = self.applied or not self.flawed
        return not self.flawed


class Stepper:
    """Decides on steps, and submits the update of every tile.

    Arguments:
        context: shared by all components of the engine.
        updater: plans and submits the updates of tiles.
        sharing: divides the host's tiles between host and device; `None` if the device updates none of them.
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
        self._forwards = False  # the last update went through the units in their order
        self._early = _Early()

    def measure(self) -> GradientMeasure:
        """Wait for the gradients; sum their norms over ranks, and which parameters have one (phase 1). Collective.

        Raises:
            Exception: the first failure of earlier work, on the rank where it failed.
            EngineError: on the other ranks.
        """
        failure: Exception | None = None
        for unit, trained in self._units:  # all, also after a failure: their collectives precede the one here
            try:
                for (
                    storage
                ) in unit.storages.values():  # raise the error of an earlier update or move that has failed by now
                    storage.written.check()
                # The host reads the norm, which the work that writes the gradient takes (ordering rule 5).
                trained.gradient.storage.memory.written.synchronize()  # site step.gradient_measured
            except Exception as error:
                failure = failure or error
        try:  # after the waits: this reads the storages
            measure_late(self._context.units if failure is None else [], self._context.streams)
        except Exception as error:
            failure = error
        # A failure is raised after the all-reduce: the other ranks would wait for this one there until their timeout.
        squares: list[float | Tensor] = []  # of every slot
        flags: list[float] = []
        for unit, trained in self._units:
            gradient = trained.gradient
            # A parameter that several ranks hold counts on one of them; a value that is not finite counts on all: 0
            # times it is NaN.
            for parameter in unit.parameters:
                square = gradient.squared_norms.get(parameter.index, 0.0)
                squares.append(square if parameter.counts else square * 0.0)
                flags.append(float(parameter.index in gradient.present))
        norms = _on_host(squares)
        if self._context.ranks.world_size > 1:
            report = self._context.ranks.report(failure)
            # One message for all of it: each all-reduce is a wait for the slowest rank.
            numbers = [*norms, *flags, *report, *self._context.ranks.sequel.digest()]
            # The host waits for the device here, to decide (ordering rule 5).
            *summed, digest, digest_squared = self._context.ranks.sum_numbers(numbers, self._context.streams.device)
            # Replicas hold the same gradient, and each has added its norm.
            norms = [norm / self._context.ranks.replicas for norm in summed[: len(norms)]]
            flags = summed[len(norms) :]
            # Every rank has the same numbers from here on, so all of them raise, or none does.
            try:
                self._context.ranks.check_reports(flags[-len(report) :], failure)
            except Exception as error:
                self._fail(error)  # on every rank: `close` would wait for the others when it gathers parameters
                raise
            # Ranks that ran different units have gathered and reduced wrong values: stop before any update.
            self._context.ranks.sequel.check([digest, digest_squared])
        elif failure is not None:
            raise failure
        counts = iter(flags)
        present = {unit: frozenset([p.index for p in unit.parameters if next(counts) > 0]) for unit, _ in self._units}
        names = [name for unit, _ in self._units for name in unit.spec.names]
        flawed = [name for name, norm in zip(names, norms, strict=True) if not math.isfinite(norm)]
        # The exact sum, rounded once: it does not depend on the order, nor on how parameters are divided into units. As
        # fp32 it does not depend either on the order in which a device sums the squares of a part.
        total = math.nan if flawed else math.fsum(norms)
        return GradientMeasure(_as_fp32(math.sqrt(total) * self._context.gradient_scale.size), present, norms, flawed)

    def update(self, measure: GradientMeasure, max_grad_norm: float | None) -> None:
        """Submit the update of every tile, and publish parameters that were written to staging (phases 3 and 4).

        Units are updated in order, as forward waits for them. Without that overlap every other step goes backwards: it
        begins with the tiles that the rings still hold.

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
        # After the plans, which may refuse a group: `abandon` still finds the early updates then.
        begun = self._take_early().units
        try:  # from here on nothing is refused
            for unit, as_begun in begun.items():
                if plans.get(unit) != as_begun.plan:  # some of its tiles were updated with the options of before
                    raise EngineError(
                        f"The options of a param group changed after the update of unit '{unit.name}' began in "
                        "backward. Change learning rates after step(), or use overlap='forward'. Close the optimizer: "
                        "this step is not whole."
                    )
            left = [tile for unit, plan in plans.items() for tile in self._rest(unit, plan, scale, begun.get(unit))]
            if self._sharing is not None:
                left = self._sharing.divide(left, forwards=self._forwards)
            tiles: dict[Unit, list[TileUpdate]] = {unit: [] for unit in plans}
            for tile in left:
                tiles[tile.unit].append(tile)
            self._updater.submit(left if self._forwards else left[::-1])
            # After all are submitted, which sets their events, and before any forward, whose gathers follow the updates
            # by the last write of the storages (ordering rule 6).
            for unit, plan in plans.items():
                self._updater.publish(unit, tiles[unit], goes_on=unit in begun)
                self._updater.count(unit, plan)
            for group, values in zip(groups, written, strict=True):
                group.update(values)
            if not self._overlaps:
                for _, trained in self._units:
                    # Without overlap no update runs beside the user's next code. Writes to files may still go on: each
                    # record has events of its own.
                    trained.optimizer.memory.written.synchronize()  # site step.updates_over
        except BaseException as error:  # an interrupt too: some tiles are of this step and others of the last
            self._fail(error)
            raise

    # Updates that begin in backward

    def begin(self, unit: Unit) -> None:
        """Begin the update of a unit whose gradients have all been submitted: no other comes before the step.

        Tiles that the device updates are left to the step: they would take time from backward. Backward of the unit is
        over, so parameters out of compute's reach may change now.
        """
        trained = unit.trained
        assert trained is not None
        plan = self._updater.plan(unit, range(len(unit.layout.slots)), KnownScalars())
        # Taken before these updates are noted in the storages: the tiles that are left to the step follow the same
        # event, and need not follow the tiles that are submitted here.
        complete = self._updater.complete(unit)
        tiles = self._updater.tiles(unit, plan, self._context.gradient_scale.value, complete, singly=True)
        begun = _Begun(plan, [tile for tile in tiles if tile.runs_on is not Tier.DEVICE], complete)
        self._early.units[unit] = begun  # before anything is submitted: a failure in between is one of a begun update
        if not begun.tiles:
            return
        try:
            # `may_update` of this backward: the next one has a new `_Early` while tiles of this one may still ask.
            self._updater.submit(begun.tiles, allowed=partial(self._early.may_update, trained.gradient))
            # Now: the unit is released next, and its next gather follows these writes (ordering rule 6).
            self._updater.publish(unit, begun.tiles)
        except BaseException as error:
            self._fail(error)
            raise

    def check(self, unit: Unit) -> None:
        """Refuse a backward that returns to a unit whose update has begun: its values are those of after the step.

        Raises:
            EngineError: names the unit. The state is failed from here on.
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
        """Mark the state as failed if updates began in a backward that failed, or that no step follows."""
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
        """True if updates have begun in backward and the step has not followed."""
        return bool(self._early.units)

    def skip(self) -> None:
        """End a step without an update, because the norm is not finite. Collective.

        Raises:
            EngineError: some units were updated before the first gradient that is not finite.
        """
        early = self._take_early()
        failure: Exception | None = None
        try:
            for unit in early.units:
                assert unit.trained is not None
                # `applied` is final once the last of these updates has called `may_update` (ordering rule 5).
                unit.trained.optimizer.memory.written.synchronize()  # site step.early_updates_over
        except Exception as error:
            failure = error
        if early.applied:
            failure = failure or EngineError(
                "A gradient is not finite, and units whose gradients came before it in backward are updated already: "
                "the state is that of no step. Close the optimizer and go back to a checkpoint; overlap='forward' skips"
                " such steps whole."
            )
        # A rank without an updated tile stops too if another rank has one. Whether ranks meet depends on `overlap`
        # alone, which is the same on every rank.
        try:
            if self._begins:
                self._context.ranks.control_group.agree(failure)
        except Exception as error:
            self._fail(error)
            raise

    def _take_early(self) -> _Early:
        """Return the updates that began in the last backward. The next backward has an `_Early` of its own."""
        early, self._early = self._early, _Early()
        return early

    def _rest(self, unit: Unit, plan: Plan, scale: float, begun: _Begun | None) -> list[TileUpdate]:
        """List the tiles of a unit that are left to be updated: those whose update did not begin in backward."""
        if begun is None:
            return self._updater.tiles(unit, plan, scale, self._updater.complete(unit))
        # The event from before the tiles that are done, which the others need not follow; and the reads of a save that
        # began since then (ordering rule 3).
        # site step.rest_complete, step.rest_reads
        complete = all_of([begun.complete, *(storage.read for storage in unit.updated_storages)])
        tiles = self._updater.tiles(unit, plan, scale, complete, singly=True)
        done = {tile.number for tile in begun.tiles}
        return [tile for tile in tiles if tile.number not in done]

    def _fail(self, error: BaseException) -> None:
        """Mark the state of all units as failed: every wait for one of their storages raises an error."""
        self._early = _Early()  # no step finishes these updates
        if not isinstance(error, Exception):  # an interrupt is over once it was raised
            error = EngineError("An update was interrupted: its values are not whole. Close the optimizer.")
        # All units: which of them were being updated differs between ranks, and a rank that gathered another unit would
        # wait there for ranks that raise.
        for unit, _ in self._units:
            for storage in unit.updated_storages:
                storage.note_write(FailedEvent(error))


def _as_fp32(value: float) -> float:
    """Round a value to fp32, unless it overflows there."""
    rounded = fp32(value)
    return rounded if math.isfinite(rounded) else value


def _on_host(numbers: Sequence[float | Tensor]) -> list[float]:
    """Return numbers on the host, in order. Those on the device are copied together, with one wait."""
    on_device = [number for number in numbers if isinstance(number, Tensor)]
    read = iter(torch.stack(on_device).tolist() if on_device else [])
    return [next(read) if isinstance(number, Tensor) else float(number) for number in numbers]
