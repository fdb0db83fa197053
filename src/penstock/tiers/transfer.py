"""Copies between tiers: the route of each, and the streams that it runs on."""

from collections.abc import Callable, Iterable, Mapping, Sequence
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
# A device copies from or to pageable host memory only while the host waits. So values in pageable memory pass pinned
# bounce buffers: a thread of the host fills one while the device empties another, or the other way round.
# ----------------------------------------------------------------------------------------------------------------------


#: Uses the values in a buffer. Arguments: the index of the first one among all values that pass, and the values.
Use = Callable[[int, Tensor], None]


def in_reach(tier: Tier, of: Tier, reach: Reach) -> bool:
    """Return True if arithmetic beside the tier `of` reads and writes `tier` directly."""
    return tier.is_memory and (tier is of or reach.aliases_host)


class CopyRoute(NamedTuple):
    """Route of a copy within memory.

    Attributes:
        to: the tier of the target.
        crosses: True if source and target are on the device and the host, or the reverse.
        bounce: the rings of bounce buffers that the values pass, by the stream that reads; `None` for a direct copy.
    """

    to: Tier
    crosses: bool
    bounce: Mapping[str, Ring] | None = None


class CopyRoutes:
    """Submits copies of flat values within memory.

    Arguments:
        streams: the streams that copies run on.
        landing: host buffers in which values from the device land in their own dtype, where they are cast or added on
            the host: a device that casts would take a temporary, and send what is wider over the bus.
        reader: the stream on which the host reads its own memory, where values pass bounce buffers.
    """

    def __init__(self, streams: Streams, landing: Ring, reader: str) -> None:
        self._streams = streams
        self._landing = landing
        self._reader = reader

    def copy(
        self, route: CopyRoute, targets: Sequence[Tensor], sources: Sequence[Tensor], after: Event, label: Label
    ) -> Event:
        """Submit copies of one route: one piece of work, since each costs the host as much as a kernel's launch.

        Values that are cast, or pass bounce buffers, take a way of their own. Values that cross between the device and
        the host are cast on the host.
        """
        up, crosses = route.to is Tier.DEVICE, route.crosses and not self._streams.aliases_host
        together: list[Work] = []
        written, nbytes = list[Tensor](), 0
        copied: list[Event] = []
        for target, source in zip(targets, sources, strict=True):
            if route.bounce is not None:
                ring = route.bounce[self._reader]
                # Two streams: the device fills or empties one buffer while a thread of the host is at another.
                fill, drain = (self._reader, UPLOAD) if up else (DOWNLOAD, WRITE)
                dtype = (target if up else source).dtype
                put = partial(_put, target)
                copied.append(
                    self.through(ring, source, put, after, label, fill=fill, drain=drain, dtype=dtype, over=target)
                )
            elif crosses and not up and target.dtype != source.dtype:
                # Cast where it lands: a device would need memory for the cast, and may send more bytes.
                copied.append(self.land(source, partial(_put, target), after, label, over=target))
            else:
                together.append(across(target, source) if crosses else partial(copy, target, source))
                written.append(target)
                nbytes += source.nbytes
        if together:
            event = self._streams.submit(
                UPLOAD if up else DOWNLOAD,
                partial(_run_each, together),
                after=(after,),  # site copy.source_ready: the sources are complete, and reads of the targets are over
                writes=written,
                nbytes=nbytes,
                label=label,
            )
            copied.append(event)
        return all_of(copied)  # site copy.over: all, because each of them may fail

    def land(self, source: Tensor, use: Use, after: Event, label: Label, over: Tensor | None = None) -> Event:
        """Copy values from the device in their own dtype, and use them on the host, in order."""
        return self.through(
            self._landing, source, use, after, label, fill=DOWNLOAD, drain=UPDATE, dtype=source.dtype, over=over
        )

    def through(  # noqa: PLR0913 (the two ways through a ring differ in them)
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
        """Pass flat values through the buffers of a ring. One buffer is filled while the one before it is used.

            fill     | 0 | 1 | 2 |
            drain        | 0 | 1 | 2 |

        Arguments:
            ring: one whose slots have one buffer each.
            source: the values.
            use: uses the values of a buffer.
            after: the event after which the source is complete, and what `use` writes may be overwritten.
            label: the purpose of the work, in traces.
            fill: the stream that copies to the buffers.
            drain: the stream that `use` runs on.
            dtype: the dtype of the values in the buffers.
            over: the tensor that `use` overwrites as a whole; `None` where it adds.
        """
        drained: list[Event] = []
        start = 0
        # Autograd's thread takes slots too. If it took a slot before the event of this use is recorded, it would not
        # wait for this use.
        with ring.lock:
            while start < source.numel():
                slot = ring.take()
                buffer = slot.near[PASSING]
                here = source[start : start + buffer.numel() // dtype.itemsize]
                nbytes = here.numel() * dtype.itemsize
                held = buffer[:nbytes].view(dtype)
                # The values that the slot held before are used until `slot.free` (ordering rule 3).
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
                    after=(filled,),  # another stream does not follow the copy by itself (ordering rule 2)
                    writes=overwritten,
                    nbytes=nbytes,
                    label=label,
                )
                drained.append(slot.free)
                start += here.numel()
        return all_of(drained)  # site staged_copy.over: all, because each of them may fail


def _run_each(works: Sequence[Work]) -> None:
    """Run several pieces of work as one."""
    for work in works:
        work()


def _put(target: Tensor, start: int, values: Tensor) -> None:
    """Copy the values of a buffer to their range of the target."""
    copy(target[start : start + values.numel()], values)


# ----------------------------------------------------------------------------------------------------------------------
# Transfers between any two tiers: of whole storages (`Transfers`), or tile by tile (`TileStreamer`).
#
#     memory to memory     a copy, on the stream of its direction; where the host's memory is pageable, through pinned
#                          bounce buffers
#     from and to records  loads into a buffer of a ring, stores from one
#
# All work is submitted ahead, and follows the events of the storages that it reads and writes. The slots of rings bound
# how far it runs ahead: a slot is used again once its last use is over. So no buffer is larger than a tile, or than a
# tile range. Until a slot is used again, a read of the record that it holds needs no load.
# ----------------------------------------------------------------------------------------------------------------------


#: Writes values back after an event. Returns the event after which they are written.
Back = Callable[[Event], Event]


class Transfers:
    """Copies whole storages, through a ring of buffers where one of them is records.

    A copy follows the last write of its source, and the last write and the reads of its target. It is recorded in both
    storages.

    Arguments:
        streams: the streams that copies run on.
        ring: host buffers of one record each, into which records are loaded and from which they are stored.
        landing: host buffers of a tile, for values that are cast or added on the host; none where no storage needs one.
    """

    def __init__(self, streams: Streams, ring: Ring, landing: Ring | None = None) -> None:
        self._streams = streams
        self._ring = ring
        self._copies = CopyRoutes(streams, landing or Ring(), READ)

    def copy(self, source: Storage, target: Storage, label: Label) -> Event:
        """Copy all values of a storage to another one of the same extent, kinds and tiles.

        Segments that both share, and elements that one of them does not keep, are left out. Returns the event after
        which the source may be written again, and the memory of the target holds the values.
        """
        # The copy reads the source and writes the target (ordering rule 3).
        # site transfer.source_written, transfer.target_free
        after = all_of([source.memory.written, target.memory.free])
        copied: list[Event] = []
        for here, there in product(source.segments, target.segments):
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
                route = CopyRoute(there.tier, crosses, None if bounce is None else bounce())
                copied.append(self._copies.copy(route, _at(there, start, stop), _at(here, start, stop), after, label))
        # The copies follow `after`. An event of both would keep the events of all earlier copies, where only copies
        # write the target.
        event = all_of(copied) if copied else after  # site transfer.over
        # The next write of the source and the next read of the target follow the copy (ordering rule 3).
        source.note_read(event)  # site transfer.source_read
        target.note_write(event)  # site transfer.target_written
        return event

    def land(self, source: Tensor, use: Use, *, after: Event, label: Label) -> Event:
        """Copy flat values from the device tile by tile, and use them on the host, in order."""
        return self._copies.land(source, use, after, label)

    def _load(self, here: Records, there: Segment, tiles: range, after: Event, label: Label) -> list[Event]:
        """Load records and copy them to memory."""
        route = CopyRoute(there.tier, there.tier is Tier.DEVICE)
        copied = []
        for number in tiles:
            first, last = (element + here.plan.start for element in here.tile_range(number))
            kept = here.kept.get(number)
            slot = kept.slot if kept is not None else self._ring.take()
            if kept is not None:
                buffer, ready = kept.buffer, kept.ready
            else:
                slot.forget()  # before it is filled again: a read of its old record would get this one
                buffer = slot.near[PASSING]
                # The record's last store and the last use of the slot may be under way (ordering rule 3).
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
            values, target = here.views_of(number, buffer), _at(there, first, last)
            # site load.copy_target_free, load.copy_read
            arrived = self._copies.copy(route, target, values, all_of([after, ready]), label)
            slot.add_use(arrived)  # filled before that, the buffer would give these copies another tile
            copied.append(arrived)
        return copied

    def _store(self, here: Segment, there: Records, tiles: range, after: Event, label: Label) -> list[Event]:
        """Copy values in memory to records, and store these."""
        route = CopyRoute(Tier.CPU, here.tier is Tier.DEVICE)
        taken = []
        for number in tiles:
            slot = self._ring.take()
            slot.forget()
            buffer = slot.near[PASSING]
            first, last = (element + there.plan.start for element in there.tile_range(number))
            # The store of the tile that the slot held before may still read it (ordering rule 3).
            # site store.source_ready, store.slot_free
            values, free = there.views_of(number, buffer), all_of([after, slot.free])
            landed = self._copies.copy(route, values, _at(here, first, last), free, label)
            # Stores of one record follow each other: a disk may finish the later one first (ordering rule 3).
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


@dataclass
class StagedTile:
    """A tile or tile range that is copied to where it is used, and written back.

    Attributes:
        after: the event after which the storages' memory is complete, and may be overwritten.
        slot: the buffers that it passes; `None` where it is used in place.
        label: its purpose, in traces.
        views: its values, by storage, complete after `ready`.
        arrivals: the events of its copies and loads.
        to_memory: write values back to memory.
        to_records: store values in records.
        summed: the records whose checksums the use computes and verifies before they are stored.
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
        """The event after which all its values are complete."""
        return all_of([self.after, *self.arrivals])  # site tile.complete, tile.arrived

    def put_back(self, used: Event) -> Event:
        """Write values back after the use.

        Returns the event after which they are in those storages that are memory. Records keep their own events.
        """
        # The copies back read what the use writes (ordering rule 3).
        home_again = all_of([used, *(back(used) for back in self.to_memory)])  # site tile.used, tile.copied_back
        if self.slot is not None:
            # The next tile of the slot overwrites the buffers that copies and stores read (ordering rule 3).
            # site tile.slot_copied_from, tile.slot_stored_from
            self.slot.free = all_of([home_again, *(back(used) for back in self.to_records)])
        return home_again


class _InMemory(NamedTuple):
    """Values of a tile in memory out of reach: their segment, where they rest and where they are used."""

    segment: Segment
    home: Views
    near: Views
    back: bool


def _pairs(places: Iterable[_InMemory]) -> tuple[list[Tensor], list[Tensor]]:
    """List the values where they are used, and where they rest."""
    found = list(places)
    return [view for each in found for view in each.near], [view for each in found for view in each.home]


class TileRange(NamedTuple):
    """Neighbouring tiles, contiguous in each storage.

    Attributes:
        tiles: the number of tiles.
        in_place: True if all of them are used in place.
    """

    tiles: int
    in_place: bool


class TileStreamer:
    """Copies tiles to where they are updated, and writes them back. One tile is used while others are moved.

        FETCH    | 0 | 1 | 2 | ...
        UPDATE       | 0 | 1 | 2 | ...
        WRITE            | 0 | 1 | ...

    Arguments:
        streams: the streams that copies run on.
        ring: slots with a buffer for each storage that may be out of reach.
        beside: the tier whose memory the update works in.
    """

    def __init__(self, streams: Streams, ring: Ring, *, beside: Tier) -> None:
        self._streams = streams
        self._ring = ring
        self._beside = beside
        self._reached = {tier for tier in Tier if in_reach(tier, beside, streams.reach)}
        self._copies = CopyRoutes(streams, Ring(), FETCH)

    def range_at(self, number: int, storages: Mapping[str, Storage]) -> TileRange:
        """Return how many tiles from this one on are moved, or used in place, at once."""
        counts, in_place = [], True
        for storage in storages.values():
            segment, local = storage.tile(number)
            counts.append(segment.tiles - local)
            if not self._reaches(segment):
                if isinstance(segment, Records):
                    return TileRange(1, in_place=False)  # a record holds one tile
                in_place = False
        if not in_place:
            counts.append(self._ring.tiles)
        elif self._beside is not Tier.DEVICE:
            # The threads of the host divide it among themselves: no more is won, and a wait for its end takes longer.
            counts.append(max(1, STRETCH_NUMEL // segment.tile_numel))
        return TileRange(min(counts), in_place)

    def bring(
        self,
        number: int,
        storages: Mapping[str, Storage],
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
            storages: the storages of its values, by name.
            after: the event after which the storages' memory is complete, and may be overwritten.
            label: its purpose, in traces.
            written: names of the storages that the use writes, and that are written back.
            count: the number of tiles, at most what `range_at` returns.
            sums: True if the use computes the checksums of `StagedTile.summed`.
        """
        places = {name: storage.tile(number) for name, storage in storages.items()}
        tile = StagedTile(after, None, label)
        in_memory: list[_InMemory] = []
        for name, (segment, local) in places.items():
            if self._reaches(segment):
                tile.views[name] = segment.views(*segment.tile_range(local, count))
                continue
            tile.slot = tile.slot or self._slot_for(places)
            if isinstance(segment, Records):
                assert count == 1, "a record is one tile"
                self._bring_record(tile, name, segment, local, back=name in written, sums=sums)
            else:
                values = segment.views(*segment.tile_range(local, count))
                tile.views[name] = _views_like(values, tile.slot.near[name])
                in_memory.append(_InMemory(segment, values, tile.views[name], name in written))
        self._bring_memory(tile, in_memory)
        return tile

    def _slot_for(self, places: Mapping[str, tuple[Segment, int]]) -> RingSlot:
        """Take the next slot, or the one that still holds the tile's optimizer state."""
        segment, number = places.get(OPTIMIZER, (None, 0))
        kept = segment.kept.get(number) if isinstance(segment, Records) else None
        slot = self._ring.take(kept.slot if kept else None)
        if kept is None or kept.slot is not slot:
            slot.forget()  # its records would be taken from buffers that this tile fills
        return slot

    def _reaches(self, segment: Segment) -> bool:
        return segment.tier in self._reached or not segment.plan.cells

    def _bring_memory(self, tile: StagedTile, places: Sequence[_InMemory]) -> None:
        """Copy values between host and device memory, and back after the use if asked for."""
        for bounces in (False, True):
            some = [each for each in places if (each.segment.bounce is not None) is bounces]
            if not some:
                continue
            assert tile.slot is not None
            segment = some[0].segment  # all of them lie on one tier, and share the bounce buffers
            bounce = None if segment.bounce is None else segment.bounce()
            # site tile.copy_complete, tile.copy_slot_free
            free = all_of([tile.after, tile.slot.free])  # the slot's last tile may still be copied back
            near, home = _pairs(some)
            tile.arrivals.append(self._copies.copy(CopyRoute(self._beside, True, bounce), near, home, free, tile.label))
            near, home = _pairs(each for each in some if each.back)
            if home:
                route = CopyRoute(segment.tier, True, bounce)
                tile.to_memory.append(partial(self._copies.copy, route, home, near, label=tile.label))

    def _bring_record(
        self, tile: StagedTile, name: str, segment: Records, number: int, *, back: bool, sums: bool
    ) -> None:
        """Load a record, through a buffer on the host where the tile is used on a device."""
        slot = tile.slot
        assert slot is not None
        nbytes, kept = segment.record_bytes(number), segment.kept.get(number)
        near, host = slot.near[name][:nbytes], slot.host[name][:nbytes]
        passes = slot.near[name] is not slot.host[name]
        up, down = CopyRoute(self._beside, True), CopyRoute(Tier.CPU, True)
        load: Work = partial(segment.load, number, host)
        put: Work = partial(segment.store, number, host)
        # A record in a buffer was checked, or made by an update: if it is not written back, no checksum is needed.
        if sums and (back or kept is None) and (summed := segment.summed(number, host)) is not None:
            assert not passes, "an update sums what it works on"
            tile.summed.append(summed)
            load, put = summed.load, summed.store
        if kept is not None and kept.slot is slot:
            event = slot.free  # the record is here: complete once its last use is over
        else:
            event = self._fetch(segment, number, host, tile, load)
            if passes:
                event = self._copies.copy(up, (near,), (host,), event, tile.label)
        tile.arrivals.append(event)
        tile.views[name] = segment.views_of(number, near)

        def store(used: Event) -> Event:
            landed = self._copies.copy(down, (host,), (near,), used, tile.label) if passes else used
            slot.keep(segment, number, host, landed)  # who wants the record next need not wait for the file
            # site tile.store_landed
            written = self._streams.submit(WRITE, put, after=(landed,), nbytes=nbytes, label=tile.label)
            segment.last_stores[number] = written  # the next load follows it (ordering rule 3)
            return written

        if back:
            tile.to_records.append(store)

    def _fetch(self, segment: Records, number: int, buffer: Tensor, tile: StagedTile, load: Work) -> Event:
        """Copy a record to a buffer from the slot that still holds it, or load it."""
        assert tile.slot is not None
        kept = segment.kept.get(number)
        if kept is None:
            # The record's last store and the last use of the slot may be under way (ordering rule 3).
            return self._streams.submit(
                FETCH,
                load,
                # site tile.load_complete, tile.load_stored, tile.load_slot_free
                after=(tile.after, segment.last_stores[number], tile.slot.free),
                writes=(buffer,),
                nbytes=buffer.numel(),
                label=tile.label,
            )
        # After the record is complete there, and the last use of this slot is over (ordering rule 3).
        event = self._streams.submit(
            FETCH,
            partial(copy, buffer, kept.buffer[: buffer.numel()]),
            # site tile.reuse_complete, tile.reuse_ready, tile.reuse_slot_free
            after=(tile.after, kept.ready, tile.slot.free),
            writes=(buffer,),
            nbytes=buffer.numel(),
            label=tile.label,
        )
        kept.slot.add_use(event)  # before that slot is filled again
        return event


def take_tile(segment: Segment, number: int, buffer: Tensor, streams: Streams, label: Label) -> None:
    """Copy a tile to a page-aligned buffer in the layout of a record. Return when the copy is complete."""
    if isinstance(segment, Records):
        loading = segment.load(number, buffer)
        if loading is not None:
            loading.wait()  # site checkpoint.record_loaded
        return
    start, stop = segment.tile_range(number)
    buffer[-PAGE_BYTES:].zero_()  # the padding
    for target, values in zip(
        RecordLayout(segment.plan.cells).views(buffer, stop - start), segment.views(start, stop), strict=True
    ):
        nbytes = target.numel() * target.element_size()
        # Waited for on the host: the caller writes the buffer to a file next (ordering rule 5).
        streams.submit(SAVE, across(target, values), writes=(target,), nbytes=nbytes, label=label).synchronize()


def _range_of(segment: Segment, start: int, stop: int) -> range:
    """Return the numbers of a segment's tiles in a range of its storage."""
    first, last = start - segment.plan.start, stop - segment.plan.start
    return range(first // segment.tile_numel, -(-last // segment.tile_numel))


def _at(segment: Segment, start: int, stop: int) -> Views:
    """Return views of the values in a range of a segment's storage."""
    return segment.views(start - segment.plan.start, stop - segment.plan.start)


def _views_like(sources: Views, buffer: Tensor) -> Views:
    """Return views of a buffer of bytes with the shapes and dtypes of `sources`, one after the other."""
    sizes = [source.nbytes for source in sources]
    parts = buffer[: sum(sizes)].split_with_sizes(sizes)
    return tuple(part.view(source.dtype) for part, source in zip(parts, sources, strict=True))
