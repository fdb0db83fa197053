"""Room of any size in a few slabs: which bytes are free. Arithmetic alone.

    slab 0    | extent | hole | extent | extent | hole |
    slab 1    | extent |                hole           |

What is free between two extents is one hole, however it came to be. Room is one extent in the smallest hole that holds
it; where none does, it is put together from the largest ones. So room is there whenever as many bytes are free: what
the slabs hold is bounded by what was wanted at once, and not by the order in which sizes came and went.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

from penstock.layout import round_up


class Extent(NamedTuple):
    """Bytes of a slab."""

    slab: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """How many."""
        return self.stop - self.start


class Space:
    """The free bytes of some slabs.

    Arguments:
        grain: what extents are multiples of; it is all that a taker gets beyond what it asks for.
    """

    def __init__(self, grain: int) -> None:
        self._grain = grain
        self._sizes: dict[int, int] = {}
        self._holes: list[Extent] = []  # sorted

    @property
    def capacity(self) -> int:
        """Bytes of all slabs."""
        return sum(self._sizes.values())

    @property
    def free(self) -> int:
        """Bytes of all holes."""
        return sum(hole.nbytes for hole in self._holes)

    @property
    def holes(self) -> Sequence[Extent]:
        """What is free, in order; neighbours are one."""
        return tuple(self._holes)

    def room(self, nbytes: int) -> int:
        """Say how many bytes taking some takes."""
        return round_up(nbytes, self._grain)

    def add(self, slab: int, nbytes: int) -> None:
        """Add a slab of whole grains, under a number that no other one has."""
        assert slab not in self._sizes
        assert nbytes % self._grain == 0
        self._sizes[slab] = nbytes
        insort(self._holes, Extent(slab, 0, nbytes))

    def remove(self, slab: int) -> None:
        """Remove a slab of which nothing is taken."""
        self._holes.remove(Extent(slab, 0, self._sizes.pop(slab)))

    def idle(self) -> list[int]:
        """Find the slabs of which nothing is taken."""
        return [hole.slab for hole in self._holes if hole.nbytes == self._sizes[hole.slab]]

    def take(self, nbytes: int) -> list[Extent]:
        """Take extents that hold some bytes, one after the other. As many bytes are free."""
        left = self.room(nbytes)
        assert 0 < left <= self.free
        taken: list[Extent] = []
        while left:
            fitting = min((hole for hole in self._holes if hole.nbytes >= left), key=_size, default=None)
            hole = max(self._holes, key=_size) if fitting is None else fitting
            self._holes.remove(hole)
            cut = hole.start + min(left, hole.nbytes)
            if cut < hole.stop:
                insort(self._holes, Extent(hole.slab, cut, hole.stop))
            taken.append(Extent(hole.slab, hole.start, cut))
            left -= taken[-1].nbytes
        return taken

    def give_back(self, extent: Extent) -> None:
        """Free an extent that was taken."""
        slab, start, stop = extent
        place = bisect_left(self._holes, extent)
        if place < len(self._holes) and self._holes[place][:2] == (slab, stop):
            stop = self._holes.pop(place).stop
        if place and (self._holes[place - 1].slab, self._holes[place - 1].stop) == (slab, start):
            place -= 1
            start = self._holes.pop(place).start
        self._holes.insert(place, Extent(slab, start, stop))


def _size(hole: Extent) -> int:
    return hole.nbytes
