"""What every part of an engine works with: one value, made once units have their memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from penstock._native import Pool
from penstock.engine.units.unit import Unit
from penstock.engine.updates.scale import GradientScale
from penstock.machine.collectives import Ranks
from penstock.machine.streams import Streams
from penstock.rules.rule import Rule


@dataclass(frozen=True, eq=False)
class Rig:
    """The model and what trains it. Parts take it in their constructors; which of them it is does not change.

    Attributes:
        model: the prepared one.
        units: all of its parameters, in the order of their index.
        ranks: all that train it together.
        streams: where work runs beside compute.
        pool: the threads that do the host's arithmetic.
        rule: the arithmetic of the optimizer.
        gradient_scale: what a gradient in its home is multiplied with.
        param_groups: the optimizer's own, which users and schedulers change between steps; none without an optimizer.
    """

    model: nn.Module
    units: Sequence[Unit]
    ranks: Ranks
    streams: Streams
    pool: Pool
    rule: Rule
    gradient_scale: GradientScale
    param_groups: Sequence[dict[str, Any]]

    @property
    def trains(self) -> bool:
        """Whether there is an optimizer; else the engine has parameters alone, all of them frozen."""
        return bool(self.param_groups)
