"""How long a step takes on a machine, and what each resource does meanwhile.

A run on paper (`program_run.py`) shares capacities fairly, as machines do, and starts work as soon as it can. So it has
the anomaly that machines have (R. L. Graham, "Bounds on Multiprocessing Timing Anomalies", 1969): where something
becomes faster, work that nothing waits for starts sooner, and may delay work that something waits for.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from penstock.ext.observe.timeline import OUTSIDE, RESOURCES, Recording, TraceSummary, TraceTimeline, Wait, merged
from penstock.planner.simulation.fair_share import Demand, total_loads
from penstock.planner.simulation.program import Program, WorkKind, one_collection
from penstock.planner.simulation.program_run import Costs, Run
from penstock.trace import NO_LABEL

__all__ = ["Costs", "Timing", "between", "busiest", "retime"]

#: What binds where neither compute nor a stream is busy most: the host, which enqueues one operation after the other.
ENQUEUING = "host enqueuing"


@dataclass(frozen=True)
class Timing:
    """When everything of a program would happen on a machine.

    Attributes:
        recording: of all its steps, from 0 on, as a trace of a run would be.
        marks: when each step begins, and when the last one is over: when compute is through with what it was given.
        step_s: seconds of a step in the steady state: of the last one, and no less than any resource needs for it.
        steps_s: seconds of each step; the first ones still find everything idle.
    """

    recording: Recording
    marks: Sequence[float]
    step_s: float
    steps_s: Sequence[float] = field(default=())

    @cached_property
    def step(self) -> Recording:
        """The last step alone."""
        return between(self.recording, self.marks[-2], self.marks[-1])

    @cached_property
    def summary(self) -> TraceSummary:
        """What kept the last step busy, and what kept it waiting."""
        return self._timeline.summary()

    @cached_property
    def busy_s(self) -> Mapping[str, float]:
        """Seconds in which each resource works in the last step, by its words in a trace."""
        rows: dict[str, list[tuple[float, float]]] = {}
        for row, spans in self._timeline.rows.items():
            rows.setdefault(RESOURCES[row], []).extend((span.start, span.stop) for span in spans)
        return {name: sum(stop - start for start, stop in merged(pieces)) for name, pieces in rows.items()}

    @property
    def waits_s(self) -> Mapping[str, float]:
        """Seconds of exposed wait in the last step by cause, such as "gather layers.3 (upload)"; the longest first."""
        return self.summary.waits

    @property
    def bound_by(self) -> str:
        """The resource with the most busy time in the last step."""
        found = self.summary.bound_by
        return ENQUEUING if found == OUTSIDE else found  # on paper there is nothing else that could take time

    @cached_property
    def _timeline(self) -> TraceTimeline:
        return TraceTimeline(self.step)


@one_collection()
def retime(program: Program, costs: Costs) -> Timing:
    """Say when everything of a program happens, by the rules of its back end.

    Arguments:
        program: what one rank does in some steps.
        costs: what its parts take (`MachineCosts`).

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


def between(recording: Recording, start: float, stop: float) -> Recording:
    """Cut out what happens from one moment to another. What a span follows is kept where it is in that time as well."""
    kept = [number for number, span in enumerate(recording.spans) if span.stop > start and span.start < stop]
    numbers = {number: place for place, number in enumerate(kept)}
    spans = []
    for number in kept:
        span = recording.spans[number]
        after = tuple(numbers[other] for other in span.after if other in numbers)
        spans.append(replace(span, start=max(span.start, start), stop=min(span.stop, stop), after=after))
    waits = [
        Wait(numbers[wait.span], max(wait.start, start), min(wait.stop, stop), wait.by_host)
        for wait in recording.waits
        if wait.stop > start and wait.start < stop and wait.span in numbers
    ]
    before = [label for when, label in recording.compute if when <= start]
    turns = [(when, label) for when, label in recording.compute if start < when < stop]
    return Recording(start, stop, spans, waits, [(start, before[-1] if before else NO_LABEL), *turns])
