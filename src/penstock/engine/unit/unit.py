"""A unit: its storage, its gathered buffer, who holds it, and which parameters belong to it."""

import math
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import chain
from operator import attrgetter, is_, methodcaller
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from penstock.config import GRAD, MASTER, OPTIMIZER, PARAM, SECONDARY, SHADOW, Tier
from penstock.engine.unit.dtensor import is_divided, own_elements
from penstock.engine.unit.parameter import ReadWatch, UnitParameter
from penstock.engine.unit.partition import UnitSpec
from penstock.errors import EngineError
from penstock.layout import FlatLayout, SlotPiece
from penstock.rules.formats import read_master, write_master
from penstock.rules.rule import Rule
from penstock.runtime.modes import engine_entry
from penstock.runtime.streams import DONE, Event
from penstock.tiers.storage import Storage, Views, visit_together

# ----------------------------------------------------------------------------------------------------------------------
# The gradient of a unit: where it rests, of which parameters it is, and how large.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass
class UnitGradient:
    """The gradient of a unit since the last `zero_grad`.

    Attributes:
        home: this rank's shard of the reduced gradient, summed over ranks and micro-batches.
        present: slots that got a gradient on this rank.
        squared_norms: squared norm of this rank's part of each slot, of the values that `home` has once it is written.
        unmeasured: slots whose norm is yet to be taken, of what `home` has then (`engine/step/step.py`).
        held: slots whose values `home` holds, which the next micro-batch is added to. Elsewhere in it is what a step
            before has left.
        pending: the flat gradient of the backward under way, not reduced yet (reduce dtype, whole unit).
        rests: whether `pending` waits in host memory, which no tier counts, for the next micro-batch.
        arrived: slots that `pending` holds, with the squared norm of what it holds; `None` where it was not taken.
        due: whether other ranks may have one to be reduced: this rank takes part, with zeros where it has none.
        flaws: once `home` is written, on how many ranks it is not finite; `None` where the norms on the host say it,
            and where nobody asks.
        flawed: whether a micro-batch was not finite in this rank's shard, where the home measures their sum too late
            for `flaws`.
    """

    home: Storage
    present: set[int] = field(default_factory=set)
    squared_norms: dict[int, float | Tensor] = field(default_factory=dict)
    unmeasured: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)
    pending: Tensor | None = None
    rests: bool = False
    arrived: dict[int, float | Tensor | None] = field(default_factory=dict)
    due: bool = False
    flaws: Tensor | None = None
    flawed: Tensor | None = None

    def measure(self, parts: Sequence[SlotPiece], squared_norms: Sequence[float | Tensor]) -> None:
        """Note the squared norms of these parts, which are then no longer to be taken."""
        for (index, _, _), norm in zip(parts, squared_norms, strict=True):
            self.squared_norms[index] = norm
            self.unmeasured.discard(index)

    def is_finite(self) -> bool:
        """Whether its norm is, over all ranks. The home is written, and the host was told."""
        # Read without a wait: the copy that told the host is the home's last write, which the caller has waited for.
        if self.flaws is not None:
            return float(self.flaws) == 0
        return all(math.isfinite(float(norm)) for norm in self.squared_norms.values())


# ----------------------------------------------------------------------------------------------------------------------
# The state of a gathered unit, and the one count of who holds it.
#
#     RELEASED --> GATHERING --> GATHERED --> RELEASED
#     OUTDATED --^      \____________________> OUTDATED --> RELEASED
#
# A unit is released when the last holder lets go of it, and by nobody else. Whoever uses a unit says here what
# happened; nobody else writes these fields.
# ----------------------------------------------------------------------------------------------------------------------


class UnitState(Enum):
    """What device memory a unit's parameters hold beside their home.

    RELEASED: none; the parameters refuse to be read.
    OUTDATED: the full buffer has memory, and its values do not count: those of a resident or persistent unit from
        before an update, or NaN in a buffer that somebody else still has views of.
    GATHERING: the full buffer is being filled.
    GATHERED: the full buffer holds the values and the parameters are views of it.
    """

    RELEASED = "released"
    OUTDATED = "outdated"
    GATHERING = "gathering"
    GATHERED = "gathered"


