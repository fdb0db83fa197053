"""Where the parameters of a unit lie in its flat buffer, and which rank has which, where a rule looks at whole ones.

A parameter that is not cut is one rank's: its gradient is reduced to that rank, its states rest there, and it is
updated there, once. Ranks are chosen so that each gets its share of the work of all units together: the work of one
update grows with a parameter's rows, columns and the shorter of both, as a product of matrices does.

Source: Liu et al., "Muon is Scalable for LLM Training", 2025, whose ranks gather what they update; here it is
never apart.
"""

from collections.abc import Sequence

from penstock.engine.units.discover import UnitSpec
from penstock.engine.units.dtensors import own_shape, region_of
from penstock.layout import FlatLayout


class Owners:
    """Chooses the ranks of parameters, unit by unit, the same on every rank.

    Arguments:
        shards: how many ranks share the state.
    """

    def __init__(self, shards: int) -> None:
        self._work = [0.0] * shards

    def choose(self, shapes: Sequence[tuple[int, ...]]) -> list[int]:
        """Give parameters of one size to ranks, those with the least work so far first.

        Arguments:
            shapes: theirs.

        Returns:
            How many of them each rank has, in the order of the ranks.
        """
        counts = [0] * len(self._work)
        work = sum(_work(shape) for shape in shapes) / max(len(shapes), 1)
        for _ in shapes:
            rank = min(range(len(counts)), key=lambda rank: (self._work[rank], rank))
            counts[rank] += 1
            self._work[rank] += work
        return counts


def lay_out(spec: UnitSpec, shards: int, owners: Owners) -> FlatLayout:
    """Lay out the flat buffer of a unit.

    Arguments:
        spec: its parameters.
        shards: how many ranks share them.
        owners: chooses whose those are that are not cut.
    """
    shapes = [own_shape(parameter) for parameter in spec.parameters]
    if spec.whole_numel:
        return FlatLayout.build_whole(spec.names, shapes, owners.choose(shapes), spec.whole_numel)
    return FlatLayout.build(spec.names, shapes, shards, [region_of(parameter) for parameter in spec.parameters])


def _work(shape: Sequence[int]) -> float:
    """Estimate the work of one update, in any unit: of a stack of matrices that of each of them."""
    if len(shape) < 2:
        return float(sum(shape))
    *stack, rows, columns = shape
    times = 1.0
    for size in stack:
        times *= size
    return times * rows * columns * min(rows, columns)
