"""Work that runs at the same time shares what it uses: max-min fair, as a fluid.

A task alone runs at speed 1. Beside others it runs as fast as its fair share of each capacity lets it: all speeds grow
alike from 0 until some capacity is used up; those that use it keep their speed, the others go on growing, up to 1
(progressive filling: D. Bertsekas, R. Gallager, "Data Networks", 1992, section 6.5.2). The slowest is as fast as it can
be.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

#: Shares of a capacity that sum to 1 but for rounding are no more than it.
_FULL = 1 + 1e-9
#: Tasks that end within this part of the time that it is end together: else rounding would decide what comes first.
_TOGETHER = 1 + 1e-11


Owner = TypeVar("Owner")


class Figures(Protocol):
    """A machine, as far as times follow from it (`penstock.planner.Machine` is one)."""

    def value(self, name: str) -> float:
        """Look up a figure; ConfigError where the machine lacks it."""

    def has(self, name: str) -> bool:
        """Whether the machine has a figure."""


class Demand(NamedTuple):
    """What a piece of work takes.

    Attributes:
        seconds: how long it takes alone.
        uses: by the name of a capacity, the share of it that it uses while it runs alone, on average; at most 1.
    """

    seconds: float
    uses: Mapping[str, float] = {}


def demand(seconds: float, loads: Mapping[str, float]) -> Demand:
    """Make the demand of work that takes some seconds at least, and alone would hold each capacity for some seconds.

    Arguments:
        seconds: that it takes where no capacity is in its way.
        loads: by the name of a capacity, how many seconds it would need all of it.
    """
    seconds = max(seconds, *loads.values()) if loads else seconds
    if seconds <= 0:
        return Demand(0.0)
    return Demand(seconds, {name: load / seconds for name, load in loads.items() if load > 0})


def fair_speeds(uses: Sequence[Mapping[str, float]]) -> list[float]:
    """Find the max-min fair speeds of tasks, from 0 to 1, in their order.

    Arguments:
        uses: of each task, the share of each capacity that it uses at speed 1.
    """
    speeds = [1.0] * len(uses)
    growing = list(range(len(uses)))
    left = {name: 1.0 for each in uses for name in each}
    while growing:
        wanted = {name: sum(uses[index].get(name, 0.0) for index in growing) for name in left}
        levels = {name: max(left[name], 0.0) / share for name, share in wanted.items() if share > 0}
        full = min(levels, key=levels.__getitem__, default="")  # the capacity that is used up first
        if not full or levels[full] * _FULL >= 1:
            break
        for index in [each for each in growing if full in uses[each]]:
            growing.remove(index)
            speeds[index] = levels[full]
            for name, share in uses[index].items():
                left[name] -= levels[full] * share
    return speeds


class _Task(Generic[Owner]):
    __slots__ = ("finish", "kind", "owner", "speed")

    def __init__(self, owner: Owner, kind: int, finish: float) -> None:
        self.owner, self.kind, self.finish, self.speed = owner, kind, finish, 1.0


class Fluid(Generic[Owner]):
    """Tasks under way, from one moment to the next at which one of them is over.

    Attributes:
        now: the time, in seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._tasks: list[_Task[Owner]] = []
        self._kinds: dict[tuple[tuple[str, float], ...], int] = {(): 0}
        self._uses: list[Mapping[str, float]] = [{}]
        self._known: dict[tuple[int, ...], dict[int, float]] = {}
        self._stale = False

    def start(self, taken: Demand, owner: Owner) -> None:
        """Begin a task.

        Arguments:
            taken: what it takes.
            owner: what `advance` returns once the task is over.
        """
        kind = self._kind(taken.uses) if taken.uses else 0
        self._tasks.append(_Task(owner, kind, self.now + taken.seconds))
        self._stale = self._stale or kind != 0

    def _kind(self, uses: Mapping[str, float]) -> int:
        """Number what a task uses: tasks of one number share alike."""
        key = tuple(sorted(uses.items()))
        number = self._kinds.setdefault(key, len(self._uses))
        if number == len(self._uses):
            self._uses.append(dict(key))
        return number

    def advance(self) -> list[Owner]:
        """Go on to when a task is over; return the owners of those that are, none where no task is under way."""
        if not self._tasks:
            return []
        if self._stale:
            self._share()
        self.now = max(self.now, min([task.finish for task in self._tasks]))
        limit = self.now * _TOGETHER
        over = [task for task in self._tasks if task.finish <= limit]
        self._tasks = [task for task in self._tasks if task.finish > limit]
        self._stale = any([task.kind for task in over])
        return [task.owner for task in over]

    def _share(self) -> None:
        """Give every task its speed."""
        self._stale = False
        kinds = tuple(sorted([task.kind for task in self._tasks if task.kind]))
        speeds = self._known.get(kinds)
        if speeds is None:
            found = fair_speeds([self._uses[kind] for kind in kinds])
            speeds = self._known[kinds] = dict(zip(kinds, found, strict=True)) | {0: 1.0}
        now = self.now
        for task in self._tasks:
            speed = speeds[task.kind]
            if speed != task.speed:  # else when it ends is known, and not rounded again
                task.finish = now + (task.finish - now) * task.speed / speed
                task.speed = speed


def total_loads(demands: Iterable[Demand]) -> dict[str, float]:
    """Sum up for how many seconds work would hold each capacity."""
    loads: dict[str, float] = {}
    for each in demands:
        for name, share in each.uses.items():
            loads[name] = loads.get(name, 0.0) + share * each.seconds
    return loads
