"""Every row of the table gives the bits of the device's row, and the device's rows those of plain torch."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.lib.covering import named
from tests.lib.ranks import run_ranks
from tests.parity.compare import against_plain_by_step
from tests.parity.rows import CORE, EXTRA, Arithmetic, Movement, changed, train
from tests.parity.table import (
    PLAIN,
    Row,
    arithmetic,
    at_home,
    different,
    is_defined,
    mesh_of,
    rows_of_one,
    rows_of_two,
)
from tests.parity.table import train as train_row

ONE, TWO = rows_of_one(), rows_of_two()
MESHES = [row for row in TWO if row["stage"] in (1, 3)][::5]
STEPS = 3
#: What plain torch defines; the rows have some more.
STATED = (*CORE, *EXTRA)

pytestmark = pytest.mark.filterwarnings("ignore:.*of the cpu tier are not pinned")


def defined(rows: Iterable[Row], world_size: int = 1) -> list[tuple[Arithmetic, int]]:
    """What plain torch defines of the rows, each once, with a stage that honours `no_sync` where the row's does."""
    found = ((arithmetic(row), at_home(row, world_size)["stage"]) for row in rows if is_defined(row))
    return list(dict.fromkeys(found))


def otherwise_than_plain(
    what: Arithmetic, stage: int, rank: int = 0, world_size: int = 1, mesh: Any = None
) -> list[str]:
    trace = train(what, Movement(stage), look=True, rank=rank, world_size=world_size, mesh=mesh, steps=STEPS)
    return [f"{changed(what)}: {message}" for message in against_plain_by_step(what, trace, rank, world_size)]


@pytest.mark.parametrize("row", ONE, ids=[named(row, PLAIN) for row in ONE])
def test_movement_changes_no_bit(row: Row) -> None:
    assert different(row) == []


@pytest.mark.parametrize("what", dict.fromkeys([*STATED, *(what for what, _ in defined(ONE))]), ids=changed)
def test_steps_are_plain_torchs(what: Arithmetic) -> None:
    assert otherwise_than_plain(what, 3) == []


def otherwise_than_plain_on_rank(rank: int) -> list[str]:
    stages = [1 if what.no_sync else 3 - number % 2 for number, what in enumerate(STATED)]
    found = []
    for what, stage in zip(STATED, stages, strict=True):
        found += otherwise_than_plain(what, stage, rank, 2)
    return found


def test_steps_of_two_ranks_are_plain_torchs() -> None:
    assert run_ranks(otherwise_than_plain_on_rank, 2) == [[], []]


def otherwise_on_rank(
    rank: int, rows: list[Row], world_size: int, folder: Path, shape: tuple[int, int] | None
) -> list[str]:
    mesh = mesh_of(shape)
    found = []
    for number, row in enumerate(rows):
        found += different(row, rank, world_size, mesh, folder / str(number))
    for what, stage in defined(rows, world_size):
        found += otherwise_than_plain(what, stage, rank, world_size, mesh)
    return found


@pytest.mark.parametrize("part", range(4))
def test_two_ranks_change_no_bit_and_step_as_plain_torch_does(part: int, tmp_path: Path) -> None:
    assert run_ranks(otherwise_on_rank, 2, TWO[part::4], 2, tmp_path, None) == [[], []]


@pytest.mark.parametrize("shape", [(2, 1), (2, 2)], ids=str)
def test_replicated_shards_change_no_bit_and_step_as_plain_torch_does(shape: tuple[int, int], tmp_path: Path) -> None:
    world_size = shape[0] * shape[1]
    found = run_ranks(otherwise_on_rank, world_size, MESHES[shape[1] - 1 :: 2], world_size, tmp_path, shape)
    assert found == [[]] * world_size


def test_steps_are_skipped_in_rows_with_a_dynamic_scale() -> None:
    results = [
        value[1]
        for row in ONE
        if row["precision"] == "fp16, dynamic" and row["clip"] == "no"
        for name, value in train_row(at_home(row)).items()
        if name.endswith("result")
    ]
    assert set(results) == {True, False}