class Holder(Enum):
    """Who needs a unit's parameters. The values are the names of the counts.

    FORWARD: a forward of one of its anchors is under way; forwards nest.
    BACKWARD: its backward is under way.
    UNANNOUNCED: a backward may need it that nothing tells of; until that backward is over.
    BLOCK: a `gathered` block; blocks nest.
    """

    FORWARD = "forwards"
    BACKWARD = "backwards"
    UNANNOUNCED = "unannounced"
    BLOCK = "blocks"


_FOLLOWS = {
    UnitState.RELEASED: {UnitState.GATHERING, UnitState.OUTDATED},  # outdated: memory that is lent to become a home
    UnitState.OUTDATED: {UnitState.GATHERING, UnitState.RELEASED, UnitState.OUTDATED},
    UnitState.GATHERING: {UnitState.GATHERED, UnitState.OUTDATED, UnitState.RELEASED},
    UnitState.GATHERED: {UnitState.OUTDATED, UnitState.RELEASED},
}


class UnitHolders:
    """Who holds one unit, and what its full buffer has.

    Attributes:
        forwards, backwards, unannounced, blocks: how many of each hold it.
        used: whether its parameters were ever there for somebody to compute with.
        empties_views: whether the buffer's memory goes when the unit is released, whoever has views of it. Autograd may
            have saved some where nobody saw that, or what filled the buffer has failed.
        shown: whether people have seen the buffer since it was filled: views that they may have kept are to stay good.
    """

    def __init__(self) -> None:
        self.residency = UnitState.OUTDATED
        self.forwards = self.backwards = self.unannounced = self.blocks = 0
        self.used = False
        self.empties_views = False
        self.shown = False

    def become(self, residency: UnitState) -> None:
        """Go on to another state, one that may follow."""
        # A step that may not follow means that a unit is released under a reader, or gathered twice into one buffer.
        assert residency in _FOLLOWS[self.residency], f"{self.residency.name} -> {residency.name}"
        self.residency = residency

    def take(self, holder: Holder) -> None:
        """Count one more holder of this kind: the unit stays gathered until it lets go."""
        name = holder._value_  # `value` is a property, which takes longer than all the rest
        setattr(self, name, getattr(self, name) + 1)
        self.used = True
        self.shown = self.shown or holder is Holder.BLOCK

    def drop(self, holder: Holder) -> None:
        """Count one holder of this kind less. Whoever was the last of all has the unit released after this."""
        name = holder._value_
        left = getattr(self, name) - 1
        assert left >= 0, f"{holder.name} does not hold the unit"
        setattr(self, name, left)

    def drop_all(self, *holders: Holder) -> None:
        """Forget every holder of these kinds: none of them needs the unit any longer."""
        for holder in holders:
            setattr(self, holder._value_, 0)

    def leave_blocks(self, count: int) -> None:
        """Set how many `gathered` blocks hold the unit from now on."""
        # The number that is left, and not one less: a block that an interrupt stopped in here may say it again.
        self.blocks = count

    def empty_views(self) -> None:
        """Have the buffer's memory go with the next release: graphs may have views of it, or its fill has failed."""
        self.empties_views = True

    def forget_unseen_saves(self) -> None:
        """Note that backward is over, and with it the graphs that may have had views of the buffer."""
        self.empties_views = False

    def hand_to_caller(self) -> None:
        """Note that a module has returned parameters: views of the buffer are the caller's, and have to stay good."""
        self.shown = True

    def note_emptied(self) -> None:
        """Note that the buffer was emptied: nobody has seen the values that come next."""
        self.shown = False

    @property
    def is_held(self) -> bool:
        """Whether anybody needs it."""
        return bool(self.forwards or self.backwards or self.unannounced or self.blocks)


# ----------------------------------------------------------------------------------------------------------------------
# Graphs of recorded backwards (`create_graph=True`): what they need stays until they are gone.
#
# A recorded backward saves views of the parameters, and the parameters themselves (a norm's weight). Nothing announces
# the backward of its graph. Views keep the memory that they were made of; a parameter shows what it shows when that
# backward comes. So the buffer that a backward was recorded with is left to its graph, and while the graph lives the
# unit's parameters show that buffer instead of placeholders.
# ----------------------------------------------------------------------------------------------------------------------


_KEY = "penstock"  # in the metadata of a graph's node


