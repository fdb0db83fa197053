"""What a plan knows of a device and of the ranks, before there are streams or process groups: two small values."""

from typing import NamedTuple


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
        """How many ranks there are in all."""
        return self.data_size * self.tp

    @property
    def data_size(self) -> int:
        """How many ranks sum the gradient of a parameter: those that have other batches, or other parts of a batch."""
        return self.shards * self.replicas

    @property
    def sizes(self) -> dict[str, int]:
        """How many ranks there are along each dimension, by the names that a mesh has for them."""
        return {"dp_replicate": self.replicas, "dp_shard": self.shards, "tp": self.tp}

    def stride(self, dimension: str) -> int:
        """Say how far the ranks of a dimension lie apart in the job: "tp" innermost, then "shard", then "replicate".

        Of the shard ranks, those "inside" a node are neighbours, and those "across" nodes lie a node apart.
        """
        inner = {"tp": 1, "shard": self.tp, "inside": self.tp, "across": self.tp * self.inside}
        return (inner | {"replicate": self.tp * self.shards})[dimension]

    @property
    def inside(self) -> int:
        """How many shards are on a node."""
        return self.node or self.shards

    @property
    def across(self) -> int:
        """How many nodes the shards are on."""
        return self.shards // self.inside

    def in_nodes(self, size: int) -> "Grid":
        """Give the same grid, its shards in nodes of some size; in one, where that does not divide them."""
        return self._replace(node=size if 1 < size < self.shards and self.shards % size == 0 else 0)

    @property
    def number(self) -> int:
        """The number of this rank in the grid, from 0 on."""
        return self.shard_rank + self.shards * (self.replica_rank + self.replicas * self.tp_rank)

    @classmethod
    def first_of(cls, world_size: int, *, sharded: bool) -> "Grid":
        """Make the grid of so many ranks, as the first of them sees it.

        Arguments:
            world_size: how many ranks there are.
            sharded: whether they shard the state; else each has a copy.
        """
        return cls(shards=world_size) if sharded else cls(replicas=world_size)
