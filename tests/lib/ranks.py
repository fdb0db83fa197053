"""Several ranks on one machine: processes that are kept from call to call, or made for one call."""

import contextlib
import fcntl
import gc
import logging
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANK_TIMEOUT = timedelta(seconds=60)
# Modules that the processes of ranks have from the one that they are forked from; it starts with the first of them.
PRELOADED = ["tests.preloaded"]
MOST_KEPT = 4  # ranks that are kept; a call of more has processes of its own


def run_ranks(
    work: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: timedelta = RANK_TIMEOUT,
    backend: str = "gloo",
    start: Callable[[], None] | None = None,
    fresh: bool = False,
) -> list[Any]:
    """Run `work(rank, *args)` in `world_size` processes with a group, and return what each returned.

    `work` is a module-level function; an exception on any rank fails the test with that rank's traceback. The processes
    are kept for the next call, which finds the state of a new one (`_Clean`), unless something is left in them.

    Arguments:
        start: a module-level function that each process calls before it makes the group; it has new processes.
        fresh: for work that ends its process, or changes it for good: processes of its own.
    """
    if fresh or start is not None or backend != "gloo" or world_size > MOST_KEPT:
        return _run_once(work, world_size, args, timeout, backend, start)
    return POOL.run(work, world_size, args, timeout)


