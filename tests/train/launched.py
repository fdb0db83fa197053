"""Agents of torchrun, one for each host of a job. They are forked with all imports made, and fork their ranks."""

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, get_args_parser, parse_args

from tests.lib.processes import lives
from tests.lib.ranks import PRELOADED
from tests.train.runs import ROOT, command, listening

#: So that agents find out within seconds that another one is gone, and wait for one that is slow.
_SOON = "last_call_timeout=20,keep_alive_interval=2,keep_alive_max_attempt=3"
#: Torch before 2.13 has no such option, and waits for 30 s.
_SHUTDOWN = ["--shutdown-timeout", "5"] if "--shutdown-timeout" in get_args_parser().format_help() else []


class Job:
    """Agents on this machine, and their ranks, which run `penstock train`.

    Arguments:
        words: what every rank's command is given.
        folder: for what ranks and agents say, and the numbers of the ranks' processes.
    """

    def __init__(self, words: list[str], folder: Path) -> None:
        self.agents: list[Any] = []
        self._words, self._folder = words, folder
        (folder / "ranks").mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._endpoint = f"127.0.0.1:{free.getsockname()[1]}"

    def start(self, ranks: int, hosts: str, dies: Callable[[str, Any], None] | None = None) -> None:
        """Start a host with some ranks, of a job of `hosts` (torchrun's --nnodes).

        Arguments:
            dies: a hook of the events of this host's ranks, until they are started again.
        """
        options = ["--nnodes", hosts, "--nproc-per-node", str(ranks), "--rdzv-id", "job", "--rdzv-backend", "c10d"]
        options += ["--rdzv-endpoint", self._endpoint, "--rdzv-conf", _SOON, "--max-restarts", "3"]
        options += ["--monitor-interval", "0.1", *_SHUTDOWN, "-m", "penstock"]
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        agent = context.Process(target=_agent, args=(options, self._words, self._folder, dies))
        with chdir(ROOT):
            agent.start()
        self.agents.append(agent)
        # The first one has the rendezvous, and with it the job: another that came before it would take its part.
        while not _listens(self._endpoint):
            assert agent.is_alive(), self.said
            time.sleep(0.01)

    def ended(self, agent: int) -> int:
        """Wait for an agent, and return its exit status."""
        self.agents[agent].join()
        return self.agents[agent].exitcode

    @property
    def ranks(self) -> list[int]:
        """The processes of all ranks that were started."""
        return [int(file.name) for file in (self._folder / "ranks").iterdir()]

    @property
    def said(self) -> str:
        """All that agents and ranks have said."""
        return (self._folder / "said").read_text(errors="replace")

    def end(self) -> None:
        for agent in self.agents:
            agent.kill()
            agent.join()
        for rank in filter(lives, self.ranks):
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)


@contextmanager
def job(words: list[str], folder: Path) -> Iterator[Job]:
    """A job that leaves no process behind by itself."""
    made = Job(words, folder)
    try:
        yield made
        assert not any(map(lives, made.ranks)), "processes are left"
    finally:
        made.end()


def kill_rank(event: str, state: Any) -> None:
    """Kill rank 1 between two checkpoints."""
    if (event, state.global_step, os.environ["RANK"]) == ("step ends", 7, "1"):
        os.kill(os.getpid(), signal.SIGKILL)


def kill_host(event: str, state: Any) -> None:
    """Kill a host: its agent, and this rank of it."""
    if (event, state.global_step) == ("step ends", 7):
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def _listens(endpoint: str) -> bool:
    host, port = endpoint.split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def _agent(options: list[str], words: list[str], folder: Path, dies: Callable[[str, Any], None] | None) -> None:
    """What torchrun does with these options, but that ranks are a function."""
    said = os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.chdir(folder)
    os.environ.update(CI="1", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    config, _, _ = config_from_args(parse_args(options))
    config.start_method = "fork"
    try:
        elastic_launch(config, _rank)(words, folder, dies)
    except BaseException:
        traceback.print_exc()
        sys.exit(1)


def _rank(words: list[str], folder: Path, dies: Callable[[str, Any], None] | None) -> None:
    (folder / "ranks" / str(os.getpid())).touch()
    torch.set_num_threads(1)
    with listening(dies if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else None):
        status = command(words)
    if status:
        sys.exit(status)
