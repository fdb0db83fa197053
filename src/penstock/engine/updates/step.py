"""One optimizer step.

1. Wait for the gradients; sum their squared norms over ranks, and which parameters got one: one all-reduce.
2. Decide: a norm that is not finite skips the step, and nothing changes.
3. Update each tile where its optimizer state lives: one fused pass that unscales, clips, updates and writes the param.
4. Publish what was written beside its home.

With `overlap="backward"` phase 3 begins in backward, unit by unit, for the tiles that the host updates. What decides
there is whether the gradients so far are finite, agreed by all ranks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from penstock.engine.units.norms import measure_late
from penstock.engine.units.unit import Unit
from penstock.engine.updates.rig import Rig
from penstock.engine.updates.sharing import Sharing
from penstock.engine.updates.update import Plan, TileUpdate, Updater
from penstock.errors import EngineError
from penstock.kinds import Tier
from penstock.machine.streams import Event, FailedEvent, all_of
from penstock.rules.exact import fp32


@dataclass(frozen=True)
class StepResult:
    """What one `step` did.

    Attributes:
        grad_norm: norm of the gradient before clipping, over all ranks, as fp32; NaN when it is not finite.
        skipped: nothing was updated, because the norm was not finite.
        loss_scale: loss scale of this step; 1 without fp16.
    """

    grad_norm: float
    skipped: bool
    loss_scale: float


@dataclass(frozen=True)
class Measure:
    """The gradient of a step over all ranks: its norm, and for each unit the slots that have one.

    Attributes:
        flawed: names of the parameters whose gradient is not finite.
    """

    grad_norm: float
    present: Mapping[Unit, frozenset[int]]
    flawed: Sequence[str] = ()


@dataclass(frozen=True)
class _Begun:
    """A unit whose update began in backward: as what, the tiles that the host updates, what all tiles follow."""

    plan: Plan
    tiles: Sequence[TileUpdate]
    complete: Event


@dataclass
class _Early:
    """What began in one backward.

    Attributes:
        units: in the order in which their updates began.
        flawed: a gradient was not finite; from then on nothing is updated.
        applied: a tile was updated.
    """

    units: dict[Unit, _Begun] = field(default_factory=dict)
    flawed: bool = False
    applied: bool = False

    def may_update(self, unit: Unit) -> bool:
        """On the thread of updates, once the unit's gradient is there: whether all so far are finite."""
        assert unit.trained is not None
        self.flawed = self.flawed or not unit.trained.gradient.is_finite()
        self.applied = self.applied or not self.flawed
        return not self.flawed


