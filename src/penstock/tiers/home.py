"""Where some kinds of one unit rest, tile by tile: in sections, each on one tier.

    home       | section on the device | section on the cpu     | section in a file |
    tiles      | 0 | 1 | 2 |           | 3 | 4 |                | 5 | 6 |

Most homes are one section. A home is split where the placement splits its kinds between tiers, and its sections are
exchanged when it moves. Elements are counted from the start of this rank's shard, in a section from the start of the
section; sections are whole tiles.

A home knows the events of its last write and of its last read. Whoever writes it or reads it beside compute notes that
here, and whoever needs it asks here: nobody else keeps an event of it. Sections whose tiles are records
(`tiers/records.py`) know each tile's last write by themselves.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from penstock.kinds import Tier
from penstock.machine.aio import File
from penstock.machine.arena import Arena
from penstock.machine.streams import DONE, Event, all_of
from penstock.tiers.ring import Ring

#: The values of a home's kinds for some range of elements, in the order of its cells.
Views = tuple[Tensor, ...]

#: Which tiles a device updates whose state rests elsewhere.
Streamed = Literal["none", "some", "all"]


@dataclass(frozen=True)
class CellPlan:
    """A cell before its memory: what will be allocated, where.

    Attributes:
        numel: how many values it has.
        grain: how many elements of the shard one value belongs to: 1, or the block of a scale.
    """

    unit: str
    kind: str
    tier: Tier
    dtype: torch.dtype
    numel: int
    grain: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of the cell's values."""
        return self.numel * self.dtype.itemsize

    @property
    def taken_bytes(self) -> int:
        """Bytes of memory that the cell takes: on the cpu tier whole pages."""
        return Arena.lease_bytes(self.numel, self.dtype) if self.tier is Tier.CPU else self.nbytes

    def part(self, start: int, stop: int) -> slice:
        """Place the values of elements `start` to `stop` of the section; `start` is the first of a grain."""
        return slice(start // self.grain, -(-stop // self.grain))


@dataclass(frozen=True)
class SectionPlan:
    """A section before its memory.

    Attributes:
        home: which home it is a section of: `"param"`, `"grad"`, `"master"`, `"optimizer"`, ...
        tier: where it will be.
        cells: its kinds; none where the home keeps nothing of these elements.
        start: its first element.
        numel: its elements.
        tile_numel: elements of a tile; the last one may be shorter.
        copied: whether a device copies it from or to the cpu tier, where it is there; else the host alone works on it.
        streamed: which of its tiles a device updates, where it is on another tier.
    """

    home: str
    tier: Tier
    cells: tuple[CellPlan, ...]
    start: int
    numel: int
    tile_numel: int
    copied: bool = field(default=True, compare=False)  # says nothing of where it is
    streamed: Streamed = field(default="none", compare=False)

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.numel

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the values of all its cells."""
        return sum(cell.nbytes for cell in self.cells)

    @cached_property
    def label(self) -> str:
        """Say which kinds of which unit they are, for errors: every transfer is named, in case that it fails."""
        kinds = " and ".join(dict.fromkeys(cell.kind for cell in self.cells))
        return f"{kinds} of unit '{self.cells[0].unit}'"

    def on(self, tier: Tier) -> "SectionPlan":
        """Plan the same on another tier, where it is brought."""
        return replace(self, tier=tier, copied=True, cells=tuple(replace(cell, tier=tier) for cell in self.cells))


class Place(NamedTuple):
    """Where a record lies."""

    file: File
    offset: int
    nbytes: int


class Stored(NamedTuple):
    """A record that was written."""

    place: Place
    checksum: int


class Section(ABC):
    """Some kinds of a part of a unit's shard, on one tier.

    Attributes:
        tensors: the values of each kind, where arithmetic can reach them; none of those whose tiles are records.
        bounce: asks for the rings through which copies between the values and the device pass, one for each stream that
            may read; `None` where the device copies by itself. They may be taken by the first call.
    """

    tensors: tuple[Tensor, ...] = ()
    bounce: Callable[[], Mapping[str, Ring]] | None = None

    def __init__(self, plan: SectionPlan) -> None:
        self.plan = plan
        self.tier = plan.tier
        self.numel = plan.numel
        self.tile_numel = plan.tile_numel

    @property
    def tiles(self) -> int:
        """How many tiles there are."""
        return -(-self.numel // self.tile_numel)

    def tile_range(self, number: int) -> tuple[int, int]:
        """Give the first element of a tile, and one past its last."""
        first = number * self.tile_numel
        return first, min(first + self.tile_numel, self.numel)

    @property
    @abstractmethod
    def written(self) -> Event:
        """The last writes that the section itself knows of, of all tiles."""

    @abstractmethod
    def views(self, start: int, stop: int) -> Views:
        """View the values of elements `start` to `stop` in place. Of memory alone."""

    @abstractmethod
    def visit(self, start: int, stop: int, *, modify: bool = False) -> Iterator[tuple[int, int, Views]]:
        """Look at elements `start` to `stop`, piece by piece, on the caller's time. See `Home.visit`."""

    @abstractmethod
    def cut(self, tile: int, start: int, plan: SectionPlan) -> "Section":
        """Make a section of its own over a part of a section of bytes.

        Arguments:
            tile: the tile that the part lies in.
            start: the part's first byte in it.
            plan: what the new section is.
        """

    @abstractmethod
    def drop(self) -> None:
        """Let go of the values: they are elsewhere now."""

    def stored(self, number: int) -> Stored | None:
        """Say where the record of a tile is in a file; `None` where it is in none."""
        del number
        return None


class MemorySection(Section):
    """Kinds that are tensors: on the device or the cpu tier.

    Arguments:
        tensors: the values of each kind.
        bounce: see `Section.bounce`.
    """

    def __init__(
        self,
        plan: SectionPlan,
        tensors: Sequence[Tensor],
        bounce: Callable[[], Mapping[str, Ring]] | None = None,
    ) -> None:
        super().__init__(plan)
        self.tensors = tuple(tensors)
        self.bounce = bounce

    @property
    def written(self) -> Event:
        """Nothing: the home knows who writes memory."""
        return DONE

    def views(self, start: int, stop: int) -> Views:
        """View the values of elements `start` to `stop` in place."""
        if start == 0 and stop == self.numel:
            return self.tensors
        return tuple(tensor[cell.part(start, stop)] for cell, tensor in zip(self.plan.cells, self.tensors, strict=True))

    def visit(self, start: int, stop: int, *, modify: bool = False) -> Iterator[tuple[int, int, Views]]:
        """Look at one piece, in place."""
        del modify
        yield start, stop, self.views(start, stop)

    def cut(self, tile: int, start: int, plan: SectionPlan) -> "MemorySection":
        """Make a section over the same memory, of the only kind's values from `start` of the tile on."""
        (memory,) = self.tensors
        first = self.tile_range(tile)[0] + start
        return MemorySection(plan, [memory[first : first + plan.numel]], self.bounce)

    def drop(self) -> None:
        """Let go of the tensors."""
        self.tensors = ()


class MemoryEvents:
    """Who wrote and who read a home's memory last. Homes over the same memory share it.

    Attributes:
        written: the last write: values are there after it.
    """

    def __init__(self, written: Event) -> None:
        self.written = written
        self._read = DONE

    def write(self, event: Event) -> None:
        """Note the last write. It follows all before it, so nobody has to wait for those any longer."""
        self.written, self._read = event, DONE  # else the reads would add up for as long as training goes on

    @property
    def read(self) -> Event:
        """The reads since then that are not over yet: memory is written again after them."""
        if self._read is not DONE:  # not those that are over: events keep their errors, and what those refer to
            self._read = all_of(part for part in self._read.parts() if not part.done())  # site storage.reads
        return self._read

    def add_read(self, event: Event) -> None:
        """Note one more read."""
        self._read = all_of([*self.read.parts(), event])  # site storage.earlier_reads, storage.new_read

    @property
    def free(self) -> Event:
        """Everything that a write has to follow."""
        return all_of([self.written, self.read])  # site storage.free_of_write, storage.free_of_reads


class Home:
    """Some kinds of one unit, in sections.

    Arguments:
        sections: one after the other, without gaps.
        memory: the events of its memory, where another home shares it.

    Attributes:
        memory: the events of what of it is memory.
    """

    def __init__(self, sections: Sequence[Section], memory: MemoryEvents | None = None) -> None:
        self.sections = tuple(sections)
        self.memory = memory or MemoryEvents(DONE)
        assert all(a.plan.stop == b.plan.start for a, b in pairwise(self.sections)), "sections follow each other"

    @property
    def start(self) -> int:
        """The first element."""
        return self.sections[0].plan.start

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.sections[-1].plan.stop

    def section_at(self, element: int) -> Section:
        """Find the section that holds an element."""
        if len(self.sections) == 1:
            return self.sections[0]
        return next(section for section in self.sections if element < section.plan.stop)

    def tile(self, number: int) -> tuple[Section, int]:
        """Find the section that a tile of the shard is in, and its number there."""
        section = self.section_at(number * self.sections[0].tile_numel)
        return section, number - section.plan.start // section.tile_numel

    @property
    def in_files(self) -> bool:
        """Whether any of it is where arithmetic cannot reach."""
        return any(not section.tier.is_memory and section.plan.cells for section in self.sections)

    @property
    def plans(self) -> tuple[SectionPlan, ...]:
        """Its sections as they are now."""
        return tuple(section.plan for section in self.sections)

    @property
    def written(self) -> Event:
        """The last write: after it everything is where it rests, in memory and in files. It raises what has failed."""
        beside = [event for section in self.sections if (event := section.written) is not DONE]
        # site storage.memory_written, storage.files_written
        return all_of([self.memory.written, *beside]) if beside else self.memory.written

    @property
    def read(self) -> Event:
        """The last read that goes on beside compute: nothing is written before it is over."""
        return self.memory.read

    def note_write(self, event: Event) -> None:
        """Note the last write of the memory. It follows the writes and the reads before it."""
        self.memory.write(event)

    def note_read(self, event: Event) -> None:
        """Note a read of the memory: writes wait for it."""
        self.memory.add_read(event)

    def visit(self, start: int, stop: int, *, modify: bool = False) -> Iterator[tuple[int, int, Views]]:
        """Look at elements `start` to `stop`, piece by piece, on the caller's time.

        Work under way has been waited for. Yields the range of each piece and its values; what a `modify` visitor
        writes into them is kept once it asks for the next piece.
        """
        for section in self.sections:
            first = section.plan.start
            inside = max(start, first), min(stop, section.plan.stop)
            if inside[0] < inside[1]:
                for begin, end, views in section.visit(inside[0] - first, inside[1] - first, modify=modify):
                    yield begin + first, end + first, views

    def part(self, start: int, stop: int) -> "Home":
        """Make a home of the elements `start` to `stop` of one in memory, counted from there, over the same memory."""
        sections = []
        for section in self.sections:
            first, last = max(start, section.plan.start), min(stop, section.plan.stop)
            if first < last:
                views = section.views(first - section.plan.start, last - section.plan.start)
                cells = tuple(replace(c, numel=v.numel()) for c, v in zip(section.plan.cells, views, strict=True))
                plan = replace(section.plan, cells=cells, start=first - start, numel=last - first)
                sections.append(MemorySection(plan, views, section.bounce))
        # With its events: who writes through one home would not be seen by who reads through the other.
        return Home(sections, self.memory)


def buffer_home(values: Tensor, written: Event = DONE) -> Home:
    """Make a home of a flat buffer in device memory, to copy from and to; `written` is its last write so far."""
    cell = CellPlan("", "", Tier.DEVICE, values.dtype, values.numel())
    plan = SectionPlan("", Tier.DEVICE, (cell,), 0, values.numel(), values.numel())
    return Home([MemorySection(plan, [values])], MemoryEvents(written))


def visit_together(
    homes: Sequence[Home], start: int, stop: int, *, modify: bool = False
) -> Iterator[tuple[int, int, list[Views]]]:
    """Visit several homes at once, as `Home.visit` does one: each piece lies in one piece of all of them."""
    if not homes:
        yield start, stop, []
        return
    home, *others = homes
    for first, last, views in home.visit(start, stop, modify=modify):
        cells = home.section_at(first).plan.cells
        for begin, end, rest in visit_together(others, first, last, modify=modify):
            own = tuple(v[c.part(begin - first, end - first)] for c, v in zip(cells, views, strict=True))
            yield begin, end, [own, *rest]


class Shared(NamedTuple):
    """Elements `start` to `stop` that lie in one section of each of two homes."""

    start: int
    stop: int
    one: Section
    other: Section


def shared_sections(one: Home, other: Home) -> Iterator[Shared]:
    """Find where the sections of two homes of equal extent overlap, in order."""
    for a in one.sections:
        for b in other.sections:
            start, stop = max(a.plan.start, b.plan.start), min(a.plan.stop, b.plan.stop)
            if start < stop:
                yield Shared(start, stop, a, b)
