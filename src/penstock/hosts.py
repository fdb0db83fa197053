"""What the ranks of a host take of its memory and of its disks together, held against what it has.

Each rank counts what it takes itself (`budgets.py`). A host's memory and a file system are for all ranks on it, so they
tell each other, before anything is taken, and all refuse what does not fit on one of the hosts.
"""

import contextlib
import errno
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.budgets import MemoryBudget, host_memory
from penstock.errors import MemoryBudgetError, NvmeError
from penstock.machine.council import Council
from penstock.machine.host import Host, this_host
from penstock.machine.swap import ELSEWHERE, existing_folder, free_disk_bytes
from penstock.machine.threads import ranks_of_host

_MEMORY, _DISK = "memory", "disk"


class _Claim(NamedTuple):
    """One claim, as ranks tell it to each other.

    Attributes:
        kind: `"memory"` or `"disk"`.
        which: what tells it from others of that kind on one host: who limits the memory, the number of a file system.
        needed: how many bytes this rank needs there.
        available: how many there are, for all ranks of the host.
        whose: who has them, for messages.
    """

    kind: str
    which: str
    needed: int
    available: int
    whose: str


@dataclass
class _Pool:
    """A memory or a file system of one host, and what ranks need of it.

    Attributes:
        host: which host it is of.
        kind, whose: as the claims say.
        available: how many bytes there are, by the least that a rank has seen.
        started: how many ranks the launcher has started on the host.
        needed: bytes by rank.
    """

    host: Host
    kind: str
    whose: str
    available: int
    started: int
    needed: dict[int, int] = field(default_factory=dict)

    @property
    def share(self) -> int:
        """How many bytes there are for these ranks: of memory others that were started here, alone, have their part."""
        if self.kind == _DISK:
            return self.available
        return self.available * len(self.needed) // max(len(self.needed), self.started)

    @property
    def missing(self) -> int:
        """By how many bytes it is too small."""
        return sum(self.needed.values()) - self.share

    @property
    def lacks(self) -> bool:
        """Whether it is too small. A file system that one rank has for itself is looked at when its files are made."""
        return self.missing > 0 and (self.kind == _MEMORY or len(self.needed) > 1)

    def __str__(self) -> str:
        if len(self.needed) == 1:
            each = f" for each of its {self.started} ranks" if self.started > 1 else ""
            return f"{self.whose} {self.share:,} available{each}, {self.missing:,} too few"
        room = "available for them" if self.kind == _MEMORY else "bytes free"
        ranks = ", ".join(f"rank {rank}: {nbytes:,}" for rank, nbytes in self.needed.items())
        return (
            f"the ranks of host {self.host.name} need {sum(self.needed.values()):,} bytes together ({ranks}), and "
            f"{self.whose} {self.share:,} {room}, {self.missing:,} too few"
        )


def check_hosts(council: Council, budget: MemoryBudget | None) -> None:
    """Refuse, on all ranks, what takes more than there is on one of the hosts. Collective; nothing was taken.

    Arguments:
        council: the ranks. All of them have counted: none is about to remove a leftover.
        budget: what this rank takes; `None` takes nothing, and finds nothing too small.

    Raises:
        MemoryBudgetError: the memory of a host is too small; it names the host, and says what to do.
        NvmeError: a file system of a host has too little room for all of its ranks.
    """
    rank = council.members[council.rank]
    told = council.collect([this_host(), ranks_of_host(), _told(budget, with_disks=council.size > 1)])
    lacking = [pool for pool in _pools(dict(zip(council.members, told, strict=True))) if pool.lacks]
    if not lacking:
        return
    # The first rank of each knows what to do there, and all say it.
    said = council.collect([_lack(pool, budget, rank) for pool in lacking if rank == min(pool.needed)])
    texts = [
        f"Host {Host(*host).name}, rank {member}: {text}" if council.size > 1 else text
        for member, (host, *_), of_rank in zip(council.members, told, said, strict=True)
        for text in of_rank
    ]
    if any(pool.kind == _MEMORY for pool in lacking):
        raise MemoryBudgetError(" ".join(texts))
    raise NvmeError(" ".join(texts), errno=errno.ENOSPC)


def _told(budget: MemoryBudget | None, *, with_disks: bool) -> list[_Claim]:
    """Look up what there is of what a rank takes. What cannot be looked up is no claim: to take it will tell.

    Arguments:
        budget: what it takes.
        with_disks: whether disks count. Those of a rank alone are looked at when its files are made.
    """
    if budget is None:
        return []
    found = []
    host = host_memory(budget.options)
    if host is not None:
        found.append(_Claim(_MEMORY, host.whose, budget.host_bytes, host.nbytes, host.whose))
    for parent, nbytes in budget.folders if with_disks else ():
        if nbytes:
            with contextlib.suppress(NvmeError, OSError):
                folder = existing_folder(parent)
                system = str(folder.stat().st_dev)
                found.append(_Claim(_DISK, system, nbytes, free_disk_bytes(folder), f"{str(folder)!r} has"))
    return found


def _pools(told: Mapping[int, Any]) -> Iterable[_Pool]:
    """Add up what ranks need of each memory and each file system of each host.

    Arguments:
        told: what each rank has said: its host, how many ranks a launcher has started there, and its claims.
    """
    pools: dict[tuple[Host, str, str], _Pool] = {}
    for rank, (host, started, claims) in told.items():
        for said in claims:
            claim = _Claim(*said)
            fresh = _Pool(Host(*host), claim.kind, claim.whose, claim.available, started)
            pool = pools.setdefault((fresh.host, claim.kind, claim.which), fresh)
            pool.available = min(pool.available, claim.available)
            pool.needed[rank] = pool.needed.get(rank, 0) + claim.needed
    return pools.values()


def _lack(pool: _Pool, budget: MemoryBudget | None, rank: int) -> str:
    """Say that a memory or a file system is too small, and what to do, on one of the ranks that need it."""
    if pool.kind == _MEMORY:
        assert budget is not None
        own = -(-pool.missing * pool.needed[rank] // sum(pool.needed.values()))
        return budget.lack_of_host(str(pool), own)
    return (
        f"The nvme tier needs {pool.needed[rank]:,} bytes on this rank; {pool}. Keep less on the nvme tier, or "
        f"{ELSEWHERE}."
    )
