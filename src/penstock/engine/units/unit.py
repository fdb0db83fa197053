"""One unit: its cells, and the states of its parameters.

params     where this rank's shard of the parameters rests
replica    the whole unit, of which `params` is a part, where parameters are replicated over ranks
master     what the parameters lack of their fp32 values
optimizer  the rule's states
shadow     what an update writes where it cannot reach `params`: published there afterwards
full       the flat buffer that compute reads; for a resident unit it is the replica's own memory
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.units.discover import UnitSpec
from penstock.engine.units.holding import Holding, Residency
from penstock.engine.units.parameter import UnitParameter, count_writes
from penstock.engine.units.reads import ReadWatch
from penstock.engine.units.recorded import Recorded
from penstock.kinds import GRAD, MASTER, OPTIMIZER, PARAM, SHADOW, Tier
from penstock.layout import FlatLayout, Piece
from penstock.machine.streams import DONE, Event, Streams
from penstock.rules.master import read_master, write_master
from penstock.tiers.copies import in_reach
from penstock.tiers.home import Home, Views, visit_together


@dataclass
class Gradient:
    """The gradient of a unit since the last `zero_grad`.

    Attributes:
        home: this rank's shard of the reduced gradient, summed over ranks and micro-batches.
        present: slots that got a gradient on this rank.
        squared_norms: squared norm of this rank's part of each slot, of the values that `home` has once it is written.
        unmeasured: slots whose norm is yet to be taken, of what `home` has then (`engine/units/norms.py`).
        held: slots whose values `home` holds, which the next micro-batch is added to. Elsewhere in it is what a step
            before has left.
        pending: the flat gradient of the backward under way, not reduced yet (reduce dtype, whole unit).
        rests: `pending` is in host memory, beside the tiers.
        arrived: slots that `pending` holds.
        due: other ranks may have one to be reduced: this rank takes part, with zeros where it has none.
        flaws: once `home` is written, on how many ranks it is not finite; `None` where the norms on the host say it,
            and where nobody asks.
        flawed: whether a micro-batch was not finite in this rank's shard, where the home measures their sum too late
            for `flaws`.
    """

    home: Home
    present: set[int] = field(default_factory=set)
    squared_norms: dict[int, float | Tensor] = field(default_factory=dict)
    unmeasured: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)
    pending: Tensor | None = None
    rests: bool = False
    arrived: set[int] = field(default_factory=set)
    due: bool = False
    flaws: Tensor | None = None
    flawed: Tensor | None = None

    def measure(self, parts: Sequence[Piece], squared_norms: Sequence[float | Tensor]) -> None:
        """Note the squared norms of these parts."""
        for (index, _, _), norm in zip(parts, squared_norms, strict=True):
            self.squared_norms[index] = norm
            self.unmeasured.discard(index)

    def is_finite(self) -> bool:
        """Whether its norm is, over all ranks. The home is written, and the host was told."""
        if self.flaws is not None:
            return float(self.flaws) == 0
        return all(math.isfinite(float(norm)) for norm in self.squared_norms.values())


class Weights(NamedTuple):
    """The parameters of a range of elements, and what their fp32 values consist of."""

    param: Tensor
    shadow: Tensor | None
    master: Tensor | None

    def read(self) -> Tensor:
        """The fp32 values, where the master is."""
        return read_master(self._beside_master(), self.master)

    def write(self, values: Tensor) -> None:
        """Write fp32 values, from anywhere, into the parameter and its master."""
        written = self._beside_master()
        write_master(written, self.master, values.to(written.device))
        if written is not self.param:
            self.param.copy_(written)

    def _beside_master(self) -> Tensor:
        """What the master completes: a shadow, the parameter, or a copy of it where a move has parted the two."""
        if self.shadow is not None:
            return self.shadow
        return self.param if self.master is None else self.param.to(self.master.device)


@dataclass(frozen=True)
class Fields:
    """Which of the optimizer home's kinds is what."""

    states: tuple[int, ...]
    scales: tuple[int | None, ...]  # of 8-bit states, one value per block

    def name(self, views: Views) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        """The states of a range of elements, and their scales."""
        states = tuple(views[index] for index in self.states)
        return states, tuple(None if index is None else views[index] for index in self.scales)


