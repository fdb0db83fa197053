"""The nvme tier by itself: how records are spread over files, and what becomes of folders."""

import logging
from pathlib import Path

import pytest
import torch

from penstock.errors import NvmeError
from penstock.kinds import Tier
from penstock.tiers.home import CellPlan
from penstock.tiers.nvme import FILE_NAME, Extents, NvmeTier
from penstock.tiers.records import RecordLayout

PAGE = 4096


def layout(tiles: int, record_pages: int = 1, last_pages: int | None = None) -> RecordLayout:
    """`tiles` records of some pages, the last one of fewer."""
    tile_numel = record_pages * PAGE // 4
    last = (last_pages or record_pages) * PAGE // 4
    numel = (tiles - 1) * tile_numel + last
    return RecordLayout([CellPlan("u", "exp_avg", Tier.NVME, torch.float32, numel)], numel, tile_numel)


class TestExtents:
    def test_records_of_one_file_lie_one_after_the_other(self) -> None:
        extents = Extents(1)
        assert extents.place(layout(3, 2, last_pages=1)) == [
            (0, 0, 2 * PAGE),
            (0, 2 * PAGE, 2 * PAGE),
            (0, 4 * PAGE, PAGE),
        ]
        assert extents.place(layout(1)) == [(0, 5 * PAGE, PAGE)], "behind what was there"
        assert extents.used == [6 * PAGE]

    def test_each_record_goes_to_the_file_that_is_filled_least(self) -> None:
        extents = Extents(3)
        first = extents.place(layout(4, 3, last_pages=1))
        assert [file for file, _, _ in first] == [0, 1, 2, 0]
        assert extents.used == [4 * PAGE, 3 * PAGE, 3 * PAGE]
        assert [file for file, _, _ in extents.place(layout(2))] == [1, 2]
        assert extents.used == [4 * PAGE] * 3

    @pytest.mark.parametrize("files", [1, 2, 5])
    def test_files_differ_by_a_record_at_most_and_nothing_overlaps(self, files: int) -> None:
        extents = Extents(files)
        taken: list[list[tuple[int, int]]] = [[] for _ in range(files)]
        for tiles, pages, last in ((7, 5, 1), (1, 1, 1), (3, 2, 2), (11, 3, 2)):
            for file, offset, nbytes in extents.place(layout(tiles, pages, last)):
                taken[file].append((offset, nbytes))
        assert max(extents.used) - min(extents.used) <= 5 * PAGE
        for ranges, used in zip(taken, extents.used, strict=True):
            cursor = 0
            for offset, nbytes in ranges:
                assert offset == cursor
                cursor += nbytes
            assert cursor == used


def tier(parents: list[Path], layouts: list[RecordLayout]) -> NvmeTier:
    return NvmeTier(parents, layouts, queue_depth=2, checksums=True)


def test_files_are_as_large_as_what_was_planned(tmp_path: Path) -> None:
    parents = [tmp_path / name for name in "ab"]
    for parent in parents:
        parent.mkdir()
    layouts = [layout(3, 2), layout(2)]
    made = tier(parents, layouts)
    sizes = [next(parent.glob(f"*/{FILE_NAME}")).stat().st_size for parent in parents]
    assert sizes == [4 * PAGE, 4 * PAGE]
    homes = [made.make_home(each.plans, each.numel, each.tile_numel) for each in layouts]
    assert [home.tiles for home in homes] == [3, 2]
    for home in homes:  # every record has a place of its own, inside its file
        for _ in home.visit(0, home.numel, modify=True):
            pass
    assert made.bytes_written == sum(sizes)
    assert made.bytes_read == 0, "what was never written is not read"
    made.close()
    assert [list(parent.iterdir()) for parent in parents] == [[], []]


def test_folders_that_no_record_goes_to_are_left_alone(tmp_path: Path) -> None:
    """Such as those of a small model on many disks: a file of no bytes is none."""
    parents = [tmp_path / str(number) for number in range(5)]
    for parent in parents:
        parent.mkdir()
    planned = layout(2)
    made = tier(parents, [planned])
    assert [len(list(parent.iterdir())) for parent in parents] == [1, 1, 0, 0, 0]
    home = made.make_home(planned.plans, planned.numel, planned.tile_numel)
    for _, _, (values,) in home.visit(0, home.numel, modify=True):
        values.fill_(3.0)
    assert all(bool(values.eq(3).all()) for _, _, (values,) in home.visit(0, home.numel))
    made.close()


def test_a_folder_that_cannot_be_used_leaves_nothing_in_the_others(tmp_path: Path) -> None:
    with pytest.raises(NvmeError, match="missing"):
        tier([tmp_path, tmp_path / "missing"], [layout(4)])
    assert list(tmp_path.iterdir()) == []


def test_close_may_come_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = tier([tmp_path], [layout(1)])
    made.close()
    with caplog.at_level(logging.WARNING):
        made.close()
    assert not caplog.records
