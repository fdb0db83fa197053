"""Repeated runs within a stated time: cases take turns, and a figure is a median with its quartiles."""

import time
from collections.abc import Callable, Mapping

import torch

from penstock.planner.rates import Rate
from penstock.runtime.control_group import ControlGroup
from penstock.runtime.hardware import CPU

LEAST_ROUNDS = 3  # after the warm-up: one run says nothing of its spread
MOST_ROUNDS = 25
RUN_SECONDS, MOST_TIMES = 0.01, 200  # of `seconds_each`
#: What a run goes over for each second of its part: a round is then a tenth of the part's time, or less.
BYTES_PER_SECOND = 64 << 20

#: Runs a case once and returns its sample, and what it runs, in words.
Case = tuple[Callable[[], float], str]


#: Figures of a machine by name.
Figures = dict[str, Rate]


class Deadline:
    """A time to be done by.

    Arguments:
        seconds: from now on.
        control_group: ranks that measure together, whose first one's clock decides: a rank that went on alone would
            wait for the others in vain. `None` for a rank that measures alone.
    """

    def __init__(self, seconds: float, control_group: ControlGroup | None = None) -> None:
        self._end = time.perf_counter() + seconds
        self._control_group = control_group

    def left(self) -> float:
        """Return the seconds that are left, below 0 after the end."""
        return self._end - time.perf_counter()

    def share(self, part: float) -> "Deadline":
        """Make the deadline of a part of what is left now, from 0 to 1."""
        return Deadline(max(0.0, self.left()) * part)

    def allows(self, seconds: float) -> bool:
        """Return True if something that takes some seconds is over in time. Collective, if several ranks measure."""
        allowed = self.left() > seconds
        return allowed if self._control_group is None else bool(self._control_group.share(allowed))

    def nbytes(self, least: int, most: int) -> int:
        """Return how many bytes a run may go over in the time that is left: whole MiB, `least` or more."""
        return max(least, min(most, int(self.left() * BYTES_PER_SECOND))) >> 20 << 20


def take_turns(cases: Mapping[str, Case], deadline: Deadline) -> Figures:
    """Run all cases in turn, once to warm up, then three times and more until the time is up.

    In turn, because a machine's pace drifts: figures that are compared were measured under the same conditions. The
    first run on an accelerator loads kernels and wakes clocks.

    Arguments:
        cases: by the name of the figure.
        deadline: no round after the third begins that would be over after it.

    Returns:
        The figures, of all rounds but the warm-up.
    """
    for run, _ in cases.values():
        run()
    samples: dict[str, list[float]] = {name: [] for name in cases}
    rounds, round_seconds = 0, 0.0
    while rounds < LEAST_ROUNDS or (rounds < MOST_ROUNDS and deadline.allows(round_seconds)):
        start = time.perf_counter()
        for name, (run, _) in cases.items():
            samples[name].append(run())
        round_seconds = time.perf_counter() - start
        rounds += 1
    told = f"; median of {rounds} runs" + (", then the time was up" if rounds < MOST_ROUNDS else "")
    return {name: Rate.of(samples[name], how + told) for name, (_, how) in cases.items()}


def synchronize(device: torch.device) -> None:
    """Wait until a device is idle."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device = CPU, times: int = 1) -> float:
    """Return the seconds of some work, above 0: of each time, from when the device is idle to when it is idle again."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(times):
        work()
    synchronize(device)
    return max(time.perf_counter() - start, 1e-9) / times


def seconds_each(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of some work, which is run so often that its start and its end do not count."""
    once = seconds_of(work, device)
    times = min(MOST_TIMES, int(RUN_SECONDS / once))
    return once if times < 2 else seconds_of(work, device, times)
