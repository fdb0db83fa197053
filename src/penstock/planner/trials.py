"""Placements that are tried: each is simulated once, and timed for as many machines as are asked for."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from penstock.config import Placement, TierName
from penstock.errors import ConfigError, PenstockError, one_line
from penstock.ext.observe.timeline import TraceTimeline, to_chrome
from penstock.files import open_own
from penstock.planner.cost import MachineCosts
from penstock.planner.machine import Machine
from penstock.planner.plan_request import PlanRequest
from penstock.planner.simulation.engine_internals import PrepareRequest, device_for
from penstock.planner.simulation.operation_times import time_ops
from penstock.planner.simulation.program import Op
from penstock.planner.simulation.retime import Timing, retime
from penstock.planner.simulation.simulate import Setup, Simulation, simulate
from penstock.planner.workload import TIERS, Choice, Fractions


@dataclass(frozen=True)
class Trial:
    """A placement that was tried.

    Attributes:
        placement: where state was.
        choice: what is not a matter of degree.
        simulation: what the engine does.
        timing: how long that takes.
        peak_bytes: the most bytes at once, by tier.
    """

    placement: Placement
    choice: Choice
    simulation: Simulation
    timing: Timing
    peak_bytes: Mapping[TierName, int]


class Trials:
    """Tries placements.

    Arguments:
        request: what is asked.
        measures: whether each kind of operation is run for real, once, and timed: on this machine.
    """

    def __init__(
        self, request: PlanRequest, *, measures: bool = False, measured: dict[Op, float] | None = None
    ) -> None:
        self._request = request
        self._measures = measures
        self._measured: dict[Op, float] = {} if measured is None else measured
        self._found: dict[str, Trial] = {}

    def __len__(self) -> int:
        return len(self._found)

    def run(self, placement: Placement, choice: Choice) -> Trial:
        """Simulate a placement, or give what was found when it was simulated before.

        Raises:
            ConfigError: `prepare` would refuse it, or the model cannot be simulated.
        """
        key = f"{placement!r} {choice!r}"
        if key not in self._found:
            request = self._request
            prepare_request = request.request(placement, streamed=choice.streamed)
            simulation = self._simulate(replace(request.setup, recompute=choice.recompute), prepare_request)
            peak: dict[TierName, int] = {tier: simulation.program.peak_bytes.get(tier, 0) for tier in TIERS}
            there = {tier: nbytes for tier, nbytes in peak.items() if nbytes}
            timing = self.time(simulation, request.machine)
            self._found[key] = Trial(placement, choice, simulation, timing, there)
        return self._found[key]

    def simulate_other(
        self, trial: Trial, *, state_dtype: Literal["bf16", "int8"] | None = None, twice: bool = False
    ) -> Trial | None:
        """Simulate a trial with states of another dtype, or with twice the batch; `None` where that cannot be."""
        request = self._request
        if state_dtype is not None:
            if request.options.state_dtype == state_dtype:
                return None
            options = replace(request.options, state_dtype=state_dtype)
            request = replace(request, arguments={**request.arguments, "options": options})
        if twice:
            request = replace(request, setup=replace(request.setup, batch=lambda: _twice(self._request.setup.batch())))
        try:
            return Trials(request, measures=self._measures, measured=self._measured).run(trial.placement, trial.choice)
        except PenstockError:
            return None

    def time(self, simulation: Simulation, machine: Machine) -> Timing:
        """Say how long a simulated step takes on a machine."""
        return retime(simulation.program, self.costs(machine))

    def costs(self, machine: Machine) -> MachineCosts:
        """Say what parts of a program take on a machine: as they were measured, where they were."""
        return MachineCosts(machine, measured=self._measured, measured_share=_share_of_cores())

    def _simulate(self, setup: Setup, prepare_request: PrepareRequest) -> Simulation:
        """Simulate; where operations are measured, time them, and run for real what cannot be simulated without."""
        if not self._measures:
            return simulate(setup, prepare_request)
        try:
            simulation = simulate(setup, prepare_request)
        except ConfigError:
            simulation = simulate(replace(setup, runs_operations=True), prepare_request)
        unknown = {op: recipe for op, recipe in simulation.recipes.items() if op not in self._measured}
        costs = MachineCosts(self._request.machine)
        self._measured |= time_ops(unknown, costs.op, device=device_for((), None).device)
        return simulation

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


def _share_of_cores() -> float:
    """Say which part of the cores operations have that are timed here."""
    return min(1.0, torch.get_num_threads() / len(os.sched_getaffinity(0)))


def _twice(inputs: Any) -> Any:
    """Make a micro-batch of twice the samples."""
    return tree_map(
        lambda value: torch.cat([value, value]) if isinstance(value, Tensor) and value.dim() else value, inputs
    )


def placement_of(fractions: Fractions, choice: Choice, request: PlanRequest) -> Placement:
    """Make the placement of fractions and a choice."""
    storages: dict[str, Any] = {kind: _storage(shares) for kind, shares in fractions.items()}
    in_files = choice.activations == "nvme" or any(shares.get("nvme") for shares in fractions.values())
    folders = tuple(request.folders) if in_files else None
    return Placement(**storages, activations=choice.activations, nvme_path=folders)


def _storage(shares: Mapping[TierName, float]) -> TierName | dict[TierName, float]:
    """Name the one tier, or the fractions where there are several."""
    there = {tier: share for tier, share in shares.items() if share > 0}
    return next(iter(there)) if len(there) == 1 else there