@dataclass
class Trained:
    """What only a trainable unit has: gradient, master weights, optimizer states, and how they are cut into tiles.

    Homes of what the rule or the precision does not need keep nothing; so do sections of `shadow` whose parameters are
    in reach of the update.
    """

    gradient: Gradient
    master: Home
    optimizer: Home
    shadow: Home
    fields: Fields
    tiles: Sequence[tuple[Piece, ...]]

    def update_tier(self, number: int) -> Tier:
        """Where a tile is updated: on the device if its states live there, else on the host."""
        section, _ = self.optimizer.tile(number)
        return Tier.DEVICE if section.tier is Tier.DEVICE else Tier.CPU

    def is_shadowed(self, number: int) -> bool:
        """Whether the update of a tile writes a shadow of its parameters."""
        section, _ = self.shadow.tile(number)
        return bool(section.plan.cells)


class Unit:
    """Parameters that are gathered, computed, reduced, updated and moved together.

    Arguments:
        spec: what belongs to it.
        index: its number among all units.
        layout: where each parameter is in the flat buffer.
        parameters: each of them, in the order of their slots.
        rank: whose shard this process has.
        home: where the parameters rest: the whole unit if it is replicated over ranks, else this rank's shard.
        replicated: every rank has all of it.
        full: what compute reads; `None` where it reads the home itself.
    """

    def __init__(
        self,
        spec: UnitSpec,
        index: int,
        layout: FlatLayout,
        parameters: Sequence[UnitParameter],
        *,
        rank: int,
        home: Home,
        replicated: bool,
        full: Tensor | None,
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self.index = index
        self.layout = layout
        self.parameters = parameters
        self.rank = rank
        self.params = home.part(*layout.shard_range(rank)) if replicated else home
        self.replica = home if replicated else None
        self.resident = full is None  # compute reads the replica: nothing to gather, nothing to release
        if full is None:
            (full,) = home.sections[0].tensors
        self.full = full
        self.trained: Trained | None = None
        self.holding = Holding()
        self.recorded = Recorded()
        self.reads: Sequence[ReadWatch[Unit]] = ()  # told when the parameters are hidden and shown
        self.event: Event = DONE  # what fills the full buffer, or copies from it, is over
        self.stale = False  # replicated: the other ranks' parts are from before the last update
        self.placeholder = torch.full((), float("nan"), dtype=torch.float32, device=full.device).to(spec.dtype)
        self._nothing = self.placeholder.clone()
        if not self.resident:
            self.holding.become(Residency.RELEASED)

    @property
    def own_range(self) -> tuple[int, int]:
        """The part of the flat buffer that is this rank's."""
        return self.layout.shard_range(self.rank)

    @property
    def is_released_after_use(self) -> bool:
        """Whether its parameters are there only while somebody needs them."""
        return not (self.resident or self.spec.persistent)

    @property
    def leased(self) -> bool:
        """Whether the full buffer has memory of its own."""
        return not self.resident and self.holding.residency is not Residency.RELEASED

    @property
    def label(self) -> str:
        """What messages about ranks call it."""
        return f"unit '{self.name}'" + (f" (run by {self.spec.run_by})" if self.spec.run_by else "")

    @property
    def wants_gradient(self) -> bool:
        """Whether a backward may give it one: some of its parameters may be frozen for a while."""
        return self.trained is not None and any(parameter.requires_grad for parameter in self.spec.parameters)

    @property
    def homes(self) -> dict[str, Home]:
        """Every home, by name."""
        homes = {PARAM: self.replica or self.params}
        if self.trained is not None:
            trained = self.trained
            homes |= {GRAD: trained.gradient.home, MASTER: trained.master, OPTIMIZER: trained.optimizer}
            homes[SHADOW] = trained.shadow
        return homes

    @property
    def updated_homes(self) -> list[Home]:
        """Every home that an update writes."""
        return [home for name, home in self.homes.items() if name != GRAD]

    @property
    def shard_homes(self) -> dict[str, Home]:
        """Every home, of this rank's shard alone."""
        return self.homes | {PARAM: self.params}

    def exchange(self, name: str, home: Home) -> None:
        """What the home of a name is from now on; not of the parameters."""
        trained = self.trained
        assert trained is not None
        if name == GRAD:
            trained.gradient.home = home
        elif name == MASTER:
            trained.master = home
        elif name == OPTIMIZER:
            trained.optimizer = home
        else:
            assert name == SHADOW
            trained.shadow = home

    def visit(self, start: int, stop: int, *, modify: bool = False) -> Iterator[tuple[int, int, Weights]]:
        """Look at the parameters of a range of this rank's shard, piece by piece. See `Home.visit`."""
        others = [] if self.trained is None else [self.trained.shadow, self.trained.master]
        for first, last, ((param,), *rest) in visit_together([self.params, *others], start, stop, modify=modify):
            shadow, master = (views[0] if views else None for views in rest) if rest else (None, None)
            yield first, last, Weights(param, shadow, master)

    @property
    def nbytes(self) -> int:
        """Bytes of the full buffer."""
        return self.layout.numel * self.spec.dtype.itemsize

    @property
    def shown(self) -> Tensor:
        """What the parameters are views of where they are no placeholders."""
        kept = self.recorded.shown
        return kept if kept is not None and self.holding.residency is not Residency.GATHERED else self.full

    def expose(self, buffer: Tensor | None = None) -> None:
        """Make the parameters views of the full buffer, or of another one like it."""
        buffer = self.full if buffer is None else buffer
        for parameter in self.parameters:
            parameter.expose(buffer)
        for watch in self.reads:
            watch.show(self)

    def hide(self) -> None:
        """Make the parameters placeholders: their real shape, NaN when read, one element of memory, no writes."""
        for parameter in self.parameters:
            parameter.hide(self.placeholder)
        self.placeholder.copy_(self._nothing)  # torch lets people write all elements of it at once
        for watch in self.reads:
            watch.hide(self)

    def watch_reads(self, watches: Sequence[ReadWatch["Unit"]]) -> None:
        """Tell these when the parameters are hidden and shown."""
        self.reads = watches
        if self.holding.residency is not Residency.GATHERED:
            self.hide()

    @property
    def is_whole(self) -> bool:
        """Whether the parameters are all there is of their values: no part of a master is beside them."""
        copies = (self.trained.master, self.trained.shadow) if self.trained else ()
        return not any(plan.cells for home in copies for plan in home.plans)

    def note_versions(self) -> None:
        """Take what the parameters show for what the home and the master say."""
        for parameter in self.parameters:
            parameter.note_version()

    def count_writes(self, slots: Iterable[int] | None = None) -> None:
        """The values of these parameters change, or of all: a graph from before cannot be used any more."""
        indices = range(len(self.parameters)) if slots is None else slots
        count_writes([self.parameters[index] for index in indices])

    def check_written(self) -> None:
        """Refuse a parameter that somebody wrote where no update starts from.

        Raises:
            EngineError: names the parameter.
        """
        if self.resident and self.is_whole:
            return  # what was written is all there is
        for parameter in self.parameters:
            parameter.check_written()

    @property
    def is_dropped(self) -> bool:
        """Whether everything was given back."""
        return self.params is None

    def drop(self) -> None:
        """Let go of every tensor."""
        self.trained = None
        self.full = torch.empty(0, dtype=self.spec.dtype, device="cpu")
        self.params = self.replica = None  # type: ignore[assignment]

    def contains(self, other: "Unit") -> bool:
        """Whether the other unit's forward runs inside a forward of this one."""
        return self.spec.contains(other.spec)

    def shares_forward(self, other: "Unit") -> bool:
        """Whether a forward of one runs inside one of the other, or is the same (frozen and trained parameters)."""
        return self.spec.spans(other.spec) or other.contains(self)

    def parts(self) -> list[Piece]:
        """The parts of slots that this rank has."""
        first = self.own_range[0]
        overlaps = ((index, self.layout.overlap(slot, self.rank)) for index, slot in enumerate(self.layout.slots))
        return [Piece(index, found[0] - first, found[1] - first) for index, found in overlaps if found]

    def pieces(self, number: int, count: int) -> Iterator[Piece]:
        """The pieces of a stretch of tiles, each parameter's in one."""
        first = number * self.params.sections[0].tile_numel
        last = first + count * self.params.sections[0].tile_numel
        for slot, start, stop in self.parts():
            if max(start, first) < min(stop, last):
                yield Piece(slot, max(start, first), min(stop, last))


def reached(home: Home, streams: Streams) -> Tensor | None:
    """The values of a home of one kind, where compute reaches all of them in one piece."""
    section, *others = home.sections
    if others or not in_reach(section.tier, Tier.DEVICE, streams):
        return None
    (values,) = section.tensors
    return values
