"""A disk that fails on one rank of two: the other one does not wait for it."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import penstock
from tests.faults.failing_files import Faults, mounted
from tests.faults.test_training import BATCHES, KIND_NAMES, Row
from tests.lib.engines import prepare_on
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline
from tests.parity.rows import loss_of, make_model

EVERYTHING = Row(**dict.fromkeys(KIND_NAMES, "nvme"))


def wait_until_quiet(optimizer: penstock.Optimizer) -> None:
    """Until what was submitted is over, failed or not."""
    while any(row.in_flight for row in optimizer.locations().rows):
        time.sleep(0.001)


def fail_before_step(rank: int, folder: Path) -> str:
    """Rank 1 cannot write a gradient. It is known when `step` begins."""
    faults = Faults()
    with pytest.MonkeyPatch.context() as patch:
        faults.install(patch)
        model, optimizer = Row(grads="nvme").prepare(folder, inline())
        optimizer.backward(loss_of(model, BATCHES[0]))
        optimizer.step()
        optimizer.zero_grad()
        wait_until_quiet(optimizer)
        faults.arm(2 if rank == 1 else 0)
        optimizer.backward(loss_of(model, BATCHES[0]))
        wait_until_quiet(optimizer)
        with pytest.raises((penstock.NvmeError, penstock.EngineError)) as caught:
            optimizer.step()
        with pytest.raises(caught.type):
            optimizer.step()
        with pytest.raises(caught.type):
            optimizer.close()
        optimizer.close()
        assert all(p.numel() == 0 for p in model.parameters())
    return f"{caught.type.__name__}: {caught.value}"


def test_a_failure_known_at_step_stops_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(fail_before_step, 2, tmp_path)
    assert first == f"EngineError: Rank 1 of 2 failed, and this one stops with it. {second}"
    assert second.startswith("NvmeError: Writing grad of unit ")
    assert list(tmp_path.iterdir()) == []


def fail_while_looking(rank: int, folder: Path) -> list[str]:
    """Rank 1 cannot read its part, of a parameter and at the end."""
    faults = Faults()
    said = []
    with pytest.MonkeyPatch.context() as patch:
        faults.install(patch)
        model, optimizer = EVERYTHING.prepare(folder, inline())
        weights = [p for p in model.parameters() if p.numel() > 1000]
        for look in (lambda: [optimizer.full_param(p) for p in weights], optimizer.close):
            faults.arm(1 if rank == 1 else 0)
            with pytest.raises((penstock.NvmeError, penstock.EngineError)) as caught:
                look()
            said.append(f"{caught.type.__name__}: {caught.value}")
        optimizer.close()
        assert all(p.numel() == 0 for p in model.parameters())
    return said


def test_a_part_that_one_rank_cannot_read_stops_every_rank(tmp_path: Path) -> None:
    for first, second in zip(*run_ranks(fail_while_looking, 2, tmp_path), strict=True):
        assert second.startswith("NvmeError: Reading ")
        assert first.startswith("EngineError: Rank 1 of 2 failed")
        assert second in first
    assert list(tmp_path.iterdir()) == []


def fail_in_forward(rank: int, folder: Path) -> None:
    """Rank 1 cannot read its parameters, and nobody catches it. Rank 0 waits for them in a gather."""
    faults = Faults()
    with pytest.MonkeyPatch.context() as patch:
        faults.install(patch)
        model, optimizer = EVERYTHING.prepare(folder, inline())
        EVERYTHING.iterate_to_the_end(model, optimizer)
        dist.barrier()
        faults.arm(1 if rank == 1 else 0)
        EVERYTHING.iterate(model, optimizer)


def test_a_process_that_ends_in_forward_ends_the_others(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(fail_in_forward, 2, tmp_path)
    first, second = str(caught.value).split("rank 1:\n")
    assert "\nRuntimeError: " in first
    assert "penstock.errors.NvmeError: Reading param of unit " in second
    assert list(tmp_path.iterdir()) == []


def prepare_where(rank: int, folders: list[Path]) -> str:
    """Each rank prepares with a folder of its own."""
    model = make_model()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises((penstock.NvmeError, penstock.EngineError)) as caught:
        prepare_on(
            inline(),
            model,
            torch.optim.AdamW(model.parameters()),
            placement=penstock.Placement(optimizer="nvme", nvme_path=folders[rank]),
        )
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), before, strict=True))
    return f"{caught.type.__name__}: {caught.value}"


def test_a_folder_that_one_rank_does_not_have_stops_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(prepare_where, 2, [tmp_path / "missing", tmp_path])
    assert first.startswith("NvmeError: The nvme path ")
    assert second == f"EngineError: Rank 0 of 2 failed in prepare(), and this one stops with it. {first}"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """With room for the files of one rank and not of two."""
    yield from mounted(tmp_path / "mounted", "128k")


def test_two_ranks_on_one_small_disk(small_disk: Path) -> None:
    """Each needs less than there is, both need more."""
    said = sorted(run_ranks(prepare_where, 2, [small_disk, small_disk]))
    assert said[-1].startswith("NvmeError: ")
    assert "free" in said[-1] or "No space left" in said[-1]
    assert list(small_disk.iterdir()) == []
