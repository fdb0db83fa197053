"""The process groups of one engine, formed of the ranks of a mesh: by what its dimensions do (`machine/mesh.py`)."""

import secrets
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import EngineError
from penstock.machine.council import Council
from penstock.machine.groups import give_back, own_group
from penstock.machine.mesh import Nodes, node_size, nodes_of, peers_of
from penstock.machine.reach import Grid
from penstock.machine.threads import ranks_of_host


class Formed(NamedTuple):
    """What the ranks of an engine have made together.

    Attributes:
        grid, groups, council, divided: as `Ranks` takes them.
    """

    grid: Grid
    groups: Sequence[dist.ProcessGroup | None]
    council: Council
    divided: Sequence[Sequence[int]]


def form(mesh: DeviceMesh | None, *, sharded: bool, timeout_s: float, nodes: Nodes) -> Formed:
    """Make a council and groups of our own. Collective; `Ranks.from_mesh` says what the arguments are.

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
        # One size of nodes, too.
        facts = [f"penstock {secrets.token_hex(8)}", sharded, nodes, ranks_of_host(default=0)]
        name, sharded, nodes, of_host = council.share(facts)
        peers = peers_of(mesh, sharded=sharded)
        grid = peers.grid.in_nodes(node_size(peers.shards, nodes, of_host))
        # In one order on all ranks: the members of a group make it together, and ranks that began with different
        # dimensions would wait for each other for ever. Of each dimension a rank is in one group.
        likes = [*peers.likes, peers.likes[0], peers.likes[0]]
        for line, like in zip([*peers.lines, *nodes_of(peers.shards, grid)], likes, strict=True):
            own.append(own_group(line, like, name, timeout_s=timeout_s) if len(line) > 1 and like is not None else None)
    except BaseException as error:
        give_back(group for group in own if group is not None)
        council.close()
        if isinstance(error, RuntimeError):  # torch's
            raise EngineError(
                f"Rank {dist.get_rank()} could not make a process group of the same ranks as the one it was given: "
                f"another one has ended, or does something else. ({error})"
            ) from error
        raise
    return Formed(grid, own, council, peers.divided)
