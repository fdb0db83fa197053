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
from typing import Any

import torch
from torch import Tensor, nn

from penstock._native import Pool
from penstock.engine.unit import Trained, Unit
from penstock.errors import EngineError
from penstock.kinds import Tier
from penstock.layout import Piece
from penstock.machine.collectives import Ranks
from penstock.machine.streams import DONE, DOWNLOAD, UPDATE, UPLOAD, Event, FailedEvent, Streams, all_of, copy
from penstock.rules.rule import BLOCK_NUMEL, Hyper, Rule, Scalars, Segment
from penstock.tiers.home import Home, MemoryHome, Views
from penstock.tiers.pipeline import GRAD_AREA, OPTIMIZER_AREA, PARAM_AREA, Pipeline


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
        pipeline: brings what the update cannot reach where it rests.
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
        pipeline: Pipeline,
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
        self._pipeline = pipeline
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
        plans = [(unit, self._hypers(unit, slots, param_groups)) for unit, slots in measure.present.items() if slots]
        self._forwards = self._overlaps or not self._forwards
        try:
            for unit, hypers in plans if self._forwards else plans[::-1]:  # from here on nothing is refused
                self._update_unit(unit, hypers, scale)
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

    def _update_unit(self, unit: Unit, plan: Mapping[int, tuple[Hyper, Scalars]], scale: float) -> None:
        trained = unit.trained
        assert trained is not None
        for index, (_, scalars) in plan.items():
            self.steps[unit.spec.parameters[index]] += 1
            self.scalars[unit.spec.parameters[index]] = scalars
        hypers = {index: hyper for index, (hyper, _) in plan.items()}
        bases = {index: self._base(unit, index) for index in plan}
        updated, published = [], []
        numbers = range(len(trained.tiles))
        for number in numbers if self._forwards else reversed(numbers):
            runs = merge(trained.tiles[number], hypers, bases)
            if runs:
                done, home_again = self._update_tile(unit, number, runs, scale)
                updated.append(done)
                published.append(home_again)
        trained.updated = all_of(updated)
        unit.published = all_of(published)
        if trained.fields.shadow is not None:
            unit.published = self._publish(unit, trained)
        unit.stale = unit.replica is not None and unit.layout.shards > 1

    def _update_tile(self, unit: Unit, number: int, runs: Sequence[Run], scale: float) -> tuple[Event, Event]:
        """Returns the events of the update, and of the parameters' way home."""
        trained = unit.trained
        assert trained is not None
        homes: dict[str, Home] = {GRAD_AREA: trained.gradient.home}
        if trained.optimizer is not None:
            homes[OPTIMIZER_AREA] = trained.optimizer
        if trained.fields.shadow is None:
            homes[PARAM_AREA] = unit.params
        what = f"update {unit.name}"
        complete = all_of([trained.gradient.ready, unit.published])  # the last update may be under way
        tile = self._pipeline.bring(number, homes, after=complete, written=(OPTIMIZER_AREA, PARAM_AREA), what=what)
        first = number * unit.params.tile_numel
        work = partial(self._apply, trained, tile.views, first, runs, scale)
        if trained.optimizer_tier is Tier.DEVICE:  # compute itself updates what is on the device
            tile.ready.wait()
            self._streams.compute(work, what=f"{what} tile {number}")
            updated = DONE
        else:
            updated = self._streams.submit(UPDATE, work, after=(tile.ready,), what=f"{what} tile {number}")
        return updated, tile.put_back(updated)

    def _publish(self, unit: Unit, trained: Trained) -> Event:
        """Copy the shadow to where the parameters rest."""
        assert isinstance(trained.optimizer, MemoryHome)
        assert isinstance(unit.params, MemoryHome)
        shadow = trained.fields.name(trained.optimizer.tensors).shadow
        (own,) = unit.params.tensors
        assert shadow is not None
        return self._streams.submit(
            DOWNLOAD if trained.optimizer_tier is Tier.DEVICE else UPLOAD,
            partial(copy, own, shadow),
            after=(trained.updated,),
            nbytes=own.numel() * own.element_size(),
            what=f"publish {unit.name}",
        )

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

    def _apply(
        self, trained: Trained, views: Mapping[str, Views], first: int, runs: Sequence[Run], scale: float
    ) -> None:
        """Update every run of a tile whose values begin at element `first` of the shard."""
        kinds = trained.fields.name(views.get(OPTIMIZER_AREA, ()))
        (grad,) = views[GRAD_AREA]
        param = kinds.shadow if kinds.shadow is not None else views[PARAM_AREA][0]
        for run in runs:
            start, stop = run.start - first, run.stop - first
            part, blocks = slice(start, stop), slice(start // BLOCK_NUMEL, -(-stop // BLOCK_NUMEL))
            segment = Segment(
                param=param[part],
                grad=grad[part],
                master=None if kinds.master is None else kinds.master[part],
                states=tuple(state[part] for state in kinds.states),
                scales=tuple(None if scale is None else scale[blocks] for scale in kinds.scales),
                first=run.base + run.start,
            )
            self._rule.update(segment, run.hyper, scale, self._pool)


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
    for home in unit.homes:
        home.check()


def _total(squared_norms: Sequence[float | Tensor]) -> float:
    """The sum, in order; device values are summed there and read once."""
    on_device = [norm for norm in squared_norms if isinstance(norm, Tensor)]
    on_host = [norm for norm in squared_norms if not isinstance(norm, Tensor)]
    total = sum(on_host)
    return total + float(torch.stack(on_device).sum().item()) if on_device else float(total)
