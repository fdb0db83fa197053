"""An average of the parameters, beside the training state, and blocks in which it takes the parameters' place.

An average is a storage of each trained unit, fp32, of this rank's shard, on one tier: 4 bytes for each parameter. It is
made after `prepare`, saved and loaded with the rest, and moved by nothing. To update it reads 4 bytes of each parameter
(the master) and reads and writes 4; in its block it changes places with the masters, so no further copy of either is
needed, and each value comes back bit for bit.
"""

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor

from penstock.config import MASTER, PARAM, SHADOW, Tier, TierName, average_kind, parse_tier
from penstock.engine.engine import Engine
from penstock.engine.state.access import failing_as_a_whole
from penstock.engine.step.update import use_staged
from penstock.engine.unit.plan import UnitPlan
from penstock.engine.unit.unit import Holder, TrainingState, Unit
from penstock.errors import ConfigError, EngineError
from penstock.optimizer import Optimizer
from penstock.rules.average import begin, follow, hide, show
from penstock.runtime.modes import EngineBlock, engine_entry
from penstock.runtime.streams import UPDATE, all_of
from penstock.tiers.staging import SIDES, Buffers, plan_ring, worked_on
from penstock.tiers.storage import CellPlan, Ring, RingPlan, Segment, SegmentPlan, Storage
from penstock.tiers.transfer import TileStreamer
from penstock.trace import Label


class EMA:
    """An exponential moving average of the trained parameters: fp32, sharded as they are, on any tier.

    It begins with the parameters as they are, at master precision, and `update` makes it follow them:
    `average = decay * average + (1 - decay) * parameter`, as `torch.optim.swa_utils.get_ema_multi_avg_fn` does, with
    the same bits at every stage, placement, tier and world size. It takes 4 bytes for each trained parameter of this
    rank's shard; `optimizer.locations()` lists them as `ema`. Parameters that the optimizer does not train, and
    buffers, are not averaged (`AveragedModel(use_buffers=False)`).

    `optimizer.save` keeps it and `optimizer.load` brings it back, at any world size, stage and tier: make it before
    `load`. From a checkpoint without one it begins with the loaded parameters, after a warning. `optimizer.close` frees
    it.

    Arguments:
        optimizer: the optimizer of `penstock.prepare`. Collective: every rank makes the same averages, in one order.
        decay: the weight of the average in each update, from 0 to 1. It may be set between updates.
        tier: where the average rests, and is updated: `"device"`, `"cpu"`, or `"nvme"`, which needs
            `Placement(nvme_path=...)`.
        name: tells several averages of one optimizer apart: kind `ema.<name>` in reports and checkpoints.

    Raises:
        ConfigError: an argument is not as above, the name is taken, or no parameter is trained. Nothing has changed.
        MemoryBudgetError, NvmeError: there is no room for it. Nothing has changed.
        EngineError: closed; inside forward, backward, `gathered` or `applied`.

    Example:
        >>> ema = penstock.EMA(optimizer, decay=0.999)  # doctest: +SKIP
        >>> for batch in loader:  # doctest: +SKIP
        ...     optimizer.backward(model(**batch).loss)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     ema.update()
        >>> with ema.applied():  # doctest: +SKIP
        ...     evaluate(model)
    """

    @engine_entry
    def __init__(self, optimizer: Optimizer, decay: float = 0.999, *, tier: TierName = "cpu", name: str = "") -> None:
        _check(optimizer, name)
        where = parse_tier(tier, what="tier")
        self.decay = decay
        self._optimizer = optimizer
        self._kind = average_kind(name)
        with optimizer._open("EMA").turn("EMA"), ExitStack() as undo:
            with optimizer._together("EMA", whole=True, writes=True, idle=True, settled=True) as (engine, rank_checks):
                averages = engine.averages = engine.averages or Averages(engine)
                averages.check_new(self._kind)
                rank_checks.update({"tier": where.value, "name": name, "decay": self.decay})
                undo.callback(averages.remove, self._kind)
                averages.make(self._kind, where)
            undo.pop_all()
            averages.begin(self._kind, engine.context.trained)

    @property
    def decay(self) -> float:
        """The weight of the average in each update, from 0 to 1."""
        return self._decay

    @decay.setter
    def decay(self, value: float) -> None:
        self._decay = _fraction(value)

    @engine_entry
    def update(self) -> None:
        """Update the average by the parameters, after `step`. Collective.

        It runs after the updates of that step, on any stream, and before those of the next: with `overlap="forward"`
        the host does not wait for it. After a step that was skipped, which `StepResult.skipped` tells, it averages the
        same parameters once more.

        Raises:
            EngineError: closed; inside forward, backward, `gathered` or `applied`; or ranks have another decay. Nothing
                has changed.
        """
        optimizer = self._optimizer
        with optimizer._open("EMA.update").turn("EMA.update"):
            with optimizer._together("EMA.update", whole=True, idle=True) as (engine, rank_checks):
                rank_checks.update({"name": self._kind, "decay": self.decay})
            engine.averages.update(self._kind, self.decay)

    @engine_entry
    def applied(self) -> AbstractContextManager[None]:
        """Show the average in the model inside a `with` block, and the parameters again after it. Collective.

        The two change places, so it takes no memory; after the block both have the bits that they had, also where an
        exception ends it. Inside, the model computes with the average in the compute dtype: forward, `generate`,
        `optimizer.gathered()` with `state_dict` and `save_pretrained` in it, `full_param`. Training is refused by name:
        backward, `step`, `save`, `load`, setting parameters or states, and `close`.

        Raises:
            EngineError: closed; inside forward, backward, `gathered` or another `applied`; a forward waits for its
                backward. Nothing has changed.

        Example:
            >>> with ema.applied(), optimizer.gathered():  # doctest: +SKIP
            ...     model.save_pretrained("averaged")
        """
        meeting = self._optimizer._together("EMA.applied", whole=True, writes=True, idle=True, settled=True)
        with meeting as (engine, rank_checks):
            for unit, _ in engine.context.trained:
                if unit.holding.is_held:
                    raise EngineError(
                        f"EMA.applied(): unit '{unit.name}' is in use by a forward whose backward has not run. Run it, "
                        "or run such forwards under torch.no_grad()."
                    )
            rank_checks["name"] = self._kind
        return EngineBlock(engine.averages.applied(self._kind), partial(engine.turn, "EMA.applied"))


