"""How long a program takes on a machine.

A run on paper (`program_run.py`) shares capacities fairly, as machines do, and starts work as soon as it can. So it has
the anomaly that machines have (R. L. Graham, "Bounds on Multiprocessing Timing Anomalies", 1969): where something
becomes faster, work that nothing waits for starts sooner, and may delay work that something waits for.
"""

from collections import defaultdict
from itertools import pairwise

from penstock.planner.simulation.fair_share import Demand, total_loads
from penstock.planner.simulation.program import Program, WorkKind
from penstock.planner.simulation.program_run import Costs, Run
from penstock.planner.simulation.timing import Timing

__all__ = ["Costs", "Timing", "retime"]


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
