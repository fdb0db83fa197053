"""One unit: its cells, and the states of its parameters.

params     where this rank's shard of the parameters rests
replica    the whole unit, of which `params` is a part, where parameters are replicated over ranks
master     what the parameters lack of their fp32 values
optimizer  the rule's states
shadow     what an update writes where it cannot reach `params`: published there afterwards
secondary  a part of the whole unit, as it was gathered last: the ranks of a node have all of it together
full       the flat buffer that compute reads; for a resident unit it is the replica's own memory
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.units.discover import UnitSpec
from penstock.engine.units.gradient import Gradient
from penstock.engine.units.holding import Holding, Residency
from penstock.engine.units.parameter import UnitParameter, count_writes
from penstock.engine.units.reads import ReadWatch
from penstock.engine.units.recorded import Recorded
from penstock.kinds import GRAD, MASTER, OPTIMIZER, PARAM, SECONDARY, SHADOW, Tier
from penstock.layout import FlatLayout, Piece
from penstock.machine.streams import DONE, Event
from penstock.rules.master import read_master, write_master
from penstock.rules.rule import Rule
from penstock.tiers.home import Home, Views, visit_together


class Weights(NamedTuple):
    """The parameters of a range of elements, and what their fp32 values consist of."""

    param: Tensor
    shadow: Tensor | None
    master: Tensor | None

    def read(self) -> Tensor:
        """Compute the fp32 values, in the memory that the master is in."""
        return read_master(self._beside_master(), self.master)

    def write(self, values: Tensor) -> None:
        """Write fp32 values, from anywhere, into the parameter and its master."""
        written = self._beside_master()
        write_master(written, self.master, values.to(written.device))
        # Else forward would read another value than the one that the next update starts from.
        if written is not self.param:
            self.param.copy_(written)

    def _beside_master(self) -> Tensor:
        """Give what the master completes: a shadow, the parameter, or a copy of it where a move has parted the two."""
        if self.shadow is not None:
            return self.shadow
        return self.param if self.master is None else self.param.to(self.master.device)


@dataclass(frozen=True)
class Fields:
    """Which of the optimizer home's kinds is what.

    Attributes:
        states: the number of each state's kind.
        scales: the number of the kind that has a state's scales, where it is stored in 8 bits with one for each block.
    """

    states: tuple[int, ...]
    scales: tuple[int | None, ...]

    def name(self, views: Views) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        """Pick the states of a range of elements out of all values of the home there, and their scales."""
        states = tuple(views[index] for index in self.states)
        return states, tuple(None if index is None else views[index] for index in self.scales)


@dataclass
class Trained:
    """What only a trainable unit has: gradient, master weights, optimizer states, and how they are cut into tiles.

    Homes of what the rule or the precision does not need keep nothing; so do sections of `shadow` whose parameters are
    in reach of the update. `averages` are made later, by kind, and no update writes them.
    """

    gradient: Gradient
    master: Home
    optimizer: Home
    shadow: Home
    fields: Fields
    tiles: Sequence[tuple[Piece, ...]]
    averages: dict[str, Home] = field(default_factory=dict)

    def update_tier(self, number: int) -> Tier:
        """Say where a tile is updated: on the device if its states live there, else on the host."""
        # By where the states are now: they are most of the bytes of an update, and homes may have moved since the last.
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
        parameters: the seam for each of them, in the order of their slots.
        rank: the one whose shard this process has.
        home: where the parameters rest: the whole unit if it is replicated over ranks, else this rank's shard.
        replicated: whether every rank has all of it.
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
        # The part shares the events of the whole: a gather that copies the replica waits for an update of the shard.
        self.params = home.part(*layout.shard_range(rank)) if replicated else home
        self.replica = home if replicated else None
        self.resident = full is None  # compute reads the replica: nothing to gather, nothing to release
        if full is None:  # the home's own memory, in one section: parameters are views of it
            (full,) = home.sections[0].tensors
        self.full = full
        self.trained: Trained | None = None
        self.holding = Holding()
        self.recorded = Recorded()
        self.reads: Sequence[ReadWatch[Unit]] = ()  # told when the parameters are hidden and shown
        # What fills the full buffer, or copies from it, is over. Whoever shows the buffer or takes its memory waits for
        # this first: else compute reads half a gather, or a copy under way writes into memory that is somebody else's.
        self.event: Event = DONE
        self.secondary: Home | None = None
        # Replicated: the other ranks' parts are from before the last update; so is what `secondary` has, or it has
        # nothing. The same on every rank, because it decides whether an all-gather is issued, and among which ranks: a
        # rank that issued one alone would wait for ever.
        self.stale = False
        self.is_rounded = False  # what was last gathered are not the values of the home, but what codes stand for
        # NaN: what reads a parameter past its class shows it, instead of computing with values of another unit.
        self.placeholder = torch.full((), float("nan"), dtype=torch.float32, device=full.device).to(spec.dtype)
        self._nothing = self.placeholder.clone()
        if not self.resident:
            self.holding.become(Residency.RELEASED)

    @property
    def own_range(self) -> tuple[int, int]:
        """The part of the flat buffer that is this rank's."""
        return self.layout.shard_range(self.rank)

    @property
    def shard_numel(self) -> int:
        """How many elements of the flat buffer are this rank's."""
        return self.layout.shard_numel(self.rank)

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
    def rule(self) -> Rule:
        """What updates the parameters, of a unit that is trained."""
        assert self.spec.rule is not None, f"unit '{self.name}' is not trained"
        return self.spec.rule

    @property
    def wants_gradient(self) -> bool:
        """Whether a backward may give it one: some of its parameters may be frozen for a while."""
        return self.trained is not None and any(parameter.requires_grad for parameter in self.spec.parameters)

    @property
    def homes(self) -> dict[str, Home]:
        """Every home, by name."""
        homes = {PARAM: self.replica or self.params}
        if self.secondary is not None:
            homes[SECONDARY] = self.secondary
        if self.trained is not None:
            trained = self.trained
            homes |= {GRAD: trained.gradient.home, MASTER: trained.master, OPTIMIZER: trained.optimizer}
            homes |= {SHADOW: trained.shadow, **trained.averages}
        return homes

    @property
    def updated_homes(self) -> list[Home]:
        """Every home that an update writes."""
        trained = () if self.trained is None else (self.trained.master, self.trained.optimizer, self.trained.shadow)
        return [self.replica or self.params, *trained]

    @property
    def shard_homes(self) -> dict[str, Home]:
        """Every home, of this rank's shard alone."""
        return self.homes | {PARAM: self.params}

    def exchange(self, name: str, home: Home) -> None:
        """Put another home in the place of one, by its name: of any but the parameters.

        The new one has events of its own, and nobody asks for those of the old one from here on. So the copy between
        the two has to follow those, and to be noted in the new one, before this.
        """
        if name == SECONDARY:
            self.secondary = home
            return
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
        """Look at the parameters of a range of this rank's shard, piece by piece. See `Home.visit`.

        It reads and writes on the caller's time and waits for nothing: updates and copies of these homes are over.
        """
        others = [] if self.trained is None else [self.trained.shadow, self.trained.master]
        for first, last, ((param,), *rest) in visit_together([self.params, *others], start, stop, modify=modify):
            # A home that keeps nothing of these elements has no views of them.
            shadow, master = (views[0] if views else None for views in rest) if rest else (None, None)
            yield first, last, Weights(param, shadow, master)

    @property
    def nbytes(self) -> int:
        """Bytes of the full buffer."""
        return self.layout.numel * self.spec.dtype.itemsize

    @property
    def shown(self) -> Tensor:
        """What the parameters are views of where they are no placeholders."""
        kept = self.recorded.shown  # for graphs, whose backward nothing announces
        return kept if kept is not None and self.holding.residency is not Residency.GATHERED else self.full

    def expose(self, buffer: Tensor | None = None) -> None:
        """Make the parameters views of the full buffer, or of another one like it."""
        buffer = self.full if buffer is None else buffer
        # What fills the buffer is over, or compute has waited for it: from here on anybody's kernel may read it.
        for parameter in self.parameters:
            parameter.expose(buffer)
        for watch in self.reads:  # last: a module tells of reads as long as any of its parameters is a placeholder
            watch.show(self)

    def hide(self) -> None:
        """Make the parameters placeholders: their real shape, one element of memory, no reads and writes."""
        # Before the buffer's memory goes: a parameter that were still a view of it would show what others write there.
        for parameter in self.parameters:
            parameter.hide(self.placeholder)
        # Torch lets people write all elements of a placeholder at once. What they wrote would be read for values.
        self.placeholder.copy_(self._nothing)
        for watch in self.reads:
            watch.hide(self)

    def watch_reads(self, watches: Sequence[ReadWatch["Unit"]]) -> None:
        """Tell these when the parameters are hidden and shown."""
        self.reads = watches
        # Parameters were hidden before there was a watch: it would take them for shown, and their first read be NaN.
        if self.holding.residency is not Residency.GATHERED:
            self.hide()

    @property
    def is_whole(self) -> bool:
        """Whether the parameters are all there is of their values: no part of a master is beside them."""
        copies = (self.trained.master, self.trained.shadow) if self.trained else ()
        return not any(plan.cells for home in copies for plan in home.plans)

    def note_versions(self) -> None:
        """Take what the parameters show for what the home and the master say: only later writes are refused."""
        for parameter in self.parameters:
            parameter.note_version()

    def count_writes(self, slots: Iterable[int] | None = None) -> None:
        """Have torch count a write of the parameters in these slots, or of all, so that it refuses graphs from before.

        Updates write the homes, where torch sees nothing. Without the count, a backward through a graph from before a
        step would give gradients of values that are gone, and no error.
        """
        indices = range(len(self.parameters)) if slots is None else slots
        count_writes([self.parameters[index] for index in indices])

    def check_written(self) -> None:
        """Refuse a parameter that somebody wrote where no update starts from.

        Raises:
            EngineError: names the parameter.
        """
        if self.resident and self.is_whole:
            return  # what was written is all there is: the update starts from it
        # Else a gathered copy was written, or a parameter and not its master: the update starts from home and master,
        # and would undo it in silence.
        for parameter in self.parameters:
            parameter.check_written()

    def outdate_parts(self) -> None:
        """Note that this rank's part was written: what it has of others' is from before, until they are gathered."""
        self.stale = self.layout.shards > 1 and (self.replica is not None or self.secondary is not None)

    @property
    def is_dropped(self) -> bool:
        """Whether everything was given back."""
        return self.params is None

    def drop(self) -> None:
        """Let go of every tensor. Work on them is over: nothing here waits for it."""
        self.trained = None
        self.full = torch.empty(0, dtype=self.spec.dtype, device="cpu")
        self.params = self.replica = self.secondary = None  # type: ignore[assignment]

    def contains(self, other: "Unit") -> bool:
        """Whether the other unit's forward runs inside a forward of this one."""
        return self.spec.contains(other.spec)

    def shares_forward(self, other: "Unit") -> bool:
        """Whether a forward of one runs inside one of the other, or is the same (frozen and trained parameters)."""
        return self.spec.spans(other.spec) or other.contains(self)

    def parts(self) -> list[Piece]:
        """List the parts of slots that are in this rank's shard, counted from its start."""
        first = self.own_range[0]
        overlaps = ((index, self.layout.overlap(slot, self.rank)) for index, slot in enumerate(self.layout.slots))
        return [Piece(index, found[0] - first, found[1] - first) for index, found in overlaps if found]

    def pieces(self, number: int, count: int) -> Iterator[Piece]:
        """Yield the pieces of slots that lie in `count` tiles from tile `number` on, each parameter's in one piece."""
        first = number * self.params.sections[0].tile_numel
        last = first + count * self.params.sections[0].tile_numel
        # Not those of each tile in turn: a parameter that lies in several tiles would be cut into as many runs.
        for slot, start, stop in self.parts():
            if max(start, first) < min(stop, last):
                yield Piece(slot, max(start, first), min(stop, last))
