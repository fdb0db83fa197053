"""Roles of ranks: the dimensions of a mesh, and this rank's place in it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import ConfigError, one_line
from penstock.runtime.system import neighbours_of_host

# ----------------------------------------------------------------------------------------------------------------------
# Values that describe a device and the ranks, before there are streams or process groups.
# ----------------------------------------------------------------------------------------------------------------------


class Reach(NamedTuple):
    """State that compute reads and writes in its storage.

    Attributes:
        aliases_host: compute reads and writes the cpu tier directly: nothing has to be copied to be used.
        reads_in_place: compute reads parameters in their storage, where it reaches them; else they are gathered and
            released.
    """

    aliases_host: bool
    reads_in_place: bool = True


class Grid(NamedTuple):
    """The ranks as they divide the training state, and this rank's place among them.

    Attributes:
        shards, shard_rank: the number of shards, and which of them this rank has.
        replicas, replica_rank: the number of copies, and which of them this rank has a shard of.
        tp, tp_rank: over how many ranks the parameters themselves are divided (tensor or expert parallel), each with a
            state of its own, and which of them this rank is.
        node: how many neighbours among the shards are a node, within which some collectives stay; 0 where all of them
            are one.
    """

    shards: int = 1
    shard_rank: int = 0
    replicas: int = 1
    replica_rank: int = 0
    tp: int = 1
    tp_rank: int = 0
    node: int = 0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.data_size * self.tp

    @property
    def data_size(self) -> int:
        """Number of ranks that sum the gradient of a parameter: those with other batches, or other parts of a batch."""
        return self.shards * self.replicas

    @property
    def sizes(self) -> dict[str, int]:
        """Number of ranks along each dimension, by the names of a mesh."""
        return {"dp_replicate": self.replicas, "dp_shard": self.shards, "tp": self.tp}

    def stride(self, dimension: str) -> int:
        """Return the distance of a dimension's ranks in the job: "tp" innermost, then "shard", then "replicate".

        Of the shard ranks, those "inside" a node are neighbours, and those "across" nodes lie a node apart.
        """
        inner = {"tp": 1, "shard": self.tp, "inside": self.tp, "across": self.tp * self.inside}
        return (inner | {"replicate": self.tp * self.shards})[dimension]

    @property
    def inside(self) -> int:
        """Number of shards on a node."""
        return self.node or self.shards

    @property
    def across(self) -> int:
        """Number of nodes of the shards."""
        return self.shards // self.inside

    def in_nodes(self, size: int) -> "Grid":
        """Return the same grid, its shards in nodes of some size; in one node, if the size does not divide them."""
        return self._replace(node=size if 1 < size < self.shards and self.shards % size == 0 else 0)

    @property
    def number(self) -> int:
        """Number of this rank in the grid, from 0 on."""
        return self.shard_rank + self.shards * (self.replica_rank + self.replicas * self.tp_rank)

    @classmethod
    def first_of(cls, world_size: int, *, sharded: bool) -> "Grid":
        """Make the grid of so many ranks, as the first of them sees it.

        Arguments:
            world_size: how many ranks there are.
            sharded: whether they shard the state; else each has a copy.
        """
        return cls(shards=world_size) if sharded else cls(replicas=world_size)


# ----------------------------------------------------------------------------------------------------------------------
# Role of each dimension of a mesh: to share the training state, to copy it, or to divide the model itself.
#
#     dp_replicate, replicate    ranks have copies of the state
#     dp_shard, cp, shard, dp    ranks share one copy; `cp` divides sequences, and its ranks share state as others do
#     tp, ep                     ranks have parts of the parameters (`torch.distributed.tensor`), and a state each
#
# Dimensions without a name, or with others than these, are what they are in FSDP: one shards, two replicate and shard.
# ----------------------------------------------------------------------------------------------------------------------


#: Nodes of the shard ranks: so many neighbours, or those on a host; `None` for no nodes.
Nodes = int | Literal["host"] | None

SHARE, COPY, DIVIDE = "share", "copy", "divide"
_ROLES = {
    "dp_replicate": COPY,
    "replicate": COPY,
    "dp_shard": SHARE,
    "shard": SHARE,
    "dp": SHARE,
    "cp": SHARE,
    "tp": DIVIDE,
    "ep": DIVIDE,
}
_MOST_RANKS = 1 << 26  # along a dimension: of ranks that need not be there
_POSITIONS = {1: (SHARE,), 2: (COPY, SHARE)}


@dataclass(frozen=True)
class Peers:
    """The ranks with which one rank divides the training state.

    Attributes:
        rank: this rank's number in the job.
        members: all ranks of the mesh, in its order.
        shards: those that share one copy of the state, in the order of their shards; this one among them.
        copies: those that have a copy of this one's shard, and this one.
        tp: those that have other parts of the parameters, for the same batches, and this one.
        likes: for each of the three a process group whose backend and device its own one takes; where there is one.
        divided: the ranks of each dimension over which parameters are divided, this one among them.
    """

    rank: int
    members: Sequence[int]
    shards: Sequence[int]
    copies: Sequence[int]
    tp: Sequence[int]
    likes: Sequence[dist.ProcessGroup | None] = (None, None, None)
    divided: Sequence[Sequence[int]] = ()

    @property
    def grid(self) -> Grid:
        """Sizes of the lines, and this rank's place in each."""
        lines = (self.shards, self.copies, self.tp)
        return Grid(*(number for line in lines for number in (len(line), line.index(self.rank))))


