"""What a plan knows of a device and of the ranks, before there are streams or process groups: two small values."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist


class Reach(NamedTuple):
    """What compute reads and writes where it rests.

    Attributes:
        aliases_host: compute reads and writes the cpu tier directly: nothing has to be copied to be used.
        reads_in_place: compute reads parameters where they rest, where it reaches them; else they are gathered and
            released all the same.
    """

    aliases_host: bool
    reads_in_place: bool = True


class Grid(NamedTuple):
    """The ranks as they divide the training state, and this rank's place among them.

    Attributes:
        shards, shard_rank: the number of shards, and which of them this rank has.
        replicas, replica_rank: the number of copies, and which of them this rank has a shard of.
    """

    shards: int = 1
    shard_rank: int = 0
    replicas: int = 1
    replica_rank: int = 0

    @property
    def world_size(self) -> int:
        """How many ranks there are in all."""
        return self.shards * self.replicas

    @classmethod
    def first_of(cls, world_size: int, *, sharded: bool) -> "Grid":
        """Make the grid of so many ranks, as the first of them sees it.

        Arguments:
            world_size: how many ranks there are.
            sharded: whether they shard the state; else each has a copy.
        """
        return cls(shards=world_size) if sharded else cls(replicas=world_size)

    @classmethod
    def of_groups(cls, groups: Sequence[dist.ProcessGroup], *, sharded: bool) -> "Grid":
        """Make the grid of the ranks of process groups, one for each dimension. Not collective.

        Arguments:
            groups: those that this rank is in.
            sharded: whether the last dimension shards the state; else all dimensions replicate it.
        """
        sizes = [dist.get_world_size(group) for group in groups]
        numbers = [dist.get_rank(group) for group in groups]
        shards, shard_rank = (sizes.pop(), numbers.pop()) if sharded and groups else (1, 0)
        replica_rank = 0
        for size, number in zip(sizes, numbers, strict=True):
            replica_rank = replica_rank * size + number
        return cls(shards, shard_rank, math.prod(sizes), replica_rank)
