"""Which tiles go where: whole tiles, as many as the fractions say, in forward order, fastest tier first."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import Tier
from penstock.layout import FASTEST_FIRST, TierRange, part, split
from tests.lib.fuzz import examples

DEVICE, CPU, NVME = Tier.DEVICE, Tier.CPU, Tier.NVME

#: elements of each tile of each unit
models = st.lists(st.lists(st.integers(1, 1000), min_size=1, max_size=8), min_size=1, max_size=8)


@st.composite
def fractions(draw: st.DrawFn) -> dict[Tier, float]:
    """Any that sum to 1, of one tier, two or three, in any order."""
    tiers = draw(st.permutations(FASTEST_FIRST))[: draw(st.integers(1, 3))]
    cuts = sorted(draw(st.lists(st.floats(0, 1), min_size=len(tiers) - 1, max_size=len(tiers) - 1)))
    return {tier: stop - start for tier, (start, stop) in zip(tiers, pairwise([0.0, *cuts, 1.0]), strict=True)}


def on(tier: Tier, units: list[tuple[TierRange, ...]]) -> int:
    return sum(span.stop - span.start for spans in units for span in spans if span.tier is tier)


@examples(40)
@given(models, fractions())
def test_each_tier_has_its_fraction_of_all_elements_to_within_a_tile(units, fractions):
    found = split(units, fractions)
    tile = max(map(max, units))
    for tier in Tier:
        share = fractions.get(tier, 0.0)
        assert abs(on(tier, found) - share * sum(map(sum, units))) <= tile + 1e-6
        assert share or not on(tier, found), "a tier without a share has no tile"


@examples(40)
@given(models, fractions(), st.data())
def test_bytes_count_where_units_are_not_alike(units, fractions, data):
    bytes_of = data.draw(st.lists(st.sampled_from([2, 4, 12]), min_size=len(units), max_size=len(units)))
    found = split(units, fractions, bytes_of)
    tile = max(nbytes * max(tiles) for nbytes, tiles in zip(bytes_of, units, strict=True))
    total = sum(nbytes * sum(tiles) for nbytes, tiles in zip(bytes_of, units, strict=True))
    for tier in Tier:
        held = sum(nbytes * on(tier, [spans]) for nbytes, spans in zip(bytes_of, found, strict=True))
        assert abs(held - fractions.get(tier, 0.0) * total) <= tile + 1e-6


@examples(40)
@given(models, fractions())
def test_spans_are_whole_tiles_that_follow_each_other_fastest_first(units, fractions):
    found = split(units, fractions)
    assert len(found) == len(units)
    speeds = []
    for tiles, spans in zip(units, found, strict=True):
        borders = {sum(tiles[:count]) for count in range(len(tiles) + 1)}
        assert spans[0].start == 0
        assert spans[-1].stop == sum(tiles)
        assert all(a.stop == b.start and a.tier is not b.tier for a, b in pairwise(spans))
        assert {border for span in spans for border in span[1:]} <= borders
        speeds += [FASTEST_FIRST.index(span.tier) for span in spans]
    assert speeds == sorted(speeds), "over all units in forward order"


@examples(40)
@given(models, fractions())
def test_equal_fractions_are_equal_cuts(units, fractions):
    assert split(units, fractions) == split(units, dict(reversed(fractions.items())))


def test_a_cut_in_the_middle_of_a_unit():
    tenths = {DEVICE: 0.5, CPU: 0.3, NVME: 0.2}
    assert split([[4, 4, 2], [4, 4, 2]], tenths) == [
        (TierRange(DEVICE, 0, 10),),
        (TierRange(CPU, 0, 4), TierRange(NVME, 4, 10)),
    ]
    assert split([[4] * 10], tenths) == [(TierRange(DEVICE, 0, 20), TierRange(CPU, 20, 32), TierRange(NVME, 32, 40))]


def test_a_tile_goes_where_more_than_half_of_it_belongs_and_where_none_has_more_to_the_slower_tier():
    assert split([[10, 10]], {DEVICE: 0.75, CPU: 0.25}) == [(TierRange(DEVICE, 0, 10), TierRange(CPU, 10, 20))]
    assert split([[10, 10]], {DEVICE: 0.8, CPU: 0.2}) == [(TierRange(DEVICE, 0, 20),)]
    assert split([[10, 10]], {DEVICE: 0.74, CPU: 0.26}) == [(TierRange(DEVICE, 0, 10), TierRange(CPU, 10, 20))]


def test_fractions_whose_sum_is_rounded_lose_no_tile():
    thirds = {DEVICE: 0.3333333, CPU: 0.3333333, NVME: 0.3333333}
    assert split([[1] * 9], thirds) == [(TierRange(DEVICE, 0, 3), TierRange(CPU, 3, 6), TierRange(NVME, 6, 9))]


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [
        (0, 10, (TierRange(DEVICE, 0, 4), TierRange(CPU, 4, 8), TierRange(NVME, 8, 10))),
        (2, 6, (TierRange(DEVICE, 0, 2), TierRange(CPU, 2, 4))),
        (4, 8, (TierRange(CPU, 0, 4),)),
        (5, 7, (TierRange(CPU, 0, 2),)),
        (8, 10, (TierRange(NVME, 0, 2),)),
        (3, 3, ()),
    ],
)
def test_a_part_is_counted_from_its_start(start, stop, expected):
    spans = (TierRange(DEVICE, 0, 4), TierRange(CPU, 4, 8), TierRange(NVME, 8, 10))
    assert part(spans, start, stop) == expected
