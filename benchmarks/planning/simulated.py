"""Steps on simulated streams, which sleep as long as their bytes take: paper against the clock.

Beside the bandwidths the paper is told what one kind of operation takes (timed here), what it takes the host besides
(probed), and what a piece of work takes beside its sleep: the median of runs of work that sleeps for a millisecond.
"""

import contextlib
import itertools
import statistics
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import penstock
from penstock.planner import Machine, plan
from penstock.planner.cost import MachineCosts
from penstock.planner.plan_request import made, plan_request
from penstock.planner.search import given
from penstock.planner.simulation.fair_share import Demand
from penstock.planner.simulation.operation_times import time_ops
from penstock.planner.simulation.retime import retime
from penstock.planner.simulation.simulate import Setup
from penstock.planner.trials import Trials
from penstock.runtime.simulated import SimulatedStreams
from planning.models import batch, gpt2, llama
from planning.rows import row, summary

LINK, UPDATE = 2e6, 8e6
GRID_LINK, GRID_UPDATE = 2e7, 4e7  # a step is a tenth of those
WARM_UP, STEPS, ROUNDS, MOST = 2, 2, 3, 60
PROBE_SECONDS = 5.0
LIMIT = 0.5  # of the memory that everything on the device takes
ON_CPU = penstock.Placement(params="cpu", grads="cpu", optimizer="cpu")


def simulated() -> dict[str, Any]:
    """The rows: medians of rounds that take turns."""
    state = penstock.Placement(grads="cpu", optimizer="cpu")
    half = penstock.Placement(params={"device": 0.5, "cpu": 0.5}, grads="cpu", optimizer="cpu")
    own_s = Machine.probe(seconds=PROBE_SECONDS).value("op_host_seconds")
    rows = []
    for name, model in {"llama": llama, "gpt2": gpt2}.items():
        for where, placement in {"all on cpu": ON_CPU, "state on cpu": state, "half of params": half}.items():
            for count, overlap in ((1, "forward"), (3, "forward"), (1, "none")):
                case = f"{name}, {where}, {count} x {overlap}"
                rows.append(_row(case, model, placement, count, {"overlap": overlap}, own_s))
    return summary(rows)


def simulated_grid() -> dict[str, Any]:
    """`auto` against the best of a grid of placements that fit, by the clock: steps that take turns with `auto`'s."""
    from tests.modelled import machine_of

    rows = []
    shares = ({"cpu": 1.0}, {"device": 0.25, "cpu": 0.75}, {"device": 0.5, "cpu": 0.5}, {"device": 1.0})
    every = [
        penstock.Placement(params=params, grads=grads, optimizer=optimizer)
        for params, grads, optimizer in itertools.islice(itertools.product(shares, repeat=3), MOST)
    ]
    for name, model in {"llama": llama, "gpt2": gpt2}.items():
        machine = machine_of(GRID_LINK, 1e-5, update=GRID_UPDATE, device_update=GRID_UPDATE)
        options = penstock.Options(streamed_updates=0.0, tile_bytes=4096)
        asked = partial(plan, model, torch.optim.AdamW, batch, machine=machine, overlap="forward", options=options)
        room = int(LIMIT * asked(placement=penstock.Placement()).peak_bytes["device"])
        auto = asked(placement="auto", device_bytes=room)
        arguments = {"overlap": "forward", "options": options}
        found = {
            str(placement): _measured(model, placement, 1, arguments, GRID_LINK, GRID_UPDATE)
            for placement in every
            if asked(placement=placement, device_bytes=room).fits
        }
        # The least of many is lucky: the best few and the plan's are measured once more, in turns.
        best = [each for each in every if str(each) in sorted(found, key=lambda key: found[key])[:3]]
        again: dict[str, list[float]] = {}
        for _ in range(ROUNDS):
            for placement in (auto.placement, *best):
                seconds = _measured(model, placement, 1, arguments, GRID_LINK, GRID_UPDATE)
                again.setdefault(str(placement), []).append(seconds)
        medians = {key: statistics.median(each) for key, each in again.items()}
        least = min(medians[str(each)] for each in best)
        rows.append(row(name, medians[str(auto.placement)], least, fitting=len(found), auto=str(auto.placement)))
    return summary(rows)


def _row(
    name: str, make: Any, placement: penstock.Placement, count: int, arguments: Any, own_s: float
) -> dict[str, Any]:
    from tests.modelled import machine_of

    machine = machine_of(LINK, 1e-9, update=UPDATE, device_update=UPDATE, job_seconds=_beside())
    request = plan_request(
        Setup(made(make), torch.optim.AdamW, batch, micro_batches=count, hosts=1),
        machine=machine,
        arguments=arguments,
    )
    request = replace(request, setup=replace(request.setup, back_end="threads"))
    simulation = given(request, Trials(request), placement).trial.simulation
    timed = time_ops(simulation.recipes, lambda op: max(MachineCosts(machine).op(op), 1e-9), most_seconds=2)
    measured_s = _measured(make, placement, count, arguments, LINK, UPDATE)
    costs = _Sleeps(_sleeps(LINK, UPDATE), timed, machine.value("job_seconds"), own_s)
    return row(name, retime(simulation.program, costs).step_s, measured_s)


def _sleeps(link: float, update: float) -> dict[str, float]:
    """Bytes/s of each stream that sleeps."""
    return {"upload": link, "download": link, "update": update, "device update": update}


def _measured(
    make: Any, placement: penstock.Placement, count: int, arguments: Any, link: float, update: float
) -> float:
    """Seconds of a step on streams that sleep."""
    from tests.lib.engines import prepare_on

    sleeps = _sleeps(link, update)
    streams = SimulatedStreams(lambda stream, nbytes: nbytes / sleeps[stream] if stream in sleeps else 0.0)
    torch.manual_seed(0)
    model = make()
    stock = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = prepare_on(streams, model, stock, placement=placement, **arguments)
    steps = [_step(model, optimizer, count) for _ in range(WARM_UP + STEPS * ROUNDS)][WARM_UP:]
    optimizer.synchronize()
    optimizer.close()
    return statistics.median(steps)


class _Sleeps:
    """Costs of streams that sleep."""

    def __init__(self, sleeps: Any, ops: Any, beside: float, own: float) -> None:
        self._sleeps, self._ops, self._beside, self._own = sleeps, ops, beside, own

    def submit_seconds(self, program: Any) -> float:
        return 0.0

    def wake_seconds(self, program: Any) -> float:
        return 0.0

    def host_seconds(self, program: Any, number: int) -> float:
        return 0.0

    def segment(self, program: Any, number: int) -> Any:
        counted = program.segments[number]
        return Demand(sum((self._ops.get(program.ops[op], 0.0) + self._own) * times for op, times in counted))

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
