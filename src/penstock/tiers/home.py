"""Where some kinds of one unit rest on one tier, tile by tile.

A home holds the param alone, the gradient alone, or together everything that the optimizer keeps. Elements are counted
from the start of this rank's shard.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kinds import Tier
from penstock.machine.arena import Arena

#: The values of a home's kinds for some range of elements, in the order of its plans.
Views = tuple[Tensor, ...]


@dataclass(frozen=True)
class CellPlan:
    """A cell before its memory: what will be allocated, where.

    Attributes:
        numel: values.
        grain: elements of the shard that one value belongs to: 1, or the block of a scale.
    """

    unit: str
    kind: str
    tier: Tier
    dtype: torch.dtype
    numel: int
    grain: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of the cell's values."""
        return self.numel * self.dtype.itemsize

    @property
    def lease_bytes(self) -> int:
        """Bytes that the cell takes on the cpu tier, whole pages."""
        return Arena.lease_bytes(self.numel, self.dtype)

    def part(self, start: int, stop: int) -> slice:
        """The values of elements `start` to `stop` of the shard; `start` is the first of a grain."""
        return slice(start // self.grain, -(-stop // self.grain))


class Home(ABC):
    """Some kinds of one unit's shard, on one tier.

    Arguments:
        plans: its cells, one for each kind.
        numel: elements of the shard.
        tile_numel: elements of a tile.
    """

    def __init__(self, plans: Sequence[CellPlan], numel: int, tile_numel: int) -> None:
        self.plans = tuple(plans)
        self.tier = self.plans[0].tier
        self.numel = numel
        self.tile_numel = tile_numel

    @property
    def tiles(self) -> int:
        """How many tiles there are."""
        return -(-self.numel // self.tile_numel)

    def tile_range(self, number: int) -> tuple[int, int]:
        """The first element of a tile, and one past its last."""
        first = number * self.tile_numel
        return first, min(first + self.tile_numel, self.numel)

    @abstractmethod
    def settle(self) -> None:
        """Wait on the host until everything that was written has arrived; raise the error of what has not."""

    @abstractmethod
    def check(self) -> None:
        """Raise the error of a write that has failed by now, without waiting."""

    @abstractmethod
    def at_rest(self) -> bool:
        """Whether everything that was written has arrived."""

    @abstractmethod
    def visit(self, start: int, stop: int, *, modify: bool = False) -> Iterator[tuple[int, int, Views]]:
        """Look at elements `start` to `stop`, piece by piece, on the caller's time.

        Work under way has been waited for. Yields the range of each piece and its values; what a `modify` visitor
        writes into them is kept once it asks for the next piece.
        """


class MemoryHome(Home):
    """Kinds that are tensors: on the device or the cpu tier."""

    def __init__(self, plans: Sequence[CellPlan], tensors: Sequence[Tensor], numel: int, tile_numel: int) -> None:
        super().__init__(plans, numel, tile_numel)
        self.tensors = tuple(tensors)

    def views(self, start: int, stop: int) -> Views:
        """The values of elements `start` to `stop`, in place."""
        return tuple(tensor[plan.part(start, stop)] for plan, tensor in zip(self.plans, self.tensors, strict=True))

    def settle(self) -> None:
        """Whoever writes tensors has an event for it."""

    def check(self) -> None:
        """Whoever writes tensors has an event for it."""

    def at_rest(self) -> bool:
        """Whoever writes tensors has an event for it."""
        return True

    def visit(self, start: int, stop: int, *, modify: bool = False) -> Iterator[tuple[int, int, Views]]:
        """One piece, in place."""
        del modify
        yield start, stop, self.views(start, stop)
