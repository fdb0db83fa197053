"""Contract of `run_ranks`: each call finds new ranks, whatever the last one has left in them."""

import os
import random
import signal
import threading
from pathlib import Path
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


def test_ranks_are_kept_and_shared_by_calls_of_two_and_of_four() -> None:
    two, four, again = (run_ranks(said, count) for count in (2, 4, 2))
    assert [each[1:] for each in four] == [(rank, 4) for rank in range(4)]
    assert [each[1:] for each in two] == [(0, 2), (1, 2)]
    assert four[:2] == [(process, rank, 4) for process, rank, _ in two]
    assert again == two


# What is as in a new process


def state(rank: int) -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "records": torch.is_grad_enabled(),
        "of torch": torch.rand(1).item(),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "handler": signal.getsignal(signal.SIGTERM),
    }


def change(rank: int, folder: Path) -> float:
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    os.environ.update(RANK="9", OF_A_TEST="1")
    del os.environ["PATH"]
    os.chdir(folder)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.manual_seed(3)
    random.seed(3)
    return random.random()


def drawn(rank: int) -> float:
    return random.random()


def test_a_call_finds_the_state_of_a_new_process(tmp_path: Path) -> None:
    new = run_ranks(state, 2, fresh=True)
    before = run_ranks(said, 2)
    first = run_ranks(drawn, 2)
    assert run_ranks(change, 2, tmp_path) != first
    assert run_ranks(state, 2) == new
    assert run_ranks(drawn, 2) == first
    assert run_ranks(said, 2) == before


# What ends ranks


def fails(rank: int) -> None:
    if rank == 1:
        raise ValueError("of the second rank")
    dist.barrier()  # its error comes with the other's


def dies(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()  # for ever: the others are ended


def cannot_be_sent(rank: int) -> Any:
    return lambda: rank


@pytest.mark.parametrize(
    ("work", "args", "message"),
    [
        (fails, (), r"(?s)rank 0:\n.*in fails.*rank 1:\n.*ValueError: of the second rank"),
        (dies, (), "rank 1 died with exit code -9"),
        (cannot_be_sent, (), r"rank 0:\n.*(?s:.*)[Cc]an't (get|pickle) local object"),
    ],
    ids=["an error", "a kill", "an answer that cannot be sent"],
)
def test_failures_fail_the_test_and_end_the_ranks(work: Any, args: Any, message: str) -> None:
    before = processes(run_ranks(said, 2))
    with pytest.raises(AssertionError, match=message):
        run_ranks(work, 2, *args)
    assert not before & processes(run_ranks(said, 2))


def test_a_rank_that_ended_between_calls_is_replaced() -> None:
    first, second = (process for process, *_ in run_ranks(said, 2))
    os.kill(second, signal.SIGKILL)
    POOL.ranks[1].process.join()
    assert not {first, second} & processes(run_ranks(said, 2))


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


def drops_an_engine(rank: int) -> None:
    model, _ = prepared()
    model.own = model  # a cycle


def test_an_engine_that_is_dropped_is_collected() -> None:
    before = run_ranks(said, 2)
    run_ranks(drops_an_engine, 2)
    assert run_ranks(said, 2) == before