class _GraphToken:
    """Lives as long as the graph whose node has it in its metadata."""


class RecordedGraphs:
    """The recorded graphs of one unit.

    Attributes:
        shown: the buffer that released parameters show while a graph lives.
        is_new: a backward was recorded with the buffer that is gathered now.
    """

    def __init__(self) -> None:
        self.shown: Tensor | None = None
        self.is_new = False
        # Weakly: kept here, the token would stay, and the graph seem to live for ever.
        self._graphs: weakref.WeakSet[_GraphToken] = weakref.WeakSet()
        self._unmarked: list[_GraphToken] = []

    def mark(self, grad: Tensor) -> Tensor:
        """Note that a backward which is being recorded comes to the unit. Return the gradient it is to go on with.

        All that is recorded of the unit follows from the gradient, so a node there lives as long as the graph does.
        """
        graph = _GraphToken()
        self._graphs.add(graph)
        self.is_new = True
        if is_functorch_wrapped_tensor(grad):  # nobody can tell when its graph is gone
            self._unmarked.append(graph)
            return grad
        if not grad.requires_grad:
            grad = grad.detach().requires_grad_()
        marked = grad.view_as(grad)
        assert marked.grad_fn is not None
        metadata: Any = marked.grad_fn.metadata
        metadata[_KEY] = graph
        return marked

    @property
    def is_alive(self) -> bool:
        """Whether a graph is left that may need the parameters."""
        return bool(self._graphs)

    def keep(self, buffer: Tensor) -> None:
        """Leave a buffer to the graphs: released parameters show it from now on."""
        self.shown, self.is_new = buffer, False

    def end_unmarked(self) -> None:
        """Take graphs of which nobody can tell whether they live for gone: a backward came that was not recorded."""
        self._unmarked.clear()

    def outdate(self) -> None:
        """Forget every graph, because the values have changed: torch refuses the backward of these graphs."""
        self._graphs.clear()
        self._unmarked.clear()

    def forget(self) -> None:
        """Let go of the buffer that was left to graphs: none of them lives, and parameters show it no longer."""
        self.shown, self.is_new = None, False


def views_elsewhere(buffer: Tensor) -> bool:
    """Whether anything but this tensor has a hold on its memory: views that autograd or a user keeps, arrays."""
    storage = buffer.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count > 2 or not storage.resizable()  # the tensor, and `storage`


# ----------------------------------------------------------------------------------------------------------------------
# One unit: its cells, and the states of its parameters.
#
# params     where this rank's shard of the parameters rests
# replica    the whole unit, of which `params` is a part, where parameters are replicated over ranks
# master     what the parameters lack of their fp32 values
# optimizer  the rule's states
# shadow     what an update writes where it cannot reach `params`: published there afterwards
# secondary  a part of the whole unit, as it was gathered last: the ranks of a node have all of it together
# full       the flat buffer that compute reads; for a resident unit it is the replica's own memory
# ----------------------------------------------------------------------------------------------------------------------


class WeightRange(NamedTuple):
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
class StateFields:
    """Which of the optimizer home's kinds is what.

    Attributes:
        states: the number of each state's kind.
        scales: the number of the kind that has a state's scales, where it is stored in 8 bits with one for each block.
    """

    states: tuple[int, ...]
    scales: tuple[int | None, ...]

    def name(self, views: Views) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        """Pick the states of a range of elements out of all values of the home there, and their scales."""
        states = tuple(map(views.__getitem__, self.states))
        return states, tuple(None if index is None else views[index] for index in self.scales)


