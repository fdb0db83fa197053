"""Ranks that are not there: collectives are noted, and what other ranks would say is what this one says."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from penstock.planner.simulation.engine_internals import Collectives, Grid, Hop
from penstock.planner.simulation.program import Collective
from penstock.planner.simulation.recorder import Recorder


class SimulatedRanks(Collectives):
    """One rank of a grid.

    Arguments:
        grid: how many ranks there are, and which of them this one is.
        recorder: take the collectives.
    """

    def __init__(self, grid: Grid, recorder: Recorder) -> None:
        super().__init__(grid)
        self._recorder = recorder

    def all_gather(self, full: Tensor, shard: Tensor, what: str = "", *, inside: bool = False) -> None:
        """Note a gather."""
        del shard, what
        self._recorder.issue(self._along("inside" if inside else "shard", "all_gather", full.nbytes))

    def reduce_scatter(self, shard: Tensor, full: Tensor, what: str = "") -> None:
        """Note a reduction to shards."""
        del shard, what
        self._recorder.issue(self._along("shard", "reduce_scatter", full.nbytes))

    def broadcast_shards(self, full: Tensor, cuts: Sequence[int], what: str = "") -> None:
        """Note a gather of shards of any sizes."""
        del what
        for start, stop in pairwise(cuts):
            self._recorder.issue(self._along("shard", "broadcast", (stop - start) * full.element_size()))

    def reduce_to_owners(self, shard: Tensor, full: Tensor, cuts: Sequence[int], what: str = "") -> None:
        """Note a reduction of parts of any sizes."""
        del shard, what
        for start, stop in pairwise(cuts):
            self._recorder.issue(self._along("shard", "reduce", (stop - start) * full.element_size()))

    def all_to_all(self, received: Tensor, sent: Tensor, hop: Hop, what: str = "") -> None:
        """Note an exchange. What other ranks would send is what this one does."""
        del what
        received.copy_(sent)
        self._recorder.issue(self._along(hop, "all_to_all", sent.nbytes))

    def all_reduce_replicas(self, tensor: Tensor, what: str = "") -> None:
        """Note a sum over the copies."""
        del what
        if self.replicas > 1:
            self._recorder.issue(self._along("replicate", "all_reduce", tensor.nbytes))

    def agree(self, tensor: Tensor) -> None:
        """Note a sum over all ranks."""
        if self.shards > 1:
            self._recorder.issue(self._along("shard", "all_reduce", tensor.nbytes))
        self.all_reduce_replicas(tensor)
        if self.grid.tp > 1:
            self._recorder.issue(self._along("tp", "all_reduce", tensor.nbytes))

    def sum_numbers(self, numbers: Sequence[float], device: torch.device) -> list[float]:
        """Note a meeting; every rank says the same."""
        del device
        self._meet("all_reduce", 8 * len(numbers))
        return [number * self.world_size for number in numbers]

    def all_reduce(self, tensor: Tensor) -> None:
        """Note a meeting."""
        self._meet("all_reduce", tensor.nbytes)

    all_reduce_max = all_reduce

    def broadcast(self, tensor: Tensor) -> None:
        """Note a meeting."""
        self._meet("broadcast", tensor.nbytes)

    def broadcast_alike(self, tensor: Tensor) -> None:
        """Note a meeting."""
        if self.grid.tp > 1:
            self._recorder.meet(Collective("broadcast", tensor.nbytes, self.grid.tp, "tp"))

    def assemble(self, tensor: Tensor) -> None:
        """Note a meeting."""
        if self.grid.tp > 1:
            self._recorder.meet(Collective("all_reduce", tensor.nbytes, self.grid.tp, "tp"))

    def broadcast_part(self, tensor: Tensor, shard_rank: int) -> None:
        """Note a meeting."""
        del shard_rank
        self.broadcast(tensor)

    def _meet(self, name: str, nbytes: int) -> None:
        """Note a collective of all ranks: one for each dimension of the mesh."""
        if self.shards > 1:
            self._recorder.meet(self._along("shard", name, nbytes))
        if self.replicas > 1:
            self._recorder.meet(self._along("replicate", name, nbytes))
        if self.grid.tp > 1 and name != "broadcast":
            self._recorder.meet(self._along("tp", name, nbytes))

    def _along(self, dimension: str, name: str, nbytes: int) -> Collective:
        """Make a collective of the ranks along a dimension of the mesh."""
        grid = self.grid
        counts = {"shard": grid.shards, "inside": grid.inside, "across": grid.across, "replicate": grid.replicas}
        return Collective(name, nbytes, counts.get(dimension, grid.tp), dimension, grid.stride(dimension))
