"""What is missing where nothing fits, and the changes after which something does.

Nothing takes less than cuts that all kinds share: then no tile has its parameters apart from its update. So state fits
if its bytes are no more than the room of all tiers together, beside what is there anyway.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, floor

from penstock.config import TierName
from penstock.planner.formatting import size
from penstock.planner.workload import TIERS, Limits, StepWorkload

MOST_TIMES_RANKS = 1024
#: No batch is smaller than a sample: what needs less than this share of it is no way out.
LEAST_BATCH = 1 / 256


@dataclass(frozen=True)
class Change:
    """A change after which something fits.

    Attributes:
        what: "choice", "nvme", "batch" or "ranks".
        amount: bytes more of the nvme tier; the share of the batch that fits; ranks in all; 0 for a choice.
        words: the same for people.
    """

    what: str
    amount: float
    words: str


@dataclass(frozen=True)
class Infeasible:
    """Nothing fits.

    Attributes:
        missing: bytes by tier: with so many more something fits, with fewer nothing does.
        changes: what else makes it fit, the smallest first.
    """

    missing: Mapping[TierName, int]
    changes: tuple[Change, ...] = ()


def lacks(workload: StepWorkload, limits: Limits) -> Infeasible:
    """Say what is missing for a workload that fits nowhere, and what would make it fit."""
    ways = (_files(workload, limits), _batch(workload, limits), _ranks(workload, limits))
    return Infeasible(missing(workload, limits), tuple(way for way in ways if way is not None))


def fits(workload: StepWorkload, limits: Limits) -> bool:
    """Whether there is a placement within the limits, as fine as bytes."""
    return not missing(workload, limits)


def missing(workload: StepWorkload, limits: Limits) -> dict[TierName, int]:
    """Count the bytes that are missing on each tier, as few in all as can be; empty where it fits.

    Where it makes no difference in bytes, what is missing is missing on the slowest tier.
    """
    room = _room(workload, limits)
    lacking = {tier: ceil(-nbytes) for tier, nbytes in room.items() if nbytes < 0}
    if (rest := _at_rest(workload, limits) - sum(max(0.0, nbytes) for nbytes in room.values())) > 0:
        lacking[limits.tiers[-1]] = ceil(rest + max(0.0, -room[limits.tiers[-1]]))
    return lacking


def _room(workload: StepWorkload, limits: Limits) -> dict[TierName, float]:
    """Count what each tier has room for, beside what is there wherever the state is; below 0 where that is too much."""
    there = {tier: workload.there(tier) for tier in TIERS}
    return {tier: limits.room(tier) - limits.taken(tier, there) for tier in limits.tiers}


def _at_rest(workload: StepWorkload, limits: Limits) -> int:
    """Count the state. Where a part of the parameters can be in files, each rank has its shard alone."""
    return sum((workload.in_shards if "nvme" in limits.tiers else workload).kind_bytes.values())


def _files(workload: StepWorkload, limits: Limits) -> Change | None:
    """Find how many bytes more in files would do."""
    room = _room(workload, limits)
    if any(nbytes < 0 for tier, nbytes in room.items() if tier != "nvme"):
        return None
    unlimited = limits.with_room("nvme", 0)
    more = ceil(_at_rest(workload, unlimited) - sum(room.values()))
    words = "more of the nvme tier" if "nvme" in limits.bytes else "of an nvme tier"
    return Change("nvme", more, f"{size(more)} {words}")


def _batch(workload: StepWorkload, limits: Limits) -> Change | None:
    """Find what share of the batch would do."""
    room = _room(replace(workload, activation_peak_bytes={}), limits)
    peak = {tier: limits.taken(tier, workload.activation_peak_bytes) for tier in limits.tiers}
    whole = sum(peak.values())
    if not whole or any(nbytes < 0 for nbytes in room.values()):
        return None
    shares = [nbytes / peak[tier] for tier, nbytes in room.items() if peak[tier]]
    share = min(*shares, (sum(room.values()) - _at_rest(workload, limits)) / whole)
    if share < LEAST_BATCH:
        return None
    return Change("batch", share, f"a micro-batch of {floor(share * 100) or '<1'} % of this one")


def _ranks(workload: StepWorkload, limits: Limits) -> Change | None:
    """Find how many ranks would do, each with memory of its own."""
    ranks = range(workload.ranks, MOST_TIMES_RANKS * workload.ranks)
    found = bisect_left(ranks, True, key=lambda count: fits(workload.over(count), limits))
    if not workload.sharded or found == len(ranks):
        return None
    every, more = ranks[found] * workload.copies, found * workload.copies
    return Change("ranks", every, f"{more} more rank{'s' if more > 1 else ''}, {every} in all")
