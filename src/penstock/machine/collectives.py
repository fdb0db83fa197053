"""The collectives of one engine: issued in the order of the program, counted, and compared between ranks.

Ranks form a grid: the shards of one copy of the training state, the replicas of that copy, and the ranks over which the
parameters themselves are divided (tensor parallel), each with a state of its own. ZeRO stages 1 to 3 shard over all
ranks; stage 0 replicates over all ranks (one shard); a mesh says otherwise (`machine/mesh.py`).
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import EngineError
from penstock.machine import uneven
from penstock.machine.arena import view_apart
from penstock.machine.council import DEFAULT_TIMEOUT_S, FORWARDS, Council
from penstock.machine.forming import form
from penstock.machine.groups import all_gather_flat as _all_gather_flat
from penstock.machine.groups import give_back, is_alive
from penstock.machine.groups import reduce_scatter_flat as _reduce_scatter_flat
from penstock.machine.issued import Tally, UnderWay
from penstock.machine.lifetime import at_end
from penstock.machine.mesh import Nodes
from penstock.machine.reach import Grid
from penstock.machine.sequel import SAME, Sequel
from penstock.machine.streams import DONE, Event, Pending

_all_to_all_flat = dist.all_to_all_single

Groups = Sequence[dist.ProcessGroup | None]
#: Which of the shard ranks take part: those of this rank's node, or those of the same place in each node.
Hop = Literal["inside", "across"]
ALONE = Grid()


class Ranks:
    """The process groups of one engine, and every collective that it issues.

    Collectives are issued in the order of the program, by the thread that runs it: ranks that run the same program
    issue the same ones in the same order, those of its user included. What a rank has to wait for first may take
    another time on each, and decides nothing.

    Arguments:
        grid: the ranks, and this one's place among them.
        groups: our own, of the ranks that share one copy of the state, of those that have a copy of this rank's shard,
            and of those that train other parts of the parameters; of the shard ranks of this rank's node, and of those
            of its place in each node. `None` where this rank is alone, and where the shard ranks are one node. They end
            with this object.
        council: the council of all ranks, for the user's thread.
        divided: the ranks of each dimension of the mesh over which parameters are divided, this one among them.

    Attributes:
        rank: this rank's number among all ranks of the job.
        shards, shard_rank, replicas, replica_rank: as the grid says.
        counts: how many collectives were issued so far, by name; and of how many bytes.
        sequel: which ones since the last step, for ranks to compare.
        mesh: the one that the groups were made of; `None` where there was none.
    """

    def __init__(
        self,
        grid: Grid = ALONE,
        groups: Groups = (None,) * 5,
        council: Council | None = None,
        divided: Sequence[Sequence[int]] = (),
    ) -> None:
        self.council = council or Council()
        self.grid = grid
        self.divided = divided
        self.mesh: DeviceMesh | None = None
        self.shards, self.shard_rank, self.replicas, self.replica_rank, *_ = grid
        self._shard_group, self._replica_group, self._tp_group, inside, self._across_group = groups
        # Over the copies first: a value that goes from rank to rank is then in the first shard of each of them.
        self._data_groups = [group for group in (self._replica_group, self._shard_group) if group is not None]
        self._groups = [*self._data_groups, *([self._tp_group] if self._tp_group is not None else [])]
        self._inside_group = inside or self._shard_group
        self._end_groups = at_end(self, give_back, [group for group in groups if group is not None])
        self._last: Event = DONE  # of the collectives that were submitted to a stream
        self.rank = dist.get_rank() if self._groups else 0
        self.counts = Tally()
        self.sequel = Sequel(self.council)

    @classmethod
    def from_mesh(
        cls, mesh: DeviceMesh | None, *, sharded: bool, timeout_s: float = DEFAULT_TIMEOUT_S, nodes: Nodes = None
    ) -> "Ranks":
        """Make groups of our own of the ranks of a mesh, by what its dimensions do (`machine/mesh.py`). Collective.

        Arguments:
            mesh: `None` stands for the default process group, if there is one.
            sharded: whether ranks share the state where they may; else those have copies.
            timeout_s: how long a rank waits for the others, in the council and in collectives, in seconds.
            nodes: of what the nodes of the shard ranks consist, which get groups of their own then. Where that does not
                divide the shard ranks, all of them are one node.

        Raises:
            ConfigError: the mesh's dimensions have no meaning.
            EngineError: another rank does not take part.
        """
        formed = form(mesh, sharded=sharded, timeout_s=timeout_s, nodes=nodes)
        ranks = cls(formed.grid, formed.groups, formed.council, formed.divided)
        ranks.mesh = mesh
        return ranks

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

    def all_gather(self, full: Tensor, shard: Tensor, what: str = "", *, inside: bool = False) -> Pending | None:
        """Fill a flat buffer with the shards of all shard ranks.

        Arguments:
            full: of any dtype, [shards * n].
            shard: this rank's, of the same dtype, [n]. It may be its own place in `full`.
            what: the unit's name, for messages.
            inside: whether the ranks of this one's node alone take part, each with an equal part of `full`.

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
        if inside:
            group, dimension, where = self._inside_group, "inside", " inside its node"
        else:
            group, dimension, where = self._shard_group, "shard", ""
        gather = partial(_all_gather_flat, every, own, group=group, async_op=goes_on)
        self.counts.note("all_gather", dimension, every)
        work = self._issue(f"the gather of {what}{where}", group, gather)
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
        self.counts.note("reduce_scatter", "shard", full)
        self._issue(f"the reduction of {what}", self._shard_group, reduce)

    def broadcast_shards(self, full: Tensor, cuts: Sequence[int], what: str = "") -> Pending | None:
        """Fill a flat buffer with shards of any sizes, as `all_gather` with equal ones (`machine/uneven.py`).

        Arguments:
            full: of any dtype; this rank's shard is there.
            cuts: where shards begin in it, in elements, and where the last one ends.
            what: the unit's name, for messages.
        """
        parts = [as_bytes(part) for part in uneven.parts_of(full, cuts)]
        for part in parts:
            self.counts.note("broadcast", "shard", part)
        broadcast = partial(uneven.broadcast_shards, parts, full, self._shard_group)
        return self._issue(f"the gather of {what}", self._shard_group, broadcast)

    def reduce_to_owners(self, shard: Tensor, full: Tensor, cuts: Sequence[int], what: str = "") -> None:
        """Sum a flat buffer over the shard ranks, as `reduce_scatter`, into parts of any sizes.

        Arguments:
            shard: filled with the sum of this rank's part.
            full: this rank's summands, of the same dtype; spoilt.
            cuts: where parts begin in it, in elements, and where the last one ends.
            what: the unit's name, for messages.
        """
        parts = uneven.parts_of(full, cuts)
        for part in parts:
            self.counts.note("reduce", "shard", part)
        reduce = partial(uneven.reduce_to_owners, parts, self._shard_group)
        self._issue(f"the reduction of {what}", self._shard_group, reduce)
        shard.copy_(parts[self.shard_rank])

    def all_to_all(self, received: Tensor, sent: Tensor, hop: Hop, what: str = "") -> None:
        """Send each rank of a node, or of this place in each node, a part of its own, and receive one from each.

        Arguments:
            received: bytes, filled with what each rank sends to this one, in their order, [n].
            sent: bytes, for each rank its part, in their order, [n].
            hop: which ranks.
            what: the unit's name, for messages.

        Raises:
            EngineError: another rank does not take part.
        """
        group = self._inside_group if hop == "inside" else self._across_group
        exchange = partial(_all_to_all_flat, received, sent, group=group)
        self.counts.note("all_to_all", hop, sent)
        self._issue(f"the reduction of {what} {hop} nodes", group, exchange)

    def all_reduce_replicas(self, tensor: Tensor, what: str = "") -> None:
        """Sum a tensor over the replicas, in place."""
        if self._replica_group is not None:
            reduce = partial(dist.all_reduce, tensor, op=dist.ReduceOp.SUM, group=self._replica_group)
            self.counts.note("all_reduce", "replicate", tensor)
            self._issue(f"the sum of {what}", self._replica_group, reduce)

    def agree(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks, in place."""
        for group in self._groups:
            reduce = partial(dist.all_reduce, tensor, op=dist.ReduceOp.SUM, group=group)
            self._count("all_reduce", tensor, group, reduce)

    def _issue(
        self,
        what: str,
        group: dist.ProcessGroup | None,
        collective: Callable[[], dist.Work | uneven.Together | None],
    ) -> UnderWay | None:
        """Note a collective, for ranks to compare, and issue it. Return what goes on of it, if anything does."""
        self._check_alive(group)
        failed = partial(self._could_not_finish, what, self.sequel.note(what))
        try:
            work = collective()
        except RuntimeError as error:
            raise failed(error) from error
        return None if work is None else UnderWay(work, failed)

    def _could_not_finish(self, what: str, number: int, error: RuntimeError) -> EngineError:
        """Make the error of a collective that failed, with what the other ranks say."""
        return EngineError(
            f"Rank {self.rank}{self.council.host_of(self.rank)} could not finish {what}, collective {number} since the "
            f"last step; {self.council.others_say(what)} {SAME} ({error})"
        )

    def _count(
        self, name: str, tensor: Tensor, group: dist.ProcessGroup | None, collective: Callable[[], object]
    ) -> None:
        """Issue a collective that ranks need not compare: they have agreed on it before."""
        self._check_alive(group)
        dimensions = {id(self._shard_group): "shard", id(self._replica_group): "replicate", id(self._tp_group): "tp"}
        self.counts.note(name, dimensions[id(group)], tensor)
        try:
            collective()
        except RuntimeError as error:
            others = self.council.others_say(f"the {name} of all ranks")
            raise EngineError(
                f"Rank {self.rank}{self.council.host_of(self.rank)} could not finish the {name} that another one takes "
                f"part in, which has ended or does something else; {others} ({error})"
            ) from error

    def _check_alive(self, group: dist.ProcessGroup | None) -> None:
        """Refuse a group that the user has destroyed."""
        if group is not None and not is_alive(group):
            raise EngineError(
                "torch.distributed.destroy_process_group() has ended the process groups of this engine. Call close() "
                "before it; close(keep_params=False) after it."
            )

    def begin_forward(self, *, recorded: bool) -> None:
        """Refuse a forward that only some ranks run, before its first gather. Collective over the shard ranks.

        A gather would meet another collective: of another size, gloo aborts the process. Copies of the shards may run
        forwards of their own, and are not asked.

        Arguments:
            recorded: whether autograd records it.
        """
        if self.council.size == self.shards:
            with self.council.together(FORWARDS[recorded]):
                pass

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
            self._count(
                "all_reduce", tensor, group, partial(dist.all_reduce, tensor, op=dist.ReduceOp.MAX, group=group)
            )

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite a tensor with that of the first rank of those that have the same parts of the parameters."""
        self._come_after_submitted()
        for group in self._data_groups:
            # Copies may be on other hosts: each gets one copy over the link, which goes from its first shard to others.
            if group is not self._replica_group or self.shard_rank == 0:
                send = partial(dist.broadcast, as_bytes(tensor), group=group, group_src=0)
                self._count("broadcast", tensor, group, send)

    def broadcast_alike(self, tensor: Tensor) -> None:
        """Overwrite a tensor with that of the first of the ranks that have different parts of the parameters.

        It is of what they have alike, and the same already on those with the same parts.
        """
        self._come_after_submitted()
        if self._tp_group is not None:
            send = partial(dist.broadcast, as_bytes(tensor), group=self._tp_group, group_src=0)
            self._count("broadcast", tensor, self._tp_group, send)

    def assemble(self, tensor: Tensor) -> None:
        """Put a tensor together of which each of the ranks that divide parameters has a box, and zeros around it."""
        self._come_after_submitted()
        if self._tp_group is not None:
            # The greatest byte: exact for every value, of boxes of any size, and where several ranks have the same one.
            put = partial(dist.all_reduce, as_bytes(tensor), op=dist.ReduceOp.MAX, group=self._tp_group)
            self._count("all_reduce", tensor, self._tp_group, put)

    def broadcast_part(self, tensor: Tensor, shard_rank: int) -> None:
        """Overwrite a tensor with that of one of the shard ranks, on all of them."""
        self._come_after_submitted()
        if self._shard_group is not None:
            send = partial(dist.broadcast, as_bytes(tensor), group=self._shard_group, group_src=shard_rank)
            self._count("broadcast", tensor, self._shard_group, send)

    def _come_after_submitted(self) -> None:
        """Wait until the collectives that were submitted to a stream have been issued.

        Without it this one could overtake them on a group, and would meet another collective on other ranks. An error
        of theirs is raised where their event is waited for.
        """
        with contextlib.suppress(Exception):
            self._last.wait()
        self._last = DONE


def as_bytes(tensor: Tensor) -> Tensor:
    """View a tensor as bytes: no process group moves every dtype (float8, int16), and every one moves bytes."""
    return tensor.view(torch.uint8)
