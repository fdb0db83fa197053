"""How evenly the ranks of a run work: who the others wait for."""

from dataclasses import dataclass
from statistics import median
from typing import Any

#: A rank that takes this much longer than the median rank is shown.
SLOW = 1.2


@dataclass(frozen=True)
class Spread:
    """What each rank's steps take without what it waits for other ranks.

    Attributes:
        seconds: of a step, by rank.
        hosts: how many hosts there are, each with as many ranks.
    """

    seconds: tuple[float, ...]
    hosts: int = 1

    @property
    def slowest(self) -> int:
        """The rank that takes longest."""
        return max(range(len(self.seconds)), key=lambda rank: self.seconds[rank])

    def __str__(self) -> str:
        """Name the slowest rank; empty where it is not clearly slower than the others."""
        usual, most = median(self.seconds), max(self.seconds)
        if not 0 < SLOW * usual < most:
            return ""
        host = self.slowest * self.hosts // len(self.seconds) + 1
        where = f" on host {host} of {self.hosts}" if self.hosts > 1 else ""
        return f"rank {self.slowest}{where}, {most / usual - 1:.0%} longer than the median"

    def to_dict(self) -> dict[str, Any]:
        """List what `metrics.jsonl` says of it."""
        return {
            "rank_seconds_least": min(self.seconds),
            "rank_seconds_median": median(self.seconds),
            "rank_seconds_most": max(self.seconds),
            "slowest_rank": self.slowest,
        }
