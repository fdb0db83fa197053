"""Passes over the parameters and an average of them, tile by tile, where the average rests.

A pass brings what it needs of each tile as an update does, follows the last writes of what it reads, and is noted in
the homes: the next update of a unit waits for what a pass still reads, and a pass for the update before it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial

from torch import Tensor

from penstock.config import MASTER, PARAM, SHADOW, Tier
from penstock.engine.step.context import EngineContext
from penstock.engine.unit.unit import Unit
from penstock.runtime.streams import DONE, UPDATE, Event, all_of
from penstock.tiers.staging import SIDES, Buffers, plan_ring, worked_on
from penstock.tiers.storage import Ring, RingPlan, SegmentPlan
from penstock.tiers.transfer import StagedTile, TileStreamer
from penstock.trace import Label

#: What is done with some elements: their average, their parameters, and what those lack to the fp32 values.
Work = Callable[[Tensor, Tensor, Tensor | None], None]


class Averaging:
    """Passes over tiles."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._rings = {beside: Ring() for beside in SIDES}
        self._pipelines = {
            beside: TileStreamer(context.streams, ring, beside=beside) for beside, ring in self._rings.items()
        }
        self._planned = {beside: RingPlan() for beside in SIDES}
        self._buffers = Buffers(context.store)

    def make_room(self, kinds: Collection[str]) -> None:
        """Take the buffers that the passes over these averages need, as homes are now, in the place of those before."""
        units = [
            {name: home.plans for name, home in unit.shard_homes.items()}
            for unit in self._context.units
            if unit.trained
        ]
        rings = {}
        for beside in SIDES:
            sections: Iterator[tuple[str, SegmentPlan]] = (
                ("average" if name == kind else name, plan)
                for unit in units
                for kind in kinds
                for name, plan in worked_on(beside, unit, kind, (MASTER, kind, SHADOW, PARAM))
            )
            rings[beside] = plan_ring("average", beside, sections, self._context.streams.reach)
        if rings == self._planned:
            return
        self.drop()
        reserved = self._context.store.reserve([plan for ring in rings.values() for plan in ring.sections()])
        for beside, ring in self._rings.items():
            ring.fill(self._buffers.make_slots(rings[beside], reserved))
            ring.tiles = rings[beside].tiles
        self._planned = rings

    def drop(self) -> None:
        """Give the buffers back, once what passes them is over."""
        for ring in self._rings.values():
            ring.drop()
        self._buffers.free()
        self._planned = {beside: RingPlan() for beside in SIDES}

    def run(self, units: Iterable[Unit], kind: str, work: Work, *, label: str, exchanges: bool = False) -> None:
        """Submit a pass over all tiles of some units.

        Arguments:
            units: trained ones, which have this average.
            kind: the average.
            work: what is done with each tile.
            label: what it is for, in traces.
            exchanges: whether it writes parameters and masters as well as the average.
        """
        for unit in units:
            self._run(unit, kind, work, label, exchanges)

    def _run(self, unit: Unit, kind: str, work: Work, label: str, exchanges: bool) -> None:
        trained = unit.trained
        assert trained is not None
        average = trained.averages[kind]
        weights = [unit.params, trained.master, trained.shadow]
        read, written = ([], [*weights, average]) if exchanges else (weights, [average])
        complete = all_of(home.memory.written for home in read)  # site average.weights_written
        # site average.storage_free
        free = all_of(home.memory.free for home in written)  # of updates, gathers, saves, and of the pass before
        after = all_of([complete, free])  # site average.after_weights, average.after_storage
        events, number = [], 0
        while number < len(trained.tiles):
            section, _ = average.tile(number)
            beside = Tier.DEVICE if section.tier is Tier.DEVICE else Tier.CPU
            homes = {MASTER: trained.master, "average": average}
            homes |= {SHADOW: trained.shadow} if trained.is_shadowed(number) else {PARAM: unit.params}
            count = self._pipelines[beside].stretch(number, homes).tiles
            brought = self._pipelines[beside].bring(
                number,
                homes,
                after=after,
                label=Label(label, unit.name, kind, number),
                written=tuple(homes) if exchanges else ("average",),
                count=count,
            )
            events.append(self._submit(brought, beside, work))
            number += count
        over = all_of(events)  # site average.tiles_over
        for home in read:
            home.note_read(over)  # site average.read: the next update would else write what this still reads
        for home in written:
            home.note_write(over)  # site average.written
        if exchanges and any(trained.is_shadowed(number) for number in range(len(trained.tiles))):
            self._context.movement.copy(trained.shadow, unit.params, Label("publish", unit.name))

    def _submit(self, brought: StagedTile, beside: Tier, work: Work) -> Event:
        """Do the work on a tile once all of it is there, and put back what it wrote."""
        (average,), master = brought.views["average"], brought.views[MASTER]
        (param,) = brought.views[SHADOW] if SHADOW in brought.views else brought.views[PARAM]
        call = partial(work, average, param, master[0] if master else None)
        streams = self._context.streams
        if beside is Tier.DEVICE:
            brought.ready.wait()  # site average.loaded_for_compute: compute works with what is brought on other streams
            streams.compute(call, label=brought.label)
            done: Event = DONE
        else:
            nbytes = sum(tensor.numel() * tensor.element_size() for views in brought.views.values() for tensor in views)
            # site average.loaded
            done = streams.submit(UPDATE, call, after=(brought.ready,), nbytes=nbytes, label=brought.label)
        return brought.put_back(done)
