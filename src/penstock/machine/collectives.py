"""The collectives of one engine: issued in the order of the program, counted, and compared between ranks.

Ranks form a grid: the shards of one copy of the training state, the replicas of that copy, and the ranks over which the
parameters themselves are divided (tensor parallel), each with a state of its own. ZeRO stages 1 to 3 shard over all
ranks; stage 0 replicates over all ranks (one shard); a mesh says otherwise (`machine/mesh.py`).
"""

import contextlib
import secrets
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import EngineError, PenstockError
from penstock.machine.arena import view_apart
from penstock.machine.council import DEFAULT_TIMEOUT_S, Council
from penstock.machine.groups import give_back, is_alive, own_group
from penstock.machine.issued import UnderWay
from penstock.machine.lifetime import at_end
from penstock.machine.mesh import peers_of
from penstock.machine.reach import Grid
from penstock.machine.streams import DONE, Event, Pending

# torch 2.13 renamed the flat collectives; the older names still work in torch 2.8 to 2.12.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


Groups = tuple[dist.ProcessGroup | None, dist.ProcessGroup | None, dist.ProcessGroup | None]
ALONE = Grid()

_SAME = (
    "Every rank must run the same units in the same order. Where ranks choose what to run (experts, layers that are "
    "skipped), the choice must lie inside a unit: units=(<class of the module that chooses>,)."
)
_MOST_NOTED = 1 << 16  # names of collectives, in a long evaluation without a step
_HEARING = timedelta(seconds=5)  # how long to wait for each other rank's word once a collective has failed


