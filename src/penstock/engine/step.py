"""One optimizer step.

1. Wait for the gradients; sum their squared norms over ranks, and which parameters got one: one all-reduce.
2. Decide: a norm that is not finite skips the step, and nothing changes.
3. Update each tile where its optimizer state lives: one fused pass that unscales, clips, updates and writes the param.
4. Publish what was written beside its home.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from penstock._native import Pool
from penstock.engine.unit import Fields, Unit
from penstock.errors import EngineError
from penstock.kinds import GRAD, MASTER, OPTIMIZER, PARAM, SHADOW, Tier
from penstock.layout import Piece
from penstock.machine.collectives import Ranks
from penstock.machine.streams import DONE, UPDATE, Event, FailedEvent, Streams, all_of
from penstock.rules.rule import BLOCK_NUMEL, Hyper, Rule, Scalars, Segment
from penstock.tiers.home import Views
from penstock.tiers.pipeline import Pipeline
from penstock.tiers.transit import Transit


@dataclass(frozen=True)
class StepResult:
    """What one `step` did.

    Attributes:
        grad_norm: norm of the gradient before clipping, over all ranks; NaN when it is not finite.
        skipped: nothing was updated, because the norm was not finite.
        loss_scale: loss scale of this step; 1 without fp16.
    """

    grad_norm: float
    skipped: bool
    loss_scale: float


@dataclass(frozen=True)
class Run:
    """Neighbouring pieces of a tile that are updated in one pass: elements `start` to `stop` of the shard."""

    start: int
    stop: int
    hyper: Hyper
    base: int = 0  # what added to an element's index in the shard numbers it among all elements of the optimizer


@dataclass
class _TileUpdate:
    """One tile's update: where it runs, what of it in which passes, and once submitted, its events."""

    unit: Unit
    number: int
    beside: Tier
    runs: Sequence[Run]
    scale: float
    updated: Event = DONE
    home_again: Event = DONE  # what it wrote is in those homes that are memory


@dataclass(frozen=True)
class Measure:
    """The gradient of a step over all ranks: its norm, and for each unit the slots that have one."""

    grad_norm: float
    present: Mapping[Unit, frozenset[int]]


