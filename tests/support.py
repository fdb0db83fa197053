"""Several ranks on one machine, and rows that `make test-thorough` runs."""

import contextlib
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANK_TIMEOUT = timedelta(seconds=60)
# Modules that the processes of ranks have from the one that they are forked from; it starts with the first of them.
PRELOADED = ["tests.preloaded"]


def thorough(*values: Any, id: str | None = None) -> Any:
    """A row of a table that `make test-thorough` runs, and `make test` leaves out: others are much like it."""
    return pytest.param(*values, marks=pytest.mark.thorough, id=id)


def sampled(values: Iterable[Any], every: int) -> list[Any]:
    """Every so-many-th row of a long table; `make test-thorough` runs the others."""
    return [value if number % every == 0 else thorough(value) for number, value in enumerate(values)]


def sampled_rows(rows: Iterable[tuple[Any, ...]], every: int) -> list[Any]:
    """The same of rows of several values."""
    return [row if number % every == 0 else thorough(*row) for number, row in enumerate(rows)]


def run_ranks(
    work: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: timedelta = RANK_TIMEOUT,
    backend: str = "gloo",
    start: Callable[[], None] | None = None,
) -> list[Any]:
    """Run `work(rank, *args)` in `world_size` processes with a group, and return what each returned.

    `work` is a module-level function; an exception on any rank fails the test with that rank's traceback. So is
    `start`, which each process calls before it makes the group.
    """
    with tempfile.TemporaryDirectory() as folder:
        # The server of forks imports torch once for all ranks of all tests of this process. What it imports may touch
        # CUDA, which no fork can use then.
        context = mp.get_context("spawn" if "nccl" in backend else "forkserver")
        context.set_forkserver_preload(PRELOADED)
        processes = [
            context.Process(target=_rank, args=(work, rank, world_size, folder, args, timeout, backend, start))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        results = []
        for rank in range(world_size):
            path = Path(folder, f"result{rank}")
            assert path.exists(), f"rank {rank} died with exit code {processes[rank].exitcode}"
            results.append(pickle.loads(path.read_bytes()))
        failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(results) if not ok]
        assert not failures, "\n".join(failures)
        return [value for _, value in results]


def _rank(
    work: Callable[..., Any],
    rank: int,
    world_size: int,
    folder: str,
    args: tuple[Any, ...],
    timeout: timedelta,
    backend: str,
    start: Callable[[], None] | None,
) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if start is not None:
        start()
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=timeout
    )
    # A rank may be done before another has made its end of the connections, which then fails.
    joined = dist.FileStore(f"{folder}/joined", world_size)
    joined.set(str(rank), "")
    joined.wait([str(each) for each in range(world_size)], timeout)
    try:
        outcome = (True, work(rank, *args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    Path(folder, f"result{rank}").write_bytes(pickle.dumps(outcome))
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    os._exit(0)  # a rank whose peer failed must not hang in a collective at exit