class Stepper:
    """Decides on steps, and has every tile updated.

    Arguments:
        updater: plans and submits the updates of tiles.
        sharing: which of the host's tiles the device updates; `None` for none of them.
        overlaps: `update` returns before the last update has run: whoever needs a unit waits for it.
        begins: updates begin in backward.
    """

    def __init__(
        self,
        rig: Rig,
        updater: Updater,
        *,
        sharing: Sharing | None,
        overlaps: bool,
        begins: bool,
    ) -> None:
        self._units = [unit for unit in rig.units if unit.trained]
        self._ranks = rig.ranks
        self._streams = rig.streams
        self._updater = updater
        self._param_groups = rig.param_groups
        self._gradient_scale = rig.gradient_scale
        self._sharing = sharing
        self._overlaps = overlaps
        self._begins = begins
        self._forwards = False  # of the last update
        self._early = _Early()

    def measure(self) -> Measure:
        """Phase 1. The same values on every rank.

        Raises:
            Exception: what has failed by now, on the rank where it did.
            EngineError: on the other ranks.
        """
        failure: Exception | None = None
        for unit in self._units:  # all of them, also after a failure: their collectives come before the one here
            assert unit.trained is not None
            try:
                _check(unit)
                # Its norm is what the host decides on.
                unit.trained.gradient.home.memory.written.synchronize()
            except Exception as error:
                failure = failure or error
        try:
            measure_late(self._units if failure is None else [], self._streams)
        except Exception as error:
            failure = error
        squares: list[float | Tensor] = []  # of every slot
        flags: list[float] = []
        for unit in self._units:
            assert unit.trained is not None
            gradient, slots = unit.trained.gradient, range(len(unit.layout.slots))
            squares += [gradient.squared_norms.get(index, 0.0) for index in slots]
            flags += [float(index in gradient.present) for index in slots]
        norms = _on_host(squares)
        if self._ranks.world_size > 1:
            report = self._ranks.report(failure)
            numbers = [*norms, *flags, *report, *self._ranks.digest()]
            message = torch.tensor(numbers, dtype=torch.float64, device="cpu").to(self._streams.device)
            self._ranks.all_reduce(message)
            *summed, digest, digest_squared = message.tolist()
            norms = [norm / self._ranks.replicas for norm in summed[: len(norms)]]
            flags = summed[len(norms) :]
            try:
                self._ranks.check_reports(flags[-len(report) :], failure)
            except Exception as error:
                self._fail(error)  # on every rank: a close that gathers parameters would wait for the others
                raise
            self._ranks.check_digests([digest, digest_squared])
        elif failure is not None:
            raise failure
        present, cursor = {}, 0
        for unit in self._units:
            count = len(unit.layout.slots)
            present[unit] = frozenset(i for i in range(count) if flags[cursor + i] > 0)
            cursor += count
        names = [name for unit in self._units for name in unit.spec.names]
        flawed = [name for name, norm in zip(names, norms, strict=True) if not math.isfinite(norm)]
        # The exact sum, rounded once: the same for every order, in whatever units the parameters are. As fp32 it is the
        # same, too, for devices that sum the squares of a part in an order of their own.
        total = math.nan if flawed else math.fsum(norms)
        return Measure(_as_fp32(math.sqrt(total) * self._gradient_scale.value), present, flawed)

    def update(self, measure: Measure, max_grad_norm: float | None) -> None:
        """Phases 3 and 4.

        Units are updated in order, which forward waits for them in. Where it does not wait, every other step goes
        backwards: it begins with the tiles that the rings still hold.

        Raises:
            EngineError: a group changed after the update of a parameter of it began in backward.
        """
        scale = self._gradient_scale.value
        if max_grad_norm is not None:  # as torch.nn.utils.clip_grad_norm_
            scale *= min(1.0, max_grad_norm / (measure.grad_norm + 1e-6))
        plans = {
            unit: self._updater.plan(unit, slots, self._param_groups)
            for unit, slots in measure.present.items()
            if slots
        }
        self._forwards = self._overlaps or not self._forwards
        begun = self._take_early().units
        try:  # from here on nothing is refused
            self._check_groups_kept(begun, plans)
            tiles = {unit: self._rest(unit, plan, scale, begun.get(unit)) for unit, plan in plans.items()}
            left = [tile for of_unit in tiles.values() for tile in of_unit]
            if self._sharing is not None:
                left = self._sharing.divide(left)
                tiles = {unit: [tile for tile in left if tile.unit is unit] for unit in plans}
            self._updater.submit(left if self._forwards else left[::-1])
            for unit, plan in plans.items():
                self._updater.publish(unit, tiles[unit], goes_on=unit in begun)
                self._updater.count(unit, plan)
            if not self._overlaps:
                for unit in self._units:
                    assert unit.trained is not None
                    # Files may still be written: nobody is kept from them.
                    unit.trained.optimizer.memory.written.synchronize()
        except BaseException as error:
            self._fail(error)
            raise

    # Updates that begin in backward

    def begin(self, unit: Unit) -> None:
        """Every gradient of the unit is on its way home, and no other will come before the step: update it.

        The device's own tiles wait for the step: they would take time from backward. Parameters that rest elsewhere get
        their new values now, which the unit's backward needs no longer.
        """
        trained = unit.trained
        assert trained is not None
        plan = self._updater.plan(unit, frozenset(range(len(unit.layout.slots))), self._param_groups)
        complete = self._updater.complete(unit)
        tiles = self._updater.tiles(unit, plan, self._gradient_scale.value, complete)
        begun = _Begun(plan, [tile for tile in tiles if tile.beside is not Tier.DEVICE], complete)
        self._early.units[unit] = begun
        if not begun.tiles:
            return
        try:
            self._updater.submit(begun.tiles, allowed=partial(self._early.may_update, unit))
            self._updater.publish(unit, begun.tiles)
        except BaseException as error:
            self._fail(error)
            raise

    def check(self, unit: Unit) -> None:
        """Refuse that backward comes back to a unit whose update has begun: its values are those of after the step."""
        if unit in self._early.units:
            error = EngineError(
                f"Backward came back to unit '{unit.name}' after its update began: in a second backward before step(), "
                "or for a parameter that several checkpointed segments share. Run all micro-batches but the last under "
                "no_sync(), or use overlap='forward'. Close the optimizer: this step is not whole."
            )
            self._fail(error)
            raise error

    def abandon(self) -> None:
        """Backward has failed, or no step will follow: what began cannot be taken back."""
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
        """The norm is not finite: nothing is to change. Collective.

        Raises:
            EngineError: some units were updated before the first gradient that is not finite.
        """
        early = self._take_early()
        failure: Exception | None = None
        try:
            for unit in early.units:
                assert unit.trained is not None
                # Until then it is open whether any of its tiles was updated.
                unit.trained.optimizer.memory.written.synchronize()
        except Exception as error:
            failure = error
        if early.applied:
            failure = failure or EngineError(
                "A gradient is not finite, and units whose gradients came before it in backward are updated already: "
                "the state is that of no step. Close the optimizer and go back to a checkpoint; overlap='forward' skips"
                " such steps whole."
            )
        try:
            if self._begins and self._ranks.world_size > 1:
                self._ranks.council.agree(failure)
            elif failure is not None:
                raise failure
        except Exception as error:
            self._fail(error)
            raise

    def _take_early(self) -> _Early:
        """What began in the last backward; the next one begins anew, while tiles of this one may still be updated."""
        early, self._early = self._early, _Early()
        return early

    def _check_groups_kept(self, begun: Mapping[Unit, _Begun], plans: Mapping[Unit, Plan]) -> None:
        for unit, as_begun in begun.items():
            if plans.get(unit) != as_begun.plan:
                raise EngineError(
                    f"The options of a param group changed after the update of unit '{unit.name}' began in backward. "
                    "Change learning rates after step(), or use overlap='forward'. Close the optimizer: this step is "
                    "not whole."
                )

    def _rest(self, unit: Unit, plan: Plan, scale: float, begun: _Begun | None) -> list[TileUpdate]:
        """What is left to be updated of a unit."""
        if begun is None:
            return self._updater.tiles(unit, plan, scale, self._updater.complete(unit))
        # As the homes were before the tiles that are done, for which the others need not wait; and a save since then.
        complete = all_of([begun.complete, *(home.read for home in unit.updated_homes)])
        tiles = self._updater.tiles(unit, plan, scale, complete)
        done = {tile.number for tile in begun.tiles}
        return [tile for tile in tiles if tile.number not in done]

    def _fail(self, error: BaseException) -> None:
        """The units are not whole, here or on another rank: whoever asks for any of them gets the error."""
        self._early = _Early()
        if not isinstance(error, Exception):  # an interrupt is over once it was raised
            error = EngineError("An update was interrupted: its values are not whole. Close the optimizer.")
        for unit in self._units:
            for home in unit.updated_homes:
                home.note_write(FailedEvent(error))


def _check(unit: Unit) -> None:
    """Raise the error of an earlier update or movement that has failed by now."""
    for home in unit.homes.values():
        home.written.check()


def _as_fp32(value: float) -> float:
    """The value rounded to fp32, where that has room for it."""
    rounded = fp32(value)
    return rounded if math.isfinite(rounded) else value


def _on_host(numbers: Sequence[float | Tensor]) -> list[float]:
    """The numbers, in order; those of the device are read together, once."""
    on_device = [number for number in numbers if isinstance(number, Tensor)]
    read = iter(torch.stack(on_device).tolist() if on_device else [])
    return [next(read) if isinstance(number, Tensor) else float(number) for number in numbers]
