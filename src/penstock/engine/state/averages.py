"""Averages of the parameters: their homes, and blocks in which one of them takes the parameters' place.

An average is a home of each trained unit, fp32, of this rank's shard, on one tier: 4 bytes for each parameter. It is
made after `prepare`, saved and loaded with the rest, and moved by nothing. To update it reads 4 bytes of each
parameter (the master) and reads and writes 4; in its block it changes places with the masters, so no further copy of
either is needed, and what it was comes back bit for bit.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from penstock.config import Tier
from penstock.engine.forward_backward.backward import Backward
from penstock.engine.forward_backward.gather import Gatherer
from penstock.engine.state.access import StateAccess, failing_as_a_whole
from penstock.engine.step.averaging import Averaging
from penstock.engine.step.context import EngineContext
from penstock.engine.unit.plan import UnitPlan
from penstock.engine.unit.unit import Holder, Unit
from penstock.errors import ConfigError, EngineError
from penstock.rules.average import begin, follow, hide, show
from penstock.tiers.storage import CellPlan, Segment, SegmentPlan, Storage


class Averages:
    """Every average of one engine.

    Arguments:
        access: knows when everything has reached its home.
        gatherer: hears that parameters have other values.
        backward: refuses to run while an average is shown.
        averaging: works on parameters and averages, tile by tile.

    Attributes:
        tiers: where each of them rests, by kind.
        shown: the kind of the one that has the parameters' place now.
    """

    def __init__(
        self,
        context: EngineContext,
        access: StateAccess,
        gatherer: Gatherer,
        backward: Backward,
        averaging: Averaging,
    ) -> None:
        self._context = context
        self._access = access
        self._gatherer = gatherer
        self._backward = backward
        self._averaging = averaging
        self.tiers: dict[str, Tier] = {}
        self.shown: str | None = None

    def check_new(self, kind: str) -> None:
        """Refuse an average of a name that there is, or of nothing."""
        if kind in self.tiers:
            raise ConfigError(
                f"This optimizer has an average '{kind}' already. Give each one a name: EMA(..., name='slow')."
            )
        if not self._trained:
            raise ConfigError("EMA: the optimizer trains no parameter, so there is nothing to average.")

    def add(self, kind: str, tier: Tier) -> None:
        """Take the memory of an average, and begin it with the parameters as they are. Collective.

        Raises:
            MemoryBudgetError, NvmeError: there is no room for it on some rank. Nothing has changed.
        """
        failure: Exception | None = None
        try:
            self._make(kind, tier)
        except Exception as error:  # ours, or torch's where the device has no room
            failure = error
        try:
            self._context.ranks.control_group.agree(failure)
        except BaseException:
            self.remove(kind)
            raise
        self.tiers[kind] = tier
        self._averaging.run(self._trained, kind, begin, label="begin")

    def _make(self, kind: str, tier: Tier) -> None:
        plans = [
            _plan(unit.name, unit.shard_numel, unit.params.sections[0].tile_numel, kind, tier) for unit in self._trained
        ]
        reserved = self._context.store.reserve(plans)
        for unit, plan in zip(self._trained, plans, strict=True):
            assert unit.trained is not None
            unit.trained.averages[kind] = Storage([reserved.make(plan)])
        self._averaging.make_room([*self.tiers, kind])

    def plans_for(self, plans: Iterable[UnitPlan]) -> list[SegmentPlan]:
        """Plan the homes that every average has of units that are to be trained."""
        return [
            _plan(plan.spec.name, plan.shard_numel, plan.tile_numel, kind, tier)
            for plan in plans
            for kind, tier in self.tiers.items()
        ]

    def go_on_from(self, other: "Averages", new: Sequence[Unit], sections: Sequence[Segment]) -> None:
        """Go on with the averages of another one, which begin with the parameters of units that are new.

        Arguments:
            other: has no buffers any more.
            new: the units that none of them has.
            sections: made as `plans_for` says.
        """
        self.tiers = other.tiers
        made = iter(sections)
        for unit in new:
            assert unit.trained is not None
            unit.trained.averages |= {kind: Storage([next(made)]) for kind in self.tiers}
        if self.tiers:
            self._averaging.make_room(self.tiers)
        for kind in self.tiers:
            self._averaging.run(new, kind, begin, label="begin")

    def drop_buffers(self) -> None:
        """Give back the buffers that passes go through. The next pass takes some again."""
        self._averaging.drop()

    def remove(self, kind: str) -> None:
        """Give the memory of an average back, as far as there is any."""
        self._access.finish()
        self.tiers.pop(kind, None)
        self._averaging.drop()  # its buffers may hold records of it
        for unit in self._trained:
            assert unit.trained is not None
            home = unit.trained.averages.pop(kind, None)
            for section in home.sections if home is not None else ():
                self._context.store.leave(section)
                self._context.store.free(section)

    def update(self, kind: str, decay: float) -> None:
        """Have an average follow the parameters as they are after the updates that are under way."""
        self._averaging.make_room(self.tiers)  # homes may have moved
        work = partial(follow, decay=decay, pool=self._context.pool)
        self._averaging.run(self._trained, kind, work, label="average")

    @contextmanager
    def applied(self, kind: str) -> Iterator[None]:
        """Show an average in the place of the parameters for the time of a `with` block. Collective."""
        self._exchange(kind, back=False)
        self.shown = kind
        self._backward.refusal = (
            "backward() was called inside EMA.applied(): its gradients would be of the average. Leave the block first."
        )
        try:
            yield
        finally:
            if not any(unit.is_dropped for unit in self._context.units):
                self._exchange(kind, back=True)
            self.shown = self._backward.refusal = None

    def check_free(self) -> None:
        """Refuse to exchange parameters that somebody holds.

        Raises:
            EngineError: names the unit.
        """
        for unit in self._trained:
            if unit.holding.is_held:
                raise EngineError(
                    f"EMA.applied(): unit '{unit.name}' is in use by a forward whose backward has not run. Run it, or "
                    "run such forwards under torch.no_grad()."
                )

    def _exchange(self, kind: str, *, back: bool) -> None:
        self._access.finish()
        self._averaging.make_room(self.tiers)
        self._gatherer.drop_unused()
        units = self._trained
        if back:
            for unit in units:  # graphs of forwards inside have no backward any more, and what waits for it lets go
                unit.holding.drop_all(Holder.BACKWARD, Holder.UNANNOUNCED)
                self._gatherer.release(unit)
        with failing_as_a_whole(units, "EMA.applied()"):
            for unit in units:  # before the first write: what is gathered has the values of before
                self._gatherer.outdate(unit)
                unit.count_writes()  # a graph from before reads other weights: its backward is refused
            self._averaging.run(units, kind, hide if back else show, label="exchange", exchanges=True)
            self._access.finish()
            for unit in units:
                # Each rank has exchanged its own part of a replica: the others' are old until they are gathered.
                unit.outdate_parts()
            self._gatherer.show_resident(units, wait=True)

    @property
    def _trained(self) -> list[Unit]:
        return [unit for unit in self._context.units if unit.trained is not None]


def _plan(name: str, shard_numel: int, tile_numel: int, kind: str, tier: Tier) -> SegmentPlan:
    """Plan the home of an average of a unit: one section, of the tiles of the parameters."""
    cell = CellPlan(name, kind, tier, torch.float32, shard_numel)
    # The host works on what rests there: a device copies none of it.
    return SegmentPlan(kind, tier, (cell,), 0, shard_numel, tile_numel, copied=False)
