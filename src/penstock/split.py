"""Which tiles are on which tier, when a kind of state is split between tiers. Pure arithmetic.

    tiles of unit 0        | tiles of unit 1        | tiles of unit 2        |
    device device device     device cpu    cpu        cpu    nvme   nvme

All units are cut together, in forward order, fastest tier first: what forward needs first is updated first, and what
has to wait for a slow tier is needed last. Equal fractions of two kinds give equal cuts, so that a tile's gradient and
parameters are where its update runs. Only units on a cut have several tiers.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.kinds import Tier

FASTEST_FIRST = (Tier.DEVICE, Tier.CPU, Tier.NVME)


class TierRange(NamedTuple):
    """Elements `start` to `stop`, on one tier."""

    tier: Tier
    start: int
    stop: int


def split(
    units: Sequence[Sequence[int]], fractions: Mapping[Tier, float], bytes_of: Sequence[float] | None = None
) -> list[tuple[TierRange, ...]]:
    """Give each tier its fraction of all bytes, to within one tile.

    Arguments:
        units: how many elements each tile of each unit has, the units in forward order.
        fractions: each tier's fraction of the bytes; they sum to 1.
        bytes_of: how many bytes an element of each unit takes; `None` where that is the same for all.

    Returns:
        For each unit its spans, in order, each of whole tiles.

    Example:
        >>> split([[4, 4], [4, 2]], {Tier.DEVICE: 0.25, Tier.CPU: 0.75})[0]
        (TierRange(tier=<Tier.DEVICE: 'device'>, start=0, stop=4), TierRange(tier=<Tier.CPU: 'cpu'>, start=4, stop=8))
    """
    tiers = [tier for tier in FASTEST_FIRST if fractions.get(tier)]
    weights = bytes_of or [1.0] * len(units)
    total = sum(weight * sum(tiles) for weight, tiles in zip(weights, units, strict=True))
    ends, share = [], 0.0
    for tier in tiers[:-1]:
        share += fractions[tier]
        ends.append(share * total)
    spans: list[tuple[TierRange, ...]] = []
    passed, current = 0.0, 0
    for tiles, weight in zip(units, weights, strict=True):
        unit: list[TierRange] = []
        cursor = 0
        for numel in tiles:
            # The cut is rounded to whole tiles: one goes to the next tier where half of it or more is behind the cut.
            while current < len(ends) and passed + weight * numel / 2 >= ends[current]:
                current += 1
            if unit and unit[-1].tier is tiers[current]:
                unit[-1] = unit[-1]._replace(stop=cursor + numel)
            else:
                unit.append(TierRange(tiers[current], cursor, cursor + numel))
            cursor += numel
            passed += weight * numel
        spans.append(tuple(unit))
    return spans


def part(spans: Sequence[TierRange], start: int, stop: int) -> tuple[TierRange, ...]:
    """Cut a range out of spans.

    Arguments:
        spans: the spans, in order.
        start: the first element of the range.
        stop: the element after its last one.

    Returns:
        What lies in the range, counted from its start.
    """
    inside = (TierRange(tier, max(first, start) - start, min(last, stop) - start) for tier, first, last in spans)
    return tuple(span for span in inside if span.start < span.stop)
