"""Squared norms that were left for later: of what compute has put into gradients' homes, of many parts together.

A kernel of a device costs its launch, however little it reads. So a gradient that goes straight into a home there is
one kernel, and its norm is taken when somebody asks: of the last micro-batch alone, of all units' parts in one go.
"""

from collections.abc import Iterable

from torch import Tensor

from penstock.engine.units.unit import Unit
from penstock.kinds import Tier
from penstock.layout import Piece
from penstock.machine.streams import Streams
from penstock.rules.deposit import squared_norms_of
from penstock.tiers.copies import in_reach
from penstock.tiers.home import Home


def measure_late(units: Iterable[Unit], streams: Streams) -> None:
    """Take the norms of the parts of gradients that were not measured on their way. Waits for nothing.

    Compute has written these homes itself, and takes the norms after that.
    """
    late: list[tuple[Unit, Piece]] = []
    values = []
    for unit in units:
        if unit.trained is None or not unit.trained.gradient.unmeasured:
            continue
        gradient = unit.trained.gradient
        home = reached(gradient.home, streams)
        # A home that has moved away would be read before its copy is there: who moves one has it measured first.
        assert home is not None, "gradients are measured before their home moves"
        for part in unit.parts():
            if part.slot in gradient.unmeasured:
                late.append((unit, part))
                values.append(home[part.start : part.stop])
    for (unit, part), norm in zip(late, squared_norms_of(values), strict=True):
        assert unit.trained is not None
        unit.trained.gradient.measure([part], [norm])


def reached(home: Home, streams: Streams) -> Tensor | None:
    """Return the values of a home of one kind, if compute reaches all of them in one piece, else `None`."""
    section, *others = home.sections
    if others or not in_reach(section.tier, Tier.DEVICE, streams.reach):
        return None
    (values,) = section.tensors
    return values
