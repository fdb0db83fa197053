"""How long a program takes on a machine, and on others so that no two answers contradict each other.

A run on paper (`program_run.py`) shares capacities fairly, as machines do, and starts work as soon as it can. So
it has the anomaly that machines have (R. L. Graham, "Bounds on Multiprocessing Timing Anomalies", 1969): something
becomes faster, work that nobody waits for starts sooner, and is in the way of work that somebody waits for. Of 4,000
random programs one faster figure lengthened 7 % of the runs and 3 % of the steps, by about 1 % at the median and 74 %
at worst. `Timings` takes that out.
"""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Generic, TypeVar

from penstock.planner.simulation.fair_share import Demand, total_loads
from penstock.planner.simulation.program import Program, WorkKind
from penstock.planner.simulation.program_run import Costs, Run
from penstock.planner.simulation.timing import Timing

__all__ = ["Costs", "Timing", "Timings", "retime"]

AnyCosts = TypeVar("AnyCosts", bound=Costs)


class Timings(Generic[AnyCosts]):
    """Times of one program on several machines: one that is faster in some figures, and in none slower, is no slower.

    Guaranteed, in whatever order machines are asked for: the step on one is at most `pace` times the step on another.
    For figures that are at least as good that factor is 1 or less; where all are k times as good it is 1/k, in both
    directions, so the step is 1/k exactly.

    Why that is sound: what one machine does at some moment the other can do as well, so many times slower. So the first
    one's run, at that pace, is a run of the second one, and its step is no shorter than need be. A run that is longer
    than the shortest of these is replaced by it. One that is shorter than what was answered for a faster machine allows
    is let run at the pace that meets it. The two never exclude each other, because factors multiply: from a to c it is
    at most that from a to b times that from b to c.

    Arguments:
        program: what one rank does in some steps.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._known: list[tuple[AnyCosts, Timing]] = []

    def on(self, costs: AnyCosts) -> Timing:
        """Say how long the program takes on a machine; the step is consistent with all that was answered before.

        Arguments:
            costs: what its parts take there.

        Raises:
            ConfigError: the machine lacks a figure that the program needs.
            ValueError: the program has no step, or waits for work that it never submits.
        """
        timing = retime(self._program, costs)
        paced = [(factor, known) for other, known in self._known if (factor := costs.pace(other)) < inf]
        most = min(((factor * known.step_s, factor, known) for factor, known in paced), key=_first, default=None)
        least = max((known.step_s / factor for other, known in self._known if (factor := other.pace(costs))), default=0)
        if most is not None and timing.step_s > most[0]:
            timing = most[2].at_pace(most[1])
        elif timing.step_s < least:
            timing = _stretched(timing, least)
        self._known.append((costs, timing))
        return timing


def retime(program: Program, costs: Costs) -> Timing:
    """Say when everything of a program happens, by the rules of its back end.

    Arguments:
        program: what one rank does in some steps.
        costs: what its parts take (`machine_costs`).

    Returns:
        The times.

    Raises:
        ConfigError: the machine lacks a figure that the program needs.
        ValueError: the program has no step, or waits for work that it never submits.
    """
    if len(program.steps) < 2:
        raise ValueError("This program has no step.")
    run = Run(program, costs)
    recording = run.run()
    steps_s = [stop - start for start, stop in pairwise(run.marks)]
    # What a lone step leaves under way is part of it; what the last of several does, the one before did as well.
    last = steps_s[-1] if len(steps_s) > 1 else recording.stop
    return Timing(recording, run.marks, max(last, busiest(program, costs, len(steps_s) - 1)), steps_s)


def busiest(program: Program, costs: Costs, step: int) -> float:
    """Give the most seconds for which a step's work needs any one capacity, stream or clock: no steady step is shorter.

    Arguments:
        program: what one rank does.
        costs: what its parts take.
        step: the number of the step.
    """
    seconds: defaultdict[object, float] = defaultdict(float)
    demands: list[Demand] = []
    for item in program.items[program.steps[step] : program.steps[step + 1]]:
        row: object = "compute"
        if item.kind is WorkKind.COMPUTE:
            taken = costs.segment(program, item.index)
        elif item.kind is WorkKind.SUBMIT:
            job = program.jobs[item.index]
            taken, row = costs.job(job, program), (job.stream, job.folder)
        elif item.kind is WorkKind.MEET:
            taken, row = costs.meeting(program.meetings[item.index], program), "host"
        else:
            continue
        seconds[row] += taken.seconds
        demands.append(taken)
    return max([*seconds.values(), *total_loads(demands).values()], default=0.0)


def _stretched(timing: Timing, step_s: float) -> Timing:
    if not timing.step_s:  # a wait alone, which was over when earlier steps had taken long: no pace lengthens that
        return replace(timing, step_s=step_s)
    return timing.at_pace(step_s / timing.step_s)


def _first(found: tuple[float, float, Timing]) -> float:
    return found[0]
