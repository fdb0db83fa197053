"""Where some kinds of one unit rest, tile by tile: in sections, each on one tier.

    home       | section on the device | section on the cpu     | section in a file |
    tiles      | 0 | 1 | 2 |           | 3 | 4 |                | 5 | 6 |

Most homes are one section. A home is split where the placement splits its kinds between tiers, and its sections are
exchanged when it moves. Elements are counted from the start of this rank's shard, in a section from the start of the
section; sections are whole tiles.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kinds import Tier
from penstock.machine.arena import Arena
from penstock.machine.streams import DONE, Event, all_of
from penstock.tiers.bounce import Bounce

#: The values of a home's kinds for some range of elements, in the order of its cells.
Views = tuple[Tensor, ...]


@dataclass(frozen=True)
class CellPlan:
    """A cell before its memory: what will be allocated, where.

    Attributes:
        numel: values.
        grain: elements of the shard that one value belongs to: 1, or the block of a scale.
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
    def lease_bytes(self) -> int:
        """Bytes that the cell takes on the cpu tier, whole pages."""
        return Arena.lease_bytes(self.numel, self.dtype)

    def part(self, start: int, stop: int) -> slice:
        """The values of elements `start` to `stop` of the section; `start` is the first of a grain."""
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
        copied: a device copies it from the cpu tier or to it, where it is there; else the host alone works on it.
    """

    home: str
    tier: Tier
    cells: tuple[CellPlan, ...]
    start: int
    numel: int
    tile_numel: int
    copied: bool = field(default=True, compare=False)  # says nothing of where it is

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.numel

    def on(self, tier: Tier) -> "SectionPlan":
        """The same on another tier, where it is brought."""
        return replace(self, tier=tier, copied=True, cells=tuple(replace(cell, tier=tier) for cell in self.cells))


class Section(ABC):
    """Some kinds of a part of a unit's shard, on one tier."""

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
        """The first element of a tile, and one past its last."""
        first = number * self.tile_numel
        return first, min(first + self.tile_numel, self.numel)

    @abstractmethod
    def settle(self) -> None:
        """Wait on the host until everything that was written has arrived; raise the error of what has not."""

    @abstractmethod
    def arrival(self) -> Event:
        """Of everything that was written until now."""

    @abstractmethod
    def check(self) -> None:
        """Raise the error of a write that has failed by now, without waiting."""

    @abstractmethod
    def at_rest(self) -> bool:
        """Whether everything that was written has arrived."""

    @abstractmethod
    def visit(self, start: int, stop: int, *, modify: bool = False) -> Iterator[tuple[int, int, Views]]:
        """Look at elements `start` to `stop`, piece by piece, on the caller's time. See `Home.visit`."""

    @abstractmethod
    def drop(self) -> None:
        """Let go of the values: they are elsewhere now."""


class MemorySection(Section):
    """Kinds that are tensors: on the device or the cpu tier.

    Arguments:
        bounce: gives what copies between them and the device pass; `None` where the device makes them by itself.
    """

    def __init__(
        self, plan: SectionPlan, tensors: Sequence[Tensor], bounce: Callable[[], Bounce] | None = None
    ) -> None:
        super().__init__(plan)
        self.tensors = tuple(tensors)
        self._bounce = bounce

    def cut(self, start: int, plan: SectionPlan) -> "MemorySection":
        """Some values of its only kind, from `start` on, as a section of their own over the same memory."""
        (memory,) = self.tensors
        return MemorySection(plan, [memory[start : start + plan.numel]], self._bounce)

    @property
    def bounce(self) -> Bounce | None:
        """What copies between the tensors and the device pass; asked for by those alone, since it may be taken then."""
        return None if self._bounce is None else self._bounce()

    def views(self, start: int, stop: int) -> Views:
        """The values of elements `start` to `stop`, in place."""
        return tuple(tensor[cell.part(start, stop)] for cell, tensor in zip(self.plan.cells, self.tensors, strict=True))

    def settle(self) -> None:
        """Whoever writes tensors has an event for it."""

    def arrival(self) -> Event:
        """Whoever writes tensors has an event for it."""
        return DONE

    def check(self) -> None:
        """Whoever writes tensors has an event for it."""

    def at_rest(self) -> bool:
        """Whoever writes tensors has an event for it."""
        return True

    def visit(self, start: int, stop: int, *, modify: bool = False) -> Iterator[tuple[int, int, Views]]:
        """One piece, in place."""
        del modify
        yield start, stop, self.views(start, stop)

    def drop(self) -> None:
        """Let go of the tensors."""
        self.tensors = ()


class Home:
    """Some kinds of one unit, in sections.

    Arguments:
        sections: one after the other, without gaps.
    """

    def __init__(self, sections: Sequence[Section]) -> None:
        self.sections = tuple(sections)
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
        """The section that holds an element."""
        return next(section for section in self.sections if element < section.plan.stop)

    @property
    def in_files(self) -> bool:
        """Whether any of it is in files."""
        return any(section.tier is Tier.NVME and section.plan.cells for section in self.sections)

    @property
    def plans(self) -> tuple[SectionPlan, ...]:
        """Its sections as they are now."""
        return tuple(section.plan for section in self.sections)

    def settle(self) -> None:
        """Wait on the host until everything that was written has arrived; raise the error of what has not."""
        for section in self.sections:
            section.settle()

    def arrival(self) -> Event:
        """Of everything that was written until now."""
        return all_of([section.arrival() for section in self.sections])

    def check(self) -> None:
        """Raise the error of a write that has failed by now, without waiting."""
        for section in self.sections:
            section.check()

    def at_rest(self) -> bool:
        """Whether everything that was written has arrived."""
        return all(section.at_rest() for section in self.sections)

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
        """The elements `start` to `stop` of a home in memory, counted from there; the memory is shared."""
        sections = []
        for section in self.sections:
            assert isinstance(section, MemorySection)
            first, last = max(start, section.plan.start), min(stop, section.plan.stop)
            if first < last:
                views = section.views(first - section.plan.start, last - section.plan.start)
                cells = tuple(replace(c, numel=v.numel()) for c, v in zip(section.plan.cells, views, strict=True))
                plan = replace(section.plan, cells=cells, start=first - start, numel=last - first)
                sections.append(MemorySection(plan, views, section._bounce))
        return Home(sections)


def visit_together(
    homes: Sequence[Home], start: int, stop: int, *, modify: bool = False
) -> Iterator[tuple[int, int, list[Views]]]:
    """`Home.visit` of several homes at once: each piece lies in one piece of all of them."""
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
    """Where the sections of two homes of equal extent overlap, in order."""
    for a in one.sections:
        for b in other.sections:
            start, stop = max(a.plan.start, b.plan.start), min(a.plan.stop, b.plan.stop)
            if start < stop:
                yield Shared(start, stop, a, b)
