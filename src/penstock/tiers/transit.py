"""Values on their way from one home to another: gathers, gradients, and homes that move."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from penstock.kinds import Tier
from penstock.machine.streams import DOWNLOAD, READ, UPDATE, UPLOAD, WRITE, Event, Streams, across, all_of, copy
from penstock.tiers.bounce import Bounce
from penstock.tiers.home import CellPlan, Home, MemorySection, Section, SectionPlan, shared_sections
from penstock.tiers.records import Records
from penstock.tiers.ring import Ring, take_kept

#: Takes a record's values from a buffer, once it holds them.
Arrive = Callable[[Tensor, Event], Event]

#: The one buffer of a slot through which records pass, and of one in which values come down that are cast on the host.
PASSING = "passing"
LANDING = "landing"


class _Way(NamedTuple):
    """Where values go: to a tier, between host and device or not, through buffers or not."""

    tier: Tier
    crosses: bool
    bounce: Bounce | None = None


class Transit:
    """Copies homes as a whole, through memory where one of them is in files.

    Arguments:
        ring: of host buffers of one record, in which files are read and written.
        landing: of host buffers in which what comes from the device lands in its own dtype, where homes have another.
    """

    def __init__(self, streams: Streams, ring: Ring, landing: Ring | None = None) -> None:
        self._streams = streams
        self._ring = ring
        self._landing = landing or Ring()

    def copy(self, source: Home, target: Home, *, after: Event, what: str = "") -> Event:
        """Copy all values of a home to another one of the same extent, kinds and tiles. `what`: what for, in traces.

        What one of them does not keep, and what they share, stays as it is. Returns the event after which the source is
        free, and what of the target is memory holds the values; `Records.settled` tells of the rest.
        """
        copied: list[Event] = [after]
        for start, stop, here, there in shared_sections(source, target):
            if here is there or not here.plan.cells or not there.plan.cells:
                continue
            if isinstance(here, Records):
                copied += self._from_file(here, there, start, stop, after, what)
            elif isinstance(there, Records):
                copied += self._to_file(here, there, start, stop, after, what)
            else:
                targets, sources = _views(there, start, stop), _views(here, start, stop)
                way = _Way(there.tier, here.tier is not there.tier, _bounce(here, there))
                copied += self._copy_all(way, targets, sources, (after,), what)
        return all_of(copied)

    def _from_file(self, here: Records, there: Section, start: int, stop: int, after: Event, what: str) -> list[Event]:
        copied = []
        way = _Way(there.tier, there.tier is Tier.DEVICE)
        for number in _tiles(here, start, stop):
            first, last = here.tile_range(number)
            targets = _views(there, first + here.plan.start, last + here.plan.start)

            def arrive(
                buffer: Tensor, ready: Event, number: int = number, targets: Sequence[Tensor] = targets
            ) -> Event:
                views = here.views(number, buffer)
                return all_of(self._copy_all(way, targets, views, (after, ready), what))

            copied.append(take_kept(here, number, arrive) or self._read(here, number, arrive, after, what))
        return copied

    def _read(self, here: Records, number: int, arrive: Arrive, after: Event, what: str) -> Event:
        slot = self._ring.take()
        slot.forget()
        buffer = slot.near[PASSING]
        read = self._streams.submit(
            READ,
            partial(here.read, number, buffer),
            after=(after, here.settled[number], slot.free),
            writes=(buffer,),
            nbytes=here.record_bytes(number),
            what=f"{what} tile {number}",
        )
        slot.free = arrive(buffer, read)
        slot.keep(here, number, buffer, read)
        return slot.free

    def _to_file(self, here: Section, there: Records, start: int, stop: int, after: Event, what: str) -> list[Event]:
        taken = []
        way = _Way(Tier.CPU, here.tier is Tier.DEVICE)
        for number in _tiles(there, start, stop):
            slot = self._ring.take()
            slot.forget()
            buffer = slot.near[PASSING]
            first, last = there.tile_range(number)
            sources = _views(here, first + there.plan.start, last + there.plan.start)
            views = there.views(number, buffer)
            landed = all_of(self._copy_all(way, views, sources, (after, slot.free), what))
            slot.free = self._streams.submit(
                WRITE,
                partial(there.write, number, buffer),
                after=(landed, there.settled[number]),
                nbytes=there.record_bytes(number),
                what=f"{what} tile {number}",
            )
            there.settled[number] = slot.free
            slot.keep(there, number, buffer, landed)
            taken.append(landed)
        return taken

    def _copy_all(
        self, way: _Way, targets: Sequence[Tensor], sources: Sequence[Tensor], after: Sequence[Event], what: str
    ) -> list[Event]:
        return [self._copy(way, t, s, after, what) for t, s in zip(targets, sources, strict=True)]

    def _copy(self, way: _Way, target: Tensor, source: Tensor, after: Sequence[Event], what: str) -> Event:
        stream = UPLOAD if way.tier is Tier.DEVICE else DOWNLOAD
        if way.bounce is not None:
            through = way.bounce.upload if stream == UPLOAD else way.bounce.download
            return through(self._streams, target, source, after, reader=READ, what=what)
        crosses = way.crosses and not self._streams.aliases_host
        if crosses and stream == DOWNLOAD and target.dtype != source.dtype:
            return self._land(target, source, after, what)
        nbytes = source.numel() * source.element_size()
        work = across(target, source) if crosses else partial(copy, target, source)
        return self._streams.submit(stream, work, after=after, writes=(target,), nbytes=nbytes, what=what)

    def _land(self, target: Tensor, source: Tensor, after: Sequence[Event], what: str) -> Event:
        """Down in the dtype that the values have on the device, and cast on the host, tile by tile."""
        ready, itemsize, start = all_of(after), source.element_size(), 0
        arrived = []
        while start < source.numel():
            slot = self._landing.take()
            buffer = slot.near[LANDING]
            here = source[start : start + buffer.numel() // itemsize]
            held = buffer[: here.numel() * itemsize].view(source.dtype)
            there = target[start : start + here.numel()]
            start += here.numel()
            landed = self._streams.submit(
                DOWNLOAD,
                across(held, here),
                after=(ready, slot.free),
                writes=(held,),
                nbytes=here.numel() * itemsize,
                what=what,
            )
            slot.free = self._streams.submit(
                UPDATE, partial(copy, there, held), after=(landed,), writes=(there,), what=what
            )
            arrived.append(slot.free)
        return all_of(arrived)


def buffer_home(values: Tensor) -> Home:
    """A flat buffer in device memory as a home, to copy from and to."""
    cell = CellPlan("", "", Tier.DEVICE, values.dtype, values.numel())
    plan = SectionPlan("", Tier.DEVICE, (cell,), 0, values.numel(), values.numel())
    return Home([MemorySection(plan, [values])])


def _views(section: Section, start: int, stop: int) -> Sequence[Tensor]:
    assert isinstance(section, MemorySection)
    return section.views(start - section.plan.start, stop - section.plan.start)


def _bounce(here: Section, there: Section) -> Bounce | None:
    """What copies between two sections in memory pass, where one of them is the device's and one is pageable."""
    assert isinstance(here, MemorySection)
    assert isinstance(there, MemorySection)
    return None if here.tier is there.tier else here.bounce or there.bounce


def _tiles(section: Section, start: int, stop: int) -> range:
    """The numbers of a section's tiles in a range of its home."""
    first, last = start - section.plan.start, stop - section.plan.start
    return range(first // section.tile_numel, -(-last // section.tile_numel))
