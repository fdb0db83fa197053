"""Repeated runs within a stated time: what is measured takes turns, and a figure is a median with its quartiles."""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median, quantiles
from typing import NamedTuple

#: At least. The first run on an accelerator loads kernels and wakes clocks, and one more says nothing of its spread.
LEAST_ROUNDS = 3
#: More rounds than these make no figure better.
MOST_ROUNDS = 25


class Measurement(NamedTuple):
    """One figure of a machine, in SI units: bytes/s, FLOP/s, seconds, bytes, or a count.

    Attributes:
        value: the median of the runs.
        low: their lower quartile.
        high: their upper quartile.
        how: how it was measured, as a sentence without its full stop.
    """

    value: float
    low: float
    high: float
    how: str


class Deadline:
    """A time to be done by.

    Arguments:
        seconds: from now on.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds

    def left(self) -> float:
        """Return the seconds that are left, below 0 once they are over."""
        return self._end - time.perf_counter()

    def share(self, part: float) -> "Deadline":
        """Make the deadline of a part of what is left now, from 0 to 1."""
        return Deadline(max(0.0, self.left()) * part)


class Turns(NamedTuple):
    """What the runs of several cases gave.

    Attributes:
        samples: of each case, what its runs after the warm-up returned.
        cut_short: whether the time was up before the rounds that were wanted.
    """

    samples: Mapping[str, Sequence[float]]
    cut_short: bool

    def median(self, case: str) -> float:
        """Return the median of a case."""
        return median(self.samples[case])

    def measurement(self, case: str, how: str) -> Measurement:
        """Make the figure of a case.

        Arguments:
            case: the name of the case.
            how: what was run; how often is added.
        """
        found = self.samples[case]
        told = f"{how}; median of {len(found)} runs"
        if self.cut_short:
            told += ", then the time was up"
        return Measurement(median(found), *quartiles(found), told)


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """Return the lower and the upper quartile of one sample or more."""
    if len(samples) == 1:
        return samples[0], samples[0]
    low, _, high = quantiles(samples, n=4, method="inclusive")
    return low, high


def take_turns(
    cases: Mapping[str, Callable[[], float]], deadline: Deadline, *, most_rounds: int = MOST_ROUNDS
) -> Turns:
    """Run all cases in turn, once to warm up, then three times and more until the time is up.

    In turn, because a machine's pace drifts: what is compared later has been measured under the same conditions.

    Arguments:
        cases: by name, what runs a case once and returns its sample.
        deadline: no round after the third begins that would be over after it.
        most_rounds: how many rounds to run at most, three or more.

    Returns:
        The samples of all rounds but the warm-up.
    """
    for run in cases.values():
        run()
    samples: dict[str, list[float]] = {name: [] for name in cases}
    rounds, round_seconds = 0, 0.0
    while rounds < LEAST_ROUNDS or (rounds < most_rounds and deadline.left() > round_seconds):
        start = time.perf_counter()
        for name, run in cases.items():
            samples[name].append(run())
        round_seconds = time.perf_counter() - start
        rounds += 1
    return Turns(samples, cut_short=rounds < most_rounds)


def seconds_of(work: Callable[[], object]) -> float:
    """Run work of the host and return its seconds, above 0."""
    start = time.perf_counter()
    work()
    return max(time.perf_counter() - start, 1e-9)
