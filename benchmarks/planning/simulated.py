"""Steps on simulated streams, which sleep as long as their bytes take: paper against the clock.

Beside the bandwidths the paper is told what one kind of operation takes (timed here), and what a piece of work takes
beside its sleep: the median of runs of work that sleeps for no time.
"""

import contextlib
import statistics
import time
from dataclasses import replace
from typing import Any

import torch

import penstock
from penstock.planner.cost import machine_costs
from penstock.planner.plan_request import plan_request
from penstock.planner.search import given
from penstock.planner.simulation.fair_share import Demand
from penstock.planner.simulation.operation_times import time_ops
from penstock.planner.simulation.retime import retime
from penstock.planner.trials import Trials
from penstock.runtime.simulated import SimulatedStreams
from planning.models import batch, gpt2, llama
from planning.rows import row, summary

LINK, UPDATE = 2e6, 8e6
WARM_UP, STEPS, ROUNDS = 2, 2, 3


def simulated() -> dict[str, Any]:
    """The rows: medians of rounds that take turns."""
    from tests.modelled import machine_of
    from tests.support import prepare_on

    on_cpu = penstock.Placement(params="cpu", grads="cpu", optimizer="cpu")
    state = penstock.Placement(grads="cpu", optimizer="cpu")
    half = penstock.Placement(params={"device": 0.5, "cpu": 0.5}, grads="cpu", optimizer="cpu")
    rows = []
    for name, model in {"llama": llama, "gpt2": gpt2}.items():
        for where, placement in {"all on cpu": on_cpu, "state on cpu": state, "half of params": half}.items():
            for count, overlap in ((1, "forward"), (3, "forward"), (1, "none")):
                arguments = {"overlap": overlap}
                rows.append(
                    _row(
                        f"{name}, {where}, {count} x {overlap}",
                        model,
                        placement,
                        count,
                        arguments,
                        machine_of,
                        prepare_on,
                    )
                )
    return summary(rows)


def _row(
    name: str, make: Any, placement: penstock.Placement, count: int, arguments: Any, machine_of: Any, prepare_on: Any
) -> dict[str, Any]:
    machine = machine_of(LINK, 1e-9, update=UPDATE, device_update=UPDATE, job_seconds=_beside())
    request = plan_request(
        make,
        torch.optim.AdamW,
        batch,
        machine=machine,
        placement=placement,
        micro_batches=count,
        arguments=arguments,
    )
    request = replace(request, setup=replace(request.setup, back_end="threads"))
    trials = Trials(request)
    simulation = given(request, trials, placement).trial.simulation
    timed = time_ops(simulation.recipes, lambda op: max(machine_costs(machine).op(op), 1e-9), most_seconds=5)
    sleeps = {"upload": LINK, "download": LINK, "update": UPDATE, "device update": UPDATE}
    streams = SimulatedStreams(lambda stream, nbytes: nbytes / sleeps[stream] if stream in sleeps else 0.0)
    torch.manual_seed(0)
    model = make()
    stock = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = prepare_on(streams, model, stock, placement=placement, **arguments)
    steps = [_step(model, optimizer, count) for _ in range(WARM_UP + STEPS * ROUNDS)][WARM_UP:]
    optimizer.synchronize()
    optimizer.close()
    timing = retime(simulation.program, _Sleeps(sleeps, timed, machine.value("job_seconds")))
    return row(name, timing.step_s, statistics.median(steps))


class _Sleeps:
    """Costs of streams that sleep."""

    def __init__(self, sleeps: Any, ops: Any, beside: float) -> None:
        self._sleeps, self._ops, self._beside = sleeps, ops, beside

    def submit_seconds(self, program: Any) -> float:
        return 0.0

    def wake_seconds(self, program: Any) -> float:
        return 0.0

    def host_seconds(self, program: Any, number: int) -> float:
        return 0.0

    def segment(self, program: Any, number: int) -> Any:
        return Demand(sum(self._ops.get(program.ops[op], 0.0) * times for op, times in program.segments[number]))

    def meeting(self, meeting: Any, program: Any) -> Any:
        return Demand(0.0)

    def job(self, job: Any, program: Any) -> Any:
        return Demand(self._beside + (job.nbytes / self._sleeps[job.stream] if job.stream in self._sleeps else 0.0))


def _beside() -> float:
    """Seconds that work takes beside its sleep."""
    streams = SimulatedStreams(lambda stream, nbytes: 1e-3)
    taken = []
    for _ in range(50):
        started = time.perf_counter()
        streams.submit("upload", lambda: None).synchronize()
        taken.append(time.perf_counter() - started - 1e-3)
    streams.close()
    return max(1e-6, statistics.median(taken))


def _step(model: Any, optimizer: Any, count: int) -> float:
    started = time.perf_counter()
    for number in range(count):
        with contextlib.nullcontext() if number == count - 1 else optimizer.no_sync():
            optimizer.backward(model(**batch()).loss)
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - started
