"""Values on their way from one home to another: gathers, gradients, and homes that move."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from penstock.kinds import Tier
from penstock.machine.streams import DOWNLOAD, READ, UPLOAD, WRITE, Event, Streams, all_of, copy
from penstock.tiers.bounce import Bounce
from penstock.tiers.home import CellPlan, Home, MemorySection, Section, SectionPlan, shared_sections
from penstock.tiers.records import Records
from penstock.tiers.ring import Ring, take_kept

#: Takes a record's values from a buffer, once it holds them.
Arrive = Callable[[Tensor, Event], Event]

#: The one buffer of a slot through which records pass.
PASSING = "passing"


class Transit:
    """Copies homes as a whole, through memory where one of them is in files.

    Arguments:
        ring: of host buffers of one record, in which files are read and written.
    """

    def __init__(self, streams: Streams, ring: Ring) -> None:
        self._streams = streams
        self._ring = ring

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
                copied += self._copy_all(there.tier, targets, sources, (after,), what, _bounce(here, there))
        return all_of(copied)

    def _from_file(self, here: Records, there: Section, start: int, stop: int, after: Event, what: str) -> list[Event]:
        copied = []
        for number in _tiles(here, start, stop):
            first, last = here.tile_range(number)
            targets = _views(there, first + here.plan.start, last + here.plan.start)

            def arrive(
                buffer: Tensor, ready: Event, number: int = number, targets: Sequence[Tensor] = targets
            ) -> Event:
                views = here.views(number, buffer)
                return all_of(self._copy_all(there.tier, targets, views, (after, ready), what))

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
        for number in _tiles(there, start, stop):
            slot = self._ring.take()
            slot.forget()
            buffer = slot.near[PASSING]
            first, last = there.tile_range(number)
            sources = _views(here, first + there.plan.start, last + there.plan.start)
            views = there.views(number, buffer)
            landed = all_of(self._copy_all(Tier.CPU, views, sources, (after, slot.free), what))
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
        self,
        tier: Tier,
        targets: Sequence[Tensor],
        sources: Sequence[Tensor],
        after: Sequence[Event],
        what: str,
        bounce: Bounce | None = None,
    ) -> list[Event]:
        stream = UPLOAD if tier is Tier.DEVICE else DOWNLOAD
        return [self._copy(stream, t, s, after, what, bounce) for t, s in zip(targets, sources, strict=True)]

    def _copy(
        self, stream: str, target: Tensor, source: Tensor, after: Sequence[Event], what: str, bounce: Bounce | None
    ) -> Event:
        if bounce is not None:
            through = bounce.upload if stream == UPLOAD else bounce.download
            return through(self._streams, target, source, after, reader=READ, what=what)
        nbytes, work = source.numel() * source.element_size(), partial(copy, target, source)
        return self._streams.submit(stream, work, after=after, writes=(target,), nbytes=nbytes, what=what)


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
