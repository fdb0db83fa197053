"""Tiles on their way between their homes and the place where they are worked on.

While tile i is used, tile i+1 is brought and tile i-1 is put back:

    FETCH    | read 0 | read 1 | read 2 | ...
    UPDATE            | use 0  | use 1  | use 2 | ...
    WRITE                      | write 0 | write 1 | ...

Everything is submitted ahead; the slots of a ring bound how far it runs. A slot is used again once what used it last is
over, so no buffer is ever larger than a tile. Until then, whoever wants the record that it still holds takes it from
there instead of reading it.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from penstock.kinds import Tier
from penstock.machine.streams import (
    DONE,
    DOWNLOAD,
    FETCH,
    READ,
    UPLOAD,
    WRITE,
    Event,
    Streams,
    all_of,
    copy,
)
from penstock.tiers.home import Home, MemoryHome, Views
from penstock.tiers.records import Kept, Records

#: What a tile consists of: three homes of one unit.
PARAM_AREA, GRAD_AREA, OPTIMIZER_AREA = "param", "grad", "optimizer"


@dataclass(eq=False)
class Slot:
    """Buffers of bytes for one tile.

    Attributes:
        near: by area, where the tile is used.
        host: by area, where files are read and written: the same buffer, unless it is used on a device.
        free: work on the slot is over.
        holds: the records that its buffers still hold.
    """

    near: Mapping[str, Tensor]
    host: Mapping[str, Tensor]
    free: Event = DONE
    holds: dict[tuple[Records, int], None] = field(default_factory=dict)

    def keep(self, home: Records, number: int, buffer: Tensor, ready: Event) -> None:
        """Let others take a record from the slot until it is used again."""
        home.kept[number] = Kept(buffer, ready, self)
        self.holds[home, number] = None

    def forget(self) -> None:
        """The slot is used for something else."""
        for home, number in self.holds:
            kept = home.kept.get(number)
            if kept is not None and kept.slot is self:
                del home.kept[number]
        self.holds.clear()


class Ring:
    """Slots, used in turn."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = deque(slots)

    def take(self, wanted: object = None) -> Slot:
        """The slot that was used least recently, or the one that is wanted."""
        assert self._slots, "the ring was planned without slots"
        slot = next((slot for slot in self._slots if slot is wanted), self._slots[0])
        self._slots.remove(slot)
        self._slots.append(slot)
        return slot


def take_kept(home: Records, number: int, copy_from: Callable[[Tensor, Event], Event]) -> Event | None:
    """Copy a record from the slot that still holds it; `None` where none does."""
    kept = home.kept.get(number)
    if kept is None:
        return None
    assert isinstance(kept.slot, Slot)
    event = copy_from(kept.buffer, kept.ready)
    kept.slot.free = event if kept.slot.free.done() else all_of([kept.slot.free, event])  # not before it was copied
    return event


class Tile:
    """A tile that was brought: its values, by area, once `ready`."""

    def __init__(self, views: Mapping[str, Views], ready: Event, put_back: Callable[[Event], Event]) -> None:
        self.views = views
        self.ready = ready
        self._put_back = put_back

    def put_back(self, used: Event) -> Event:
        """After `used`, take what was written to its home.

        Returns the event after which it is in the homes that are memory; `Records.settled` tells of the others.
        """
        return self._put_back(used)


@dataclass
class _Moves:
    """What has to happen before the use of one tile, and after it. `what`: what for."""

    what: str
    ready: list[Event] = field(default_factory=list)
    to_memory: list[Callable[[Event], Event]] = field(default_factory=list)
    to_files: list[Callable[[Event], Event]] = field(default_factory=list)


