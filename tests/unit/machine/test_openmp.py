"""Passes that compute makes on a cpu are made by the threads that torch computes with."""

import os
import threading
from pathlib import Path

import pytest
import torch

import penstock
from penstock.rules import Pool
from penstock.rules.formats import deposit, squared_norm
from penstock.runtime import system
from penstock.runtime.streams import copy, on_worker
from penstock.runtime.system import compute_pool, stay_alone
from penstock.runtime.workers import HostWorker
from tests.lib.ranks import run_ranks

CPU = torch.device("cpu")
NUMEL = 5 * (1 << 16) + 77  # pieces for several threads, and a rest


def native_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.fixture
def awake() -> Pool:
    pool = compute_pool(CPU, Pool(1))
    torch.ones(1 << 20).mul_(2)  # torch's threads are there
    return pool


@pytest.mark.parametrize("add", [False, True])
def test_the_bits_do_not_depend_on_whose_threads_they_are(awake, add):
    src, storages = torch.randn(NUMEL), [torch.ones(NUMEL, dtype=torch.bfloat16) for _ in range(2)]
    norms = [deposit(storage, src, add=add, pool=pool) for storage, pool in zip(storages, (None, awake), strict=True)]
    assert torch.equal(*storages)
    assert norms[0] == norms[1] == squared_norm(storages[0], pool=awake)


def test_a_runtime_without_that_interface_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr(system.torch, "__file__", "/nowhere/torch/__init__.py")
    pool, before = Pool(1), torch.get_num_threads()
    assert compute_pool(CPU, pool) is pool
    stay_alone()
    assert torch.get_num_threads() == before


def test_several_threads_may_call_at_once(awake):
    src, norms = torch.randn(NUMEL), []
    threads = [threading.Thread(target=lambda: norms.append(squared_norm(src, pool=awake))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(norms) == {squared_norm(src, pool=None)}


def test_a_forked_child_works_alone(awake):
    """The threads stay behind in the parent: to wait for them would be for ever."""
    src = torch.randn(NUMEL)
    expected = squared_norm(src, pool=awake)
    child = os.fork()
    if child == 0:
        os._exit(0 if squared_norm(src, pool=awake) == expected else 1)
    assert os.waitpid(child, 0)[1] == 0


def teams(rank: int) -> list[tuple[int, int]]:
    """Threads that a copy of a worker starts, its own among them, and those that compute has, where it has two."""
    torch.set_num_threads(2)
    source, target = torch.ones(1 << 20), torch.empty(1 << 20)
    target.copy_(source)
    found, workers = [], []  # one that ends is listed for a moment
    for alone in (True, False):
        before = native_threads()
        workers.append(HostWorker("copies", alone=alone))
        workers[-1].submit(lambda: [None, target.copy_(source)][0]).synchronize()
        found.append((native_threads() - before, torch.get_num_threads()))
    return found


def test_a_thread_that_moves_values_has_no_team():
    """Else torch's threads are more than the cores, and none of them spins any more."""
    assert run_ranks(teams, 1, fresh=True) == [[(1, 2), (2, 2)]]


def test_what_moves_on_threads_of_ours_beside_compute_moves_alone(monkeypatch, tmp_path):
    found: set[tuple[bool, int]] = set()

    def noted(target: torch.Tensor, source: torch.Tensor) -> None:
        found.add((on_worker(), torch.get_num_threads()))
        copy(target, source)

    monkeypatch.setattr("penstock.tiers.transfer.copy", noted)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
        placement = penstock.Placement(params="nvme", grads="nvme", optimizer="nvme", nvme_path=tmp_path)
        optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters()), placement=placement)
        for _ in range(3):
            optimizer.backward(model(torch.randn(2, 256)).sum())
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
    finally:
        torch.set_num_threads(before)
    assert (True, 1) in found
    assert (True, 2) not in found
