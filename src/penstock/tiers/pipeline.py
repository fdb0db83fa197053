"""Tiles on their way between their homes and the place where they are worked on.

While tile i is used, tile i+1 is brought and tile i-1 is put back:

    FETCH    | read 0 | read 1 | read 2 | ...
    UPDATE            | use 0  | use 1  | use 2 | ...
    WRITE                      | write 0 | write 1 | ...

Everything is submitted ahead; the slots of a ring bound how far it runs. A slot is used again once what used it last is
over, so no buffer is ever larger than a tile, or than the stretch of tiles that a device takes at once. Until then,
whoever wants the record that it still holds takes it from there instead of reading it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from torch import Tensor

from penstock.kinds import OPTIMIZER, Tier
from penstock.machine.streams import (
    DOWNLOAD,
    FETCH,
    UPLOAD,
    WRITE,
    Event,
    Streams,
    across,
    all_of,
)
from penstock.tiers.bounce import Bounce
from penstock.tiers.home import Home, MemorySection, Section, Views
from penstock.tiers.records import Records
from penstock.tiers.ring import Ring, Slot, take_kept


class Tile:
    """A tile that was brought: its values, by home, once `ready`."""

    def __init__(self, views: Mapping[str, Views], ready: Event, put_back: Callable[[Event], Event]) -> None:
        self.views = views
        self.ready = ready
        self._put_back = put_back

    def put_back(self, used: Event) -> Event:
        """After `used`, take what was written to its home.

        Returns the event after which it is in the homes that are memory; `Records.settled` tells of the others.
        """
        return self._put_back(used)


class Stretch(NamedTuple):
    """Neighbouring tiles, each home's in one piece.

    Attributes:
        tiles: how many.
        in_place: nothing of them has to be brought.
    """

    tiles: int
    in_place: bool


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
        ring: of slots with a buffer for each home that may be out of reach.
        beside: the tier whose memory the update works in.
    """

    def __init__(self, streams: Streams, ring: Ring, *, beside: Tier) -> None:
        self._streams = streams
        self._ring = ring
        self._beside = beside

    def stretch(self, number: int, homes: Mapping[str, Home]) -> Stretch:
        """The tiles from this one on that are brought, or used where they rest, at once."""
        places = [tile_of(home, number) for home in homes.values()]
        count = min(section.tiles - local for section, local in places)
        far = [section for section, _ in places if not self._reaches(section)]
        if any(isinstance(section, Records) for section in far):
            return Stretch(1, in_place=False)  # a record holds one tile
        return Stretch(min(count, self._ring.tiles) if far else count, in_place=not far)

    def bring(
        self,
        number: int,
        homes: Mapping[str, Home],
        *,
        after: Event,
        written: Sequence[str] = (),
        what: str = "",
        count: int = 1,
    ) -> Tile:
        """Make a tile's values available where the update runs.

        Arguments:
            number: the tile's number in the shard.
            homes: by name.
            after: what is in the homes is complete.
            written: homes that the use writes, and that have to be put back.
            what: what for, in traces: `update unit tile`.
            count: so many tiles at once: no more than `stretch` says.
        """
        sections = {name: tile_of(home, number) for name, home in homes.items()}
        far = any(not self._reaches(section) for section, _ in sections.values())
        slot = self._slot_for(sections) if far else None
        moves = _Moves(what)
        views: dict[str, Views] = {}
        for name, (section, local) in sections.items():
            if self._reaches(section):
                assert isinstance(section, MemorySection)
                views[name] = section.views(*_range(section, local, count))
                continue
            assert slot is not None
            back = name in written
            if isinstance(section, Records):
                assert count == 1, "a record is one tile"
                views[name] = self._from_file(name, section, local, slot, after, moves, back=back)
            else:
                extent = _range(section, local, count)
                views[name] = self._from_memory(name, section, extent, slot, after, moves, back=back)

        def put_back(used: Event) -> Event:
            home_again = all_of([used, *(back(used) for back in moves.to_memory)])
            if slot is not None:
                slot.free = all_of([home_again, *(back(used) for back in moves.to_files)])
            return home_again

        return Tile(views, all_of([after, *moves.ready]), put_back)

    def _slot_for(self, sections: Mapping[str, tuple[Section, int]]) -> Slot:
        """The next slot, or the one that still holds the tile's optimizer state."""
        section, number = sections.get(OPTIMIZER, (None, 0))
        kept = section.kept.get(number) if isinstance(section, Records) else None
        slot = self._ring.take(kept.slot if kept else None)
        if kept is None or kept.slot is not slot:
            slot.forget()
        return slot

    def _reaches(self, section: Section) -> bool:
        return not section.plan.cells or in_reach(section.tier, self._beside, self._streams)

    def _from_memory(
        self,
        name: str,
        section: Section,
        extent: tuple[int, int],
        slot: Slot,
        after: Event,
        moves: _Moves,
        *,
        back: bool,
    ) -> Views:
        """Between host and device memory: a copy each way."""
        assert isinstance(section, MemorySection)
        there, return_ = (UPLOAD, DOWNLOAD) if self._beside is Tier.DEVICE else (DOWNLOAD, UPLOAD)
        sources = section.views(*extent)
        targets = _views_like(sources, slot.near[name])
        for source, target in zip(sources, targets, strict=True):
            event = self._copy(there, target, source, (after, slot.free), moves.what, section.bounce)
            moves.ready.append(event)
            if back:
                back_again = partial(self._copy_after, return_, source, target, moves.what, section.bounce)
                moves.to_memory.append(back_again)
        return targets

    def _from_file(
        self, name: str, section: Section, number: int, slot: Slot, after: Event, moves: _Moves, *, back: bool
    ) -> Views:
        """From a file, by way of the host where the tile is used on a device."""
        assert isinstance(section, Records)
        near, host, nbytes = slot.near[name], slot.host[name], section.record_bytes(number)
        kept = section.kept.get(number)
        if kept is not None and kept.slot is slot:
            event = slot.free
        else:
            event = self._fetch(section, number, host[:nbytes], after, slot, moves.what)
            if near is not host:
                event = self._copy(UPLOAD, near[:nbytes], host[:nbytes], (event,), moves.what)
        moves.ready.append(event)

        def to_file(used: Event) -> Event:
            landed = used
            if near is not host:
                landed = self._copy(DOWNLOAD, host[:nbytes], near[:nbytes], (used,), moves.what)
            slot.keep(section, number, host, landed)
            work = partial(section.write, number, host)
            written = self._streams.submit(WRITE, work, after=(landed,), nbytes=nbytes, what=moves.what)
            section.settled[number] = written
            return written

        if back:
            moves.to_files.append(to_file)
        return section.views(number, near)

    def _fetch(self, section: Records, number: int, buffer: Tensor, after: Event, slot: Slot, what: str) -> Event:
        def from_slot(kept: Tensor, ready: Event) -> Event:
            return self._copy(FETCH, buffer, kept[: buffer.numel()], (after, ready, slot.free), what)

        return take_kept(section, number, from_slot) or self._streams.submit(
            FETCH,
            partial(section.read, number, buffer),
            after=(after, section.settled[number], slot.free),
            writes=(buffer,),
            nbytes=buffer.numel(),
            what=what,
        )

    def _copy_after(
        self, stream: str, target: Tensor, source: Tensor, what: str, bounce: Bounce | None, used: Event
    ) -> Event:
        return self._copy(stream, target, source, (used,), what, bounce)

    def _copy(
        self,
        stream: str,
        target: Tensor,
        source: Tensor,
        after: Sequence[Event],
        what: str,
        bounce: Bounce | None = None,
    ) -> Event:
        if bounce is not None:
            through = bounce.upload if stream == UPLOAD else bounce.download
            return through(self._streams, target, source, after, reader=FETCH, what=what)
        nbytes, work = source.numel() * source.element_size(), across(target, source)
        return self._streams.submit(stream, work, after=after, writes=(target,), nbytes=nbytes, what=what)


def tile_of(home: Home, number: int) -> tuple[Section, int]:
    """The section that a tile of the shard is in, and its number there."""
    section = home.section_at(number * home.sections[0].tile_numel)
    return section, number - section.plan.start // section.tile_numel


def _range(section: Section, number: int, count: int) -> tuple[int, int]:
    """The first element of some neighbouring tiles of a section, and one past their last."""
    return section.tile_range(number)[0], section.tile_range(number + count - 1)[1]


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