class Pipeline:
    """Brings tiles to where the update runs, and puts them back.

    Arguments:
        beside: the tier whose memory the update works in.
        slots: a ring of them.
    """

    def __init__(self, streams: Streams, slots: Sequence[Slot], *, beside: Tier) -> None:
        self._streams = streams
        self._ring = Ring(slots)
        self._beside = beside

    def bring(
        self, number: int, homes: Mapping[str, Home], *, after: Event, written: Sequence[str] = (), what: str = ""
    ) -> Tile:
        """Make a tile's values available where the update runs.

        Arguments:
            number: the tile's number in the shard.
            homes: by area.
            after: what is in the homes is complete.
            written: areas that the use writes, and that have to be put back.
            what: what for, `verb unit`.
        """
        far = [home for home in homes.values() if not self._reaches(home)]
        slot = self._slot_for(number, homes) if far else None
        moves = _Moves(what)
        views: dict[str, Views] = {}
        for area, home in homes.items():
            if self._reaches(home):
                assert isinstance(home, MemoryHome)
                views[area] = home.views(*home.tile_range(number))
                continue
            assert slot is not None
            move = self._from_file if isinstance(home, Records) else self._from_memory
            views[area] = move(area, home, number, slot, after, moves, back=area in written)

        def put_back(used: Event) -> Event:
            home_again = all_of([used, *(back(used) for back in moves.to_memory)])
            if slot is not None:
                slot.free = all_of([home_again, *(back(used) for back in moves.to_files)])
            return home_again

        return Tile(views, all_of([after, *moves.ready]), put_back)

    def _slot_for(self, number: int, homes: Mapping[str, Home]) -> Slot:
        """The next slot, or the one that still holds the tile's optimizer state."""
        home = homes.get(OPTIMIZER_AREA)
        kept = home.kept.get(number) if isinstance(home, Records) else None
        slot = self._ring.take(kept.slot if kept else None)
        if kept is None:
            slot.forget()
        return slot

    def _reaches(self, home: Home) -> bool:
        return in_reach(home.tier, self._beside, self._streams)

    def _from_memory(
        self, area: str, home: Home, number: int, slot: Slot, after: Event, moves: _Moves, *, back: bool
    ) -> Views:
        """Between host and device memory: a copy each way."""
        assert isinstance(home, MemoryHome)
        there, return_ = (UPLOAD, DOWNLOAD) if self._beside is Tier.DEVICE else (DOWNLOAD, UPLOAD)
        start, stop = home.tile_range(number)
        sources = home.views(start, stop)
        targets = _views_like(sources, slot.near[area])
        what = f"{moves.what} {area} tile {number}"
        for source, target in zip(sources, targets, strict=True):
            event = self._copy(there, target, source, (after, slot.free), what)
            moves.ready.append(event)
            if back:
                moves.to_memory.append(partial(self._copy_after, return_, source, target, what=what))
        return targets

    def _from_file(
        self, area: str, home: Home, number: int, slot: Slot, after: Event, moves: _Moves, *, back: bool
    ) -> Views:
        """From a file, by way of the host where the tile is used on a device."""
        assert isinstance(home, Records)
        near, host, nbytes = slot.near[area], slot.host[area], home.record_bytes(number)
        what = f"{moves.what} {area} tile {number}"
        kept = home.kept.get(number)
        if kept is not None and kept.slot is slot:
            event = slot.free
        else:
            event = self._fetch(home, number, host[:nbytes], after, slot, what)
            if near is not host:
                event = self._copy(UPLOAD, near[:nbytes], host[:nbytes], (event,), what)
        moves.ready.append(event)

        def to_file(used: Event) -> Event:
            landed = used if near is host else self._copy(DOWNLOAD, host[:nbytes], near[:nbytes], (used,), what)
            slot.keep(home, number, host, landed)
            work = partial(home.write, number, host)
            written = self._streams.submit(WRITE, work, after=(landed,), nbytes=nbytes, what=what)
            home.settled[number] = written
            return written

        if back:
            moves.to_files.append(to_file)
        return home.views(number, near)

    def _fetch(self, home: Records, number: int, buffer: Tensor, after: Event, slot: Slot, what: str) -> Event:
        def from_slot(kept: Tensor, ready: Event) -> Event:
            return self._copy(FETCH, buffer, kept[: buffer.numel()], (after, ready, slot.free), what)

        return take_kept(home, number, from_slot) or self._streams.submit(
            FETCH,
            partial(home.read, number, buffer),
            after=(after, home.settled[number], slot.free),
            writes=(buffer,),
            nbytes=buffer.numel(),
            what=what,
        )

    def _copy_after(self, stream: str, target: Tensor, source: Tensor, used: Event, *, what: str) -> Event:
        return self._copy(stream, target, source, (used,), what)

    def _copy(self, stream: str, target: Tensor, source: Tensor, after: Sequence[Event], what: str) -> Event:
        nbytes = source.numel() * source.element_size()
        work = partial(copy, target, source)
        return self._streams.submit(stream, work, after=after, writes=(target,), nbytes=nbytes, what=what)


