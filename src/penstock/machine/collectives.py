"""What ranks say to each other, counted.

Ranks form a grid: the shards of one copy of the training state, and the replicas of that copy. ZeRO stages 1 to 3 shard
over all ranks (one replica); stage 0 replicates over all ranks (one shard); hybrid sharding takes a 2-D mesh
(replicate, shard), as in FSDP.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import EngineError
from penstock.machine.council import DEFAULT_TIMEOUT_S, Council
from penstock.machine.streams import Event, all_of
from penstock.machine.turns import turns_on

# torch 2.13 renamed the flat collectives; the older names still work in torch 2.8 to 2.12.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_SAME = (
    "Every rank must run the same units in the same order. Where ranks choose what to run (experts, layers that are "
    "skipped), the choice must lie inside a unit: units=(<class of the module that chooses>,)."
)
_MOST_NOTED = 1 << 16  # of a long evaluation
_HEARING = timedelta(seconds=5)  # for what other ranks say when a collective has failed


class Ranks:
    """The process groups of one engine.

    Arguments:
        shard_group: the ranks that share one copy of the state; `None` when there is one shard.
        replica_groups: the groups over which copies are kept equal.
        council: in which the ranks of all groups agree, on the user's thread.

    Attributes:
        rank: this rank's number among all of the job.
        shards, shard_rank: number of shards, and this rank's.
        replicas, replica_rank: number of copies, and which of them this rank has a shard of.
        counts: collectives issued so far, by name.
    """

    def __init__(
        self,
        shard_group: dist.ProcessGroup | None = None,
        replica_groups: tuple[dist.ProcessGroup, ...] = (),
        council: Council | None = None,
    ) -> None:
        self.council = council or Council()
        self._shard_group = shard_group
        self._replica_groups = replica_groups
        self._turns = [turns_on(group) for group in (shard_group, *replica_groups) if group is not None]
        self.rank = dist.get_rank() if shard_group or replica_groups else 0
        self.replica_rank = 0
        for group in replica_groups:
            self.replica_rank = self.replica_rank * dist.get_world_size(group) + dist.get_rank(group)
        self.shards = dist.get_world_size(shard_group) if shard_group else 1
        self.shard_rank = dist.get_rank(shard_group) if shard_group else 0
        self.replicas = 1
        for group in replica_groups:
            self.replicas *= dist.get_world_size(group)
        self.counts: Counter[str] = Counter()
        self._issued: list[str] = []  # since ranks last compared what they issue, in order

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh | None, *, sharded: bool, timeout_s: float = DEFAULT_TIMEOUT_S) -> "Ranks":
        """The groups of a mesh of one dimension, or of two (replicate, shard). `None`: the default group, if any.

        Collective: its ranks make their council.
        """
        members = [0]
        if mesh is not None:
            found = list(mesh.get_all_groups())
            members = mesh.mesh.flatten().tolist()
        elif dist.is_available() and dist.is_initialized():
            found = [dist.distributed_c10d._get_default_group()]
            members = dist.get_process_group_ranks(found[0])
        else:
            found = []
        number = members.index(dist.get_rank()) if found else 0
        council = Council(members, number, timeout_s=timeout_s)
        shard_group = found.pop() if sharded and found else None
        replicas = tuple(group for group in found if dist.get_world_size(group) > 1)
        if shard_group is not None and dist.get_world_size(shard_group) == 1:
            shard_group = None
        return cls(shard_group, replicas, council)

    def close(self) -> None:
        """Give back the groups that are our own."""
        self.council.close()

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.shards * self.replicas

    @property
    def number(self) -> int:
        """Of this rank among all of the grid: its files in a checkpoint have it."""
        return self.shard_rank + self.shards * self.replica_rank

    @property
    def others(self) -> Event:
        """The last collectives that other engines have submitted: what this one submits next is issued after them."""
        return all_of(turns.before(self) for turns in self._turns)

    def submitted(self, event: Event) -> None:
        """Work with collectives of this engine was submitted; they have been issued by the event."""
        for turns in self._turns:
            turns.submitted(self, event)

    # Submitted to the stream of collectives

    def all_gather(self, full: Tensor, shard: Tensor, what: str = "") -> None:
        """Fill the flat `full` (numel = shards x shard numel) with every shard. `shard` may be its own part of it."""
        every, own = as_bytes(full), as_bytes(shard)
        self._issue(
            "all_gather", f"the gather of {what}", lambda: _all_gather_flat(every, own, group=self._shard_group)
        )

    def reduce_scatter(self, shard: Tensor, full: Tensor, what: str = "") -> None:
        """Sum the flat `full` over the shards; each keeps its own part."""
        reduce = dist.ReduceOp.SUM
        self._issue(
            "reduce_scatter",
            f"the reduction of {what}",
            lambda: _reduce_scatter_flat(shard, full, op=reduce, group=self._shard_group),
        )

    def all_reduce_replicas(self, tensor: Tensor, what: str = "") -> None:
        """Sum over the replicas, in place."""
        for group in self._replica_groups:
            self._issue(
                "all_reduce", f"the sum of {what}", partial(dist.all_reduce, tensor, op=dist.ReduceOp.SUM, group=group)
            )

    def agree(self, tensor: Tensor) -> None:
        """Sum over all ranks, in place."""
        if self._shard_group is not None:
            reduce = partial(dist.all_reduce, tensor, op=dist.ReduceOp.SUM, group=self._shard_group)
            self._count("all_reduce", reduce)
        self.all_reduce_replicas(tensor)

    def _issue(self, name: str, what: str, collective: Callable[[], object]) -> None:
        """Note a collective, for ranks to compare, and issue it."""
        self.counts[name] += 1
        self._issued.append(what)
        if len(self._issued) > _MOST_NOTED:
            del self._issued[: _MOST_NOTED // 2]
        try:
            collective()
        except RuntimeError as error:
            raise EngineError(
                f"Rank {self.rank} could not finish {what}, collective {len(self._issued)} since the last step; "
                f"{self._others(what)}. {_SAME} ({error})"
            ) from error

    def _count(self, name: str, collective: Callable[[], object]) -> None:
        """Issue a collective that ranks need not compare: they have agreed on it before."""
        self.counts[name] += 1
        try:
            collective()
        except RuntimeError as error:
            raise EngineError(
                f"Rank {self.rank} could not finish the {name} that another one takes part in, which has ended or does "
                f"something else. ({error})"
            ) from error

    def _others(self, what: str) -> str:
        """Tell the other ranks where this one stands, and hear where they do."""
        store = dist.distributed_c10d._get_default_store()
        store.set(f"penstock stopped {self.rank}", what)
        said = []
        for rank in range(dist.get_world_size()):
            if rank != self.rank:
                try:
                    store.wait([f"penstock stopped {rank}"], _HEARING)
                    said.append(f"rank {rank} could not finish {store.get(f'penstock stopped {rank}').decode()}")
                except RuntimeError:
                    said.append(f"rank {rank} says nothing: it has ended, or runs something else")
        return "; ".join(said)

    def digest(self) -> list[float]:
        """Numbers that ranks sum, of what they have issued since they last compared."""
        value = float(zlib.crc32("|".join(self._issued).encode()) & 0xFFFF)  # squares of it are exact when summed
        return [value, value * value]

    def check_digests(self, summed: Sequence[float]) -> None:
        """Raise `EngineError` on every rank where they have issued different collectives; it names the first."""
        issued, self._issued = self._issued, []
        total, squares = summed
        if total * total == squares * self.world_size:
            return
        everyone = self.council.collect(issued)
        for number, names in enumerate(zip_longest(*everyone), start=1):
            if len(set(names)) > 1:
                of_ranks = zip(self.council.members, names, strict=True)
                by_rank = "; ".join(f"rank {rank}: {name or 'none'}" for rank, name in of_ranks)
                raise EngineError(
                    f"Ranks are out of step: collective {number} since the last step was not the same on all of them "
                    f"({by_rank}). Nothing was updated. {_SAME}"
                )
        raise EngineError(f"Ranks are out of step. Nothing was updated. {_SAME}")

    # Issued by the caller

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over all ranks, in place."""
        self.others.wait()
        self.agree(tensor)

    def all_reduce_max(self, tensor: Tensor) -> None:
        """The greatest over all ranks, in place."""
        self.others.wait()
        for group in (self._shard_group, *self._replica_groups):
            if group is not None:
                self._count("all_reduce", partial(dist.all_reduce, tensor, op=dist.ReduceOp.MAX, group=group))

    def report(self, failure: Exception | None) -> list[float]:
        """Whether this rank has failed, as numbers that ranks sum: how many have."""
        return [0.0 if failure is None else 1.0]

    def check_reports(self, summed: Sequence[float], failure: Exception | None) -> None:
        """Raise where any rank has failed: its own error there, on the others an error that quotes it."""
        if any(summed):
            self.council.agree(failure)

    def broadcast(self, tensor: Tensor) -> None:
        """Every rank takes the tensor of the first rank of the grid."""
        self.others.wait()
        for group in (*self._replica_groups, self._shard_group):
            if group is not None:
                self._count("broadcast", partial(dist.broadcast, as_bytes(tensor), group=group, group_src=0))

    def broadcast_part(self, tensor: Tensor, shard_rank: int) -> None:
        """Every shard rank takes the tensor of one of them."""
        self.others.wait()
        if self._shard_group is not None:
            send = partial(dist.broadcast, as_bytes(tensor), group=self._shard_group, group_src=shard_rank)
            self._count("broadcast", send)


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory: what is only moved may be of a dtype that no process group knows (float8, int16)."""
    return tensor.view(torch.uint8)
