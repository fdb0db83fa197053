"""Units that change while training goes on: parameters that were frozen are trained from now on.

all of a unit's     it is trained where it rests: its parameters stay, and get what is trained beside them
some of them        they leave for a unit of their own; where they were is nobody's from then on
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from penstock.engine.units.assemble import make_trained
from penstock.engine.units.discover import UnitSpec
from penstock.engine.units.divided import make_parameters
from penstock.engine.units.parameter import UnitParameter
from penstock.engine.units.plan import UnitPlan
from penstock.engine.units.unit import Unit
from penstock.kinds import PARAM
from penstock.layout import FlatLayout, Slot
from penstock.machine.collectives import Ranks
from penstock.rules.master import write_master
from penstock.tiers.home import Home
from penstock.tiers.store import Reservation


def lay_again(layout: FlatLayout, before: UnitSpec, spec: UnitSpec) -> FlatLayout:
    """Say where the parameters of a spec are in the buffer of a unit that had them before, and what they are called."""
    slots = dict(zip(before.parameters, layout.slots, strict=True))
    return replace(
        layout, slots=tuple(replace(slots[p], name=n) for p, n in zip(spec.parameters, spec.names, strict=True))
    )


def place(unit: Unit, plan: UnitPlan) -> None:
    """Let a unit know what it consists of, and what that is called; parameters that it has no longer leave it."""
    known = {parameter.tensor: parameter for parameter in unit.parameters}
    unit.spec, unit.layout, unit.name = plan.spec, plan.layout, plan.spec.name
    unit.parameters = tuple(known[tensor].placed(slot, i) for i, (tensor, slot) in enumerate(_slots(plan)))
    for home in {unit.params, unit.homes[PARAM], *([unit.secondary] if unit.secondary is not None else [])}:
        for section in home.sections:
            section.plan = replace(
                section.plan, cells=tuple(replace(cell, unit=unit.name) for cell in section.plan.cells)
            )


def parameters_for(
    plan: UnitPlan, known: Mapping[nn.Parameter, UnitParameter], ranks: Ranks
) -> tuple[UnitParameter, ...]:
    """Note the parameters of a new unit: those of other units as they were before `prepare`."""
    new = make_parameters(plan.spec.parameters, plan.layout, ranks.divided, ranks.rank)
    return tuple(
        known[tensor].placed(slot, index) if tensor in known else new[index]
        for index, (tensor, slot) in enumerate(_slots(plan))
    )


def train_where_it_rests(unit: Unit, plan: UnitPlan, reserved: Reservation) -> None:
    """Make what is trained beside the parameters of a frozen unit, whose fp32 values are these parameters.

    Nothing is under way on them. On the caller's time, as `fill_unit`.
    """
    homes = {name: Home([reserved.make(section) for section in sections]) for name, sections in plan.beside.items()}
    unit.trained = make_trained(plan, homes, unit.rank)
    for start in range(0, unit.shard_numel, plan.tile_numel):  # a tile at a time: in fp32 it is larger
        stop = min(start + plan.tile_numel, unit.shard_numel)
        for _, _, weights in unit.visit(start, stop, modify=True):
            if weights.shadow is None and weights.master is None:
                continue  # the parameters are all there is
            written = weights.param if weights.shadow is None else weights.shadow
            write_master(written, weights.master, weights.param.float().to(written.device))


def _slots(plan: UnitPlan) -> Sequence[tuple[nn.Parameter, Slot]]:
    return list(zip(plan.spec.parameters, plan.layout.slots, strict=True))
