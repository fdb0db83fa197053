"""The thread pool: shared by threads, closed cleanly, harmless after a fork and at exit."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from penstock.rules import Pool, UpdateSlice, deposit, rule_for, squared_norm
from penstock.rules.standard import AdamRule


def thread_count() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_workers_start_once_and_end_with_close_or_the_last_reference() -> None:
    before = thread_count()
    alone, pool = Pool(1), Pool(3)
    assert (alone.threads, pool.threads, thread_count()) == (1, 3, before + 2)
    assert squared_norm(torch.ones(100_000), pool=alone) == 100_000
    for _ in range(2):
        pool.close()
        assert thread_count() == before
    with pytest.raises(RuntimeError, match="the pool is closed"):
        squared_norm(torch.ones(100_000), pool=pool)
    pool = Pool(2)
    assert thread_count() == before + 1
    del pool
    assert thread_count() == before
    with pytest.raises(ValueError, match="at least 1 thread"):
        Pool(0)


def allowed(tasks: set[Path]) -> list[set[int]]:
    """The cores that threads may run on."""
    return [os.sched_getaffinity(int(task.name)) for task in tasks]


def test_threads_run_on_the_cores_that_they_are_given() -> None:
    """The caller stays where it is."""
    own, tasks = os.sched_getaffinity(0), set(Path("/proc/self/task").iterdir())
    last = max(own)
    for cores, expected in (([last], {last}), ([last, 4000], {last}), ([4000], own), ([-1], own), ([], own)):
        pool = Pool(3, cores)
        assert squared_norm(torch.ones(300_000), pool=pool) == 300_000
        workers = set(Path("/proc/self/task").iterdir()) - tasks
        while allowed(workers) != [expected] * 2:  # each binds itself when it begins
            time.sleep(0.001)
        pool.close()
    assert os.sched_getaffinity(0) == own


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_copy_is_memcpy(threads: int) -> None:
    pool = Pool(threads)
    for nbytes in (0, 1, 4095, (1 << 19) + 1, 3_000_001):
        src = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
        dst = torch.zeros(nbytes + 1, dtype=torch.uint8)
        pool.copy(dst.data_ptr(), src.data_ptr(), nbytes)
        assert torch.equal(dst[:nbytes], src)
        assert dst[nbytes] == 0
    pool.close()


def test_many_python_threads_share_a_pool() -> None:
    pool = Pool(3)
    optimizer = torch.optim.AdamW([torch.zeros(1)])
    step_scalars = rule_for(optimizer).step_scalars(optimizer.param_groups[0], 1)
    numel, rounds = 150_001, 10
    generator = torch.Generator().manual_seed(5)
    value, grad = torch.randn(numel, generator=generator), torch.randn(numel, generator=generator)

    def updates(pool: Pool | None) -> tuple[torch.Tensor, float]:
        update_slice = UpdateSlice(value.clone(), grad.clone(), None, (torch.zeros(numel), torch.zeros(numel)))
        for _ in range(rounds):
            AdamRule("adamw").update(update_slice, step_scalars, 1.0, pool)
        return update_slice.param, float(deposit(torch.zeros(numel), update_slice.param, add=True, pool=pool))

    expected, expected_norm = updates(None)
    results: list[tuple[torch.Tensor, float]] = []
    threads = [threading.Thread(target=lambda: results.append(updates(pool))) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pool.close()
    assert len(results) == 5
    for param, norm in results:
        assert torch.equal(param, expected)
        assert norm == expected_norm


def test_close_while_others_work_lets_them_finish() -> None:
    pool = Pool(3)
    src = torch.ones(1_000_000)
    norms: list[float] = []

    def work() -> None:
        while True:
            try:
                norms.append(float(squared_norm(src, pool=pool)))
            except RuntimeError:
                return

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    while not norms:
        time.sleep(0.001)
    pool.close()
    for thread in threads:
        thread.join()
    assert set(norms) == {1_000_000.0}


def test_other_python_threads_run_during_a_call() -> None:
    """Were the interpreter locked meanwhile, this thread would have no turn from the call's beginning to its end."""
    src, turns = torch.ones(2_000_000), [0]
    done = threading.Event()

    def call() -> None:
        before = after = 0
        while after == before:
            before = turns[0]
            squared_norm(src, pool=None)
            after = turns[0]
        done.set()

    worker = threading.Thread(target=call)
    worker.start()
    while not done.is_set():
        turns[0] += 1
    worker.join()


FORK_AND_EXIT = """
import os, threading
import torch
from penstock.rules import Pool, squared_norm
pool = Pool(3)
src = torch.ones(5_000_000)
works = threading.Event()
def busy():
    while True:
        squared_norm(src, pool=pool)
        works.set()
for _ in range(2): threading.Thread(target=busy, daemon=True).start()
for _ in range(5):
    child = os.fork()
    if child == 0:
        ok = squared_norm(src, pool=pool) == 5_000_000
        own = Pool(2)
        ok = ok and squared_norm(src, pool=own) == 5_000_000
        own.close(); pool.close(); del pool
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert squared_norm(src, pool=pool) == 5_000_000
works.wait()
"""


def test_forked_children_work_and_the_process_exits_with_an_open_pool_at_work() -> None:
    quietly = ("-W", "ignore::DeprecationWarning")  # of forks beside threads, which this is about
    done = subprocess.run([sys.executable, *quietly, "-c", FORK_AND_EXIT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
