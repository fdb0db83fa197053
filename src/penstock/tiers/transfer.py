"""Copies between tiers: how each is made, and the streams that carry it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.config import OPTIMIZER, Tier
from penstock.runtime.host_memory import PAGE_BYTES
from penstock.runtime.streams import (
    DOWNLOAD,
    FETCH,
    READ,
    SAVE,
    UPDATE,
    UPLOAD,
    WRITE,
    Event,
    Streams,
    Work,
    across,
    all_of,
    copy,
)
from penstock.runtime.topology import Reach
from penstock.tiers.storage import (
    PASSING,
    STRETCH_NUMEL,
    RecordLayout,
    Records,
    Ring,
    RingSlot,
    Segment,
    Storage,
    SummedRecord,
    Views,
)
from penstock.trace import Label

# ----------------------------------------------------------------------------------------------------------------------
# Copies of flat values within memory: the device's, the host's, and between the two.
#
# Where the host's memory is pageable a device copies only while the host waits for it. So such values pass pinned
# bounce
# buffers: a thread of the host fills one while the device empties another, or the other way round.
# ----------------------------------------------------------------------------------------------------------------------


#: What is done with the values of a buffer: the number of the first one among all that pass, and the values.
Use = Callable[[int, Tensor], None]


def in_reach(tier: Tier, of: Tier, reach: Reach) -> bool:
    """Whether arithmetic beside one tier reads and writes the other directly."""
    return tier.is_memory and (tier is of or reach.aliases_host)


class CopyRoute(NamedTuple):
    """Where values in memory go.

    Attributes:
        to: the tier.
        crosses: whether they go between the device and the host.
        bounce: the rings of bounce buffers that they pass, by the stream that reads; `None` for a copy.
    """

    to: Tier
    crosses: bool
    bounce: Mapping[str, Ring] | None = None


class CopyRoutes:
    """Copies of flat values within memory.

    Arguments:
        streams: where copies run beside compute.
        landing: host buffers in which values from the device land in their own dtype, where they are cast or added on
            the host: a device that casts would take a temporary, and send what is wider over the bus.
        reader: the stream on which the host reads its own memory, where values pass bounce buffers.
    """

    def __init__(self, streams: Streams, landing: Ring, reader: str) -> None:
        self._streams = streams
        self._landing = landing
        self._reader = reader

    def copy(self, way: CopyRoute, target: Tensor, source: Tensor, after: Event, label: Label) -> Event:
        """Copy values; those that go between the device and the host are cast on the host."""
        up = way.to is Tier.DEVICE
        put = partial(_put, target)
        if way.bounce is not None:
            ring = way.bounce[self._reader]
            # Two streams: the device fills or empties one buffer while a thread of the host is at another.
            fill, drain = (self._reader, UPLOAD) if up else (DOWNLOAD, WRITE)
            dtype = (target if up else source).dtype
            return self.through(ring, source, put, after, label, fill=fill, drain=drain, dtype=dtype, over=target)
        crosses = way.crosses and not self._streams.aliases_host
        # Cast where it lands: a device would need memory for the cast, and may send more bytes.
        if crosses and not up and target.dtype != source.dtype:
            return self.land(source, put, after, label, over=target)
        return self._streams.submit(
            UPLOAD if up else DOWNLOAD,
            across(target, source) if crosses else partial(copy, target, source),
            after=(after,),  # site copy.source_ready: the source is complete, and nobody reads the target any more
            writes=(target,),
            nbytes=source.numel() * source.element_size(),
            label=label,
        )

    def land(self, source: Tensor, use: Use, after: Event, label: Label, over: Tensor | None = None) -> Event:
        """Bring values of the device down as they are, and use them on the host: the first ones first."""
        return self.through(
            self._landing, source, use, after, label, fill=DOWNLOAD, drain=UPDATE, dtype=source.dtype, over=over
        )

    def through(
        self,
        ring: Ring,
        source: Tensor,
        use: Use,
        after: Event,
        label: Label,
        *,
        fill: str,
        drain: str,
        dtype: torch.dtype,
        over: Tensor | None,
    ) -> Event:
        """Pass flat values through the buffers of a ring: one is filled while the one before it is used.

            fill     | 0 | 1 | 2 |
            drain        | 0 | 1 | 2 |

        Arguments:
            ring: one whose slots have one buffer each.
            source: the values.
            use: what is done with those of a buffer.
            after: the event after which the source is complete, and what `use` writes may be overwritten.
            label: what it is for, in traces.
            fill: the stream that copies to the buffers.
            drain: the stream on which they are used.
            dtype: what the values in the buffers have.
            over: what `use` overwrites as a whole; `None` where it adds.
        """
        drained: list[Event] = []
        start = 0
        # Autograd's thread takes slots as well: one that came round to a slot before its new event is noted would not
        # wait for this use of it.
        with ring.lock:
            while start < source.numel():
                slot = ring.take()
                buffer = slot.near[PASSING]
                here = source[start : start + buffer.numel() // dtype.itemsize]
                nbytes = here.numel() * dtype.itemsize
                held = buffer[:nbytes].view(dtype)
                # Not before the values that the slot had last were used: they would be overwritten in the buffer.
                filled = self._streams.submit(
                    fill,
                    partial(copy, held, here),
                    after=(after, slot.free),  # site staged_copy.source_ready, staged_copy.slot_free
                    writes=(held,),
                    nbytes=nbytes,
                    label=label,
                )
                overwritten = () if over is None else (over[start : start + here.numel()],)
                slot.free = self._streams.submit(
                    drain,
                    partial(use, start, held),
                    # site staged_copy.filled
                    after=(filled,),  # on another stream: it would use what the buffer held before
                    writes=overwritten,
                    nbytes=nbytes,
                    label=label,
                )
                drained.append(slot.free)
                start += here.numel()
        return all_of(drained)  # site staged_copy.over: any of them may fail, and whoever waits is to hear of it


def _put(target: Tensor, start: int, values: Tensor) -> None:
    """Copy the values of a buffer to their place."""
    copy(target[start : start + values.numel()], values)


# ----------------------------------------------------------------------------------------------------------------------
# Movement: values on their way between any two tiers, as whole homes (`Transfers`) or tile by tile (`TileStreamer`).
#
#     memory to memory     a copy, on the stream of its direction; where the host's memory is pageable, through pinned
#                          bounce buffers
#     from and to records  loads into a buffer of a ring, stores from one
#
# Everything is submitted ahead and follows the events of the homes that it reads and writes. What bounds how far it
# runs are the slots of rings: one is used again once the work that used it last is over, so no buffer is ever larger
# than a tile, or than the range of tiles that a device takes at once. Until then a read of the record that the slot
# still holds takes it from there instead of loading it.
# ----------------------------------------------------------------------------------------------------------------------


#: Puts values back after an event, and says when they are there.
Back = Callable[[Event], Event]


class Transfers:
    """Copies homes as a whole, through memory where one of them is records.

    A copy follows the last write of what it reads, and the last write and the reads of what it overwrites: the homes
    know them. They know of the copy from then on.

    Arguments:
        streams: where copies run beside compute.
        ring: host buffers of one record, into which records are loaded and from which they are stored.
        landing: host buffers of a tile, for values that are cast or added on the host; none where no home needs one.
    """

    def __init__(self, streams: Streams, ring: Ring, landing: Ring | None = None) -> None:
        self._streams = streams
        self._ring = ring
        self._copies = CopyRoutes(streams, landing or Ring(), READ)

    def copy(self, source: Storage, target: Storage, label: Label) -> Event:
        """Copy all values of a home to another one of the same extent, kinds and tiles.

        What one of them does not keep, and what they share, stays as it is. Returns the event after which the source is
        free, and the memory of the target holds the values.
        """
        # Not before the source is complete, nor while anybody still writes the target or reads what is in it.
        # site transfer.source_written, transfer.target_free
        after = all_of([source.memory.written, target.memory.free])
        copied: list[Event] = []
        for here, there in product(source.sections, target.sections):
            start, stop = max(here.plan.start, there.plan.start), min(here.plan.stop, there.plan.stop)
            if start >= stop or here is there or not here.plan.cells or not there.plan.cells:
                continue
            if isinstance(here, Records):
                copied += self._load(here, there, _range_of(here, start, stop), after, label)
            elif isinstance(there, Records):
                copied += self._store(here, there, _range_of(there, start, stop), after, label)
            else:
                crosses = here.tier is not there.tier
                bounce = (here.bounce or there.bounce) if crosses else None
                way = CopyRoute(there.tier, crosses, None if bounce is None else bounce())
                copied += self._copy_all(way, _at(there, start, stop), _at(here, start, stop), after, label)
        # What was copied came after it. Named beside that it would keep the events of all copies of a run: a target
        # that nothing but copies writes would wait for each of them.
        event = all_of(copied) if copied else after  # site transfer.over
        # Both hear of it: else an update would write the source under the copy, or a gather read the target before it.
        source.note_read(event)  # site transfer.source_read
        target.note_write(event)  # site transfer.target_written
        return event

    def land(self, source: Tensor, use: Use, *, after: Event, label: Label) -> Event:
        """Bring flat values of the device down, tile by tile and in order, and use them on the host."""
        return self._copies.land(source, use, after, label)

    def _load(self, here: Records, there: Segment, tiles: range, after: Event, label: Label) -> list[Event]:
        """Bring records to memory."""
        way = CopyRoute(there.tier, there.tier is Tier.DEVICE)
        copied = []
        for number in tiles:
            first, last = (element + here.plan.start for element in here.tile_range(number))
            kept = here.kept.get(number)
            slot = kept.slot if kept is not None else self._ring.take()
            if kept is not None:
                buffer, ready = kept.buffer, kept.ready
            else:
                slot.forget()  # before it is filled anew: whoever looked for the old record would be given this one
                buffer = slot.near[PASSING]
                # The record may still be on its way to where it rests, and the slot in use for another one.
                ready = self._streams.submit(
                    READ,
                    partial(here.load, number, buffer),
                    # site load.target_free, load.stored, load.slot_free
                    after=(after, here.last_stores[number], slot.free),
                    writes=(buffer,),
                    nbytes=here.record_bytes(number),
                    label=label.of_tile(number),
                )
                slot.free = ready
                slot.keep(here, number, buffer, ready)
            values = here.views_of(number, buffer)
            # site load.arrived, load.copy_target_free, load.copy_read
            arrived = all_of(self._copy_all(way, _at(there, first, last), values, all_of([after, ready]), label))
            slot.add_use(arrived)  # filled anew before, the buffer would give these copies another tile
            copied.append(arrived)
        return copied

    def _store(self, here: Segment, there: Records, tiles: range, after: Event, label: Label) -> list[Event]:
        """Put values in memory into records."""
        way = CopyRoute(Tier.CPU, here.tier is Tier.DEVICE)
        taken = []
        for number in tiles:
            slot = self._ring.take()
            slot.forget()
            buffer = slot.near[PASSING]
            first, last = (element + there.plan.start for element in there.tile_range(number))
            # The slot may still be read by the store of the tile that it had last.
            # site store.source_ready, store.slot_free
            values, free = there.views_of(number, buffer), all_of([after, slot.free])
            landed = all_of(self._copy_all(way, values, _at(here, first, last), free, label))  # site store.landed
            # Two stores of one record may overtake each other on the disk.
            slot.free = there.last_stores[number] = self._streams.submit(
                WRITE,
                partial(there.store, number, buffer),
                # site store.write_landed, store.write_in_order
                after=(landed, there.last_stores[number]),  # before `landed` the buffer holds another tile
                nbytes=there.record_bytes(number),
                label=label.of_tile(number),
            )
            slot.keep(there, number, buffer, landed)
            taken.append(landed)  # the source is free then: the store reads the buffer alone
        return taken

    def _copy_all(
        self, way: CopyRoute, targets: Sequence[Tensor], sources: Sequence[Tensor], after: Event, label: Label
    ) -> list[Event]:
        """Copy the values of each kind."""
        return [self._copies.copy(way, t, s, after, label) for t, s in zip(targets, sources, strict=True)]


@dataclass
class StagedTile:
    """A tile, or a stretch, that is brought to where it is used, and put back.

    Attributes:
        after: the event after which what is in the homes' memory is complete, and may be overwritten.
        slot: the buffers that it passes; `None` where all of it is used where it rests.
        label: what it is for, in traces.
        views: its values, by home, once `ready`.
        arrivals: the events of what has to be brought.
        to_memory: what puts values back to memory.
        to_records: what stores values in records.
        summed: the records that the use has to sum, and to check, before anything is stored.
    """

    after: Event
    slot: RingSlot | None
    label: Label
    views: dict[str, Views] = field(default_factory=dict)
    arrivals: list[Event] = field(default_factory=list)
    to_memory: list[Back] = field(default_factory=list)
    to_records: list[Back] = field(default_factory=list)
    summed: list[SummedRecord] = field(default_factory=list)

    @property
    def ready(self) -> Event:
        """Everything of it is there."""
        return all_of([self.after, *self.arrivals])  # site tile.complete, tile.arrived

    def put_back(self, used: Event) -> Event:
        """Put what was written where it rests, after its use.

        Returns the event after which it is in the homes that are memory; records know of theirs.
        """
        # The way back follows the use: else it would take values that the use has not written yet.
        home_again = all_of([used, *(back(used) for back in self.to_memory)])  # site tile.used, tile.copied_back
        if self.slot is not None:
            # The next tile of the slot overwrites what copies and stores still take from its buffers.
            # site tile.slot_copied_from, tile.slot_stored_from
            self.slot.free = all_of([home_again, *(back(used) for back in self.to_records)])
        return home_again


class TileRange(NamedTuple):
    """Neighbouring tiles, each home's in one piece.

    Attributes:
        tiles: how many tiles it has.
        in_place: whether nothing of them has to be brought.
    """

    tiles: int
    in_place: bool


class TileStreamer:
    """Brings tiles to where they are updated, and puts them back: one is used while others come and go.

        FETCH    | 0 | 1 | 2 | ...
        UPDATE       | 0 | 1 | 2 | ...
        WRITE            | 0 | 1 | ...

    Arguments:
        streams: where copies run beside compute.
        ring: slots with a buffer for each home that may be out of reach.
        beside: the tier whose memory the update works in.
    """

    def __init__(self, streams: Streams, ring: Ring, *, beside: Tier) -> None:
        self._streams = streams
        self._ring = ring
        self._beside = beside
        self._reached = {tier for tier in Tier if in_reach(tier, beside, streams.reach)}
        self._copies = CopyRoutes(streams, Ring(), FETCH)

    def stretch(self, number: int, homes: Mapping[str, Storage]) -> TileRange:
        """Find out how many tiles from this one on are brought, or used where they rest, at once."""
        counts, in_place = [], True
        for home in homes.values():
            section, local = home.tile(number)
            counts.append(section.tiles - local)
            if not self._reaches(section):
                if isinstance(section, Records):
                    return TileRange(1, in_place=False)  # a record holds one tile
                in_place = False
        if not in_place:
            counts.append(self._ring.tiles)
        elif self._beside is not Tier.DEVICE:
            # The threads of the host divide it among themselves: no more is won, and a wait for its end takes longer.
            counts.append(max(1, STRETCH_NUMEL // section.tile_numel))
        return TileRange(min(counts), in_place)

    def bring(
        self,
        number: int,
        homes: Mapping[str, Storage],
        *,
        after: Event,
        label: Label,
        written: Sequence[str] = (),
        count: int = 1,
        sums: bool = False,
    ) -> StagedTile:
        """Make a tile's values available where the update runs.

        Arguments:
            number: the tile's number in the shard.
            homes: the homes that it has values in, by name.
            after: the event after which what is in the homes' memory is complete, and may be overwritten.
            label: what it is for, in traces.
            written: names of the homes that the use writes, and that have to be put back.
            count: how many tiles are brought at once: no more than `stretch` says.
            sums: whether the use sums the records that it is told to.
        """
        places = {name: home.tile(number) for name, home in homes.items()}
        tile = StagedTile(after, None, label)
        for name, (section, local) in places.items():
            if self._reaches(section):
                tile.views[name] = section.views(*section.tile_range(local, count))
                continue
            tile.slot = tile.slot or self._slot_for(places)
            if isinstance(section, Records):
                assert count == 1, "a record is one tile"
                self._bring_record(tile, name, section, local, back=name in written, sums=sums)
            else:
                extent = section.tile_range(local, count)
                self._bring_memory(tile, name, section, extent, back=name in written)
        return tile

    def _slot_for(self, places: Mapping[str, tuple[Segment, int]]) -> RingSlot:
        """Take the next slot, or the one that still holds the tile's optimizer state."""
        section, number = places.get(OPTIMIZER, (None, 0))
        kept = section.kept.get(number) if isinstance(section, Records) else None
        slot = self._ring.take(kept.slot if kept else None)
        if kept is None or kept.slot is not slot:
            slot.forget()  # its records would be taken from buffers that this tile fills
        return slot

    def _reaches(self, section: Segment) -> bool:
        return section.tier in self._reached or not section.plan.cells

    def _bring_memory(
        self, tile: StagedTile, name: str, section: Segment, extent: tuple[int, int], *, back: bool
    ) -> None:
        """Copy values between host and device memory, each way."""
        assert tile.slot is not None
        bounce = None if section.bounce is None else section.bounce()
        there, back_again = CopyRoute(self._beside, True, bounce), CopyRoute(section.tier, True, bounce)
        sources = section.views(*extent)
        tile.views[name] = _views_like(sources, tile.slot.near[name])
        # site tile.copy_complete, tile.copy_slot_free
        free = all_of([tile.after, tile.slot.free])  # the tile that the slot had last may still be on its way back
        for source, target in zip(sources, tile.views[name], strict=True):
            tile.arrivals.append(self._copies.copy(there, target, source, free, tile.label))
            if back:
                tile.to_memory.append(partial(self._copies.copy, back_again, source, target, label=tile.label))

    def _bring_record(
        self, tile: StagedTile, name: str, section: Records, number: int, *, back: bool, sums: bool
    ) -> None:
        """Load a record, by way of the host where the tile is used on a device."""
        slot = tile.slot
        assert slot is not None
        nbytes, kept = section.record_bytes(number), section.kept.get(number)
        near, host = slot.near[name][:nbytes], slot.host[name][:nbytes]
        passes = slot.near[name] is not slot.host[name]
        up, down = CopyRoute(self._beside, True), CopyRoute(Tier.CPU, True)
        load: Work = partial(section.load, number, host)
        put: Work = partial(section.store, number, host)
        # What a buffer still holds was checked, or made by an update: without a way back nobody needs its checksum.
        if sums and (back or kept is None) and (summed := section.summed(number, host)) is not None:
            assert not passes, "an update sums what it works on"
            tile.summed.append(summed)
            load, put = summed.load, summed.store
        if kept is not None and kept.slot is slot:
            event = slot.free  # the record is here: complete once its last use is over
        else:
            event = self._fetch(section, number, host, tile, load)
            if passes:
                event = self._copies.copy(up, near, host, event, tile.label)
        tile.arrivals.append(event)
        tile.views[name] = section.views_of(number, near)

        def store(used: Event) -> Event:
            landed = self._copies.copy(down, host, near, used, tile.label) if passes else used
            slot.keep(section, number, host, landed)  # who wants the record next need not wait for the file
            # site tile.store_landed
            written = self._streams.submit(WRITE, put, after=(landed,), nbytes=nbytes, label=tile.label)
            section.last_stores[number] = written  # a load from the file before would bring the old values
            return written

        if back:
            tile.to_records.append(store)

    def _fetch(self, section: Records, number: int, buffer: Tensor, tile: StagedTile, load: Work) -> Event:
        """Bring a record to a buffer: from the slot that still holds it, or from where it rests."""
        assert tile.slot is not None
        kept = section.kept.get(number)
        if kept is None:
            # The record may still be on its way to where it rests, and the slot in use for another one.
            return self._streams.submit(
                FETCH,
                load,
                # site tile.load_complete, tile.load_stored, tile.load_slot_free
                after=(tile.after, section.last_stores[number], tile.slot.free),
                writes=(buffer,),
                nbytes=buffer.numel(),
                label=tile.label,
            )
        # Once it is there, and nobody needs what this slot had last.
        event = self._streams.submit(
            FETCH,
            partial(copy, buffer, kept.buffer[: buffer.numel()]),
            # site tile.reuse_complete, tile.reuse_ready, tile.reuse_slot_free
            after=(tile.after, kept.ready, tile.slot.free),
            writes=(buffer,),
            nbytes=buffer.numel(),
            label=tile.label,
        )
        kept.slot.add_use(event)  # that slot's next tile would be copied in place of this record
        return event


