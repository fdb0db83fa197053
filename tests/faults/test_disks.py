"""Disks and files that fail for real while a model trains on them, and processes that end meanwhile."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import penstock
from tests.accounts import swap_files
from tests.faults.failing_files import Faults
from tests.faults.test_training import KIND_NAMES, ROWS, Row, check_error, equal, name, nothing_stays
from tests.lib.engines import prepare_on
from tests.lib.memory import shorten_rings
from tests.lib.processes import kill_once_it_says_so
from tests.lib.streams import inline
from tests.parity.rows import Net, make_model

EVERYTHING = Row(**dict.fromkeys(KIND_NAMES, "nvme"))


@pytest.fixture(autouse=True)
def files_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_rings(monkeypatch)


@contextmanager
def after_one_step(row: Row, folder: Path) -> Iterator[tuple[Net, penstock.Optimizer]]:
    """Everything is in the files."""
    models: list[Net] = []
    with nothing_stays(folder, models):
        model, optimizer = row.prepare(folder, inline())
        models.append(model)
        row.iterate(model, optimizer)
        optimizer.synchronize()
        yield model, optimizer
        optimizer.close()


def failing_prepare(row: Row, number: int, state: bool, folder: Path, faults: Faults) -> list[bool]:
    """Prepare with a failing transfer. Returns for each parameter whether it has kept its values."""
    model = make_model()
    given = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if state:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        given.step()
        given.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    faults.injected.clear()
    faults.arm(number)
    with nothing_stays(folder, [model]):
        try:
            _, optimizer = row.prepare(folder, inline(), model, given)
        except penstock.NvmeError as error:
            check_error(error, faults)
        else:
            faults.arm(0)
            optimizer.close()
    kept = [p.numel() > 0 for p in model.parameters()]
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), before, strict=True) if p.numel())
    return kept


def test_every_transfer_of_prepare_fails_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model keeps the parameters that were not moved yet; the others are empty, not NaN."""
    faults = Faults()
    faults.install(monkeypatch)
    number, kept = 1, []
    while not kept or faults.injected:
        kept.append(sum(failing_prepare(EVERYTHING, number, False, tmp_path, faults)))
        number += 1
    everything = len(list(make_model().parameters()))
    assert kept[0] == kept[-1] == everything  # nothing was moved yet, and nothing failed
    assert kept[:-1] == sorted(kept[:-1], reverse=True)
    assert 0 < kept[-2] < everything
    for later in (0, 10):  # while the state of the optimizer is taken over: all were moved
        assert not any(failing_prepare(EVERYTHING, number + later, True, tmp_path, faults))
        assert faults.injected


def test_a_full_disk_is_refused_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each folder needs its share: a half of the records, to within one."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    asked: list[Path] = []

    def statvfs(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(f_bavail=0 if path.name == "b" else 10**6, f_frsize=4096)

    monkeypatch.setattr("penstock.runtime.aio.os.statvfs", statvfs)
    model = make_model()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(penstock.NvmeError, match="needs") as caught:
        prepare_on(
            inline(),
            model,
            torch.optim.AdamW(model.parameters()),
            placement=penstock.Placement(optimizer="nvme", nvme_path=folders),
            options=penstock.Options(tile_bytes=4096),
        )
    needed = int(str(caught.value).split("needs ")[1].split(" bytes")[0].replace(",", ""))
    total = sum(p.numel() for p in model.parameters()) * 10
    assert 0.4 * total < needed < 0.75 * total
    assert "has 0 bytes free" in str(caught.value)
    assert asked == folders
    assert caught.value.errno == errno.ENOSPC
    assert [list(folder.iterdir()) for folder in folders] == [[], []]
    assert equal(model, before)


@pytest.mark.parametrize(
    ("row", "storage"),
    [
        pytest.param(row, storage, id=f"{name(row)}, {storage}")
        for row, storage in ((ROWS[0], "master"), (ROWS[0], "optimizer"), (ROWS[1], "param"), (ROWS[3], "optimizer"))
    ],
)
def test_a_file_truncated_under_us(row: Row, storage: str, tmp_path: Path) -> None:
    """Not gradients alone: each is written, and so its place in the file made, before it is read."""
    with after_one_step(row, tmp_path) as (model, optimizer):
        (path,) = swap_files(tmp_path, storage)
        os.truncate(path, 4096)
        with pytest.raises(penstock.NvmeError, match=r"the file ends there\. Another program truncated the file"):
            row.iterate_to_the_end(model, optimizer)
        with suppress(penstock.NvmeError):  # gradients alone: the parameters are whole
            optimizer.close()


def flip(path: Path, offset: int) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
        os.fsync(file)


def test_a_training_process_that_is_killed(tmp_path: Path) -> None:
    def train(say: Callable[[], None]) -> None:
        model, optimizer = EVERYTHING.prepare(tmp_path, inline())
        EVERYTHING.iterate(model, optimizer)
        say()
        while True:
            EVERYTHING.iterate(model, optimizer)

    kill_once_it_says_so(train)
    assert list(tmp_path.iterdir()) == []
