"""Jobs of torchrun, whose ranks and hosts are killed or stopped."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

PATIENCE_S = 240.0  # for what takes seconds on a machine that does nothing else
#: So that agents find out within seconds that another one is gone, and wait for one whose imports take long.
_SOON = "last_call_timeout=20,keep_alive_interval=2,keep_alive_max_attempt=3"


def until(is_so: Callable[[], bool], what: str) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < ends, what
        time.sleep(0.005)


def processes(name: str) -> dict[int, list[str]]:
    """The arguments of those that have `name` among them, by pid; but for those that have ended."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                words = (entry / "cmdline").read_text().split("\0")
                if name in words:
                    found[int(entry.name)] = words
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def _listens(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


class Job:
    """Agents of torchrun on this machine, one for each host of a job, and what they run. A context.

    Arguments:
        command: what every rank runs: the arguments of `python`.
        out: the run's folder, which is among them.
        log: the file of all that is said.
    """

    def __init__(self, command: list[str], out: Path, log: Path) -> None:
        self.agents: list[subprocess.Popen[bytes]] = []
        self._command, self._out, self._log = command, out, log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._endpoint = f"127.0.0.1:{free.getsockname()[1]}"

    def start(self, ranks: int, hosts: str, *options: str) -> None:
        """Start a host with some ranks, of a job of `hosts` (torchrun's --nnodes)."""
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", self._endpoint, "--rdzv-conf", _SOON]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", hosts, "--nproc-per-node", str(ranks)]
        launcher += [*rendezvous, "--rdzv-id", "job", "--max-restarts", "3", "--monitor-interval", "0.1", *options]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with self._log.open("ab") as log:
            agent = subprocess.Popen([*launcher, *self._command], env=env, stdout=log, stderr=log)
        self.agents.append(agent)
        # The first one has the rendezvous, and with it the job: another that came before it would take its part.
        host, port = self._endpoint.split(":")
        until(lambda: _listens(host, int(port)), "the first agent does not listen")

    def ranks_of(self, agent: int) -> list[int]:
        """The processes of an agent's ranks, by pid, as they were started."""
        pid = self.agents[agent].pid
        with suppress(OSError, ValueError):
            return sorted(rank for rank in processes(str(self._out)) if rank != pid and parent_of(rank) == pid)
        return []

    def step(self) -> int:
        """The last step that was told."""
        with suppress(OSError, ValueError):
            lines = (self._out / "metrics.jsonl").read_text().splitlines()
            return max((json.loads(line).get("step", 0) for line in lines), default=0)
        return 0

    def ended(self, agent: int) -> int:
        """Wait for an agent, and return its exit status."""
        try:
            return self.agents[agent].wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.said) from None

    @property
    def said(self) -> str:
        """All that agents and ranks have said."""
        return self._log.read_text(errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for agent in self.agents:
            agent.kill()
            agent.wait()
        for pid in processes(str(self._out)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def job(command: list[str], out: Path) -> Iterator[Job]:
    """A job that leaves no process behind by itself."""
    with Job(command, out, out.parent / f"{out.name}.log") as made:
        yield made
        until(lambda: not processes(str(out)), "processes are left")
