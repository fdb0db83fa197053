"""A unit's homes, made from their plan and filled from the model's parameters."""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from penstock._native import Pool
from penstock.engine.units.flats import Flat, Read
from penstock.engine.units.gradient import Gradient
from penstock.engine.units.parameter import UnitParameter
from penstock.engine.units.plan import UnitPlan
from penstock.engine.units.unit import Trained, Unit, Weights
from penstock.kinds import GRAD, MASTER, OPTIMIZER, PARAM, SECONDARY, SHADOW
from penstock.layout import FlatLayout
from penstock.machine.streams import Streams
from penstock.rules.master import as_param, write_given
from penstock.tiers.home import Home
from penstock.tiers.store import Reservation


def make_unit(
    plan: UnitPlan,
    index: int,
    parameters: Sequence[UnitParameter],
    rank: int,
    streams: Streams,
    reserved: Reservation,
) -> Unit:
    """Make a unit with its homes, which are empty.

    Arguments:
        plan: where each home is.
        index: the unit's number among all.
        parameters: the unit's own, noted before any of them gave up its memory.
        rank: the number of this process among those that have a shard each.
        streams: where work runs beside compute, on the device that computes.
        reserved: the memory and files that were taken for it.
    """
    spec, layout = plan.spec, plan.layout
    # In the order of the plan, in which they were reserved: a slab hands out its memory one section after the other,
    # and one that is made out of turn would get another one's.
    homes = {name: Home([reserved.make(section) for section in sections]) for name, sections in plan.sections.items()}
    full = None
    if not plan.resident:
        full = streams.make_buffer(layout.numel, spec.dtype)
        # One object for good, and memory while the unit is gathered: views that autograd saves see the next gather.
        streams.retire(full)
    unit = Unit(spec, index, layout, parameters, rank=rank, home=homes[PARAM], replicated=plan.replicated, full=full)
    unit.secondary, unit.stale = homes.get(SECONDARY), SECONDARY in homes  # nothing is in it yet
    if spec.trainable:
        unit.trained = make_trained(plan, homes, rank)
    return unit


def make_trained(plan: UnitPlan, homes: Mapping[str, Home], rank: int) -> Trained:
    """Put together what a unit has beside its parameters where it is trained."""
    return Trained(
        gradient=Gradient(homes[GRAD]),
        master=homes[MASTER],
        optimizer=homes[OPTIMIZER],
        shadow=homes[SHADOW],
        fields=plan.fields,
        tiles=plan.layout.tiles(rank, plan.tile_numel),
    )


def fill_unit(unit: Unit, flats: Sequence[Flat] | None, pool: Pool | None = None) -> None:
    """Put parameters into their home, and this rank's part of them into the master; their own memory goes.

    Nothing is waited for and no event is noted: nobody else knows the homes yet, and whatever is submitted later
    follows compute, which writes here.

    Arguments:
        unit: one whose homes are empty.
        flats: the values of its parameters, in the order of its slots; `None` where nobody has any.
        pool: the threads that write to host memory; `None` for the calling thread alone.
    """
    if flats is not None:
        _write(unit, flats, pool)
    unit.hide()  # their own memory goes here, before the values of the next unit come
    unit.note_versions()  # after the last write here: only writes by others are to be refused


def reads_of(layout: FlatLayout, rank: int, *, replicated: bool) -> list[Read]:
    """List what `fill_unit` reads of a unit's parameters, in order.

    Arguments:
        layout: where each parameter is in the flat buffer.
        rank: the one whose shard this process has.
        replicated: whether it has the others' too.
    """
    return [*(_reads_of_others(layout, rank) if replicated else ()), *_reads_of_own(layout, rank)]


def _reads_of_own(layout: FlatLayout, rank: int) -> Iterator[Read]:
    for index, slot in enumerate(layout.slots):
        if own := layout.overlap(slot, rank):
            yield Read(index, own[0] - slot.start, own[1] - slot.start)


def _reads_of_others(layout: FlatLayout, rank: int) -> Iterator[Read]:
    first, last = layout.shard_range(rank)
    for index, slot in enumerate(layout.slots):
        for start, stop in ((slot.start, min(slot.stop, first)), (max(slot.start, last), slot.stop)):
            if start < stop:
                yield Read(index, start - slot.start, stop - slot.start)


def _write(unit: Unit, flats: Sequence[Flat], pool: Pool | None) -> None:
    """Write the values of a unit's parameters into its homes, which are zeros."""
    if unit.replica is not None:
        for index, start, stop in _reads_of_others(unit.layout, unit.rank):
            first = unit.layout.slots[index].start
            for begin, end, (values,) in unit.replica.visit(first + start, first + stop, modify=True):
                for at, value in flats[index].pieces(begin - first, end - first):
                    _at(values, first + at - begin, value).copy_(as_param(value, values.dtype))
    parts = unit.parts()
    first = unit.own_range[0]
    for begin, end, weights in unit.visit(0, unit.shard_numel, modify=True):
        for index, start, stop in parts:
            start, stop = max(start, begin), min(stop, end)
            if start < stop:
                offset = first - unit.layout.slots[index].start
                for at, value in flats[index].pieces(start + offset, stop + offset):
                    _write_own(unit, weights, at - offset - begin, value, pool)


def _write_own(unit: Unit, weights: Weights, at: int, value: Tensor, pool: Pool | None) -> None:
    """Write values into a range of this rank's shard, from its element `at` on."""
    param = _at(weights.param, at, value)
    if unit.trained is None:
        param.copy_(as_param(value, param.dtype))
        return
    # The update starts from the shadow where there is one, and the gather from the parameter: the same bits.
    written = param if weights.shadow is None else _at(weights.shadow, at, value)
    master = None if weights.master is None else _at(weights.master, at, value)
    write_given(written, master, value, zeroed=True, pool=pool)
    if weights.shadow is not None:
        param.copy_(written)


def _at(home: Tensor, start: int, value: Tensor) -> Tensor:
    return home[start : start + value.numel()]