def roles_of(mesh: DeviceMesh) -> Sequence[str]:
    """Return the role of each dimension of a mesh.

    Raises:
        ConfigError: a dimension has no meaning here, or the names do not say which has which.
    """
    names = mesh.mesh_dim_names or ()
    known = [name for name in names if name in _ROLES]
    if len(known) == mesh.ndim:
        return [_ROLES[name] for name in names]
    if mesh.ndim in _POSITIONS and not known:
        return _POSITIONS[mesh.ndim]
    others = ", ".join(repr(name) for name in names if name not in _ROLES)
    why = f"it does not say what {others} is" if names else f"its {mesh.ndim} dimensions have no names"
    raise ConfigError(
        f"{describe(mesh)}: {why}. Name each dimension dp_replicate, dp_shard, cp, tp or ep; one or two without such "
        "names are (shard) and (replicate, shard)."
    )


def grid_of(sizes: Mapping[str, int], *, sharded: bool) -> Grid:
    """Return the grid of the first rank of a mesh that need not exist.

    Arguments:
        sizes: the number of ranks along each dimension, by its name.
        sharded: whether ranks share the state where they may; else all of those have copies.

    Raises:
        ConfigError: a name has no meaning, or a size is no number of ranks.

    Example:
        >>> grid_of({"dp_replicate": 16, "dp_shard": 8}, sharded=True).shards
        8
    """
    given: Any = sizes
    if not isinstance(given, Mapping) or not given:
        raise ConfigError(
            f"mesh is {'empty' if isinstance(given, Mapping) else f'a {type(given).__name__}'}. Give the sizes of its "
            'dimensions by their names, such as {"dp_replicate": 16, "dp_shard": 8}.'
        )
    counts = {SHARE: 1, COPY: 1, DIVIDE: 1}
    for name, size in given.items():
        if name not in _ROLES:
            raise ConfigError(f"mesh has a dimension {one_line(repr(name), 80)}. Use {', '.join(_ROLES)}.")
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= _MOST_RANKS:
            raise ConfigError(f"mesh has {name}={one_line(repr(size), 80)}. Use a number of ranks, 1 to {_MOST_RANKS}.")
        role = COPY if _ROLES[name] == SHARE and not sharded else _ROLES[name]
        counts[role] *= size
    return Grid(shards=counts[SHARE], replicas=counts[COPY], tp=counts[DIVIDE])


def peers_of(mesh: DeviceMesh | None, *, sharded: bool) -> Peers:
    """Find the ranks with which this one divides the training state. Not collective.

    Arguments:
        mesh: `None` stands for the default process group, if there is one; this rank is in it.
        sharded: whether ranks share the state where they may; else all of those have copies.

    Raises:
        ConfigError: the mesh's dimensions have no meaning, or this rank is not in it.
    """
    if mesh is None:
        if not (dist.is_available() and dist.is_initialized()):
            return Peers(0, (0,), (0,), (0,), (0,))
        default = dist.group.WORLD
        members = dist.get_process_group_ranks(default)
        rank = dist.get_rank()
        shards, copies = (members, (rank,)) if sharded else ((rank,), members)
        return Peers(rank, members, shards, copies, (rank,), (default, default, default))
    roles = roles_of(mesh)
    rank, place = dist.get_rank(), mesh.get_coordinate()
    if place is None:
        raise ConfigError(f"{describe(mesh)}: rank {rank} is not in it. Its ranks alone call prepare() with it.")
    if not sharded:
        roles = [COPY if role == SHARE else role for role in roles]
    along = [[number for number, each in enumerate(roles) if each == role] for role in (SHARE, COPY, DIVIDE)]
    shards, copies, tp = (_line(mesh, place, numbers) for numbers in along)
    likes = [mesh.get_group(numbers[0]) if numbers else None for numbers in along]
    divided = [_line(mesh, place, [number]) for number in along[-1]]
    return Peers(rank, mesh.mesh.flatten().tolist(), shards, copies, tp, likes, divided)


def lines_along(mesh: DeviceMesh) -> list[list[int]]:
    """List the ranks along each dimension of a mesh, this one among them, which is in it."""
    place = mesh.get_coordinate()
    assert place is not None
    return [_line(mesh, place, [number]) for number in range(mesh.ndim)]


def _line(mesh: DeviceMesh, place: Sequence[int], along: Sequence[int]) -> list[int]:
    """List the ranks that differ from one place of a mesh along some dimensions alone."""
    at = tuple(slice(None) if number in along else place[number] for number in range(mesh.ndim))
    ranks: list[int] = mesh.mesh[at].flatten().tolist()
    return ranks


def node_size(line: Sequence[int], nodes: Nodes, of_host: int) -> int:
    """Return how many neighbours among the shard ranks are a node; 0 for no nodes.

    Arguments:
        line: the shard ranks' numbers in the job, in the order of their shards.
        nodes: the request.
        of_host: how many ranks there are on each host, which have consecutive numbers; 0 if it is not known.
    """
    if nodes == "host":
        return neighbours_of_host(line, of_host)
    return nodes or 0


def nodes_of(shards: Sequence[int], grid: Grid) -> tuple[Sequence[int], Sequence[int]]:
    """List the shard ranks of this rank's node, and those of its place in each node; none if there is one node.

    Arguments:
        shards: the shard ranks, in the order of their shards.
        grid: of this rank.
    """
    if not grid.node:
        return (), ()
    place, node = grid.shard_rank % grid.node, grid.shard_rank // grid.node
    return shards[node * grid.node : (node + 1) * grid.node], shards[place :: grid.node]


def describe(mesh: DeviceMesh) -> str:
    """Print a mesh for a message: its dimensions with their sizes, and its ranks."""
    names = mesh.mesh_dim_names or ["?"] * mesh.ndim
    sizes = " x ".join(f"{name} {size}" for name, size in zip(names, mesh.mesh.shape, strict=True))
    return f"mesh ({sizes}; ranks {mesh.mesh.tolist()})"