class Ranks:
    """The process groups of one engine, and every collective that it issues.

    Collectives are issued in the order of the program, by the thread that runs it: ranks that run the same program
    issue the same ones in the same order, those of its user included. What a rank has to wait for first may take
    another time on each, and decides nothing.

    Arguments:
        grid: the ranks, and this one's place among them.
        groups: our own, of the ranks that share one copy of the state, of those that have a copy of this rank's shard,
            and of those that train other parts of the parameters; `None` where this rank is alone. They end with this
            object.
        council: the council of all ranks, for the user's thread.
        divided: the ranks of each dimension of the mesh over which parameters are divided, this one among them.

    Attributes:
        rank: this rank's number among all ranks of the job.
        shards, shard_rank, replicas, replica_rank: as the grid says.
        counts: how many collectives were issued so far, by name.
    """

    def __init__(
        self,
        grid: Grid = ALONE,
        groups: Groups = (None, None, None),
        council: Council | None = None,
        divided: Sequence[Sequence[int]] = (),
    ) -> None:
        self.council = council or Council()
        self.grid = grid
        self.divided = divided
        self.shards, self.shard_rank, self.replicas, self.replica_rank, _, _ = grid
        self._shard_group, self._replica_group, self._tp_group = groups
        # Over the copies first: a value that goes from rank to rank is then in the first shard of each of them.
        self._data_groups = [group for group in (self._replica_group, self._shard_group) if group is not None]
        self._groups = [*self._data_groups, *([self._tp_group] if self._tp_group is not None else [])]
        self._end_groups = at_end(self, give_back, self._groups)
        self._last: Event = DONE  # of the collectives that were submitted to a stream
        self.rank = dist.get_rank() if self._groups else 0
        self.counts: Counter[str] = Counter()
        self._issued: list[str] = []  # what was issued since ranks last compared it, in order

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh | None, *, sharded: bool, timeout_s: float = DEFAULT_TIMEOUT_S) -> "Ranks":
        """Make groups of our own of the ranks of a mesh, by what its dimensions do (`machine/mesh.py`). Collective.

        Arguments:
            mesh: `None` stands for the default process group, if there is one.
            sharded: whether ranks share the state where they may; else those have copies.
            timeout_s: how long the ranks' council waits for a rank, in seconds.

        Raises:
            ConfigError: the mesh's dimensions have no meaning.
            EngineError: another rank does not take part.
        """
        peers = peers_of(mesh, sharded=sharded)
        council = Council(peers.members, peers.members.index(peers.rank), timeout_s=timeout_s)
        own: list[dist.ProcessGroup | None] = []
        try:
            # One name on all ranks, which no group had before: by it the members find each other in the job's store.
            # One stage as well: ranks that ask for others are told so later, and till then must not miss each other.
            name, sharded = council.share([f"penstock {secrets.token_hex(8)}", sharded])
            peers = peers_of(mesh, sharded=sharded)
            # In one order on all ranks: the members of a group make it together, and ranks that began with different
            # dimensions would wait for each other for ever. Of each dimension a rank is in one group.
            for line, like in zip(peers.lines, peers.likes, strict=True):
                own.append(own_group(line, like, name) if len(line) > 1 and like is not None else None)
        except BaseException as error:
            give_back(group for group in own if group is not None)
            council.close()
            if isinstance(error, RuntimeError):  # torch's
                raise EngineError(
                    f"Rank {dist.get_rank()} could not make a process group of the same ranks as the one it was given: "
                    f"another one has ended, or does something else. ({error})"
                ) from error
            raise
        shard, replica, tp = own
        return cls(peers.grid, (shard, replica, tp), council, peers.divided)

    def close(self) -> None:
        """Give back the groups that are our own, and the council."""
        self._end_groups()
        self.council.close()

    @property
    def world_size(self) -> int:
        """How many ranks there are in all."""
        return self.grid.world_size

    @property
    def data_size(self) -> int:
        """How many ranks sum the gradient of a parameter."""
        return self.grid.data_size

    @property
    def number(self) -> int:
        """The rank's number in the grid, which its files in a checkpoint have."""
        return self.grid.number

    @property
    def groups(self) -> Mapping[str, dist.ProcessGroup]:
        """The groups that this rank is in, by what their ranks do with the training state."""
        named = {"shards": self._shard_group, "copies": self._replica_group, "tp": self._tp_group}
        return {name: group for name, group in named.items() if group is not None}

    def submitted(self, event: Event) -> None:
        """Note the event of work that issues collectives on a stream, so that what the caller issues comes after it."""
        self._last = event

    # Collectives that are submitted to the stream of collectives.

    def all_gather(self, full: Tensor, shard: Tensor, what: str = "") -> Pending | None:
        """Fill a flat buffer with the shards of all shard ranks.

        Arguments:
            full: of any dtype, [shards * n].
            shard: this rank's, of the same dtype, [n]. It may be its own place in `full`.
            what: the unit's name, for messages.

        Returns:
            On the host what is to be waited for: the caller goes on meanwhile. On a device `None`: its stream waits.

        Raises:
            EngineError: another rank does not take part.
        """
        every, own = as_bytes(full), as_bytes(shard)
        # On the host the group's own threads do the work beside compute. On a device the call only enqueues it, and the
        # stream that it is called on waits for the group's own stream.
        goes_on = full.device.type == "cpu"
        if goes_on and type(full) is Tensor:  # no fake one
            every, own = view_apart(every, full), view_apart(own, full)
        gather = partial(_all_gather_flat, every, own, group=self._shard_group, async_op=goes_on)
        work = self._issue("all_gather", f"the gather of {what}", self._shard_group, gather)
        return work if goes_on else None

    def reduce_scatter(self, shard: Tensor, full: Tensor, what: str = "") -> None:
        """Sum a flat buffer over the shard ranks, each of which keeps its own part of the sum.

        Arguments:
            shard: filled with the sum of this rank's part, [n].
            full: this rank's summands, of the same dtype, [shards * n].
            what: the unit's name, for messages.

        Raises:
            EngineError: another rank does not take part.
        """
        reduce = partial(_reduce_scatter_flat, shard, full, op=dist.ReduceOp.SUM, group=self._shard_group)
        self._issue("reduce_scatter", f"the reduction of {what}", self._shard_group, reduce)

    def all_reduce_replicas(self, tensor: Tensor, what: str = "") -> None:
        """Sum a tensor over the replicas, in place."""
        if self._replica_group is not None:
            reduce = partial(dist.all_reduce, tensor, op=dist.ReduceOp.SUM, group=self._replica_group)
            self._issue("all_reduce", f"the sum of {what}", self._replica_group, reduce)

    def agree(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks, in place."""
        for group in self._groups:
            reduce = partial(dist.all_reduce, tensor, op=dist.ReduceOp.SUM, group=group)
            self._count("all_reduce", group, reduce)

    def _issue(
        self,
        name: str,
        what: str,
        group: dist.ProcessGroup | None,
        collective: Callable[[], dist.Work | None],
    ) -> UnderWay | None:
        """Note a collective, for ranks to compare, and issue it. Return what goes on of it, if anything does."""
        self._check_alive(group)
        self.counts[name] += 1
        # Collectives of equal size match on the wire whatever they are of, so ranks that run different units would
        # exchange their values and notice nothing. What each has issued is compared before anything is updated.
        self._issued.append(what)
        if len(self._issued) > _MOST_NOTED:
            del self._issued[: _MOST_NOTED // 2]  # at the same count on every rank
        failed = partial(self._could_not_finish, what, len(self._issued))
        try:
            work = collective()
        except RuntimeError as error:
            raise failed(error) from error
        return None if work is None else UnderWay(work, failed)

    def _could_not_finish(self, what: str, number: int, error: RuntimeError) -> EngineError:
        """Make the error of a collective that failed, with where the other ranks stand."""
        return EngineError(
            f"Rank {self.rank} could not finish {what}, collective {number} since the last step; {self._others(what)}. "
            f"{_SAME} ({error})"
        )

    def _count(self, name: str, group: dist.ProcessGroup | None, collective: Callable[[], object]) -> None:
        """Issue a collective that ranks need not compare: they have agreed on it before."""
        self._check_alive(group)
        self.counts[name] += 1
        try:
            collective()
        except RuntimeError as error:
            raise EngineError(
                f"Rank {self.rank} could not finish the {name} that another one takes part in, which has ended or does "
                f"something else. ({error})"
            ) from error

    def _check_alive(self, group: dist.ProcessGroup | None) -> None:
        """Refuse a group that the user has destroyed."""
        if group is not None and not is_alive(group):
            raise EngineError(
                "torch.distributed.destroy_process_group() has ended the process groups of this engine. Call close() "
                "before it; close(keep_params=False) after it."
            )

    def _others(self, what: str) -> str:
        """Tell the other ranks where this one stands, and hear where they do.

        By way of the job's store: a group in which a collective has failed carries nothing more.
        """
        if not dist.is_initialized():
            return "torch.distributed has been ended meanwhile"
        store = dist.distributed_c10d._get_default_store()
        store.set(f"penstock stopped {self.rank}", what)
        said = []
        for rank in range(dist.get_world_size()):
            if rank != self.rank:
                try:
                    # A rank that is stuck in another collective finds out later than this one: give it some seconds.
                    store.wait([f"penstock stopped {rank}"], _HEARING)
                    said.append(f"rank {rank} could not finish {store.get(f'penstock stopped {rank}').decode()}")
                except RuntimeError:
                    said.append(f"rank {rank} says nothing: it has ended, or runs something else")
        return "; ".join(said)

    def digest(self) -> list[float]:
        """Return two numbers for ranks to sum, from which `check_digests` tells whether all issued the same."""
        value = float(zlib.crc32("|".join(self._issued).encode()) & 0xFFFF)  # 16 bits: sums of squares are exact
        return [value, value * value]

    def check_digests(self, summed: Sequence[float]) -> None:
        """Compare what the ranks have issued since they last did so.

        All values are equal where n times the sum of their squares is the square of their sum.

        Arguments:
            summed: the sums over all ranks of the two numbers of `digest`.

        Raises:
            EngineError: on every rank, where ranks have issued different collectives; it names the first difference.
        """
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

    def report(self, failure: Exception | None) -> list[float]:
        """Return a number for ranks to sum, from which `check_reports` tells whether any has failed."""
        return [0.0 if failure is None else 1.0]

    def check_reports(self, summed: Sequence[float], failure: Exception | None) -> None:
        """Stop every rank where one has failed: raise `failure` there, and on the others an error that quotes it."""
        if any(summed):
            self.council.agree(failure)

    # Collectives that the caller issues at once.

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks, in place."""
        self._come_after_submitted()
        self.agree(tensor)

    def sum_numbers(self, numbers: Sequence[float], device: torch.device) -> list[float]:
        """Sum numbers of the host over all ranks, one by one, in fp64. Waits for the device.

        Arguments:
            numbers: this rank's.
            device: where the tensors of its collectives are.
        """
        message = torch.tensor(numbers, dtype=torch.float64, device="cpu").to(device)
        self.all_reduce(message)
        summed: list[float] = message.tolist()
        return summed

    def all_reduce_max(self, tensor: Tensor) -> None:
        """Put the greatest value over all ranks into each element of a tensor."""
        self._come_after_submitted()
        for group in self._groups:
            self._count("all_reduce", group, partial(dist.all_reduce, tensor, op=dist.ReduceOp.MAX, group=group))

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite a tensor with that of the first rank of those that have the same parts of the parameters."""
        self._come_after_submitted()
        for group in self._data_groups:
            self._count("broadcast", group, partial(dist.broadcast, as_bytes(tensor), group=group, group_src=0))

    def broadcast_alike(self, tensor: Tensor) -> None:
        """Overwrite a tensor with that of the first of the ranks that have different parts of the parameters.

        It is of what they have alike, and the same already on those with the same parts.
        """
        self._come_after_submitted()
        if self._tp_group is not None:
            send = partial(dist.broadcast, as_bytes(tensor), group=self._tp_group, group_src=0)
            self._count("broadcast", self._tp_group, send)

    def assemble(self, tensor: Tensor) -> None:
        """Put a tensor together of which each of the ranks that divide parameters has a box, and zeros around it."""
        self._come_after_submitted()
        if self._tp_group is not None:
            # The greatest byte: exact for every value, of boxes of any size, and where several ranks have the same one.
            put = partial(dist.all_reduce, as_bytes(tensor), op=dist.ReduceOp.MAX, group=self._tp_group)
            self._count("all_reduce", self._tp_group, put)

    def broadcast_part(self, tensor: Tensor, shard_rank: int) -> None:
        """Overwrite a tensor with that of one of the shard ranks, on all of them."""
        self._come_after_submitted()
        if self._shard_group is not None:
            send = partial(dist.broadcast, as_bytes(tensor), group=self._shard_group, group_src=shard_rank)
            self._count("broadcast", self._shard_group, send)

    def _come_after_submitted(self) -> None:
        """Wait until the collectives that were submitted to a stream have been issued.

        Without it this one could overtake them on a group, and would meet another collective on other ranks. An error
        of theirs is raised where their event is waited for.
        """
        with contextlib.suppress(Exception):
            self._last.wait()
        self._last = DONE


def council_of_all(*, timeout_s: float, error: type[PenstockError]) -> Council:
    """Make the council of the ranks of the default process group, where agreeing is all that they do. Collective."""
    peers = peers_of(None, sharded=True)
    return Council(peers.members, peers.members.index(peers.rank), timeout_s=timeout_s, error=error)


def as_bytes(tensor: Tensor) -> Tensor:
    """View a tensor as bytes: no process group moves every dtype (float8, int16), and every one moves bytes."""
    return tensor.view(torch.uint8)
