"""A rank that others wait for: they say who it is, and end after the timeout that was asked for."""

import contextlib
import logging
import os
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

import penstock
from penstock.errors import EngineError
from penstock.runtime import control_group
from tests.lib import engines
from tests.lib.engines import loss_of, train
from tests.lib.ranks import run_ranks

TIMEOUT_S = 10.0


prepared = partial(engines.prepared, timeout_s=TIMEOUT_S)


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def missed(rank: int) -> str:
    """Rank 2 comes to no step; it is still there."""
    model, optimizer = prepared()
    said = ""
    if rank != 2:
        with pytest.raises(EngineError) as caught:
            train(model, optimizer)
        said = str(caught.value)
    dist.barrier()
    return said


def test_a_rank_that_does_not_come_to_a_meeting_is_told_from_those_that_wait_there_too() -> None:
    *waited, _ = run_ranks(missed, 3, fresh=True)
    for rank, said in enumerate(waited):
        assert said.startswith(f"Rank {rank} of 3 hears nothing from another one in a forward with gradients, "), said
        assert f"; rank {1 - rank} could not finish a forward with gradients; rank 2 says nothing: it has " in said
        assert "Look at the first error of a rank that has ended. Ranks wait for 10 s at most: Options(time" in said


def stopped(rank: int, folder: Path, how: signal.Signals) -> None:
    """Rank 1 ends, or stops, between forward and backward. Rank 0 goes on, and writes down what becomes of that."""
    model, optimizer = prepared()
    train(model, optimizer)
    (folder / str(rank)).write_text(str(os.getpid()))
    dist.barrier()
    loss = loss_of(model)
    if rank == 1:
        os.kill(os.getpid(), how)
    with pytest.raises(EngineError) as caught:
        optimizer.backward(loss)
    (folder / "outcome").write_text(str(caught.value))
    os.kill(int((folder / "1").read_text()), signal.SIGKILL)  # one that is stopped would never end


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_ends_or_stops_ends_the_others(tmp_path: Path, how: signal.Signals) -> None:
    with pytest.raises(AssertionError, match="rank 1 died with exit code -9"):
        run_ranks(stopped, 2, tmp_path, how, fresh=True)
    said = (tmp_path / "outcome").read_text()
    assert re.match(r"Rank 0 could not finish the \w+ of unit ", said), said
    assert "rank 1 says nothing: it has ended, or runs something else" in said
    assert "Ranks wait for 10 s at most: Options(timeout_s=)." in said


# A rank that is ended by an exception of its user's


def in_finally(optimizer: penstock.Optimizer, error: BaseException) -> None:
    try:
        raise error
    finally:
        optimizer.close()


def in_with(optimizer: penstock.Optimizer, error: BaseException) -> None:
    with contextlib.closing(optimizer):
        raise error


def in_finalizer(optimizer: penstock.Optimizer, error: BaseException) -> None:
    class Owner:
        def __del__(self) -> None:
            optimizer.close()

    Owner()
    raise error


def ended(rank: int, leave: Callable[..., None], error: BaseException) -> None:
    """Rank 1 raises. Rank 0 goes on to a forward once rank 1 has closed: a `close` that waits for it fails."""
    heard = Heard()
    logging.getLogger("penstock").addHandler(heard)
    model, optimizer = prepared(timeout_s=60)
    train(model, optimizer)
    if rank == 1:
        with pytest.raises(type(error), match="of mine"):
            leave(optimizer, error)
        assert ["waits for no other rank" in said for said in heard.messages] == [True]
        assert all(p.numel() == 0 for p in model.parameters())
        optimizer.close()
    dist.barrier()
    if rank == 0:
        word = "the end of the program or of an object" if leave is in_finalizer else f"{type(error).__name__}: of mine"
        with pytest.raises(EngineError, match=f"in a forward with gradients, .*; rank 1 was ended by {word}"):
            train(model, optimizer)
        with pytest.raises(EngineError, match=f"in close.*does something else; rank 1 was ended by {word}"):
            optimizer.close()
    dist.barrier()
    logging.getLogger("penstock").removeHandler(heard)


def all_ended(rank: int) -> None:
    for leave in (in_finally, in_with, in_finalizer):
        ended(rank, leave, ValueError("of mine"))
    ended(rank, in_finally, KeyboardInterrupt("of mine"))


def test_a_rank_that_raises_and_closes_waits_for_no_other() -> None:
    run_ranks(all_ended, 2)


def in_a_handler(rank: int) -> list[int]:
    try:
        raise MemoryError
    except MemoryError:
        model, optimizer = prepared()
        train(model, optimizer)
        optimizer.close()
    return [p.numel() for p in model.parameters()]


def test_a_loop_that_runs_in_an_except_block_as_a_whole_keeps_its_parameters() -> None:
    assert run_ranks(in_a_handler, 2) == [[256, 16] * 3] * 2


# A rank that does not come to prepare


def absent(rank: int) -> tuple[str, list[str]]:
    """Rank 2 never comes; rank 1 comes."""
    heard = Heard()
    logging.getLogger("penstock").addHandler(heard)
    said = ""
    if rank != 2:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(control_group, "WARN_S", 0.5)
            patch.setattr(control_group, "JOINING_S", 3.0)
            with pytest.raises(EngineError) as caught:
                prepared(timeout_s=600)
        said = str(caught.value)
    dist.barrier()
    return said, heard.messages


def test_a_rank_that_does_not_come_to_prepare_is_named() -> None:
    *came, (_, silent) = run_ranks(absent, 3, fresh=True)
    assert silent == []
    for rank, (said, warned) in enumerate(came):
        assert said.startswith(f"Rank {rank} of 3 waited 3 s in prepare() for rank 2: ended, or not there yet.")
        assert "the smaller of Options(timeout_s=) and 3 s" in said
        assert warned == [
            f"Rank {rank} has waited 0.5 s in prepare() for rank 2, of 3 ranks. It waits for 3 s at most."
        ]
