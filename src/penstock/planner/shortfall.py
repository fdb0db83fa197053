"""What is missing where nothing fits, to the byte, and the changes after which something does."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil, floor

from penstock.config import TierName
from penstock.planner.bytes_moved import Traffic, variants
from penstock.planner.formatting import size
from penstock.planner.linear import CONSTANT, Linear, Terms, unit_of
from penstock.planner.workload import Fractions, Limits, Load

#: Where it makes no difference in bytes, what is missing is missing on the slowest tier.
_DEAR: Mapping[TierName, float] = {"device": 1 + 2**-16, "cpu": 1 + 2**-17, "nvme": 1.0}
_WHERE: Mapping[TierName, str] = {"device": "on the device", "cpu": "in host memory", "nvme": "on disk"}
MOST_TIMES_RANKS = 1024
#: No batch is smaller than a sample: what needs less than this share of it is no way out.
LEAST_BATCH = Fraction(1, 256)


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
    changes: tuple[Change, ...] = field(default=())

    @property
    def smallest(self) -> Change | None:
        """The smallest change after which something fits."""
        return self.changes[0] if self.changes else None

    def __str__(self) -> str:
        lacking = " and ".join(f"{size(nbytes)} {_WHERE[tier]}" for tier, nbytes in self.missing.items())
        ways = f" It fits with {', or with '.join(change.words for change in self.changes)}." if self.changes else ""
        return f"It does not fit: {lacking} too few.{ways}"


def lacks(load: Load, limits: Limits, fractions: Fractions | None = None) -> Infeasible:
    """Say what is missing for a load that fits nowhere, and what would make it fit; or what given fractions lack."""
    if fractions is not None:
        return Infeasible(missing(load, limits, fractions))
    ways = (_files(load, limits), _batch(load, limits), _ranks(load, limits))
    return Infeasible(missing(load, limits), tuple(way for way in ways if way is not None))


def fits(load: Load, limits: Limits) -> bool:
    """Whether there is a placement within the limits, as fine as bytes."""
    return not missing(load, limits)


def missing(load: Load, limits: Limits, fractions: Fractions | None = None) -> dict[TierName, int]:
    """Count the bytes that are missing on each tier, as few in all as can be; empty where it fits.

    Arguments:
        load: what there is.
        limits: where it may be.
        fractions: where it is, if that is given.
    """
    found = [_missing(variant, limits, fractions) for variant in variants(load, limits, fractions)]
    return min(found, key=lambda each: sum(each.values()))


def _missing(load: Load, limits: Limits, fractions: Fractions | None) -> dict[TierName, int]:
    linear = Linear()
    traffic = Traffic(load, limits, linear, "forward")
    if fractions is not None:
        traffic.pin(fractions)
    rows = {tier: traffic.memory(tier) for tier in limits.tiers}
    unit = max(unit_of(row) for row in rows.values())
    for tier, row in rows.items():
        linear.at_most(tier, {**row, _lack(tier): -unit}, limits.room(tier))
    values = linear.exactly({_lack(tier): _DEAR[tier] for tier in limits.tiers})
    assert values is not None, "whatever is missing may be"
    # What the rows come to, and not the variables: a byte of many is less than what tells two bases apart.
    lacking = {tier: ceil(_exact(row, values)) - limits.room(tier) for tier, row in rows.items()}
    return {tier: nbytes for tier, nbytes in lacking.items() if nbytes > 0}


def _exact(terms: Terms, values: Mapping[str, Fraction]) -> Fraction:
    """Sum up terms without rounding."""
    known = {**values, CONSTANT: Fraction(1)}
    return sum((Fraction(factor) * known[name] for name, factor in terms.items()), Fraction(0))


def _files(load: Load, limits: Limits) -> Change | None:
    """Find how many bytes more in files would do."""
    unbounded = limits.with_room("nvme", 0)

    def least(variant: Load) -> Fraction | None:
        linear = Linear()
        traffic = Traffic(variant, unbounded, linear, "forward")
        for tier in unbounded.tiers:
            if tier != "nvme":
                linear.at_most(tier, traffic.memory(tier), limits.room(tier))
        files = traffic.memory("nvme")
        linear.at_most("files", {**files, "files": -unit_of(files)})
        values = linear.exactly({"files": 1.0})
        return None if values is None else values["files"] * Fraction(unit_of(files))

    found = [need for variant in variants(load, unbounded) if (need := least(variant)) is not None]
    if not found:
        return None
    more = ceil(min(found)) - limits.of("nvme")
    words = "more of the nvme tier" if "nvme" in limits.bytes else "of an nvme tier"
    return Change("nvme", more, f"{size(more)} {words}")


def _batch(load: Load, limits: Limits) -> Change | None:
    """Find what share of the batch would do."""
    peak = load.activation_peak_bytes
    if not any(peak.values()):
        return None

    def most(variant: Load) -> Fraction | None:
        linear = Linear()
        traffic = Traffic(replace(variant, activation_peak_bytes={}), limits, linear, "forward")
        linear.equals("the rest", {"batch": 1.0, "left out": 1.0}, 1.0)
        for tier in limits.tiers:
            terms = {**traffic.memory(tier), "batch": float(limits.taken(tier, peak))}
            linear.at_most(tier, terms, limits.room(tier))
        values = linear.exactly({"left out": 1.0})
        return None if values is None else values["batch"]

    found = [share for variant in variants(load, limits) if (share := most(variant)) is not None]
    share = max(found, default=Fraction(0))
    if share < LEAST_BATCH:
        return None
    percent = floor(share * 100)
    return Change("batch", float(share), f"a micro-batch of {percent or '<1'} % of this one")


def _ranks(load: Load, limits: Limits) -> Change | None:
    """Find how many ranks would do, each with memory of its own."""
    if not load.sharded:
        return None
    enough = _least(lambda ranks: fits(load.over(ranks), limits), load.ranks, MOST_TIMES_RANKS * load.ranks)
    if enough is None:
        return None
    every, more = enough * load.copies, (enough - load.ranks) * load.copies
    return Change("ranks", every, f"{more} more rank{'s' if more > 1 else ''}, {every} in all")


def _least(enough: Callable[[int], bool], too_few: int, most: int) -> int | None:
    """Find the least number above one that is not enough; of more, each is enough once one is."""
    upper = too_few * 2
    while not enough(upper):
        too_few, upper = upper, upper * 2
        if upper > most:
            return None
    while upper - too_few > 1:
        middle = (too_few + upper) // 2
        too_few, upper = (too_few, middle) if enough(middle) else (middle, upper)
    return upper


def _lack(tier: TierName) -> str:
    return f"lack {tier}"