def _run_once(
    work: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    timeout: timedelta,
    backend: str,
    start: Callable[[], None] | None,
) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        context = _context(backend)
        processes = [
            context.Process(target=_rank, args=(work, rank, world_size, folder, args, timeout, backend, start))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        answers = []
        for rank in range(world_size):
            path = Path(folder, f"result{rank}")
            assert path.exists(), f"rank {rank} died with exit code {processes[rank].exitcode}"
            answers.append(pickle.loads(path.read_bytes()))
        return _results(answers)


def _context(backend: str = "gloo") -> Any:
    # The server of forks imports torch once for all ranks of all tests of this process. What it imports may touch CUDA,
    # which no fork can use then.
    context = mp.get_context("spawn" if "nccl" in backend else "forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _results(answers: list[tuple[bool, Any]]) -> list[Any]:
    failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
    assert not failures, "\n".join(failures)
    return [value for _, value in answers]


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
    """One rank of one call, in a process of its own."""
    _name_rank(rank, world_size)
    torch.set_num_threads(1)
    if start is not None:
        start()
    _make_group(rank, world_size, folder, timeout, backend)
    try:
        outcome = (True, work(rank, *args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    Path(folder, f"result{rank}").write_bytes(pickle.dumps(outcome))
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    os._exit(0)  # a rank whose peer failed must not hang in a collective at exit


def _name_rank(rank: int, world_size: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def _make_group(rank: int, world_size: int, folder: str, timeout: timedelta, backend: str) -> None:
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=timeout
    )
    # A rank may be done before another has made its end of the connections, which then fails.
    joined = dist.FileStore(f"{folder}/joined", world_size)
    joined.set(str(rank), "")
    joined.wait([str(each) for each in range(world_size)], timeout)


@dataclass
class _Kept:
    """A process that runs one rank of a call after the other."""

    process: Any
    connection: Connection

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


class _Pool:
    """The ranks that are kept, the first of them for every call; they end with the process that started them.

    Attributes:
        left: what was found in ranks that were ended therefore.
    """

    def __init__(self) -> None:
        self.ranks: list[_Kept] = []
        self.left: list[str] = []
        # Before those of `multiprocessing`, which waits for processes; not in the child of a fork.
        util.Finalize(None, self.end, exitpriority=100)

    def run(self, work: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout: timedelta) -> list[Any]:
        ranks = self._first(world_size)
        is_clean = False
        try:
            with tempfile.TemporaryDirectory() as folder:
                content = pickle.dumps((work, args))
                for rank in ranks:
                    rank.connection.send_bytes(pickle.dumps((world_size, folder, timeout, content)))
                answers = [pickle.loads(answer) for answer in self._answers(ranks)]
            left = [
                f"rank {rank}, {work.__qualname__}: {each}" for rank, (*_, all) in enumerate(answers) for each in all
            ]
            self.left += left
            is_clean = not left
            return _results([(ok, value) for ok, value, _ in answers])
        finally:
            if not is_clean:
                self.end()

    def _first(self, count: int) -> list[_Kept]:
        if any(not kept.process.is_alive() for kept in self.ranks):
            self.end()
        context = _context()
        for rank in range(len(self.ranks), count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs))
            process.start()
            theirs.close()
            self.ranks.append(_Kept(process, ours))
        return self.ranks[:count]

    def _answers(self, ranks: list[_Kept]) -> list[bytes]:
        """What ranks sent, when all have, or the first has ended without."""
        answers: dict[int, bytes] = {}
        while missing := [rank for rank in range(len(ranks)) if rank not in answers]:
            # The connection of a dead rank is still open in processes that it has started.
            wait([each for rank in missing for each in (ranks[rank].connection, ranks[rank].process.sentinel)])
            for rank in missing:
                process, connection = ranks[rank].process, ranks[rank].connection
                ended = not process.is_alive()
                try:
                    if connection.poll():
                        answers[rank] = connection.recv_bytes()
                        continue
                except (EOFError, OSError):
                    ended = True
                if ended:
                    process.join()
                    raise AssertionError(f"rank {rank} died with exit code {process.exitcode}")
        return [answers[rank] for rank in range(len(ranks))]

    def end(self) -> None:
        """End all ranks, whatever they are in."""
        while self.ranks:
            self.ranks.pop().end()


POOL = _Pool()


def _serve(rank: int, connection: Connection) -> None:
    """A rank that is kept: one call after the other."""
    _end_with_parent()
    torch.set_num_threads(1)
    clean = _Clean()
    while True:
        try:
            world_size, folder, timeout, content = pickle.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)
        outcome = _one_call(clean, rank, world_size, folder, timeout, content)
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        if not outcome[0]:
            connection.send_bytes(pickle.dumps((*outcome, ["failed"])))
            os._exit(0)  # the others' collectives fail rather than wait
        connection.send_bytes(pickle.dumps((*outcome, clean.left())))


def _end_with_parent() -> None:
    """Have this process ended with the one that runs the tests, whatever it is in then.

    That one has the other end of a pipe. This process is not its child, but one of the server of forks, which lives as
    long as any of them.
    """
    parent = mp.parent_process()
    assert parent is not None
    signal.signal(signal.SIGIO, signal.SIG_DFL)  # ends the process
    fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, fcntl.fcntl(parent.sentinel, fcntl.F_GETFL) | os.O_ASYNC)


def _one_call(
    clean: "_Clean", rank: int, world_size: int, folder: str, timeout: timedelta, content: bytes
) -> tuple[bool, bytes | str]:
    try:
        _name_rank(rank, world_size)
        work, args = pickle.loads(content)
        clean.note_definitions()
        _make_group(rank, world_size, folder, timeout, "gloo")
        with warnings.catch_warnings():
            value = work(rank, *args)
        pickle.dumps(value)
        return True, value
    except BaseException:
        return False, traceback.format_exc()


@dataclass
class _Clean:
    """The state of a new process of a rank: what is restored after each call, and what is looked for then."""

    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    folder: str = field(default_factory=os.getcwd)
    handlers: dict[int, Any] = field(default_factory=lambda: {n: signal.getsignal(n) for n in _handled()})
    threads: set[threading.Thread] = field(default_factory=lambda: set(threading.enumerate()))
    torch_state: torch.Tensor = field(default_factory=torch.get_rng_state)
    python_state: Any = field(default_factory=random.getstate)
    numpy_state: Any = field(default_factory=numpy.random.get_state)
    definitions: dict[str, list[tuple[Any, dict[str, Any]]]] = field(default_factory=dict)

    def restore(self) -> None:
        if dict(os.environ) != self.environment:
            os.environ.clear()
            os.environ.update(self.environment)
        os.chdir(self.folder)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        logging.getLogger("penstock").handlers.clear()
        torch.set_grad_enabled(True)
        torch.set_num_threads(1)
        torch.set_rng_state(self.torch_state)
        random.setstate(self.python_state)
        numpy.random.set_state(self.numpy_state)

    def note_definitions(self) -> None:
        """Note what modules define that are there by now; one that a call imports is noted before the next call."""
        for name, module in list(sys.modules.items()):
            if name not in self.definitions and _is_watched(name):
                classes = [each for each in vars(module).values() if issubclass(type(each), type)]
                own = [each for each in classes if each.__module__ == name]
                self.definitions[name] = [(each, dict(vars(each))) for each in (module, *own)]

    def left(self) -> list[str]:
        """Clean up; return what is left none the less."""
        self.restore()
        if "torch.distributed.tensor" in sys.modules:  # what it remembers refers to meshes of groups that are gone
            _forget_placements()
        modules = len(sys.modules)
        torch._dynamo.reset()
        gc.collect()
        from penstock.runtime import finalizers

        if finalizers._alive.endings:
            gc.collect()  # the first one has run finalizers, which had let go of more
        found = [f"not closed: {each._end}" for each in finalizers._alive.endings.values()]
        found += [f"a thread: {each.name}" for each in threading.enumerate() if self._is_left(each)]
        found += [f"a process: {each.name}" for each in mp.active_children()]
        found += [f"changed: {each}" for each in self._changed()]
        if dist.is_initialized():
            found.append("a process group")
        if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
            found.append("a mode of torch")
        if len(sys.modules) != modules:
            gc.freeze()
        return found

    def _is_left(self, thread: threading.Thread) -> bool:
        return thread not in self.threads and thread.name != "tqdm_monitor"

    def _changed(self) -> Iterator[str]:
        for owned in self.definitions.values():
            for owner, before in owned:
                now = vars(owner)
                for name, value in before.items():
                    # The first optimizer of a class wraps its `step`.
                    if now.get(name) is not value and not hasattr(now.get(name), "hooked"):
                        yield f"{owner.__name__}.{name}"


def _handled() -> tuple[int, ...]:
    return signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2


def _is_watched(name: str) -> bool:
    return name.split(".")[0] == "penstock" or name in ("os", "time", "torch", "torch.distributed")


def _forget_placements() -> None:
    from torch.distributed.tensor import DTensor

    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