def take_tile(section: Segment, number: int, buffer: Tensor, streams: Streams, label: Label) -> None:
    """Copy a tile to a page-aligned buffer, as the record that it is or would be; returns when it is there."""
    if isinstance(section, Records):
        loading = section.load(number, buffer)
        if loading is not None:
            loading.wait()  # site checkpoint.record_loaded
        return
    start, stop = section.tile_range(number)
    buffer[-PAGE_BYTES:].zero_()  # what no kind fills
    for target, values in zip(
        RecordLayout(section.plan.cells).views(buffer, stop - start), section.views(start, stop), strict=True
    ):
        nbytes = target.numel() * target.element_size()
        # On the host, at once: the caller writes the buffer to a file next.
        streams.submit(SAVE, across(target, values), writes=(target,), nbytes=nbytes, label=label).synchronize()


def _range_of(section: Segment, start: int, stop: int) -> range:
    """Number a section's tiles in a range of its home."""
    first, last = start - section.plan.start, stop - section.plan.start
    return range(first // section.tile_numel, -(-last // section.tile_numel))


def _at(section: Segment, start: int, stop: int) -> Views:
    """View the values of a range of a section's home."""
    return section.views(start - section.plan.start, stop - section.plan.start)


def _views_like(sources: Views, buffer: Tensor) -> Views:
    """View a buffer of bytes as tensors of the shapes and dtypes of `sources`, one after the other."""
    views, offset = [], 0
    for source in sources:
        nbytes = source.numel() * source.element_size()
        views.append(buffer[offset : offset + nbytes].view(source.dtype))
        offset += nbytes
    return tuple(views)
