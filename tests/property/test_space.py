"""Room of any size in a few slabs: nothing overlaps, nothing is lost, and it is there whenever the bytes are."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.tiers.space import Extent, Space

GRAIN = 8
SLABS = st.lists(st.integers(1, 64).map(lambda grains: grains * GRAIN), min_size=1, max_size=4)
#: What to ask for; 0: give one of those back that were taken, by the other number.
ASKED = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 1 << 16)), max_size=60)


def made(slabs: Sequence[int]) -> Space:
    space = Space(GRAIN)
    for number, nbytes in enumerate(slabs):
        space.add(number, nbytes)
    return space


def run(space: Space, asked: Sequence[tuple[int, int]]) -> list[list[Extent]]:
    """Takes and gives back; checks what holds throughout. Returns what is still taken."""
    taken: list[list[Extent]] = []
    for nbytes, which in asked:
        if nbytes and space.room(nbytes) <= space.free:  # the bytes are free: so there is room, in whatever pieces
            taken.append(space.take(nbytes))
            got = sum(extent.nbytes for extent in taken[-1])
            assert nbytes <= got < nbytes + GRAIN
        elif taken:
            for extent in taken.pop(which % len(taken)):
                space.give_back(extent)
        every = sorted([*space.holes, *(extent for extents in taken for extent in extents)])
        assert all(a.slab != b.slab or a.stop <= b.start for a, b in pairwise(every)), "overlap"
        assert sum(extent.nbytes for extent in every) == space.capacity, "lost"
        assert all((a.slab, a.stop) != (b.slab, b.start) for a, b in pairwise(space.holes)), "neighbours are one hole"
    return taken


@given(SLABS, ASKED)
def test_nothing_overlaps_and_nothing_is_lost(slabs: list[int], asked: list[tuple[int, int]]) -> None:
    run(made(slabs), asked)


@given(SLABS, ASKED, st.randoms())
def test_all_given_back_is_one_hole_a_slab(slabs: list[int], asked: list[tuple[int, int]], order: object) -> None:
    space = made(slabs)
    extents = [extent for taken in run(space, asked) for extent in taken]
    order.shuffle(extents)  # type: ignore[attr-defined]
    for extent in extents:
        space.give_back(extent)
    assert space.holes == tuple(Extent(number, 0, nbytes) for number, nbytes in enumerate(slabs))
    assert space.idle() == list(range(len(slabs)))
    for number in range(len(slabs)):
        space.remove(number)
    assert (space.capacity, space.free, space.holes) == (0, 0, ())


@given(st.lists(st.integers(1, 200), min_size=1, max_size=20), st.data())
def test_holes_of_one_size_have_room_for_any_other(sizes: list[int], data: st.DataObject) -> None:
    """Every second one goes, and one that is as large as all of these comes: no slab is needed for it."""
    space = Space(GRAIN)
    space.add(0, sum(map(space.room, sizes)))
    taken = [space.take(nbytes) for nbytes in sizes]
    for extents in taken[::2]:
        for extent in extents:
            space.give_back(extent)
    wanted = data.draw(st.integers(1, space.free))
    assert sum(extent.nbytes for extent in space.take(wanted)) == space.room(wanted)


def test_the_smallest_hole_that_is_large_enough_is_taken() -> None:
    space = made([10 * GRAIN, 3 * GRAIN])
    assert space.take(2 * GRAIN) == [Extent(1, 0, 2 * GRAIN)]
    assert space.take(10 * GRAIN - 1) == [Extent(0, 0, 10 * GRAIN)]
    assert space.idle() == []