def _check(optimizer: object, name: object) -> None:
    """Refuse an optimizer that was not prepared, and a name that is no identifier."""
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"EMA({type(optimizer).__name__}): give it the optimizer that penstock.prepare() returned.")
    if name != "" and not (isinstance(name, str) and name.isidentifier()):
        raise ConfigError(f"EMA(name={name!r}): use letters, digits and underscores.")


def _fraction(value: object) -> float:
    """Read a decay."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"EMA: decay={value!r}. Use a number from 0 to 1.")
    return float(value)


# ----------------------------------------------------------------------------------------------------------------------
# Passes over the parameters and an average of them, tile by tile, where the average rests.
#
# A pass transfers tiles as an update does. It follows the last writes of the storages that it reads, and is recorded in
# them: the next update of a unit follows the pass, as the pass follows the update before it (ordering rule 3).
# ----------------------------------------------------------------------------------------------------------------------


#: Arithmetic on some elements: of their average, their parameters, and the remainder of those to the fp32 values.
Work = Callable[[Tensor, Tensor, Tensor | None], None]


class Averages:
    """Every average of one engine, and the buffers of the passes over them.

    Attributes:
        tiers: the tier of each average, by kind.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._context = engine.context
        self._rings = {beside: Ring() for beside in SIDES}
        self._streamers = {
            beside: TileStreamer(self._context.streams, ring, beside=beside) for beside, ring in self._rings.items()
        }
        self._planned: dict[Tier, RingPlan] = {}
        self._buffers = Buffers(self._context.store)
        self.tiers: dict[str, Tier] = {}

    def check_new(self, kind: str) -> None:
        """Refuse an average with the name of another one, or of no parameters."""
        if kind in self.tiers:
            raise ConfigError(
                f"This optimizer has an average '{kind}' already. Give each one a name: EMA(..., name='slow')."
            )
        if not self._context.trained:
            raise ConfigError("EMA: the optimizer trains no parameter, so there is nothing to average.")

    def make(self, kind: str, tier: Tier) -> None:
        """Allocate an average.

        Raises:
            MemoryBudgetError, NvmeError: there is no room for it.
        """
        units = self._context.trained
        plans = [_plan(u.name, u.shard_numel, u.params.segments[0].tile_numel, kind, tier) for u, _ in units]
        reserved = self._context.store.reserve(plans)
        for (_, trained), plan in zip(units, plans, strict=True):
            trained.averages[kind] = Storage([reserved.make(plan)])
        self.tiers[kind] = tier
        self.make_room()

    def remove(self, kind: str) -> None:
        """Free the memory of an average, as far as it was allocated."""
        self._engine.access.finish()
        self.tiers.pop(kind, None)
        self.drop_buffers()  # their slots may hold records of it
        for _, trained in self._context.trained:
            storage = trained.averages.pop(kind, None)
            for segment in storage.segments if storage is not None else ():
                self._context.store.leave(segment)
                self._context.store.free(segment)

    def begin(self, kind: str, units: Iterable[tuple[Unit, TrainingState]]) -> None:
        """Set an average of units to their parameters."""
        self._run(units, kind, begin, label="begin")

    def plans_for(self, plans: Iterable[UnitPlan]) -> list[SegmentPlan]:
        """Plan the storages of all averages for units that are to be trained."""
        return [
            _plan(plan.spec.name, plan.shard_numel, plan.tile_numel, kind, tier)
            for plan in plans
            for kind, tier in self.tiers.items()
        ]

    def join(self, names: Container[str], segments: Iterable[Segment]) -> None:
        """Begin all averages of units that are trained from now on, in the segments that `plans_for` planned."""
        units = [(unit, trained) for unit, trained in self._context.trained if unit.name in names]
        made = iter(segments)
        for _, trained in units:
            trained.averages |= {kind: Storage([next(made)]) for kind in self.tiers}
        self.make_room()
        for kind in self.tiers:
            self.begin(kind, units)

    def update(self, kind: str, decay: float) -> None:
        """Submit the update of an average by the parameters, after the updates that are under way."""
        self.make_room()
        work = partial(follow, decay=decay, pool=self._context.pool)
        self._run(self._context.trained, kind, work, label="average")

    @contextmanager
    def applied(self, kind: str) -> Iterator[None]:
        """Exchange an average with the parameters for the time of a `with` block. Collective."""
        self._exchange(kind, back=False)
        backward = self._engine.hooks.backward
        backward.refusal = (
            "backward() was called inside EMA.applied(): its gradients would be of the average. Leave the block first."
        )
        try:
            yield
        finally:
            if not any(unit.is_dropped for unit in self._context.units):
                self._exchange(kind, back=True)
            backward.refusal = None

    def _exchange(self, kind: str, *, back: bool) -> None:
        gatherer, access = self._engine.gatherer, self._engine.access
        units = [unit for unit, _ in self._context.trained]
        access.finish()
        self.make_room()
        gatherer.drop_unused()
        if back:
            for unit in units:  # graphs of forwards inside the block have no backward any more
                unit.holding.drop_all(Holder.BACKWARD, Holder.UNANNOUNCED)
                gatherer.release(unit)
        with failing_as_a_whole(units, "EMA.applied()"):
            for unit in units:  # before the first write: gathered units have the values of before
                gatherer.outdate(unit)
                unit.count_writes()  # the backward of a graph from before is refused: it reads other weights
            self._run(self._context.trained, kind, hide if back else show, label="exchange", exchanges=True)
            access.finish()
            for unit in units:
                # Each rank has exchanged its own shard of a replica: the other shards are outdated.
                unit.outdate_parts()
            gatherer.show_resident(units, wait=True)

    def make_room(self) -> None:
        """Allocate the buffers of passes for the storages as they are now, and free those from before a move."""
        units = [
            {name: storage.plans for name, storage in unit.shard_storages.items()} for unit, _ in self._context.trained
        ]
        planned = {}
        for beside in SIDES:
            segments = (
                ("average" if name == kind else name, plan)
                for unit in units
                for kind in self.tiers
                for name, plan in worked_on(beside, unit, kind, (MASTER, kind, SHADOW, PARAM))
            )
            planned[beside] = plan_ring("average", beside, segments, self._context.streams.reach)
        if planned == self._planned:
            return
        self.drop_buffers()
        reserved = self._context.store.reserve([plan for ring in planned.values() for plan in ring.segments()])
        for beside, ring in planned.items():
            self._rings[beside].fill(self._buffers.make_slots(ring, reserved))
            self._rings[beside].tiles = ring.tiles
        self._planned = planned

    def drop_buffers(self) -> None:
        """Wait for work on the buffers of passes, and free them. The next pass allocates some again."""
        for ring in self._rings.values():
            ring.drop()
        self._buffers.free()
        self._planned = {}

    def _run(
        self,
        units: Iterable[tuple[Unit, TrainingState]],
        kind: str,
        work: Work,
        *,
        label: str,
        exchanges: bool = False,
    ) -> None:
        """Submit a pass over all tiles of some units.

        Arguments:
            units: trained ones, which have this average.
            kind: the average.
            work: the arithmetic on each tile.
            label: the name of the pass in traces.
            exchanges: it writes parameters and masters as well as the average.
        """
        for unit, trained in units:
            average = trained.averages[kind]
            weights = [unit.params, trained.master, trained.param_staging]
            read, written = ([], [*weights, average]) if exchanges else (weights, [average])
            complete = all_of(storage.memory.written for storage in read)  # site average.weights_written
            # Follows updates, gathers, saves and the last pass (ordering rule 3).
            free = all_of(storage.memory.free for storage in written)  # site average.storage_free
            after = all_of([complete, free])  # site average.after_weights, average.after_storage
            events, number = [], 0
            while number < len(trained.tiles):
                segment, _ = average.tile(number)
                beside = Tier.DEVICE if segment.tier is Tier.DEVICE else Tier.CPU
                storages = {MASTER: trained.master, "average": average}
                storages |= (
                    {SHADOW: trained.param_staging} if trained.has_param_staging(number) else {PARAM: unit.params}
                )
                count = self._streamers[beside].range_at(number, storages).tiles
                staged = self._streamers[beside].bring(
                    number,
                    storages,
                    after=after,
                    label=Label(label, unit.name, kind, number),
                    written=tuple(storages) if exchanges else ("average",),
                    count=count,
                )
                (param,) = staged.views[SHADOW] if SHADOW in staged.views else staged.views[PARAM]
                (values,), master = staged.views["average"], staged.views[MASTER]
                call = partial(work, values, param, master[0] if master else None)
                stream = None if beside is Tier.DEVICE else UPDATE
                events.append(use_staged(self._context.streams, stream, staged, call))
                number += count
            over = all_of(events)  # site average.tiles_over
            for storage in read:
                storage.note_read(over)  # site average.read: the next update writes it (ordering rule 3)
            for storage in written:
                storage.note_write(over)  # site average.written
            if exchanges and any(trained.has_param_staging(number) for number in range(len(trained.tiles))):
                self._context.transfers.copy(trained.param_staging, unit.params, Label("publish", unit.name))


def _plan(name: str, shard_numel: int, tile_numel: int, kind: str, tier: Tier) -> SegmentPlan:
    """Plan the storage of an average of a unit: one segment, with the tiles of the parameters."""
    cell = CellPlan(name, kind, tier, torch.float32, shard_numel)
    # The host updates an average in host memory: no device copies it.
    return SegmentPlan(kind, tier, (cell,), 0, shard_numel, tile_numel, copied=False)