class Transit:
    """Whole shards on their way between a home and one buffer in device memory: gathers, and gradients.

    Arguments:
        slots: host buffers of one tile, through which files are read and written; none where no home is a file.
    """

    def __init__(self, streams: Streams, slots: Sequence[Tensor]) -> None:
        self._streams = streams
        self._ring = Ring([Slot({}, {"": slot}) for slot in slots])

    def fill(self, target: Tensor, home: Home, *, after: Event, writes: Sequence[Tensor] = (), what: str = "") -> Event:
        """Copy the one kind of a home into `target`. `writes`: what `target` is a part of; `what`: what for."""
        if isinstance(home, MemoryHome):
            (source,) = home.tensors
            return self._copy(UPLOAD, target, source, (after,), writes or (target,), what)
        assert isinstance(home, Records)
        copied = []
        for number in range(home.tiles):
            start, stop = home.tile_range(number)
            part = target[start:stop]
            named = f"{what} tile {number}"
            event = take_kept(home, number, partial(self._copy_record, home, number, part, after, named))
            copied.append(event or self._read(home, number, part, after, named))
        return all_of(copied)

    def _read(self, home: Records, number: int, target: Tensor, after: Event, what: str) -> Event:
        slot = self._ring.take()
        slot.forget()
        buffer = slot.host[""]
        read = self._streams.submit(
            READ,
            partial(home.read, number, buffer),
            after=(after, home.settled[number], slot.free),
            writes=(buffer,),
            nbytes=home.record_bytes(number),
            what=what,
        )
        slot.free = self._copy_record(home, number, target, after, what, buffer, read)
        slot.keep(home, number, buffer, read)
        return slot.free

    def _copy_record(
        self, home: Records, number: int, target: Tensor, after: Event, what: str, buffer: Tensor, ready: Event
    ) -> Event:
        (view,) = home.views(number, buffer)
        return self._copy(UPLOAD, target, view, (after, ready), (target,), what)

    def save(self, home: Home, source: Tensor, *, after: Event, what: str = "") -> Event:
        """Copy `source` into the home of one kind. `what`: what for.

        Returns the event after which `source` is free, and a home in memory holds its values.
        """
        if isinstance(home, MemoryHome):
            (target,) = home.tensors
            return self._copy(DOWNLOAD, target, source, (after,), (target,), what)
        assert isinstance(home, Records)
        taken = []
        for number in range(home.tiles):
            slot = self._ring.take()
            slot.forget()
            buffer, (view,) = slot.host[""], home.views(number, slot.host[""])
            start, stop = home.tile_range(number)
            named = f"{what} tile {number}"
            landed = self._copy(DOWNLOAD, view, source[start:stop], (after, slot.free), (view,), named)
            slot.free = self._streams.submit(
                WRITE,
                partial(home.write, number, buffer),
                after=(landed, home.settled[number]),
                nbytes=home.record_bytes(number),
                what=named,
            )
            home.settled[number] = slot.free
            slot.keep(home, number, buffer, landed)
            taken.append(landed)
        return all_of(taken)

    def _copy(
        self, stream: str, target: Tensor, source: Tensor, after: Sequence[Event], writes: Sequence[Tensor], what: str
    ) -> Event:
        nbytes = source.numel() * source.element_size()
        work = partial(copy, target, source)
        return self._streams.submit(stream, work, after=after, writes=writes, nbytes=nbytes, what=what)


def in_reach(tier: Tier, of: Tier, streams: Streams) -> bool:
    """Whether arithmetic beside one tier reads and writes the other directly."""
    return tier is not Tier.NVME and (tier is of or streams.aliases_host)


def _views_like(sources: Views, buffer: Tensor) -> Views:
    """Views of a buffer of bytes that have the shapes and dtypes of `sources`, one after the other."""
    views, offset = [], 0
    for source in sources:
        nbytes = source.numel() * source.element_size()
        views.append(buffer[offset : offset + nbytes].view(source.dtype))
        offset += nbytes
    return tuple(views)
