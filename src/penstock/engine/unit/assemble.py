"""Building units, and building them again when parameters are added."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from penstock.config import GRAD, MASTER, OPTIMIZER, PARAM, SECONDARY, SHADOW
from penstock.engine.unit.first_values import FlatValues, ValueRead
from penstock.engine.unit.parameter import UnitParameter, make_parameters
from penstock.engine.unit.partition import UnitSpec
from penstock.engine.unit.plan import UnitPlan
from penstock.engine.unit.unit import TrainingState, Unit, UnitGradient, WeightRange
from penstock.layout import FlatLayout
from penstock.rules.formats import as_param, write_given, write_master
from penstock.runtime.collectives import Collectives
from penstock.runtime.streams import Streams
from penstock.tiers.storage import Storage
from penstock.tiers.tier import Reservation

# ----------------------------------------------------------------------------------------------------------------------
# A unit's storages, made from their plan and filled with first values.
# ----------------------------------------------------------------------------------------------------------------------


def make_unit(
    plan: UnitPlan,
    index: int,
    parameters: Sequence[UnitParameter],
    rank: int,
    streams: Streams,
    reserved: Reservation,
) -> Unit:
    """Make a unit with empty storages.

    Arguments:
        plan: the plan of its storages.
        index: the unit's number among all.
        parameters: the unit's parameters, made before the memory of any of them was freed.
        rank: the rank whose shard this process has.
        streams: the streams of the device that computes.
        reserved: the memory and files that were reserved for it.
    """
    spec, layout = plan.spec, plan.layout
    # In the order of the plan, in which they were reserved: an allocation hands out its memory one segment after the
    # other, and a segment that is made out of order would get another one's memory.
    storages = {
        name: Storage([reserved.make(segment) for segment in segments]) for name, segments in plan.segments.items()
    }
    full = None
    if not plan.resident:
        full = streams.make_buffer(layout.numel, spec.dtype)
        # One tensor for good, with memory while the unit is gathered: views that autograd saves see the next gather.
        streams.deallocate(full)
    unit = Unit(
        spec, index, layout, parameters, rank=rank, storage=storages[PARAM], replicated=plan.replicated, full=full
    )
    unit.secondary, unit.other_shards_outdated = storages.get(SECONDARY), SECONDARY in storages  # it is empty
    if spec.trainable:
        unit.trained = make_trained(plan, storages, rank)
    return unit


def make_trained(plan: UnitPlan, storages: Mapping[str, Storage], rank: int) -> TrainingState:
    """Make the state of a trained unit beside its parameters."""
    return TrainingState(
        gradient=UnitGradient(storages[GRAD]),
        master=storages[MASTER],
        optimizer=storages[OPTIMIZER],
        param_staging=storages[SHADOW],
        fields=plan.fields,
        tiles=plan.layout.tiles(rank, plan.tile_numel),
    )


def fill_unit(unit: Unit, flats: Sequence[FlatValues] | None) -> None:
    """Write parameters to their storage, and this rank's part of them to the master; free their own memory.

    Waits for nothing and records no event: no other work uses the storages yet, and all work that is submitted later
    follows compute, which writes here (ordering rule 2).

    Arguments:
        unit: a unit with empty storages.
        flats: the values of its parameters, in the order of its slots; `None` in a simulation.
    """
    if flats is not None:
        _write(unit, flats)
    unit.unset()  # frees their own memory, before the values of the next unit arrive
    unit.note_versions()  # after the last write here: only the user's writes are refused


def reads_of(layout: FlatLayout, rank: int, *, replicated: bool) -> list[ValueRead]:
    """List the ranges that `fill_unit` reads of a unit's parameters, in order.

    Arguments:
        layout: the slots of the parameters.
        rank: the rank whose shard this process has.
        replicated: True if it has the other shards too.
    """
    first, last = layout.shard_range(rank)
    others = [(0, first), (last, layout.numel)] if replicated else []
    return [*_reads(layout, others), *_reads(layout, [(first, last)])]


def _reads(layout: FlatLayout, ranges: Sequence[tuple[int, int]]) -> Iterator[ValueRead]:
    """Yield the parts of parameters that lie in ranges of the flat buffer, one parameter after the other."""
    for index, slot in enumerate(layout.slots):
        for first, last in ranges:
            start, stop = max(slot.start, first), min(slot.stop, last)
            if start < stop:
                yield ValueRead(index, start - slot.start, stop - slot.start)


def _write(unit: Unit, flats: Sequence[FlatValues]) -> None:
    """Write the values of a unit's parameters to its storages, which are zeros."""
    first, last = unit.own_range
    if unit.replica is not None:
        for index, start, stop in _reads(unit.layout, [(0, first), (last, unit.layout.numel)]):
            origin = unit.layout.slots[index].start
            for begin, end, (values,) in unit.replica.visit(origin + start, origin + stop, modify=True):
                for at, value in flats[index].pieces(begin - origin, end - origin):
                    _at(values, origin + at - begin, value).copy_(as_param(value, values.dtype))
    parts = unit.parts()
    for begin, end, weights in unit.visit(0, unit.shard_numel, modify=True):
        for index, start, stop in parts:
            start, stop = max(start, begin), min(stop, end)
            if start < stop:
                offset = first - unit.layout.slots[index].start
                for at, value in flats[index].pieces(start + offset, stop + offset):
                    _write_own(unit, weights, at - offset - begin, value)


