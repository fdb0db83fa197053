"""Every row of the table gives the bits of the device's row, and the device's rows those of plain torch."""

from pathlib import Path

import pytest

from tests.lib.covering import named
from tests.lib.ranks import run_ranks
from tests.parity.rows import Arithmetic, changed
from tests.parity.table import (
    PLAIN,
    Row,
    arithmetics,
    at_home,
    different,
    otherwise_on_rank,
    otherwise_than_plain,
    otherwise_than_plain_on_rank,
    rows_of_one,
    rows_of_two,
    seen_at_home,
)

ONE, TWO = rows_of_one(), rows_of_two()
MESHES = [row for row in TWO if row["stage"] in (1, 3)]

pytestmark = pytest.mark.filterwarnings("ignore:.*of the cpu tier are not pinned")


@pytest.mark.parametrize("row", ONE, ids=[named(row, PLAIN) for row in ONE])
def test_movement_changes_no_bit(row: Row) -> None:
    assert different(row) == []


@pytest.mark.parametrize("what", arithmetics(), ids=changed)
def test_steps_are_plain_torchs(what: Arithmetic) -> None:
    assert otherwise_than_plain(what, 3) == []


def test_steps_of_two_ranks_are_plain_torchs() -> None:
    assert run_ranks(otherwise_than_plain_on_rank, 2, arithmetics(risky=())) == [[], []]


@pytest.mark.parametrize("part", range(4))
def test_two_ranks_change_no_bit(part: int, tmp_path: Path) -> None:
    assert run_ranks(otherwise_on_rank, 2, TWO[part::4], 2, tmp_path, None) == [[], []]


@pytest.mark.parametrize("shape", [(2, 1), (2, 2)], ids=str)
def test_replicated_shards_change_no_bit_and_step_as_plain_torch_does(shape: tuple[int, int], tmp_path: Path) -> None:
    world_size, rows = shape[0] * shape[1], MESHES[shape[1] - 1 :: 6]
    what = Arithmetic("bf16", accumulation=2, clip=0.5)
    assert run_ranks(otherwise_on_rank, world_size, rows, world_size, tmp_path, shape, what) == [[]] * world_size


def test_steps_are_skipped_in_rows_with_a_dynamic_scale() -> None:
    results = [
        value[1]
        for row in ONE
        if row["precision"] == "fp16, dynamic" and row["clip"] == "no"
        for name, value in seen_at_home(at_home(row)).items()
        if name.endswith("result")
    ]
    assert set(results) == {True, False}
