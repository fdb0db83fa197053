"""Records: the kinds of a tile in whole pages of a file."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.config import Tier
from penstock.runtime.aio import File, Queue
from penstock.runtime.host_memory import page_aligned
from penstock.runtime.streams import DONE
from penstock.tiers.nvme import FileRecords
from penstock.tiers.storage import CellPlan, RecordLayout, RecordPlace, SegmentPlan, Storage, record_sizes

PAGE = 4096
TILE = 1024
NUMEL = 2 * TILE + 256


def plan(kind: str, dtype: torch.dtype, grain: int = 1, numel: int = NUMEL) -> CellPlan:
    return CellPlan("layers.0", kind, Tier.NVME, dtype, numel // grain, grain)


PLANS = [
    plan("master", torch.int16),
    plan("exp_avg", torch.uint8),
    plan("exp_avg_scale", torch.float32, grain=256),
    plan("exp_avg_sq", torch.float32),
]


def segment(plans: list[CellPlan] = PLANS, numel: int = NUMEL) -> SegmentPlan:
    return SegmentPlan("optimizer", Tier.NVME, tuple(plans), 0, numel, TILE)


class TestRecordLayout:
    def test_views_have_the_kinds_dtypes_lie_apart_and_begin_on_cache_lines(self) -> None:
        layout = RecordLayout(PLANS)
        for numel in (TILE, 256):
            buffer = page_aligned(layout.record_bytes(TILE))
            views = layout.views(buffer, numel)
            assert [v.dtype for v in views] == [p.dtype for p in PLANS]
            assert [v.numel() for v in views] == [numel, numel, numel // 256, numel]
            assert all(v.data_ptr() % 64 == 0 for v in views)
            assert all(0 <= v.data_ptr() - buffer.data_ptr() <= layout.record_bytes(numel) - v.nbytes for v in views)
            for view in views:
                view.view(torch.uint8).fill_(1)
            assert int(buffer.sum()) == sum(v.nbytes for v in views), "no byte belongs to two kinds"


@pytest.fixture
def file(tmp_path: Path) -> Iterator[File]:
    with Queue(2) as queue, File(queue, tmp_path / "tiles", 8 * PAGE) as file:
        yield file


def records(file: File, *, checksums: bool = True) -> FileRecords:
    places, offset = [], 0
    for nbytes in record_sizes(segment()):
        places.append(RecordPlace(file, offset, nbytes))
        offset += nbytes
    return FileRecords(segment(), places, checksums=checksums)


def number(storage: FileRecords) -> None:
    """Every value is the index of its element, as far as its dtype goes."""
    for start, stop, views in storage.visit(0, NUMEL, modify=True):
        for kind, view in zip(storage.plan.cells, views, strict=True):
            view.copy_(torch.arange(start // kind.grain, -(-stop // kind.grain)) % 100)


def test_never_written_tiles_are_zeros_whatever_the_buffer_held(file: File) -> None:
    storage = records(file)
    for first, _, views in storage.visit(0, TILE, modify=True):
        assert first == 0
        for view in views:
            view.fill_(7)
    seen = [(first, last, [int(v.count_nonzero()) for v in views]) for first, last, views in storage.visit(0, NUMEL)]
    assert seen == [(0, TILE, [TILE, TILE, 4, TILE]), (TILE, 2 * TILE, [0, 0, 0, 0]), (2 * TILE, NUMEL, [0, 0, 0, 0])]


@pytest.mark.parametrize(
    ("start", "stop", "pieces"),
    [
        (0, 256, [(0, 256)]),
        (512, 2 * TILE, [(512, TILE), (TILE, 2 * TILE)]),
        (768, 2 * TILE + 10, [(768, TILE), (TILE, 2 * TILE), (2 * TILE, 2 * TILE + 10)]),
        (TILE, TILE, []),
    ],
)
def test_a_range_is_visited_tile_by_tile(file: File, start: int, stop: int, pieces: list[tuple[int, int]]) -> None:
    storage = records(file)
    number(storage)
    seen = []
    for first, last, (master, *_, exp_avg_sq) in storage.visit(start, stop, modify=True):
        seen.append((first, last))
        assert exp_avg_sq.tolist() == [index % 100 for index in range(first, last)]
        master.fill_(-1)
    assert seen == pieces
    written = torch.cat([views[0].clone() for _, _, views in storage.visit(0, NUMEL)])
    assert int(written.eq(-1).sum()) == stop - start
    assert bool(written[start:stop].eq(-1).all())


def test_a_home_is_at_rest_when_its_writes_are_over(file: File) -> None:
    class Open:
        waited = False

        def done(self) -> bool:
            return self.waited

        def synchronize(self) -> None:
            self.waited = True

    storage = records(file)
    whole = Storage([storage])
    assert whole.written is DONE
    storage.last_stores[1] = event = Open()  # type: ignore[assignment] # as much of an event as is asked for
    assert not whole.written.done()
    whole.written.synchronize()
    assert event.waited
    assert whole.written.done()
    storage.last_stores[2] = later = Open()  # type: ignore[assignment]
    list(storage.visit(0, TILE))
    assert not later.waited, "of another tile"
    list(storage.visit(2 * TILE, NUMEL))
    assert later.waited


def test_a_record_has_the_name_that_its_unit_has_now(file: File) -> None:
    storage = records(file)
    assert storage.name(1) == "master and exp_avg and exp_avg_scale and exp_avg_sq of unit 'layers.0', tile 1"
    storage.plan = replace(storage.plan, cells=tuple(replace(cell, unit="layers") for cell in storage.plan.cells))
    assert storage.name(1).endswith("of unit 'layers', tile 1")
