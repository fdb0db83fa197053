"""Collectives of one engine: issued in order, counted, compared between ranks."""

import contextlib
import os
import platform
import secrets
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise, zip_longest
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import EngineError
from penstock.runtime.control_group import (
    DEFAULT_TIMEOUT_S,
    FORWARDS,
    ControlGroup,
    all_gather_flat,
    give_back,
    is_alive,
    own_group,
    reduce_scatter_flat,
)
from penstock.runtime.finalizers import at_end
from penstock.runtime.host_memory import view_apart
from penstock.runtime.modes import without_saved_hooks
from penstock.runtime.streams import DONE, Event, Pending
from penstock.runtime.system import boot_id, ranks_of_host
from penstock.runtime.topology import Grid, Nodes, node_size, nodes_of, peers_of

# ----------------------------------------------------------------------------------------------------------------------
# Collectives that were issued: counted, and waited for.
# ----------------------------------------------------------------------------------------------------------------------


class Tally(Counter[str]):
    """Number of collectives that were issued, by name.

    Attributes:
        nbytes: the bytes of their whole buffers, by name and dimension of the mesh, as a simulation notes them
            (`forecast.program.Collective`). The bytes on a link follow from them and the number of ranks.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.nbytes: Counter[tuple[str, str]] = Counter()

    def note(self, name: str, dimension: str, buffer: Tensor) -> None:
        """Count one.

        Arguments:
            name: "all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast" or "reduce".
            dimension: of the mesh, along which it is.
            buffer: the whole of it: what is there on every rank after a gather, or before a reduction.
        """
        self[name] += 1
        self.nbytes[name, dimension] += buffer.nbytes

    def clear(self) -> None:
        """Begin again."""
        super().clear()
        self.nbytes.clear()


class InFlightCollectives:
    """Collectives that were issued and go on, on the threads of their process group.

    Arguments:
        works: torch's handles. They hold the buffers; once the collectives are over nothing here refers to them.
        failed: makes the error that is raised at every wait, of torch's own.
    """

    def __init__(self, works: Sequence[dist.Work], failed: Callable[[RuntimeError], Exception]) -> None:
        self._left: tuple[Sequence[dist.Work], Callable[[RuntimeError], Exception]] | None = works, failed
        self._error: Exception | None = None
        self._ended: float | None = None

    def wait(self) -> None:
        """Block until the collectives are over; raise the first error."""
        left = self._left  # two threads may wait: the other one may clear the attribute at any moment
        if left is not None:
            works, failed = left
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                self._error = self._error or failed(error)
                self._error.__cause__ = error
            self._left = None  # torch's handles, and with them the buffers: a count of their users is right then
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Return True if the collectives are over."""
        left = self._left
        return left is None or all(work.is_completed() for work in left[0])

    @property
    def ended(self) -> float:
        """The time of the first query after the end, in seconds of `time.monotonic`: torch does not record the end."""
        self._ended = self._ended or time.monotonic()
        return self._ended


# ----------------------------------------------------------------------------------------------------------------------
# Fingerprint of the collectives issued since the last step. Ranks compare it in `step()`, before any update.
#
# Collectives of equal size match on the wire whatever they are of: without it, ranks that run different units would
# exchange their values without an error.
# ----------------------------------------------------------------------------------------------------------------------


SAME = (
    "Every rank must run the same units in the same order. Where ranks choose what to run (experts, layers that are "
    "skipped), the choice must lie inside a unit: units=(<class of the module that chooses>,)."
)
_MOST_NOTED = 1 << 16  # names of collectives, in a long evaluation without a step


