"""A process that has no descriptors left: errors say so, nothing is left behind, and training goes on."""

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import penstock
from tests.parity.resuming import SMALL, Run, different, iterate, values
from tests.parity.rows import Arithmetic, Movement, make_model

NVME = Run(Arithmetic(precision="bf16"), Movement(3, "nvme", "nvme", "nvme").but(**SMALL))
CPU = Run(Arithmetic(precision="bf16"), Movement(3, "cpu", "cpu", "cpu").but(**SMALL))


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Let the process open so many more files."""
    gc.collect()
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    free = [number for number in range(max(used) + count + 2) if number not in used or not is_open(number)]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[count], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def suppress_refusal() -> Iterator[list[str]]:
    """Take the error of a process without descriptors, and no other."""
    said: list[str] = []
    try:
        yield said
    except penstock.PenstockError as error:
        said.append(str(error))
    assert all("ulimit -n" in text for text in said), said


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def prepared(folder: Path) -> penstock.Optimizer:
    model = make_model()
    placement = penstock.Placement(optimizer="nvme", params="nvme", nvme_path=folder)
    return penstock.prepare(model, torch.optim.AdamW(model.parameters()), placement=placement)


def test_prepare_without_descriptors_leaves_nothing(tmp_path: Path) -> None:
    prepared(tmp_path).close()  # what is loaded the first time takes some, too
    for count in range(100):
        with descriptors_left(count), suppress_refusal() as refused:
            prepared(tmp_path).close()
        assert list(tmp_path.iterdir()) == [], count
        if not refused:
            break
    assert 1 < count < 99


@pytest.mark.parametrize(("run", "blocking"), [(CPU, False), (NVME, True)], ids=["cpu, beside training", "nvme"])
def test_a_checkpoint_without_descriptors(run: Run, blocking: bool, tmp_path: Path) -> None:
    prepared = model, optimizer, _ = run.prepare()
    iterate(run, *prepared, 0, 0, 1)
    optimizer.save(tmp_path / "whole", blocking=blocking)
    optimizer.load(tmp_path / "whole")
    before = values(model, optimizer)

    def save() -> None:
        optimizer.save(tmp_path / "new", blocking=blocking)
        optimizer.synchronize()

    for count in range(100):
        with descriptors_left(count), suppress_refusal() as not_saved:
            save()
        with descriptors_left(count), suppress_refusal() as not_loaded:
            optimizer.load(tmp_path / "whole")
        optimizer.load(tmp_path / "whole")
        assert different(values(model, optimizer), before) == []
        if not (not_saved or not_loaded):
            break
    assert 2 < count < 99
    iterate(run, *prepared, 1, 0, 1)
    optimizer.close()
