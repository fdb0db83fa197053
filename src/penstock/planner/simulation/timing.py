"""How long a step would take, and what each resource would do meanwhile."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from penstock.ext.observe.timeline import OUTSIDE, RESOURCES, Recording, TraceSummary, TraceTimeline, Wait, merged
from penstock.trace import NO_LABEL

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
