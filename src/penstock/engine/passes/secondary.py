"""Parts of gathered units that are kept until the next update, so that later gathers stay inside a node.

After a gather in training each rank keeps one of k parts of the whole unit, k being the ranks of a node: together they
have all of it, as it was gathered, and backward's gather is one among them. An evaluation keeps nothing; it takes what
is kept.

Source: G. Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023 (hpZ).
"""

from torch import nn

from penstock.engine.units.unit import Unit
from penstock.kinds import SECONDARY
from penstock.machine.border import user_records
from penstock.tiers.home import Home, buffer_home
from penstock.tiers.movement import Movement
from penstock.trace import Label


class SecondaryParts:
    """What is kept of units. Every rank keeps and takes the same ones: it decides which ranks a gather is among.

    Arguments:
        model: says whether it trains.
        movement: brings parts to their homes.
    """

    def __init__(self, model: nn.Module, movement: Movement) -> None:
        self._model = model
        self._movement = movement

    def has(self, unit: Unit, *, exact: bool) -> bool:
        """Whether the ranks of a node have all of a unit together.

        Arguments:
            unit: any.
            exact: whether it is gathered as its homes have it, where other gathers carry rounded values.
        """
        return unit.secondary is not None and not unit.stale and not exact

    def source(self, unit: Unit, *, exact: bool) -> tuple[Home, tuple[int, int]]:
        """Say what of this rank's a gather begins with, and where in the flat buffer that is."""
        if self.has(unit, exact=exact):
            assert unit.secondary is not None
            return unit.secondary, _range_of(unit, unit.secondary)
        return unit.params, unit.own_range

    def keep(self, unit: Unit) -> None:
        """Keep this rank's part of what is gathered after `unit.event`, where a backward may follow."""
        # Reentrant checkpoints run forward without gradients, in a model that trains.
        if unit.secondary is None or not (self._model.training or user_records()):
            return
        start, stop = _range_of(unit, unit.secondary)
        unit.stale = False
        # The buffer is released after this copy: else later gathers would get what the memory holds next.
        gathered = buffer_home(unit.full[start:stop], written=unit.event)  # site gather.secondary_source
        unit.event = self._movement.copy(gathered, unit.secondary, Label("save", unit.name, SECONDARY))


def _range_of(unit: Unit, secondary: Home) -> tuple[int, int]:
    """Say which part of the flat buffer is kept on this rank: that of its place in its node."""
    place = unit.rank % (unit.layout.numel // secondary.stop)
    return place * secondary.stop, (place + 1) * secondary.stop
