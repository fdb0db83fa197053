"""Two hosts on one machine, with a slow link between them: `python -m tests.hosts.two SPEC`.

A host is a set of namespaces: a network of its own with one end of a pair of virtual interfaces, a host name, mounts,
processes and a monotonic clock. All of them belong to processes below this one, which is the first one of a namespace
of processes: when it ends, however it does, the kernel ends all of them, and takes back the interfaces and mounts.
Nothing has a name that another run could have.

A spec is a file of JSON: `folder` for what is written, `mbit` of the link in each direction, `hosts` with the name of
each and the size of its disk, which is `folder/NAME/disk`; and `module`, if any, whose `main` each rank calls with
`arguments`. Ranks find each other by the variables that torchrun sets; those of a host are forks of one process, which
has imported for all of them.
"""

import ctypes
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

RANKS = 2  # on each host
PORT = 29500  # of the rendezvous: of a network where nobody else is
ADDRESSES = ("10.75.0.1", "10.75.0.2")
MOST_MTU_BYTES = 1500
_NAMESPACES = ("--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_MODULE = "tests.hosts.two"
_PR_SET_PDEATHSIG = 1


def command(spec: Path) -> list[str]:
    """The command that runs a spec: as root, or as root of a namespace of users where those are allowed."""
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    own = ["unshare", *as_root, "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return [*own, sys.executable, "-m", _MODULE, str(spec)]


def end_with_parent() -> None:
    """Have the kernel kill this process when the one that has started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def link_of(number: int) -> str:
    """The interface of a host: each calls it something else."""
    return f"link{number}"


def run(spec_file: Path) -> int:
    """Make both hosts, join them, and wait for what runs there. The first status that is not 0 ends all."""
    spec = json.loads(spec_file.read_text())
    hosts = [_start(spec_file, number) for number in range(len(spec["hosts"]))]
    _meet(hosts, "here")
    first, second = (str(host.pid) for host in hosts)
    pair = ["ip", "link", "add", link_of(0), "netns", first, "type", "veth"]
    subprocess.run([*pair, "peer", "name", link_of(1), "netns", second], check=True)
    _tell(hosts)
    _meet(hosts, "up")  # a host that ended before would take the link with it
    _tell(hosts)
    for _ in hosts:
        _, ended = os.wait()
        status = os.waitstatus_to_exitcode(ended)
        if status:
            return status
    return 0


def _meet(hosts: Sequence["subprocess.Popen[bytes]"], word: str) -> None:
    """Wait until every host has said so."""
    for host in hosts:
        assert host.stdout is not None
        if host.stdout.readline().decode().strip() != word:
            sys.exit(f"A host is not {word}.")


def _tell(hosts: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Have every host go on."""
    for host in hosts:
        assert host.stdin is not None
        host.stdin.write(b"go\n")
        host.stdin.flush()


def _start(spec_file: Path, number: int) -> "subprocess.Popen[bytes]":
    clock = [f"--{name}={(number + 1) * 1_000_000}" for name in ("monotonic", "boottime")]
    own = ["unshare", *_NAMESPACES, *(["--time", *clock] if Path("/proc/self/ns/time").exists() else [])]
    worker = [sys.executable, "-m", _MODULE, str(spec_file), str(number)]
    return subprocess.Popen([*own, *worker], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def be_host(spec_file: Path, number: int) -> None:
    """Set this host up, run its ranks, and end with the first status that is not 0."""
    spec = json.loads(spec_file.read_text())
    host: Mapping[str, Any] = spec["hosts"][number]
    socket.sethostname(host["name"])
    own = Path(spec["folder"], host["name"])
    Path(own, "tmp").mkdir(parents=True, exist_ok=True)
    disk = Path(own, "disk")
    disk.mkdir(exist_ok=True)
    _call("mount", "-t", "tmpfs", "-o", f"size={host.get('disk_bytes', 1 << 26)}", "none", str(disk))
    _say("here")  # the link is there then
    link = link_of(number)
    _call("ip", "link", "set", "lo", "up")
    _call("ip", "address", "add", f"{ADDRESSES[number]}/24", "dev", link)
    _call("ip", "link", "set", link, "mtu", str(MOST_MTU_BYTES), "up")
    # A long queue: nothing is dropped and sent again, which would count twice.
    _call(
        "tc", "qdisc", "add", "dev", link, "root", "tbf", "rate", f"{spec['mbit']}mbit", "burst", "64kb", "limit", "8mb"
    )
    _say("up")
    os.environ.update({"GLOO_SOCKET_IFNAME": link, "TMPDIR": str(Path(own, "tmp")), "OMP_NUM_THREADS": "1"})
    if "module" not in spec:
        return
    with open(Path(own, "log"), "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    import torch._dynamo  # noqa: F401 - which the first optimizer imports

    work = importlib.import_module(spec["module"])
    ranks = [_fork(spec, number * RANKS + local, local, work.main) for local in range(RANKS)]
    for _ in ranks:
        _, ended = os.wait()
        if status := os.waitstatus_to_exitcode(ended):
            sys.exit(abs(status))


def _fork(spec: Mapping[str, Any], rank: int, local: int, main: Callable[..., object]) -> int:
    """Start a rank; return the number of its process."""
    process = os.fork()
    if process:
        return process
    here = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": RANKS * len(spec["hosts"]), "LOCAL_WORLD_SIZE": RANKS}
    os.environ.update({name: str(value) for name, value in here.items()})
    os.environ.update(MASTER_ADDR=ADDRESSES[0], MASTER_PORT=str(PORT))
    try:
        main(*spec["arguments"])
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _say(word: str) -> None:
    """Say how far this host is, and wait for the others."""
    print(word, flush=True)
    if sys.stdin.readline() != "go\n":
        sys.exit("The hosts are ended.")


def sent_bytes(link: str) -> int:
    """How many bytes this host has sent on an interface, frames and all."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    counts = next(line.split(":")[1].split() for line in lines if line.strip().startswith(f"{link}:"))
    return int(counts[8])


def _call(*words: str) -> None:
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    end_with_parent()
    if len(sys.argv) == 3:
        be_host(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        sys.exit(run(Path(sys.argv[1])))