@dataclass
class TrainingState:
    """What only a trainable unit has: gradient, master weights, optimizer states, and how they are cut into tiles.

    Homes of what the rule or the precision does not need keep nothing; so do sections of `shadow` whose parameters are
    in reach of the update. `averages` are made later, by kind, and no update writes them.
    """

    gradient: UnitGradient
    master: Storage
    optimizer: Storage
    shadow: Storage
    fields: StateFields
    tiles: Sequence[tuple[SlotPiece, ...]]
    averages: dict[str, Storage] = field(default_factory=dict)

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

    Attributes:
        nbytes: bytes of the full buffer.
        own_range, shard_numel: the range of its elements that is this rank's, and how many these are.
    """

    def __init__(
        self,
        spec: UnitSpec,
        index: int,
        layout: FlatLayout,
        parameters: Sequence[UnitParameter],
        *,
        rank: int,
        home: Storage,
        replicated: bool,
        full: Tensor | None,
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self.index = index
        self.layout = layout
        self.parameters = parameters
        self.rank = rank
        self.nbytes = layout.numel * spec.dtype.itemsize
        self.own_range = layout.shard_range(rank)
        self.shard_numel = layout.shard_numel(rank)
        # The part shares the events of the whole: a gather that copies the replica waits for an update of the shard.
        self.params = home.part(*self.own_range) if replicated else home
        self.replica = home if replicated else None
        self.resident = full is None  # compute reads the replica: nothing to gather, nothing to release
        if full is None:  # the home's own memory, in one section: parameters are views of it
            (full,) = home.sections[0].tensors
        self.full = full
        self.trained: TrainingState | None = None
        self.holding = UnitHolders()
        self.recorded = RecordedGraphs()
        self.reads: list[ReadWatch] = []  # of the modules that own the parameters
        # What fills the full buffer, or copies from it, is over. Whoever shows the buffer or takes its memory waits for
        # this first: else compute reads half a gather, or a copy under way writes into memory that is somebody else's.
        self.event: Event = DONE
        self.secondary: Storage | None = None
        # Replicated: the other ranks' parts are from before the last update; so is what `secondary` has, or it has
        # nothing. The same on every rank, because it decides whether an all-gather is issued, and among which ranks: a
        # rank that issued one alone would wait for ever.
        self.stale = False
        self.is_rounded = False  # what was last gathered are not the values of the home, but what codes stand for
        # NaN: what reads a parameter past its class shows it, instead of computing with values of another unit.
        self.placeholder = torch.full((), float("nan"), dtype=torch.float32, device=full.device).to(spec.dtype)
        self._nothing = self.placeholder.clone()
        if not self.resident:
            self.holding.become(UnitState.RELEASED)

    @property
    def is_released_after_use(self) -> bool:
        """Whether its parameters are there only while somebody needs them."""
        return not (self.resident or self.spec.persistent)

    @property
    def leased(self) -> bool:
        """Whether the full buffer has memory of its own."""
        return not self.resident and self.holding.residency is not UnitState.RELEASED

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
    def homes(self) -> dict[str, Storage]:
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
    def updated_homes(self) -> list[Storage]:
        """Every home that an update writes."""
        trained = () if self.trained is None else (self.trained.master, self.trained.optimizer, self.trained.shadow)
        return [self.replica or self.params, *trained]

    @property
    def shard_homes(self) -> dict[str, Storage]:
        """Every home, of this rank's shard alone."""
        return self.homes | {PARAM: self.params}

    def exchange(self, name: str, home: Storage) -> None:
        """Put another home in the place of one, by its name: of any but the parameters.

        The new one has events of its own, and nobody asks for those of the old one from here on. So the copy between
        the two has to follow those, and to be noted in the new one, before this.
        """
        if name == SECONDARY:
            self.secondary = home
        elif name == GRAD:
            assert self.trained is not None
            self.trained.gradient.home = home
        else:
            assert name in (MASTER, OPTIMIZER, SHADOW)  # the fields have the names of their homes
            setattr(self.trained, name, home)

    def visit(self, start: int, stop: int, *, modify: bool = False) -> Iterator[tuple[int, int, WeightRange]]:
        """Look at the parameters of a range of this rank's shard, piece by piece. See `Storage.visit`.

        It reads and writes on the caller's time and waits for nothing: updates and copies of these homes are over.
        """
        others = [] if self.trained is None else [self.trained.shadow, self.trained.master]
        for first, last, ((param,), *rest) in visit_together([self.params, *others], start, stop, modify=modify):
            # A home that keeps nothing of these elements has no views of them.
            shadow, master = (views[0] if views else None for views in rest) if rest else (None, None)
            yield first, last, WeightRange(param, shadow, master)

    @property
    def shown(self) -> Tensor:
        """What the parameters are views of where they are no placeholders."""
        kept = self.recorded.shown  # for graphs, whose backward nothing announces
        return kept if kept is not None and self.holding.residency is not UnitState.GATHERED else self.full

    def expose(self, buffer: Tensor | None = None) -> None:
        """Make the parameters views of the full buffer, or of another one like it."""
        buffer = self.full if buffer is None else buffer
        # What fills the buffer is over, or compute has waited for it: from here on anybody's kernel may read it.
        for parameter in self.parameters:
            parameter.expose(buffer)
        for watch in self.reads:  # last: a module tells of reads as long as any of its parameters is a placeholder
            watch.update()

    def hide(self) -> None:
        """Make the parameters placeholders: their real shape, one element of memory, no reads and writes."""
        # Before the buffer's memory goes: a parameter that were still a view of it would show what others write there.
        for parameter in self.parameters:
            parameter.hide(self.placeholder)
        # Torch lets people write all elements of a placeholder at once. What they wrote would be read for values.
        self.placeholder.copy_(self._nothing)
        for watch in self.reads:
            watch.update()

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
        parameters = self.parameters if slots is None else [self.parameters[index] for index in slots]
        torch.autograd.graph.increment_version([parameter.tensor for parameter in parameters])  # one call for all
        for parameter in parameters:  # else the next step would take this count for a write by people, and refuse it
            parameter.note_version()

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

    def parts(self) -> list[SlotPiece]:
        """List the parts of slots that are in this rank's shard, counted from its start."""
        return self.layout.parts(self.rank)

    def pieces(self, number: int, count: int) -> Iterator[SlotPiece]:
        """Yield the pieces of slots that lie in `count` tiles from tile `number` on, each parameter's in one piece."""
        first = number * self.params.sections[0].tile_numel
        last = first + count * self.params.sections[0].tile_numel
        # Not those of each tile in turn: a parameter that lies in several tiles would be cut into as many runs.
        for slot, start, stop in self.parts():
            if max(start, first) < min(stop, last):
                yield SlotPiece(slot, max(start, first), min(stop, last))


