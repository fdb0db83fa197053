"""One unit: its cells, and the states of its parameters.

params     where this rank's shard of the parameters rests
replica    the whole unit beside it, of which `params` is a part, where parameters are replicated over ranks
shadow     what an update writes where it cannot reach `params`: published there afterwards
full       the flat buffer that compute reads; for a resident unit it is the replica itself
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.discover import UnitSpec
from penstock.errors import EngineError
from penstock.kinds import Tier
from penstock.layout import FlatLayout, Piece
from penstock.machine.streams import DONE, Event
from penstock.tiers.home import Home, MemoryHome, Views


class Part(NamedTuple):
    """A rank's part of a slot: elements `start` to `stop`, counted from the start of the shard."""

    slot: int
    start: int
    stop: int


class Residency(Enum):
    """What device memory a unit's parameters hold beside their home.

    RELEASED: none; the parameters read as NaN (a resident unit keeps its values, which may be out of date).
    GATHERING: the full buffer is leased and being filled.
    GATHERED: the full buffer holds the values and the parameters are views of it.
    """

    RELEASED = "released"
    GATHERING = "gathering"
    GATHERED = "gathered"


@dataclass
class Gradient:
    """The gradient of a unit since the last `zero_grad`.

    Attributes:
        home: this rank's shard of the reduced gradient, summed over ranks and micro-batches.
        present: slots that got a gradient on this rank.
        squared_norms: squared norm of this rank's part of each slot, of the values that `home` has after `ready`.
        ready: `home` is complete.
        held: whether `home` holds earlier micro-batches, which the next one is added to.
        pending: the flat gradient of the backward under way, not reduced yet (reduce dtype, whole unit).
        arrived: slots that `pending` holds.
    """

    home: Home
    present: set[int] = field(default_factory=set)
    squared_norms: dict[int, float | Tensor] = field(default_factory=dict)
    ready: Event = DONE
    held: bool = False
    pending: Tensor | None = None
    arrived: set[int] = field(default_factory=set)

    @property
    def values(self) -> Tensor:
        """The gradient, where its home is memory."""
        assert isinstance(self.home, MemoryHome)
        return self.home.tensors[0]


class Kinds(NamedTuple):
    """What the optimizer keeps of a range of elements, by name."""

    master: Tensor | None
    shadow: Tensor | None
    states: tuple[Tensor, ...]
    scales: tuple[Tensor | None, ...]  # of 8-bit states, one per block


@dataclass(frozen=True)
class Fields:
    """Which of the optimizer home's kinds is what."""

    master: int | None
    shadow: int | None
    states: tuple[int, ...]
    scales: tuple[int | None, ...]

    def name(self, views: Views) -> Kinds:
        """Name the values of a range of elements."""
        return Kinds(
            None if self.master is None else views[self.master],
            None if self.shadow is None else views[self.shadow],
            tuple(views[index] for index in self.states),
            tuple(None if index is None else views[index] for index in self.scales),
        )


@dataclass
class Trained:
    """What only a trainable unit has: gradient, master weights, optimizer states, and how they are cut into tiles.

    Attributes:
        optimizer: home of everything that the optimizer keeps; `None` where that is nothing.
        optimizer_tier: where the update runs beside.
        updated: the last update is over.
    """

    gradient: Gradient
    optimizer: Home | None
    fields: Fields
    optimizer_tier: Tier
    tiles: Sequence[tuple[Piece, ...]]
    updated: Event = DONE