def _write_own(unit: Unit, weights: WeightRange, at: int, value: Tensor) -> None:
    """Write values to a range of this rank's shard, from its element `at` on."""
    param = _at(weights.param, at, value)
    if unit.trained is None:
        param.copy_(as_param(value, param.dtype))
        return
    # The update starts from the staging where there is one, and the gather from the parameter: the same bits.
    written = param if weights.param_staging is None else _at(weights.param_staging, at, value)
    master = None if weights.master is None else _at(weights.master, at, value)
    write_given(written, master, value)
    if weights.param_staging is not None:
        param.copy_(written)


def _at(storage: Tensor, start: int, value: Tensor) -> Tensor:
    return storage[start : start + value.numel()]


# ----------------------------------------------------------------------------------------------------------------------
# Units that change between steps: frozen parameters become trained ones.
#
# all of a unit's     its parameters stay in their storage, and it gets gradient, master weights and optimizer states
# some of them        they move to a unit of their own; their old slots are unused from then on
# ----------------------------------------------------------------------------------------------------------------------


def lay_again(layout: FlatLayout, before: UnitSpec, spec: UnitSpec) -> FlatLayout:
    """Return the layout of the parameters of a spec in the buffer of a unit that had them before, with their names."""
    slots = dict(zip(before.parameters, layout.slots, strict=True))
    return replace(
        layout, slots=tuple(replace(slots[p], name=n) for p, n in zip(spec.parameters, spec.names, strict=True))
    )


def place(unit: Unit, plan: UnitPlan) -> None:
    """Give a unit its new spec, layout and name; drop the parameters that it has no longer."""
    known = {parameter.tensor: parameter for parameter in unit.parameters}
    unit.spec, unit.layout, unit.name = plan.spec, plan.layout, plan.spec.name
    slots = enumerate(zip(plan.spec.parameters, plan.layout.slots, strict=True))
    unit.parameters = tuple(known[tensor].placed(slot, index) for index, (tensor, slot) in slots)
    for storage in {unit.params, unit.storages[PARAM], *([unit.secondary] if unit.secondary is not None else [])}:
        for segment in storage.segments:
            segment.plan = replace(
                segment.plan, cells=tuple(replace(cell, unit=unit.name) for cell in segment.plan.cells)
            )


def parameters_for(
    plan: UnitPlan, known: Mapping[nn.Parameter, UnitParameter], ranks: Collectives
) -> tuple[UnitParameter, ...]:
    """Make the parameters of a new unit: those of other units keep their state before `prepare`."""
    new = make_parameters(plan.spec.parameters, plan.layout, ranks.divided, ranks.rank)
    return tuple(known[p.tensor].placed(p.slot, p.index) if p.tensor in known else p for p in new)


def train_where_it_rests(unit: Unit, plan: UnitPlan, reserved: Reservation) -> None:
    """Make the trained state of a frozen unit, whose fp32 values are its parameters.

    No work on them is under way. The caller's thread writes at once, as in `fill_unit`.
    """
    storages = {
        name: Storage([reserved.make(segment) for segment in segments]) for name, segments in plan.beside.items()
    }
    unit.trained = make_trained(plan, storages, unit.rank)
    for start in range(0, unit.shard_numel, plan.tile_numel):  # a tile at a time: in fp32 it is larger
        stop = min(start + plan.tile_numel, unit.shard_numel)
        for _, _, weights in unit.visit(start, stop, modify=True):
            if weights.param_staging is None and weights.master is None:
                continue  # the parameters are their own master
            written = weights.param if weights.param_staging is None else weights.param_staging
            write_master(written, weights.master, weights.param.float().to(written.device))
