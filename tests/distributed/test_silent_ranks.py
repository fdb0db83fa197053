"""A rank that others wait for: they say who it is, and end after the timeout that was asked for."""

import contextlib
import logging
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
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
from tests.lib.refusals import said_by

# Longer than any rank is held up by what else the machine does; a group of the test's own waits for longer still.
LIMIT_S = 20.0
LONGER = timedelta(seconds=240)

prepared = partial(engines.prepared, timeout_s=LIMIT_S)


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def missed(rank: int) -> str:
    """Rank 2 comes to no step; it is still there."""
    control_group.HEARING_S = LIMIT_S / 2
    model, optimizer = prepared()
    dist.barrier()
    said = said_by(lambda: train(model, optimizer)) if rank != 2 else ""
    dist.barrier()
    return said


def stopped(rank: int, folder: Path, how: signal.Signals) -> None:
    """Rank 1 ends, or stops, between forward and backward. Rank 0 goes on, and writes down what becomes of that."""
    model, optimizer = prepared()
    train(model, optimizer)
    (folder / str(rank)).write_text(str(os.getpid()))
    loss = loss_of(model)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), how)
    (folder / "outcome").write_text(said_by(lambda: optimizer.backward(loss)))
    os.kill(int((folder / "1").read_text()), signal.SIGKILL)  # one that is stopped would never end


def absent(rank: int) -> tuple[str, list[str]]:
    """Rank 2 never comes to prepare; rank 1 comes."""
    heard = Heard()
    logging.getLogger("penstock").addHandler(heard)
    control_group.WARN_S, control_group.JOINING_S = LIMIT_S / 2, LIMIT_S
    dist.barrier()
    said = said_by(lambda: prepared(timeout_s=600)) if rank != 2 else ""
    dist.barrier()
    return said, heard.messages


@pytest.fixture(scope="module")
def waits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, "Future[list[object]]"]]:
    """All that waits until a limit is over: at the same time."""
    folders = {how: tmp_path_factory.mktemp(how.name) for how in (signal.SIGKILL, signal.SIGSTOP)}
    runs: dict[str, tuple[object, ...]] = {"missed": (missed, 3), "absent": (absent, 3)}
    runs |= {how.name: (stopped, 2, folder, how) for how, folder in folders.items()}
    with ThreadPoolExecutor(len(runs)) as pool:
        start = partial(pool.submit, run_ranks, timeout=LONGER, fresh=True)
        yield {name: start(*run) for name, run in runs.items()} | folders


def test_a_rank_that_does_not_come_to_a_meeting_is_told_from_those_that_wait_there_too(waits: dict) -> None:
    *waited, _ = waits["missed"].result()
    for rank, said in enumerate(waited):
        assert said.startswith(f"EngineError: Rank {rank} of 3 hears nothing from another one in a forward with grad")
        assert f"; rank {1 - rank} could not finish a forward with gradients; rank 2 says nothing: it has " in said
        assert f"Look at the first error of a rank that has ended. Ranks wait for {LIMIT_S:g} s at most: Opt" in said


def test_a_rank_that_does_not_come_to_prepare_is_named(waits: dict) -> None:
    *came, (_, silent) = waits["absent"].result()
    assert silent == []
    for rank, (said, warned) in enumerate(came):
        assert said.startswith(
            f"EngineError: Rank {rank} of 3 waited {LIMIT_S:g} s in prepare() for rank 2: ended, or "
        )
        assert f"the smaller of Options(timeout_s=) and {LIMIT_S:g} s" in said
        assert warned == [
            f"Rank {rank} has waited {LIMIT_S / 2:g} s in prepare() for rank 2, of 3 ranks. It waits for {LIMIT_S:g} s "
            "at most."
        ]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_ends_or_stops_ends_the_others(waits: dict, how: signal.Signals) -> None:
    with pytest.raises(AssertionError, match="rank 1 died with exit code"):
        waits[how.name].result()
    said = (waits[how] / "outcome").read_text()
    assert re.match(r"EngineError: Rank 0 could not finish the \w+ of unit ", said), said
    assert "rank 1 says nothing: it has ended, or runs something else" in said
    assert f"Ranks wait for {LIMIT_S:g} s at most: Options(timeout_s=)." in said


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
    model, optimizer = prepared()
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