class Unit:
    """Parameters that are gathered, computed, reduced, updated and moved together."""

    def __init__(
        self,
        spec: UnitSpec,
        index: int,
        layout: FlatLayout,
        *,
        rank: int,
        params: Home,
        replica: Tensor | None,
        full: Tensor,
        device: torch.device,
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self.index = index
        self.layout = layout
        self.rank = rank
        self.params = params
        self.replica = replica
        self.full = full
        self.trained: Trained | None = None
        self.residency = Residency.RELEASED
        self.event: Event = DONE  # while GATHERING: full is filled
        self.published: Event = DONE  # the last update has reached the home
        self.stale = False  # replicated: the other ranks' parts are from before the last update
        self.leased = False  # the full buffer has memory of its own
        self.users = 0  # forwards of its anchors under way
        self.holds = 0  # `gathered` blocks that it is in
        self._versions: list[int] = []  # of the parameters: torch counts every write of theirs, and none of ours
        self._placeholder = torch.full((), float("nan"), device=device).to(spec.dtype)

    @property
    def resident(self) -> bool:
        """Whether compute reads the replica: nothing to gather, nothing to release."""
        return self.full is self.replica

    @property
    def own_range(self) -> tuple[int, int]:
        """The part of the flat buffer that is this rank's."""
        return self.layout.shard_range(self.rank)

    @property
    def homes(self) -> list[Home]:
        """Every home."""
        if self.trained is None:
            return [self.params]
        optimizer = [] if self.trained.optimizer is None else [self.trained.optimizer]
        return [self.params, self.trained.gradient.home, *optimizer]

    def visit(self, start: int, stop: int, *, modify: bool = False) -> Iterator[tuple[int, int, Tensor, Kinds]]:
        """Look at a range of this rank's shard, piece by piece: parameters, and what the optimizer keeps of them.

        See `Home.visit`.
        """
        trained = self.trained
        for first, last, (param,) in self.params.visit(start, stop, modify=modify):
            if trained is None or trained.optimizer is None:
                yield first, last, param, Kinds(None, None, (), ())
                continue
            for begin, end, views in trained.optimizer.visit(first, last, modify=modify):
                yield begin, end, param[begin - first : end - first], trained.fields.name(views)

    @property
    def nbytes(self) -> int:
        """Bytes of the full buffer."""
        return self.layout.numel * self.spec.dtype.itemsize

    def expose(self) -> None:
        """Make the parameters views of the full buffer."""
        for slot, parameter in zip(self.layout.slots, self.spec.parameters, strict=True):
            parameter.data = self.full[slot.start : slot.stop].view(slot.shape)

    def hide(self) -> None:
        """Make the parameters placeholders: their real shape, NaN when read, one element of memory, no writes."""
        for slot, parameter in zip(self.layout.slots, self.spec.parameters, strict=True):
            parameter.data = self._placeholder.expand(slot.shape)

    def note_versions(self) -> None:
        """What the parameters show is what the home and the master say."""
        self._versions = [parameter._version for parameter in self.spec.parameters]

    def note_version(self, index: int) -> None:
        """The same for one parameter."""
        self._versions[index] = self.spec.parameters[index]._version

    def check_written(self) -> None:
        """Refuse a parameter that somebody wrote where no update starts from: in a gathered copy, or half its master.

        Raises:
            EngineError: names the parameter.
        """
        fields = self.trained.fields if self.trained else None
        if self.resident and (fields is None or fields.master is None is fields.shadow):
            return  # what was written is all there is
        for name, parameter, version in zip(self.spec.names, self.spec.parameters, self._versions, strict=True):
            if parameter._version != version:
                raise EngineError(
                    f"Parameter '{name}' was written outside gathered(modify=True), and its master weights were not. "
                    "Set it again with set_full_param(), or write it inside."
                )

    def drop(self) -> None:
        """Let go of every tensor."""
        self.trained = None
        self.full = torch.empty(0)
        self.params = self.replica = None  # type: ignore[assignment]

    def contains(self, other: "Unit") -> bool:
        """Whether the other unit's forward runs inside a forward of this one."""
        return self.spec.contains(other.spec)

    def shares_forward(self, other: "Unit") -> bool:
        """Whether a forward of one runs inside one of the other, or is the same (frozen and trained parameters)."""
        return self.spec.spans(other.spec) or other.contains(self)

    def parts(self) -> list[Part]:
        """The parts of slots that this rank has."""
        first = self.own_range[0]
        overlaps = ((index, self.layout.overlap(slot, self.rank)) for index, slot in enumerate(self.layout.slots))
        return [Part(index, found[0] - first, found[1] - first) for index, found in overlaps if found]