class Stepper:
    """Applies the rule to every tile.

    Arguments:
        groups: index of the optimizer's param group of each trained parameter.
        firsts: number of each trained parameter's first element among all elements of the optimizer.
        gradient_scale: what a gradient in its home is multiplied with, 1 / world size for the mean.
        pipelines: bring what the updates on the host and on the device cannot reach where it rests.
        transit: publishes shadows.
        overlaps: `update` returns before the last update has run: whoever needs a unit waits for it.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        rule: Rule,
        ranks: Ranks,
        streams: Streams,
        pool: Pool,
        *,
        groups: Mapping[nn.Parameter, int],
        firsts: Mapping[nn.Parameter, int],
        gradient_scale: float,
        pipelines: Mapping[Tier, Pipeline],
        transit: Transit,
        overlaps: bool,
    ) -> None:
        self._units = [unit for unit in units if unit.trained]
        self._rule = rule
        self._ranks = ranks
        self._streams = streams
        self._pool = pool
        self._groups = groups
        self._firsts = firsts
        self._gradient_scale = gradient_scale
        self._pipelines = pipelines
        self._transit = transit
        self._overlaps = overlaps
        self._forwards = False  # of the last update
        self.steps: dict[nn.Parameter, int] = dict.fromkeys(groups, 0)
        self.scalars: dict[nn.Parameter, Scalars] = {}

    def measure(self) -> Measure:
        """Phase 1. The same values on every rank.

        Raises:
            Exception: what has failed by now, on the rank where it did.
            EngineError: on the other ranks.
        """
        failure: Exception | None = None
        norms: list[float | Tensor] = []
        flags: list[float] = []
        for unit in self._units:  # all of them, also after a failure: their collectives come before the one here
            assert unit.trained is not None
            gradient = unit.trained.gradient
            try:
                _check(unit)
                gradient.ready.synchronize()
            except Exception as error:
                failure = failure or error
            norms += [gradient.squared_norms[i] for i in sorted(gradient.squared_norms)]
            flags += [float(index in gradient.present) for index in range(len(unit.layout.slots))]
        total = _total(norms)
        if self._ranks.world_size > 1:
            report = self._ranks.report(failure)
            message = torch.tensor([total, *flags, *report], dtype=torch.float64).to(self._streams.device)
            self._ranks.all_reduce(message)
            total, *flags = message.tolist()
            total /= self._ranks.replicas
            try:
                self._ranks.check_reports(flags[-len(report) :], failure)
            except Exception as error:
                self._fail(error)  # on every rank: a close that gathers parameters would wait for the others
                raise
        elif failure is not None:
            raise failure
        present, cursor = {}, 0
        for unit in self._units:
            count = len(unit.layout.slots)
            present[unit] = frozenset(i for i in range(count) if flags[cursor + i] > 0)
            cursor += count
        return Measure(math.sqrt(total) * self._gradient_scale if total >= 0 else math.nan, present)

    def update(self, param_groups: Sequence[Mapping[str, Any]], measure: Measure, max_grad_norm: float | None) -> None:
        """Phases 3 and 4.

        Units are updated in order, which forward waits for them in. Where it does not wait, every other step goes
        backwards: it begins with the tiles that the rings still hold.
        """
        scale = self._gradient_scale
        if max_grad_norm is not None:  # as torch.nn.utils.clip_grad_norm_
            scale *= min(1.0, max_grad_norm / (measure.grad_norm + 1e-6))
        plans = {unit: self._hypers(unit, slots, param_groups) for unit, slots in measure.present.items() if slots}
        self._forwards = self._overlaps or not self._forwards
        try:  # from here on nothing is refused
            tiles = [tile for unit, plan in plans.items() for tile in self._plan_tiles(unit, plan, scale)]
            on_host = [tile for tile in tiles if tile.beside is Tier.CPU]
            on_device = [tile for tile in tiles if tile.beside is Tier.DEVICE]
            # At the same time: neither the host nor the device waits until all of the other's work is submitted.
            for pair in zip_longest(on_host if self._forwards else on_host[::-1], on_device):
                for tile in filter(None, pair):
                    self._update_tile(tile)
            for unit, updates in groupby(tiles, key=lambda tile: tile.unit):
                self._publish(unit, list(updates))
            if not self._overlaps:
                for unit in self._units:
                    assert unit.trained is not None
                    unit.trained.updated.synchronize()
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """The units are not whole, here or on another rank: whoever asks for any of them gets the error."""
        if not isinstance(error, Exception):  # an interrupt is over once it was raised
            error = EngineError("An update was interrupted: its values are not whole. Close the optimizer.")
        for unit in self._units:
            assert unit.trained is not None
            unit.trained.updated = unit.published = FailedEvent(error)

    def _plan_tiles(self, unit: Unit, plan: Mapping[int, tuple[Hyper, Scalars]], scale: float) -> list[_TileUpdate]:
        """What is to be done for a unit, in forward order."""
        trained = unit.trained
        assert trained is not None
        for index, (_, scalars) in plan.items():
            self.steps[unit.spec.parameters[index]] += 1
            self.scalars[unit.spec.parameters[index]] = scalars
        hypers = {index: hyper for index, (hyper, _) in plan.items()}
        bases = {index: self._base(unit, index) for index in plan}
        runs = [merge(pieces, hypers, bases) for pieces in trained.tiles]
        return [_TileUpdate(unit, n, trained.update_tier(n), own, scale) for n, own in enumerate(runs) if own]

    def _update_tile(self, tile: _TileUpdate) -> None:
        unit, trained = tile.unit, tile.unit.trained
        assert trained is not None
        homes = {GRAD: trained.gradient.home, MASTER: trained.master, OPTIMIZER: trained.optimizer}
        homes |= {SHADOW: trained.shadow} if trained.is_shadowed(tile.number) else {PARAM: unit.params}
        complete = all_of([trained.gradient.ready, unit.published])  # the last update may be under way
        written = MASTER, OPTIMIZER, SHADOW, PARAM
        brought = self._pipelines[tile.beside].bring(tile.number, homes, after=complete, written=written)
        work = partial(self._apply, tile, trained.fields, brought.views)
        if tile.beside is Tier.DEVICE:  # compute itself updates what is on the device
            brought.ready.wait()
            work()
        else:
            tile.updated = self._streams.submit(UPDATE, work, after=(brought.ready,))
        tile.home_again = brought.put_back(tile.updated)

    def _publish(self, unit: Unit, tiles: Sequence[_TileUpdate]) -> None:
        """Copy shadows to where the parameters rest; from now on the unit waits for its update."""
        trained = unit.trained
        assert trained is not None
        trained.updated = all_of(tile.updated for tile in tiles)
        home_again = all_of(tile.home_again for tile in tiles)
        unit.published = self._transit.copy(trained.shadow, unit.params, after=home_again)
        unit.stale = unit.replica is not None and unit.layout.shards > 1

    def _hypers(
        self, unit: Unit, slots: frozenset[int], param_groups: Sequence[Mapping[str, Any]]
    ) -> dict[int, tuple[Hyper, Scalars]]:
        """Read each slot's group as it is now, for the next step of its parameter: a scheduler may change it later."""
        plan: dict[int, tuple[Hyper, Scalars]] = {}
        known: dict[Hashable, tuple[Hyper, Scalars]] = {}
        for index in sorted(slots):
            parameter = unit.spec.parameters[index]
            group, step = self._groups[parameter], self.steps[parameter] + 1
            scalars = self.scalars.get(parameter, {})
            key = group, step, tuple(scalars.items())
            if key not in known:
                hyper = self._rule.hyper(param_groups[group], step, scalars)
                known[key] = hyper, self._rule.advance(hyper)
            plan[index] = known[key]
        return plan

    def check_groups(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise `ConfigError` for a group that asks for what the rule does not honour."""
        for group in param_groups:
            self._rule.hyper(group, step=1)

    def _base(self, unit: Unit, index: int) -> int:
        return self._firsts[unit.spec.parameters[index]] + unit.own_range[0] - unit.layout.slots[index].start

    def _apply(self, tile: _TileUpdate, fields: Fields, views: Mapping[str, Views]) -> None:
        """Update every run of a tile."""
        first = tile.number * tile.unit.params.sections[0].tile_numel  # where the values begin in the shard
        (grad,) = views[GRAD]
        (param,) = views[SHADOW] if SHADOW in views else views[PARAM]
        master = views[MASTER][0] if views[MASTER] else None
        states, scales = fields.name(views[OPTIMIZER])
        for run in tile.runs:
            start, stop = run.start - first, run.stop - first
            part, blocks = slice(start, stop), slice(start // BLOCK_NUMEL, -(-stop // BLOCK_NUMEL))
            segment = Segment(
                param=param[part],
                grad=grad[part],
                master=None if master is None else master[part],
                states=tuple(state[part] for state in states),
                scales=tuple(None if scale is None else scale[blocks] for scale in scales),
                first=run.base + run.start,
            )
            self._rule.update(segment, run.hyper, tile.scale, self._pool)


def merge(tile: Sequence[Piece], hypers: Mapping[int, Hyper], bases: Mapping[int, int]) -> list[Run]:
    """The runs of a tile: pieces of slots in `hypers`; neighbours with equal scalars become one, with the gap between.

    Gaps hold zeros in every kind. Where the update would not keep them, and where neighbours are not numbered one after
    the other (`bases`, see `Run`), they stay apart.
    """
    runs: list[Run] = []
    extends = False
    for piece in tile:
        hyper = hypers.get(piece.slot)
        if hyper is None:
            extends = False
            continue
        base = bases[piece.slot]
        if (
            extends
            and (runs[-1].hyper, runs[-1].base) == (hyper, base)
            and (hyper.keeps_zeros or runs[-1].stop == piece.start)
        ):
            runs[-1] = Run(runs[-1].start, piece.stop, hyper, base)
        else:
            runs.append(Run(piece.start, piece.stop, hyper, base))
            extends = True
    return runs


def _check(unit: Unit) -> None:
    """Raise the error of an earlier update or movement that has failed by now."""
    assert unit.trained is not None
    unit.trained.updated.check()
    unit.published.check()
    for home in unit.homes.values():
        home.check()


def _total(squared_norms: Sequence[float | Tensor]) -> float:
    """The sum, in order; device values are summed there and read once."""
    on_device = [norm for norm in squared_norms if isinstance(norm, Tensor)]
    on_host = [norm for norm in squared_norms if not isinstance(norm, Tensor)]
    total = sum(on_host)
    return total + float(torch.stack(on_device).sum().item()) if on_device else float(total)
