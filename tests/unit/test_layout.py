"""Slots, shards and tiles cover a flat buffer exactly."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.layout import ALIGNMENT_NUMEL, FlatLayout
from tests.lib.fuzz import examples

extents = st.integers(0, 40)
shapes = st.lists(st.lists(extents, max_size=3).map(tuple), max_size=8)
layouts = st.builds(
    lambda shapes, shards: FlatLayout.build([f"p{i}" for i in range(len(shapes))], shapes, shards),
    shapes,
    st.integers(1, 7),
)
tile_numels = st.integers(1, 700)


def numel_of(shape: tuple[int, ...]) -> int:
    numel = 1
    for extent in shape:
        numel *= extent
    return numel


@examples(40)
@given(shapes, st.integers(1, 7))
def test_slots_keep_order_and_shape_start_aligned_and_do_not_overlap(shapes, shards):
    layout = FlatLayout.build([f"p{i}" for i in range(len(shapes))], shapes, shards)
    assert [slot.shape for slot in layout.slots] == shapes
    cursor = 0
    for slot in layout.slots:
        assert slot.numel == numel_of(slot.shape)
        assert slot.start % ALIGNMENT_NUMEL == 0
        assert slot.start >= cursor
        assert slot.start - cursor < ALIGNMENT_NUMEL, "no more is lost than alignment takes"
        cursor = slot.stop
    assert cursor <= layout.numel


@examples(40)
@given(layouts)
def test_shards_are_equal_aligned_and_cover_the_buffer_with_the_least_padding(layout):
    ranges = [layout.shard_range(rank) for rank in range(layout.shards)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == layout.numel
    assert all(stop == start for (_, stop), (start, _) in pairwise(ranges))
    assert {stop - start for start, stop in ranges} == {layout.shard_numel(0)}
    assert layout.shard_numel(0) % ALIGNMENT_NUMEL == 0
    used = max((slot.stop for slot in layout.slots), default=0)
    assert layout.numel - max(used, 1) < ALIGNMENT_NUMEL * layout.shards


@examples(40)
@given(layouts)
def test_slots_and_gaps_partition_the_buffer(layout):
    taken = [0] * layout.numel
    for start, stop in [*((s.start, s.stop) for s in layout.slots), *layout.gaps()]:
        assert start <= stop
        for index in range(start, stop):
            taken[index] += 1
    assert set(taken) == {1}


@examples(40)
@given(layouts)
def test_the_parts_of_a_slot_on_all_ranks_make_the_slot(layout):
    for slot in layout.slots:
        found = [layout.overlap(slot, rank) for rank in range(layout.shards)]
        parts = [part for part in found if part is not None]
        assert all(start < stop for start, stop in parts)
        assert [index for start, stop in parts for index in range(start, stop)] == list(range(slot.start, slot.stop))


@examples(40)
@given(layouts, tile_numels)
def test_pieces_of_all_tiles_of_all_ranks_cover_every_slot_once(layout, tile_numel):
    seen: dict[int, list[int]] = {index: [] for index in range(len(layout.slots))}
    for rank in range(layout.shards):
        tiles = layout.tiles(rank, tile_numel)
        assert len(tiles) == -(-layout.shard_numel(rank) // tile_numel)
        for number, tile in enumerate(tiles):
            cursor = number * tile_numel
            for piece in tile:
                assert cursor <= piece.start < piece.stop <= (number + 1) * tile_numel, "in order, inside its tile"
                cursor = piece.stop
                first = layout.shard_range(rank)[0]
                seen[piece.slot] += range(first + piece.start, first + piece.stop)
    for index, slot in enumerate(layout.slots):
        assert seen[index] == list(range(slot.start, slot.stop))


def test_an_example_on_paper():
    layout = FlatLayout.build(["a", "b"], [(3, 30), (10,)], shards=2)
    assert [(slot.start, slot.stop) for slot in layout.slots] == [(0, 90), (256, 266)]
    assert layout.numel == 512
    assert layout.shard_range(1) == (256, 512)
    assert list(layout.gaps()) == [(90, 256), (266, 512)]
    assert layout.overlap(layout.slots[0], 1) is None
    pieces = [[(p.slot, p.start, p.stop) for p in tile] for tile in layout.tiles(0, 50)]
    assert pieces == [[(0, 0, 50)], [(0, 50, 90)], [], [], [], []]