class CollectiveFingerprint:
    """Names of the collectives issued since ranks last compared them.

    Arguments:
        control_group: the ranks that have to issue the same collectives.
    """

    def __init__(self, control_group: ControlGroup) -> None:
        self._control_group = control_group
        self._names: list[str] = []

    def note(self, what: str) -> int:
        """Note one more; return its number."""
        self._names.append(what)
        if len(self._names) > _MOST_NOTED:
            del self._names[: _MOST_NOTED // 2]  # at the same count on every rank
        return len(self._names)

    def digest(self) -> list[float]:
        """Return two numbers for ranks to sum, from which `check` tells whether all issued the same."""
        value = float(zlib.crc32("|".join(self._names).encode()) & 0xFFFF)  # 16 bits: sums of squares are exact
        return [value, value * value]

    def check(self, summed: Sequence[float]) -> None:
        """Compare what the ranks have issued since they last did so.

        All values are equal where n times the sum of their squares is the square of their sum.

        Arguments:
            summed: the sums over all ranks of the two numbers of `digest`.

        Raises:
            EngineError: on every rank, where ranks have issued different collectives; it names the first difference.
        """
        issued, self._names = self._names, []
        total, squares = summed
        if total * total == squares * self._control_group.size:
            return
        everyone = self._control_group.collect(issued)
        for number, names in enumerate(zip_longest(*everyone), start=1):
            if len(set(names)) > 1:
                of_ranks = zip(self._control_group.members, names, strict=True)
                by_rank = "; ".join(f"{self._control_group.named(rank)}: {name or 'none'}" for rank, name in of_ranks)
                raise EngineError(
                    f"Ranks are out of step: collective {number} since the last step was not the same on all of them "
                    f"({by_rank}). Nothing was updated. {SAME}"
                )
        raise EngineError(f"Ranks are out of step. Nothing was updated. {SAME}")


# ----------------------------------------------------------------------------------------------------------------------
# The collectives of one engine: issued in the order of the program, counted, and compared between ranks.
#
# Ranks form a grid: the shards of one copy of the training state, the replicas of that copy, and the ranks over which
# the parameters themselves are divided (tensor parallel), each with a state of its own. ZeRO stages 1 to 3 shard over
# all ranks; stage 0 replicates over all ranks (one shard); a mesh says otherwise (`runtime/topology.py`).
# ----------------------------------------------------------------------------------------------------------------------


Groups = Sequence[dist.ProcessGroup | None]
#: Which of the shard ranks take part: those of this rank's node, or those of the same place in each node.
Hop = Literal["inside", "across"]
ALONE = Grid()


class Collectives:
    """Process groups of one engine, and every collective that it issues.

    Collectives are issued in the order of the program, by the thread that runs it, those of its user included. How long
    a rank has to wait first does not change the order (ordering rule 4).

    Arguments:
        grid: the ranks, and this one's place among them.
        groups: our own, of the ranks that share one copy of the state, of those that have a copy of this rank's shard,
            and of those that train other parts of the parameters; of the shard ranks of this rank's node, and of those
            of its place in each node. `None` where this rank is alone, and where the shard ranks are one node. They end
            with this object.
        control_group: the control group of all ranks, for the user's thread.
        divided: the ranks of each dimension of the mesh over which parameters are divided, this one among them.

    Attributes:
        rank: this rank's number among all ranks of the job.
        shards, shard_rank, replicas, replica_rank, world_size, data_size, number: as the grid says.
        counts: how many collectives were issued so far, by name; and of how many bytes.
        sequel: which ones since the last step, for ranks to compare.
        mesh: the one that the groups were made of; `None` where there was none.
    """

    def __init__(
        self,
        grid: Grid = ALONE,
        groups: Groups = (None,) * 5,
        control_group: ControlGroup | None = None,
        divided: Sequence[Sequence[int]] = (),
    ) -> None:
        self.control_group = control_group or ControlGroup()
        self.grid = grid
        self.divided = divided
        self.mesh: DeviceMesh | None = None
        self.shards, self.shard_rank, self.replicas, self.replica_rank, *_ = grid
        self.world_size, self.data_size, self.number = grid.world_size, grid.data_size, grid.number
        shards, replicas, tp, inside, across = groups
        self._groups = {"replicate": replicas, "shard": shards, "tp": tp, "inside": inside or shards, "across": across}
        self._end_groups = at_end(self, give_back, [group for group in groups if group is not None])
        self._last: Event = DONE  # of the collectives that were submitted to a stream
        self.rank = dist.get_rank() if any(groups) else 0
        self.counts = Tally()
        self.sequel = CollectiveFingerprint(self.control_group)

    @classmethod
    def from_mesh(
        cls, mesh: DeviceMesh | None, *, sharded: bool, timeout_s: float = DEFAULT_TIMEOUT_S, nodes: Nodes = None
    ) -> "Collectives":
        """Make groups of our own of the ranks of a mesh, by what its dimensions do (`runtime/topology.py`). Collective.

        Arguments:
            mesh: `None` stands for the default process group, if there is one.
            sharded: whether ranks share the state where they may; else those have copies.
            timeout_s: how long a rank waits for the others, in the control group and in collectives, in seconds.
            nodes: of what the nodes of the shard ranks consist, which get groups of their own then. Where that does not
                divide the shard ranks, all of them are one node.

        Raises:
            ConfigError: the mesh's dimensions have no meaning.
            EngineError: another rank does not take part.
        """
        peers = peers_of(mesh, sharded=sharded)
        control_group = ControlGroup(peers.members, peers.members.index(peers.rank), timeout_s=timeout_s)
        own: list[dist.ProcessGroup | None] = []
        try:
            # One name on all ranks, which no group had before: by it the members find each other in the job's store.
            # One stage as well: ranks that ask for others are told so later, and till then must not miss each other.
            # One size of nodes, too.
            rank_checks = [f"penstock {secrets.token_hex(8)}", sharded, nodes, ranks_of_host(default=0)]
            name, sharded, nodes, of_host = control_group.share(rank_checks)
            peers = peers_of(mesh, sharded=sharded)
            grid = peers.grid.in_nodes(node_size(peers.shards, nodes, of_host))
            # In one order on all ranks: the members of a group make it together, and ranks that began with different
            # dimensions would wait for each other for ever. Of each dimension a rank is in one group.
            likes = [*peers.likes, peers.likes[0], peers.likes[0]]
            lines = [peers.shards, peers.copies, peers.tp, *nodes_of(peers.shards, grid)]
            for line, like in zip(lines, likes, strict=True):
                needed = like if len(line) > 1 else None
                own.append(needed and own_group(line, needed, name, timeout_s=timeout_s))
        except BaseException as error:
            give_back(group for group in own if group is not None)
            control_group.close()
            if isinstance(error, RuntimeError):  # torch's
                raise EngineError(
                    f"Rank {dist.get_rank()} could not make a process group of the same ranks as the one it was given: "
                    f"another one has ended, or does something else. ({error})"
                ) from error
            raise
        ranks = cls(grid, own, control_group, peers.divided)
        ranks.mesh = mesh
        return ranks

    def close(self) -> None:
        """Destroy the engine's process groups and the control group."""
        self._end_groups()
        self.control_group.close()

    @property
    def groups(self) -> Mapping[str, dist.ProcessGroup]:
        """Groups that this rank is in, by what their ranks do with the training state."""
        named = {"shards": self._groups["shard"], "copies": self._groups["replicate"], "tp": self._groups["tp"]}
        return {name: group for name, group in named.items() if group is not None}

    def submitted(self, event: Event) -> None:
        """Note the event of work that issues collectives on a stream: those of the caller are issued after it."""
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
            On the host the pending collective: the caller goes on. On a device `None`: its stream waits.

        Raises:
            EngineError: another rank does not take part.
        """
        every, own = as_bytes(full), as_bytes(shard)
        # On the host the group's own threads do the work beside compute. On a device the call enqueues the work, and
        # the current stream waits for the group's own stream (ordering rule 2).
        goes_on = full.device.type == "cpu"
        if goes_on and type(full) is Tensor:  # no fake one
            every, own = view_apart(every, full), view_apart(own, full)
        dimension, where = ("inside", " inside its node") if inside else ("shard", "")
        gather = partial(all_gather_flat, every, own, async_op=goes_on)
        return self._issue("all_gather", dimension, (every, gather), what=f"the gather of {what}{where}")

    def reduce_scatter(self, shard: Tensor, full: Tensor, what: str = "") -> None:
        """Sum a flat buffer over the shard ranks, each of which keeps its own part of the sum.

        Arguments:
            shard: filled with the sum of this rank's part, [n].
            full: this rank's summands, of the same dtype, [shards * n].
            what: the unit's name, for messages.

        Raises:
            EngineError: another rank does not take part.
        """
        reduce = partial(reduce_scatter_flat, shard, full, op=dist.ReduceOp.SUM)
        self._issue("reduce_scatter", "shard", (full, reduce), what=f"the reduction of {what}")

    # Shards of any sizes: a gather is a broadcast of each shard by the rank that has it, a reduction one of each part
    # to the rank that it belongs to. As many bytes cross a link as for equal shards, none for a rank that has none.

    def broadcast_shards(self, full: Tensor, cuts: Sequence[int], what: str = "") -> Pending | None:
        """Fill a flat buffer with shards of any sizes, as `all_gather` with equal ones (above).

        Arguments:
            full: of any dtype; this rank's shard is there.
            cuts: where shards begin in it, in elements, and where the last one ends.
            what: the unit's name, for messages.
        """
        parts = [as_bytes(full[start:stop]) for start, stop in pairwise(cuts)]
        goes_on = full.device.type == "cpu"
        if goes_on and type(full) is Tensor:  # no fake one
            parts = [view_apart(part, full) for part in parts]
        calls = [
            (part, partial(dist.broadcast, part, group_src=rank, async_op=goes_on)) for rank, part in enumerate(parts)
        ]
        return self._issue("broadcast", "shard", *calls, what=f"the gather of {what}")

    def reduce_to_owners(self, shard: Tensor, full: Tensor, cuts: Sequence[int], what: str = "") -> None:
        """Sum a flat buffer over the shard ranks, as `reduce_scatter`, into parts of any sizes.

        Arguments:
            shard: filled with the sum of this rank's part.
            full: this rank's summands, of the same dtype; overwritten.
            cuts: where parts begin in it, in elements, and where the last one ends.
            what: the unit's name, for messages.
        """
        parts = [full[start:stop] for start, stop in pairwise(cuts)]
        calls = [
            (part, partial(dist.reduce, part, group_dst=rank, op=dist.ReduceOp.SUM)) for rank, part in enumerate(parts)
        ]
        self._issue("reduce", "shard", *calls, what=f"the reduction of {what}")
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
        exchange = partial(dist.all_to_all_single, received, sent)
        self._issue("all_to_all", hop, (sent, exchange), what=f"the reduction of {what} {hop} nodes")

    def all_reduce_replicas(self, tensor: Tensor, what: str = "") -> None:
        """Sum a tensor over the replicas, in place."""
        reduce = partial(dist.all_reduce, tensor, op=dist.ReduceOp.SUM)
        self._issue("all_reduce", "replicate", (tensor, reduce), what=f"the sum of {what}")

    def agree(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks, in place."""
        self._combine(tensor, dist.ReduceOp.SUM)

    def _combine(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        for dimension in ("replicate", "shard", "tp"):
            self._issue("all_reduce", dimension, (tensor, partial(dist.all_reduce, tensor, op=op)))

    def _issue(
        self, name: str, dimension: str, *calls: tuple[Tensor, Callable[..., dist.Work | None]], what: str = ""
    ) -> InFlightCollectives | None:
        """Count collectives along a dimension of the mesh, and issue them; do nothing where no other rank is there.

        Arguments:
            name: as `Tally.note` takes it.
            dimension: of the mesh.
            calls: for each the whole buffer and torch's function, which takes the group.
            what: what they are for, which ranks compare; empty where ranks have agreed on them before.

        Returns:
            The collectives that go on beside the caller; `None` where there are none.
        """
        group = self._groups[dimension]
        if group is None:
            return None
        if not is_alive(group):  # the user has destroyed it
            raise EngineError(
                "torch.distributed.destroy_process_group() has ended the process groups of this engine. Call close() "
                "before it; close(keep_params=False) after it."
            )
        number = self.sequel.note(what) if what else 0
        failed = partial(self._could_not_finish, what or f"the {name} of all ranks", number)
        works = []
        try:
            with without_saved_hooks():
                for buffer, call in calls:
                    self.counts.note(name, dimension, buffer)
                    works.append(call(group=group))
        except RuntimeError as error:
            raise failed(error) from error
        going_on = [work for work in works if work is not None]
        return InFlightCollectives(going_on, failed) if going_on else None

    def _could_not_finish(self, what: str, number: int, error: RuntimeError) -> EngineError:
        """Make the error of a collective that failed, with what the other ranks say."""
        which, advice = (f", collective {number} since the last step", f" {SAME}") if number else ("", "")
        return EngineError(
            f"Rank {self.rank}{self.control_group.host_of(self.rank)} could not finish {what}{which}; "
            f"{self.control_group.others_say(what)}{advice} ({error})"
        )

    def begin_forward(self, *, recorded: bool) -> None:
        """Refuse a forward that only some ranks run, before its first gather. Collective over the shard ranks.

        A gather would meet another collective: of another size, gloo aborts the process. Copies of the shards may run
        forwards of their own, and are not asked.

        Arguments:
            recorded: whether autograd records it.
        """
        if self.control_group.size == self.shards:
            with self.control_group.together(FORWARDS[recorded]):
                pass

    def report(self, failure: Exception | None) -> list[float]:
        """Return the number that ranks sum, for `check_reports`: 1 if this rank has failed."""
        return [0.0 if failure is None else 1.0]

    def check_reports(self, summed: Sequence[float], failure: Exception | None) -> None:
        """Stop every rank if one has failed: raise `failure` there, and on the others an error that quotes it."""
        if any(summed):
            self.control_group.agree(failure)

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
        self._combine(tensor, dist.ReduceOp.MAX)

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite a tensor with that of the first rank of those that have the same parts of the parameters."""
        # Copies may be on other hosts: each gets one copy over the link, which goes from its first shard to others.
        if self.shard_rank == 0:
            self._broadcast(tensor, "replicate")
        self._broadcast(tensor, "shard")

    def broadcast_alike(self, tensor: Tensor) -> None:
        """Overwrite a tensor with that of the first of the ranks that have different parts of the parameters.

        It is of what they have alike, and the same already on those with the same parts.
        """
        self._broadcast(tensor, "tp")

    def broadcast_part(self, tensor: Tensor, shard_rank: int) -> None:
        """Overwrite a tensor with that of one of the shard ranks, on all of them."""
        self._broadcast(tensor, "shard", shard_rank)

    def _broadcast(self, tensor: Tensor, dimension: str, source: int = 0) -> None:
        self._come_after_submitted()

        def send(group: dist.ProcessGroup) -> Any:
            return dist.broadcast(as_bytes(tensor), group=group, group_src=source)

        self._issue("broadcast", dimension, (tensor, send))

    def assemble(self, tensor: Tensor) -> None:
        """Put a tensor together of which each of the ranks that divide parameters has a box, and zeros around it."""
        self._come_after_submitted()

        def put(group: dist.ProcessGroup) -> Any:
            # The greatest byte: exact for every value, of boxes of any size, and where several ranks have the same one.
            return dist.all_reduce(as_bytes(tensor), op=dist.ReduceOp.MAX, group=group)

        self._issue("all_reduce", "tp", (tensor, put))

    def _come_after_submitted(self) -> None:
        """Wait until the collectives that were submitted to a stream have been issued (ordering rule 4).

        Else this collective could be issued before them, and would match another one on other ranks. Their errors are
        raised by a wait for their event.
        """
        with contextlib.suppress(Exception):
            self._last.wait()
        self._last = DONE


def as_bytes(tensor: Tensor) -> Tensor:
    """View a tensor as bytes: process groups lack some dtypes (float8, int16), and all of them move bytes."""
    return tensor.view(torch.uint8)


# ----------------------------------------------------------------------------------------------------------------------
# Ranks of one host that need the same bytes: each rank reads a part, and they exchange the parts.
# ----------------------------------------------------------------------------------------------------------------------


class LocalRanks:
    """Ranks of this host, with a group of our own.

    Arguments:
        group: theirs; it ends with `close`.
        size: how many there are.
        number: which of them this one is.
        device: where the tensors of their collectives are.
    """

    def __init__(self, group: dist.ProcessGroup, size: int, number: int, device: torch.device) -> None:
        self._group = group
        self.size = size
        self.number = number
        self.device = device

    @classmethod
    def that_read(cls, what: str, ranks: Collectives, device: torch.device, *, whole: bool) -> "LocalRanks | None":
        """Find the ranks of this host that read the same. Collective over all ranks.

        Arguments:
            what: tells apart what ranks read; empty where this one reads nothing.
            ranks: all of them.
            device: where the tensors of their collectives are.
            whole: whether each rank needs all of it, and not its shard alone.

        Returns:
            The ranks; `None` where no two of this host need the same bytes.
        """
        if ranks.world_size == 1:
            return None
        control_group, grid = ranks.control_group, ranks.grid
        said = control_group.collect([what, *_place(ranks.rank), grid.tp_rank, grid.shard_rank])
        name = control_group.share(f"penstock readers {secrets.token_hex(8)}")
        own = said[control_group.members.index(ranks.rank)]
        line = [rank for rank, each in zip(control_group.members, said, strict=True) if each[:-1] == own[:-1]]
        shards = {each[-1] for each in said if each[:-1] == own[:-1]}
        if not what or len(line) < 2 or (not whole and len(shards) == len(line)):
            return None
        like = next(iter(ranks.groups.values()))
        group = own_group(line, like, name, timeout_s=control_group.timeout_s)
        return cls(group, len(line), line.index(ranks.rank), device)

    def any(self, value: bool) -> bool:
        """Return True if the value is True on any of the ranks. Collective."""
        said = torch.tensor([float(value)], device="cpu").to(self.device)
        dist.all_reduce(said, op=dist.ReduceOp.MAX, group=self._group)
        return bool(said.item())

    def exchange(self, own: Tensor) -> Tensor:
        """Return the parts of all ranks, in their order. Collective.

        Arguments:
            own: this rank's bytes, as many as each one's, 1-D.
        """
        whole = torch.empty(self.size * own.numel(), dtype=own.dtype, device=self.device)
        all_gather_flat(whole, own.to(self.device), group=self._group)
        return whole

    def close(self) -> None:
        """Destroy the group."""
        give_back([self._group])


def _place(rank: int, environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return the host of a rank: by the machine, and by the launcher's ranks per host."""
    machine = boot_id() or platform.node()
    return machine, rank // ranks_of_host(environment) if "LOCAL_WORLD_SIZE" in environment else 0