# ----------------------------------------------------------------------------------------------------------------------
# Parameters of a model that nothing trains: frozen, whatever they were, until the engine leaves them.
#
# What is computed from them alone records no graph then, and a backward that comes through the model goes to its
# inputs.
# ----------------------------------------------------------------------------------------------------------------------


class FrozenParameters:
    """Freezes every parameter.

    Arguments:
        units: all of a model without an optimizer.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        parameters = [parameter for unit in units for parameter in unit.parameters]
        self._frozen = [parameter for parameter in parameters if parameter.tensor.is_floating_point()]
        self._handles = []
        for parameter in self._frozen:
            refuse = engine_entry(partial(_refuse_gradient, parameter.name))
            tensor = parameter.tensor.requires_grad_(True)  # torch takes hooks of no others
            self._handles.append(tensor.register_post_accumulate_grad_hook(refuse))  # type: ignore[no-untyped-call]
            tensor.requires_grad_(False)

    def remove(self) -> None:
        """Leave them as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for parameter in self._frozen:
            parameter.tensor.requires_grad_(parameter.required_grad)


def _refuse_gradient(name: str, parameter: nn.Parameter) -> None:
    """Refuse the gradient of a parameter that somebody has unfrozen: it would be whole, and nobody's."""
    parameter.grad = None
    raise EngineError(
        f"Parameter '{name}' was unfrozen and got a gradient, and its model was prepared without an optimizer: nothing "
        "trains it. Leave it frozen, or close() and prepare(model, optimizer)."
    )


# ----------------------------------------------------------------------------------------------------------------------
# Whether modules still hold the parameters that were prepared, and those the memory that the engine gave them.
#
# A parameter that somebody put into a module after `prepare` is computed with and never trained; values that somebody
# put under a parameter (`parameter.data = ...`) go with its next gather. Torch tells nobody of either, so this is
# looked up at the beginning of each forward of the model and of each step.
# ----------------------------------------------------------------------------------------------------------------------


_PARAMETERS, _CHILDREN = attrgetter("_parameters"), attrgetter("_modules")
_VALUES = methodcaller("values")  # not those of `dict`: what a script holds is no dict


