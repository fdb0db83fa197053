"""The nvme tier by itself: how records are spread over files, and what becomes of these."""

from pathlib import Path

import pytest
import torch

from penstock.config import Tier
from penstock.errors import NvmeError
from penstock.tiers.nvme import FileAllocation, NvmeTier, Striping
from penstock.tiers.storage import CellPlan, SegmentPlan, record_sizes
from penstock.tiers.tier import Allocation
from tests.accounts import file_bytes, swap_files

PAGE = 4096


def segment(
    tiles: int, record_pages: int = 1, last_pages: int | None = None, storage: str = "optimizer"
) -> SegmentPlan:
    """`tiles` records of some pages, the last one of fewer."""
    tile_numel = record_pages * PAGE // 4
    last = (last_pages or record_pages) * PAGE // 4
    numel = (tiles - 1) * tile_numel + last
    cell = CellPlan("u", "exp_avg", Tier.NVME, torch.float32, numel)
    return SegmentPlan(storage, Tier.NVME, (cell,), 0, numel, tile_numel)


def sizes(tiles: int, record_pages: int = 1, last_pages: int | None = None) -> list[int]:
    return record_sizes(segment(tiles, record_pages, last_pages))


class TestExtents:
    @pytest.mark.parametrize("files", [1, 2, 5])
    def test_files_differ_by_a_record_at_most_and_nothing_overlaps(self, files: int) -> None:
        extents = Striping(files)
        taken: list[list[tuple[int, int]]] = [[] for _ in range(files)]
        for tiles, pages, last in ((7, 5, 1), (1, 1, 1), (3, 2, 2), (11, 3, 2)):
            for file, offset, nbytes in extents.place(sizes(tiles, pages, last)):
                taken[file].append((offset, nbytes))
        assert max(extents.used) - min(extents.used) <= 5 * PAGE
        for ranges, used in zip(taken, extents.used, strict=True):
            cursor = 0
            for offset, nbytes in ranges:
                assert offset == cursor
                cursor += nbytes
            assert cursor == used


def tier(parents: list[Path]) -> NvmeTier:
    return NvmeTier(parents, queue_depth=2, checksums=True)


def folders(path: Path, count: int) -> list[Path]:
    parents = [path / str(number) for number in range(count)]
    for parent in parents:
        parent.mkdir()
    return parents


def slab_of(made: NvmeTier, *plans: SegmentPlan) -> Allocation:
    (allocation,) = made.reserve({"optimizer": plans}).values()
    return allocation


def test_files_are_as_large_as_what_was_planned(tmp_path: Path) -> None:
    parents = folders(tmp_path, 2)
    plans = segment(3, 2), segment(2)
    made = tier(parents)
    allocation = slab_of(made, *plans)
    found = [file_bytes(parent) for parent in parents]
    assert found == [4 * PAGE, 4 * PAGE]
    segments = [allocation.make(plan) for plan in plans]
    assert [each.tiles for each in segments] == [3, 2]
    for each in segments:  # every record has a place of its own, inside its file
        for _ in each.visit(0, each.numel, modify=True):
            pass
    assert isinstance(allocation, FileAllocation)
    assert [file._native.bytes_written for file in allocation._files] == found
    assert not any(file._native.bytes_read for file in allocation._files), "what was never written is not read"
    made.close()
    allocation.close()
    assert not any(map(file_bytes, parents))


def test_a_home_that_leaves_gives_its_space_back(tmp_path: Path) -> None:
    made = tier([tmp_path])
    allocations = made.reserve({"param": [segment(1, storage="param")], "optimizer": [segment(2)]})
    for _ in (one := allocations["param"].make(segment(1, storage="param"))).visit(0, one.numel, modify=True):
        pass
    allocations["param"].close()
    assert file_bytes(tmp_path) == 2 * PAGE
    allocations["optimizer"].close()
    assert swap_files(tmp_path) == []
    again = slab_of(made, segment(3))
    assert file_bytes(tmp_path) == 3 * PAGE
    again.close()
    again.close()
    made.close()


def test_folders_that_no_record_goes_to_are_left_alone(tmp_path: Path) -> None:
    """Such as those of a small model on many disks: a file of no bytes is none."""
    parents = folders(tmp_path, 5)
    planned = segment(2)
    made = tier(parents)
    allocation = slab_of(made, planned)
    assert [len(swap_files(parent)) for parent in parents] == [1, 1, 0, 0, 0]
    storage = allocation.make(planned)
    for _, _, (values,) in storage.visit(0, storage.numel, modify=True):
        values.fill_(3.0)
    assert all(bool(values.eq(3).all()) for _, _, (values,) in storage.visit(0, storage.numel))
    made.close()


def test_a_folder_that_cannot_be_used_leaves_nothing_in_the_others(tmp_path: Path) -> None:
    made = tier([tmp_path, tmp_path / "missing"])
    with pytest.raises(NvmeError, match="missing"):
        slab_of(made, segment(4))
    assert swap_files(tmp_path) == []
