"""Placements that are tried: each is rehearsed once, and timed for as many machines as are asked for."""

import contextlib
import gc
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from penstock.config import Placement, TierName
from penstock.errors import ConfigError, PenstockError, one_line
from penstock.ext.observe.timeline import TraceTimeline, to_chrome
from penstock.files import open_own
from penstock.forecast.candidates import Choice
from penstock.forecast.costs import MachineCosts, machine_costs
from penstock.forecast.load import Fractions
from penstock.forecast.machine import Machine
from penstock.forecast.program import Op
from penstock.forecast.retime import Timing, Timings
from penstock.planner.question import Question
from penstock.rehearsal.engine_internals import PrepareRequest, device_for
from penstock.rehearsal.measured import time_ops
from penstock.rehearsal.rehearse import Rehearsal, Scene, rehearse


@dataclass(frozen=True)
class Trial:
    """A placement that was tried.

    Attributes:
        placement: where state was.
        choice: what is not a matter of degree.
        rehearsal: what the engine does.
        timing: how long that takes.
        peak_bytes: the most bytes at once, by tier.
    """

    placement: Placement
    choice: Choice
    rehearsal: Rehearsal
    timing: Timing
    peak_bytes: Mapping[TierName, int]


class Trials:
    """Tries placements.

    Arguments:
        question: what is asked.
        measures: whether each kind of operation is run for real, once, and timed: on this machine.
    """

    def __init__(self, question: Question, *, measures: bool = False, measured: dict[Op, float] | None = None) -> None:
        self._question = question
        self._measures = measures
        self._measured: dict[Op, float] = {} if measured is None else measured
        self._found: dict[str, Trial] = {}
        self._timings: dict[int, Timings[MachineCosts]] = {}  # of rehearsals, all of which are kept

    def __len__(self) -> int:
        return len(self._found)

    def run(self, placement: Placement, choice: Choice) -> Trial:
        """Rehearse a placement, or give what was found when it was rehearsed before.

        Raises:
            ConfigError: `prepare` would refuse it, or the model cannot be rehearsed.
        """
        key = f"{placement!r} {choice!r}"
        if key not in self._found:
            question = self._question
            request = question.request(placement, streamed=choice.streamed)
            rehearsal = self._rehearse(replace(question.scene, recompute=choice.recompute), request)
            self._found[key] = Trial(
                placement,
                choice,
                rehearsal,
                self.time(rehearsal, question.machine),
                _by_tier(rehearsal.program.peak_bytes),
            )
        return self._found[key]

    def rehearse_other(
        self, trial: Trial, *, state_dtype: Literal["bf16", "int8"] | None = None, twice: bool = False
    ) -> Trial | None:
        """Rehearse a trial with states of another dtype, or with twice the batch; `None` where that cannot be."""
        question = self._question
        if state_dtype is not None:
            if question.options.state_dtype == state_dtype:
                return None
            options = replace(question.options, state_dtype=state_dtype)
            question = replace(question, arguments={**question.arguments, "options": options})
        if twice:
            question = replace(
                question, scene=replace(question.scene, batch=lambda: _twice(self._question.scene.batch()))
            )
        try:
            return Trials(question, measures=self._measures, measured=self._measured).run(trial.placement, trial.choice)
        except PenstockError:
            return None

    def time(self, rehearsal: Rehearsal, machine: Machine) -> Timing:
        """Say how long a rehearsed step takes on a machine."""
        key = id(rehearsal)
        timings = self._timings.setdefault(key, Timings(rehearsal.program))
        return timings.on(machine_costs(machine, measured=self._measured, measured_share=_share_of_cores()))

    def _rehearse(self, scene: Scene, request: PrepareRequest) -> Rehearsal:
        """Rehearse; where operations are measured, time them, and run for real what cannot be rehearsed without."""
        if not self._measures:
            return rehearse(scene, request)
        try:
            rehearsal = rehearse(scene, request)
        except ConfigError:
            rehearsal = rehearse(replace(scene, performs=True), request)
        self._time_ops(rehearsal)
        return rehearsal

    def _time_ops(self, rehearsal: Rehearsal) -> None:
        """Run what was not timed yet, once, on the device that is here."""
        unknown = {op: recipe for op, recipe in rehearsal.recipes.items() if op not in self._measured}
        costs = machine_costs(self._question.machine)
        self._measured |= time_ops(unknown, costs.op, device=device_for((), None).device)

    def write_trace(self, trial: Trial, path: str | os.PathLike[str]) -> None:
        """Write a step that was not run to a file for Perfetto.

        Raises:
            ConfigError: the file cannot be written.
        """
        try:
            with open_own(os.fspath(path), "w", encoding="utf-8") as file:
                file.writelines(to_chrome(TraceTimeline(trial.timing.recording), rank=0))
        except OSError as error:
            raise ConfigError(f"The trace cannot be written: {one_line(error)}.") from error


@contextlib.contextmanager
def quick_collection() -> Iterator[None]:
    """Keep Python's collector off what is there already: after each rehearsal it looks at what came since.

    Modules of libraries are a million objects, which took longer than some rehearsals. Nothing changes where somebody
    else has objects frozen: they would be thawed.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _share_of_cores() -> float:
    """Say which part of the cores operations have that are timed here."""
    return min(1.0, torch.get_num_threads() / len(os.sched_getaffinity(0)))


def _twice(inputs: Any) -> Any:
    """Make a micro-batch of twice the samples."""
    return tree_map(
        lambda value: torch.cat([value, value]) if isinstance(value, Tensor) and value.dim() else value, inputs
    )


def placement_of(fractions: Fractions, choice: Choice, question: Question) -> Placement:
    """Make the placement of fractions and a choice."""
    storages = {kind: _storage(shares) for kind, shares in fractions.items()}
    in_files = choice.activations == "nvme" or any(shares.get("nvme") for shares in fractions.values())
    folders = tuple(question.folders) if in_files else None
    return Placement(
        params=storages["params"],
        grads=storages["grads"],
        optimizer=storages["optimizer"],
        activations=choice.activations,
        nvme_path=folders,
    )


def _storage(shares: Mapping[TierName, float]) -> TierName | dict[TierName, float]:
    """Name the one tier, or the fractions where there are several."""
    there = {tier: share for tier, share in shares.items() if share > 0}
    return next(iter(there)) if len(there) == 1 else there


def _by_tier(peak_bytes: Mapping[str, int]) -> dict[TierName, int]:
    tiers: tuple[TierName, ...] = ("device", "cpu", "nvme")
    return {tier: peak_bytes[tier] for tier in tiers if peak_bytes.get(tier)}