class Membership:
    """What modules held when the model was prepared, and since.

    Arguments:
        model: the prepared one.
        units: all units, which hold all of its parameters.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self._model = model
        self._places = [
            (unit, unit.spec.parameters, [slot.start * unit.spec.dtype.itemsize for slot in unit.layout.slots])
            for unit in units
        ]
        self._divided = {unit for unit in units if any(map(is_divided, unit.spec.parameters))}
        self._known = {parameter for unit in units for parameter in unit.spec.parameters}
        self._note()

    def _note(self) -> None:
        self._modules = list(self._model.modules())
        self._held = _held_by(self._modules)

    def check(self) -> None:
        """Refuse what would not be trained, or not be computed with.

        Raises:
            EngineError: names the parameter, and what to call instead.
        """
        now = _held_by(self._modules)
        if len(now) != len(self._held) or not all(map(is_, now, self._held)):
            self._look_for_strangers()
        for unit, parameters, offsets in self._places:
            if unit.holding.blocks:
                continue
            held = map(own_elements, parameters) if unit in self._divided else parameters
            addresses = [parameter.data_ptr() for parameter in held]
            hidden = unit.placeholder.data_ptr()
            if addresses.count(hidden) < len(addresses):
                first = unit.shown.data_ptr()
                if addresses != [first + offset for offset in offsets]:
                    self._look_at_memory(unit, addresses)

    def _look_for_strangers(self) -> None:
        """Refuse parameters that have come since `prepare`. Modules may change places, be wrapped, and go."""
        if _in_functional_call():  # which puts others in their place, for this call
            return
        found: Iterable[tuple[str, Tensor]] = self._model.named_parameters(remove_duplicate=False)
        for name, parameter in found:
            if isinstance(parameter, nn.Parameter) and parameter not in self._known:
                module = self._model.get_submodule(name.rpartition(".")[0])
                raise EngineError(
                    f"Parameter '{name}' {tuple(parameter.shape)} of {type(module).__name__} was put there after "
                    "prepare(), so nothing would train it. A new one is trained from "
                    "optimizer.add_param_group({'params': [...]}) on. Where it is to replace a prepared one, give that "
                    "one its values with optimizer.set_full_param(), or inside optimizer.gathered(modify=True) "
                    "(load_state_dict() without assign=True)."
                )
        self._note()

    def _look_at_memory(self, unit: Unit, addresses: Sequence[int]) -> None:
        hidden, first, size = unit.placeholder.data_ptr(), unit.shown.data_ptr(), unit.spec.dtype.itemsize
        for index, (slot, address) in enumerate(zip(unit.layout.slots, addresses, strict=True)):
            if address not in (hidden, first + slot.start * size) and slot.stop > slot.start:
                self._take_in(unit, index)

    @torch.no_grad()
    def _take_in(self, unit: Unit, index: int) -> None:
        """Take over the values of a parameter that was given other memory, where that loses nothing; else refuse."""
        parameter = unit.parameters[index]
        given = parameter.memory
        if given.shape != parameter.slot.shape or given.device != unit.full.device or not unit.resident:
            raise _lost(parameter)
        own = parameter.view_in(unit.full)
        values = given.detach().to(own.dtype)
        if not torch.equal(values, own):  # else a module has converted it for its own forward
            if not unit.is_whole or given.dtype != own.dtype:
                raise _lost(parameter)
            own.copy_(values)
        parameter.expose(unit.full)


def _held_by(modules: Sequence[nn.Module]) -> list[object]:
    """List the parameters and the children of modules."""
    # In no loop of Python's: it passes over all of them twice a step.
    return list(chain.from_iterable(map(_VALUES, chain(map(_PARAMETERS, modules), map(_CHILDREN, modules)))))


def _lost(parameter: UnitParameter) -> EngineError:
    given = parameter.memory
    return EngineError(
        f"Parameter '{parameter.name}' {tuple(parameter.slot.shape)} was given other memory ({given.dtype} "
        f"{tuple(given.shape)} on {given.device}) after prepare(), by 'parameter.data = ...' or by to() of a "
        "part of the model: its next gather would drop that. Set values with optimizer.set_full_param(), or inside "
        "optimizer.gathered(modify=True); dtype and device are those of prepare() until close()."
    )


def _in_functional_call() -> bool:
    """Whether `torch.func.functional_call` is running: parameters are the caller's meanwhile."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not torch.nn.utils.stateless._functional_call.__code__:
        frame = frame.f_back
    return frame is not None
