"""Ranks that are not there: collectives are noted, and what other ranks would say is what this one says."""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.forecast.program import Collective
from penstock.machine.collectives import Ranks
from penstock.machine.reach import Grid
from penstock.rehearsal.notes import Notes


class VirtualRanks(Ranks):
    """One rank of a grid.

    Arguments:
        grid: how many ranks there are, and which of them this one is.
        notes: take the collectives.
    """

    def __init__(self, grid: Grid, notes: Notes) -> None:
        super().__init__(grid)
        self._notes = notes

    def all_gather(self, full: Tensor, shard: Tensor, what: str = "") -> None:
        """Note a gather."""
        del shard, what
        self._notes.issue(Collective("all_gather", full.nbytes, self.shards))

    def reduce_scatter(self, shard: Tensor, full: Tensor, what: str = "") -> None:
        """Note a reduction to shards."""
        del shard, what
        self._notes.issue(Collective("reduce_scatter", full.nbytes, self.shards))

    def all_reduce_replicas(self, tensor: Tensor, what: str = "") -> None:
        """Note a sum over the copies."""
        del what
        if self.replicas > 1:
            self._notes.issue(Collective("all_reduce", tensor.nbytes, self.replicas, "replicate"))

    def agree(self, tensor: Tensor) -> None:
        """Note a sum over all ranks."""
        if self.shards > 1:
            self._notes.issue(Collective("all_reduce", tensor.nbytes, self.shards))
        self.all_reduce_replicas(tensor)
        if self.grid.tp > 1:
            self._notes.issue(Collective("all_reduce", tensor.nbytes, self.grid.tp, "tp"))

    def sum_numbers(self, numbers: Sequence[float], device: torch.device) -> list[float]:
        """Note a meeting; every rank says the same."""
        del device
        self._meet("all_reduce", 8 * len(numbers))
        return [number * self.world_size for number in numbers]

    def all_reduce(self, tensor: Tensor) -> None:
        """Note a meeting."""
        self._meet("all_reduce", tensor.nbytes)

    def all_reduce_max(self, tensor: Tensor) -> None:
        """Note a meeting."""
        self.all_reduce(tensor)

    def broadcast(self, tensor: Tensor) -> None:
        """Note a meeting."""
        self._meet("broadcast", tensor.nbytes)

    def broadcast_alike(self, tensor: Tensor) -> None:
        """Note a meeting."""
        if self.grid.tp > 1:
            self._notes.meet(Collective("broadcast", tensor.nbytes, self.grid.tp, "tp"))

    def assemble(self, tensor: Tensor) -> None:
        """Note a meeting."""
        if self.grid.tp > 1:
            self._notes.meet(Collective("all_reduce", tensor.nbytes, self.grid.tp, "tp"))

    def broadcast_part(self, tensor: Tensor, shard_rank: int) -> None:
        """Note a meeting."""
        del shard_rank
        self.broadcast(tensor)

    def _meet(self, name: str, nbytes: int) -> None:
        """Note a collective of all ranks: one for each dimension of the mesh."""
        if self.shards > 1:
            self._notes.meet(Collective(name, nbytes, self.shards))
        if self.replicas > 1:
            self._notes.meet(Collective(name, nbytes, self.replicas, "replicate"))
        if self.grid.tp > 1 and name != "broadcast":
            self._notes.meet(Collective(name, nbytes, self.grid.tp, "tp"))
