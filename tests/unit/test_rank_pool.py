"""Contract of `run_ranks`: what fails on a rank fails the test, and ranks in which something is left are replaced."""

import os
import signal
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

import penstock
from penstock.engine.forward_backward import saved_tensors
from tests.lib.ranks import POOL, run_ranks

KEPT: list[Any] = []


def said(rank: int) -> tuple[int, int, int]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (rank, int(os.environ["RANK"])))
    assert everyone == [(each, each) for each in range(dist.get_world_size())]
    return os.getpid(), dist.get_rank(), int(os.environ["WORLD_SIZE"])


def processes(ranks: list[Any]) -> set[int]:
    return {process for process, *_ in ranks}


def fails(rank: int) -> None:
    if rank == 1:
        raise ValueError("of the second rank")
    dist.barrier()  # its error comes with the other's


def dies(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()  # for ever: the others are ended


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (fails, r"(?s)rank 0:\n.*in fails.*rank 1:\n.*ValueError: of the second rank"),
        (dies, "rank 1 died with exit code -9"),
    ],
    ids=["an error", "a kill"],
)
def test_failures_fail_the_test_and_end_the_ranks(work: Any, message: str) -> None:
    before = processes(run_ranks(said, 2))
    with pytest.raises(AssertionError, match=message):
        run_ranks(work, 2)
    assert not before & processes(run_ranks(said, 2))


def prepared() -> tuple[torch.nn.Module, penstock.Optimizer]:
    model = torch.nn.Linear(4, 4)
    return model, penstock.prepare(model, torch.optim.AdamW(model.parameters()), precision="fp32")


def leave(rank: int) -> None:
    engine = prepared()
    if rank == 0:
        KEPT.append(engine)
    elif rank == 1:
        threading.Thread(target=threading.Event().wait, daemon=True, name="left").start()
    elif rank == 2:
        saved_tensors.LEAST_BYTES = 512
    else:
        penstock.Optimizer.step = lambda self: None  # type: ignore[method-assign]


LEFT = ("not closed: ", "a thread: left", "changed: penstock.engine.forward_backward.saved_tensors.LEAST_BYTES")


def test_ranks_in_which_something_is_left_are_replaced() -> None:
    before, found = run_ranks(said, 4), len(POOL.left)
    run_ranks(leave, 4)
    for rank, what in enumerate((*LEFT, "changed: Optimizer.step")):
        assert any(f"rank {rank}, leave: {what}" in each for each in POOL.left[found:]), POOL.left[found:]
    assert not processes(before) & processes(run_ranks(said, 4))
