"""A unit: its storages, its gathered buffer, its holders, and the parameters that belong to it."""

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
# The gradient of a unit: its storage, the parameters that have one, and its norms.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass
class UnitGradient:
    """The gradient of a unit since the last `zero_grad`.

    Attributes:
        storage: the storage of this rank's shard of the reduced gradient, summed over ranks and micro-batches.
        present: slots that got a gradient on this rank.
        squared_norms: squared norm of this rank's part of each slot, of the values that the storage has once it is
            written.
        unmeasured: slots whose norm the step takes, of the values in the storage then (`engine/step/step.py`).
        held: slots whose values the storage holds. The next micro-batch is added to them. Values of other slots are
            from an earlier step.
        pending: the flat gradient of the current backward before its reduction (reduce dtype, whole unit).
        rests: True if `pending` waits for the next micro-batch in host memory, which no tier counts.
        arrived: slots that `pending` holds, with the squared norm of their values; `None` where it was not taken.
        due: True if other ranks may have a gradient to reduce: this rank takes part, with zeros where it has none.
        flaws: the number of ranks on which the written storage is not finite; `None` where the norms on the host say
            it, and where no update asks.
        flawed: True if a micro-batch was not finite in this rank's shard, where the sum is measured too late for
            `flaws`.
    """

    storage: Storage
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
        """Record the squared norms of these parts."""
        for (index, _, _), norm in zip(parts, squared_norms, strict=True):
            self.squared_norms[index] = norm
            self.unmeasured.discard(index)

    def is_finite(self) -> bool:
        """Return True if its norm is finite over all ranks. The storage is written, and its norm copied to the host."""
        # Read without a wait: the copy to the host is the storage's last write, which the caller has waited for
        # (ordering rule 5).
        if self.flaws is not None:
            return float(self.flaws) == 0
        return all(math.isfinite(float(norm)) for norm in self.squared_norms.values())


# ----------------------------------------------------------------------------------------------------------------------
# The state of a gathered unit, and the counts of its holders.
#
#     RELEASED --> GATHERING --> GATHERED --> RELEASED
#     OUTDATED --^      \____________________> OUTDATED --> RELEASED
#
# A unit is released when its last holder drops it, and only then. Users of a unit record here what happened; no other
# module writes these fields.
# ----------------------------------------------------------------------------------------------------------------------


class UnitState(Enum):
    """Device memory that a unit's parameters hold beside their storage.

    RELEASED: none; the parameters refuse to be read.
    OUTDATED: the gathered buffer has memory, and its values do not count. They are those of a resident or persistent
        unit from before an update, or NaN in a buffer of which there are other views.
    GATHERING: the gathered buffer is being filled.
    GATHERED: the gathered buffer holds the values, and the parameters are views of it.
    """

    RELEASED = "released"
    OUTDATED = "outdated"
    GATHERING = "gathering"
    GATHERED = "gathered"


class Holder(Enum):
    """Kinds of users that need a unit's parameters. The values are the names of the counts.

    FORWARD: a forward of one of its hooked modules runs; forwards nest.
    BACKWARD: its backward runs.
    UNANNOUNCED: a backward without a hook may need it, until that backward is over.
    BLOCK: a `gathered` block; blocks nest.
    """

    FORWARD = "forwards"
    BACKWARD = "backwards"
    UNANNOUNCED = "unannounced"
    BLOCK = "blocks"


_FOLLOWS = {
    UnitState.RELEASED: {UnitState.GATHERING, UnitState.OUTDATED},  # outdated: memory that becomes a storage
    UnitState.OUTDATED: {UnitState.GATHERING, UnitState.RELEASED, UnitState.OUTDATED},
    UnitState.GATHERING: {UnitState.GATHERED, UnitState.OUTDATED, UnitState.RELEASED},
    UnitState.GATHERED: {UnitState.OUTDATED, UnitState.RELEASED},
}


class UnitHolders:
    """The holders of one unit, and the state of its gathered buffer.

    Attributes:
        forwards, backwards, unannounced, blocks: the number of holders of each kind.
        used: True if the unit ever had a holder, so that its parameters had values.
        empties_views: True if the buffer's memory is freed with the next release although there are views of it:
            autograd may have saved some past the engine's hooks, or the work that filled the buffer has failed.
        shown: True if the user has seen the buffer since it was filled: views of it must keep their values.
    """

    def __init__(self) -> None:
        self.unit_state = UnitState.OUTDATED
        self.forwards = self.backwards = self.unannounced = self.blocks = 0
        self.used = False
        self.empties_views = False
        self.shown = False

    def become(self, unit_state: UnitState) -> None:
        """Change to another state."""
        # A transition that is not in the table would release a unit under a reader, or gather twice into one buffer.
        assert unit_state in _FOLLOWS[self.unit_state], f"{self.unit_state.name} -> {unit_state.name}"
        self.unit_state = unit_state

    def take(self, holder: Holder) -> None:
        """Count one more holder of this kind: the unit stays gathered until it is dropped."""
        name = holder._value_  # `value` is a property: slower than the rest of this method
        setattr(self, name, getattr(self, name) + 1)
        self.used = True
        self.shown = self.shown or holder is Holder.BLOCK

    def drop(self, holder: Holder) -> None:
        """Count one holder of this kind less. The caller releases the unit after its last holder."""
        name = holder._value_
        left = getattr(self, name) - 1
        assert left >= 0, f"{holder.name} does not hold the unit"
        setattr(self, name, left)

    def drop_all(self, *holders: Holder) -> None:
        """Forget every holder of these kinds."""
        for holder in holders:
            setattr(self, holder._value_, 0)

    def leave_blocks(self, count: int) -> None:
        """Set how many `gathered` blocks hold the unit from now on."""
        # The number that is left, and not one less: after an interrupt in here the block calls this again.
        self.blocks = count

    def empty_views(self) -> None:
        """Have the buffer's memory go with the next release: graphs may have views of it, or its fill has failed."""
        self.empties_views = True

    def forget_unseen_saves(self) -> None:
        """Record that backward is over, and with it the graphs that may have had views of the buffer."""
        self.empties_views = False

    def hand_to_caller(self) -> None:
        """Record that a module has returned parameters: the caller's views of the buffer must keep their values."""
        self.shown = True

    def note_emptied(self) -> None:
        """Record that the buffer was emptied: the user has not seen its next values."""
        self.shown = False

    @property
    def is_held(self) -> bool:
        """True if the unit has a holder."""
        return bool(self.forwards or self.backwards or self.unannounced or self.blocks)


# ----------------------------------------------------------------------------------------------------------------------
# Graphs of recorded backwards (`create_graph=True`): the buffers that they need are kept alive as long as the graphs.
#
# A recorded backward saves views of the parameters, and the parameters themselves (a norm's weight). No hook runs
# before the backward of its graph. Views keep the memory that they were made of; a saved parameter has the values that
# it points at when that backward runs. So the graph keeps the buffer that the backward was recorded with, and while
# the graph lives the released unit's parameters point at that buffer instead of placeholders.
# ----------------------------------------------------------------------------------------------------------------------


_KEY = "penstock"  # in the metadata of a graph's node


class _GraphToken:
    """Token that lives as long as the graph whose node has it in its metadata."""


class RecordedGraphs:
    """The recorded graphs of one unit.

    Attributes:
        shown: the buffer that released parameters point at while a graph lives.
        is_new: True if a backward was recorded with the buffer that is gathered now.
    """

    def __init__(self) -> None:
        self.shown: Tensor | None = None
        self.is_new = False
        # Weak: a reference here would keep the token alive after its graph.
        self._graphs: weakref.WeakSet[_GraphToken] = weakref.WeakSet()
        self._unmarked: list[_GraphToken] = []

    def mark(self, grad: Tensor) -> Tensor:
        """Record that a recorded backward reaches the unit. Return the gradient that it continues with.

        Everything recorded of the unit depends on the gradient, so a node there lives as long as the graph.
        """
        graph = _GraphToken()
        self._graphs.add(graph)
        self.is_new = True
        if is_functorch_wrapped_tensor(grad):  # its graph has no node to mark
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
        """True if a graph is left that may need the parameters."""
        return bool(self._graphs)

    def keep(self, buffer: Tensor) -> None:
        """Keep a buffer for the graphs: released parameters point at it from now on."""
        self.shown, self.is_new = buffer, False

    def end_unmarked(self) -> None:
        """Forget graphs without a mark: a backward ran that was not recorded."""
        self._unmarked.clear()

    def outdate(self) -> None:
        """Forget every graph: the values have changed, and torch refuses the backward of these graphs."""
        self._graphs.clear()
        self._unmarked.clear()

    def forget(self) -> None:
        """Drop the buffer that was kept for graphs, none of which is alive."""
        self.shown, self.is_new = None, False


def views_elsewhere(buffer: Tensor) -> bool:
    """Return True if anything but this tensor refers to its memory: views that autograd or a user keeps, arrays."""
    storage = buffer.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count > 2 or not storage.resizable()  # the tensor, and `storage`


# ----------------------------------------------------------------------------------------------------------------------
# One unit: its storages, and the state of its parameters.
#
# params           this rank's shard of the parameters
# replica          the whole unit, of which `params` is a part, where parameters are replicated over ranks
# master           the bits that the parameters lack of their fp32 values
# optimizer        the rule's states
# param_staging    an update that cannot reach `params` writes here, and a copy goes to `params`
# secondary        a part of the whole unit, as it was gathered last: the ranks of a node have all of it together
# gathered_buffer  the flat buffer that compute reads; for a resident unit it is the replica's own memory
# ----------------------------------------------------------------------------------------------------------------------


class WeightRange(NamedTuple):
    """The parameters of a range of elements, with the staging and the master weights of their fp32 values."""

    param: Tensor
    param_staging: Tensor | None
    master: Tensor | None

    def read(self) -> Tensor:
        """Return the fp32 values, on the master's device."""
        return read_master(self._beside_master(), self.master)

    def write(self, values: Tensor) -> None:
        """Write fp32 values, from anywhere, into the parameter and its master."""
        written = self._beside_master()
        write_master(written, self.master, values.to(written.device))
        # Without this copy forward would read another value than the one that the next update starts from.
        if written is not self.param:
            self.param.copy_(written)

    def _beside_master(self) -> Tensor:
        """Return the tensor that the master completes: the staging, or the parameter on the master's device."""
        if self.param_staging is not None:
            return self.param_staging
        return self.param if self.master is None else self.param.to(self.master.device)


@dataclass(frozen=True)
class StateFields:
    """The kinds of the optimizer's storage: states and scales.

    Attributes:
        states: the index of each state's kind.
        scales: the index of the kind with a state's scales, where it is stored in 8 bits with a scale for each block.
    """

    states: tuple[int, ...]
    scales: tuple[int | None, ...]

    def name(self, views: Views) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        """Return the states of a range of elements, and their scales, of all values in the storage there."""
        states = tuple(map(views.__getitem__, self.states))
        return states, tuple(None if index is None else views[index] for index in self.scales)


@dataclass
class TrainingState:
    """State that only a trainable unit has: gradient, master weights, optimizer states, and their tiles.

    A storage that neither the rule nor the precision needs is empty; so are segments of `param_staging` whose
    parameters the update reaches. `averages` are made later, by kind, and no update writes them.
    """

    gradient: UnitGradient
    master: Storage
    optimizer: Storage
    param_staging: Storage
    fields: StateFields
    tiles: Sequence[tuple[SlotPiece, ...]]
    averages: dict[str, Storage] = field(default_factory=dict)

    def update_tier(self, number: int) -> Tier:
        """Return the tier where a tile is updated: the device if its states are there, else the host."""
        # By the states' current tier: they are most of the bytes of an update, and storages may have moved.
        segment, _ = self.optimizer.tile(number)
        return Tier.DEVICE if segment.tier is Tier.DEVICE else Tier.CPU

    def has_param_staging(self, number: int) -> bool:
        """Return True if the update of a tile writes its parameters' staging."""
        segment, _ = self.param_staging.tile(number)
        return bool(segment.plan.cells)


class Unit:
    """Parameters that are gathered, computed, reduced, updated and moved together.

    Arguments:
        spec: its parameters and modules.
        index: its number among all units.
        layout: where each parameter is in the flat buffer.
        parameters: one `UnitParameter` for each slot, in order.
        rank: the rank whose shard this process has.
        storage: the storage of the parameters: of the whole unit if it is replicated, else of this rank's shard.
        replicated: True if every rank has all of it.
        full: the gathered buffer that compute reads; `None` where it reads the storage itself.

    Attributes:
        nbytes: bytes of the gathered buffer.
        own_range, shard_numel: this rank's range of its elements, and their number.
    """

    def __init__(
        self,
        spec: UnitSpec,
        index: int,
        layout: FlatLayout,
        parameters: Sequence[UnitParameter],
        *,
        rank: int,
        storage: Storage,
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
        self.params = storage.part(*self.own_range) if replicated else storage
        self.replica = storage if replicated else None
        self.resident = full is None  # compute reads the replica: there is no gather and no release
        if full is None:  # the storage's own memory, in one segment: parameters are views of it
            (full,) = storage.segments[0].tensors
        self.gathered_buffer = full
        self.trained: TrainingState | None = None
        self.holding = UnitHolders()
        self.recorded = RecordedGraphs()
        self.reads: list[ReadWatch] = []  # one for each module that owns its parameters
        # After the last work that fills the gathered buffer or copies from it. To point parameters at the buffer, or to
        # free its memory, takes a wait for this event first: else compute reads half a gather, or the copy writes into
        # memory that was handed out again (ordering rule 1).
        self.event: Event = DONE
        self.secondary: Storage | None = None
        # Other shards outdated: the other ranks' parts of the replica are from before the last update, and so is
        # `secondary`, or it is empty. The same on every rank, because it decides whether an all-gather is issued, and
        # among which ranks: a rank that issued one alone would wait for ever (ordering rule 4).
        self.other_shards_outdated = False
        self.is_rounded = False  # the last gather carried rounded values, not those of the storage
        # NaN: a read past the class of a parameter shows it, instead of computing with values of another unit.
        self.placeholder = torch.full((), float("nan"), dtype=torch.float32, device=full.device).to(spec.dtype)
        self._nothing = self.placeholder.clone()
        if not self.resident:
            self.holding.become(UnitState.RELEASED)

    @property
    def is_released_after_use(self) -> bool:
        """True if its parameters have values only while the unit has a holder."""
        return not (self.resident or self.spec.persistent)

    @property
    def allocated(self) -> bool:
        """True if the gathered buffer has memory of its own."""
        return not self.resident and self.holding.unit_state is not UnitState.RELEASED

    @property
    def label(self) -> str:
        """Its name in messages about ranks."""
        return f"unit '{self.name}'" + (f" (run by {self.spec.run_by})" if self.spec.run_by else "")

    @property
    def rule(self) -> Rule:
        """The rule that updates the parameters of a trained unit."""
        assert self.spec.rule is not None, f"unit '{self.name}' is not trained"
        return self.spec.rule

    @property
    def wants_gradient(self) -> bool:
        """True if a backward may give it one: all of its parameters may be frozen for a while."""
        return self.trained is not None and any(parameter.requires_grad for parameter in self.spec.parameters)

    @property
    def storages(self) -> dict[str, Storage]:
        """Every storage, by name."""
        storages = {PARAM: self.replica or self.params}
        if self.secondary is not None:
            storages[SECONDARY] = self.secondary
        if self.trained is not None:
            trained = self.trained
            storages |= {GRAD: trained.gradient.storage, MASTER: trained.master, OPTIMIZER: trained.optimizer}
            storages |= {SHADOW: trained.param_staging, **trained.averages}
        return storages

    @property
    def updated_storages(self) -> list[Storage]:
        """Every storage that an update writes."""
        trained = (
            () if self.trained is None else (self.trained.master, self.trained.optimizer, self.trained.param_staging)
        )
        return [self.replica or self.params, *trained]

    @property
    def shard_storages(self) -> dict[str, Storage]:
        """Every storage, of this rank's shard alone."""
        return self.storages | {PARAM: self.params}

    def exchange(self, name: str, storage: Storage) -> None:
        """Replace a storage, by its name: any but that of the parameters.

        The new storage has its own events, and those of the old one are not waited for any more. So the copy between
        the two follows the old one's events and is recorded in the new one before this call (ordering rule 3).
        """
        if name == SECONDARY:
            self.secondary = storage
            return
        assert self.trained is not None
        if name == GRAD:
            self.trained.gradient.storage = storage
        elif name == SHADOW:
            self.trained.param_staging = storage
        else:
            assert name in (MASTER, OPTIMIZER)  # the fields have the names of their storages
            setattr(self.trained, name, storage)

    def visit(self, start: int, stop: int, *, modify: bool = False) -> Iterator[tuple[int, int, WeightRange]]:
        """Yield the parameters of a range of this rank's shard, piece by piece. See `Storage.visit`.

        The caller's thread reads and writes at once, without a wait: updates and copies of these storages are over.
        """
        others = [] if self.trained is None else [self.trained.param_staging, self.trained.master]
        for first, last, ((param,), *rest) in visit_together([self.params, *others], start, stop, modify=modify):
            # A storage that is empty for these elements has no views of them.
            param_staging, master = (views[0] if views else None for views in rest) if rest else (None, None)
            yield first, last, WeightRange(param, param_staging, master)

    @property
    def shown(self) -> Tensor:
        """The buffer that the parameters are views of where they are no placeholders."""
        kept = self.recorded.shown  # for graphs, whose backward no hook announces
        return kept if kept is not None and self.holding.unit_state is not UnitState.GATHERED else self.gathered_buffer

    def point_to(self, buffer: Tensor | None = None) -> None:
        """Make the parameters point at their values in the gathered buffer, or in another one like it."""
        buffer = self.gathered_buffer if buffer is None else buffer
        # The work that fills the buffer is over, or compute waits for it: from here on any kernel may read it
        # (ordering rule 2).
        for parameter in self.parameters:
            parameter.point_to(buffer)
        for watch in self.reads:  # last: it asks whether any parameter of its module is still released
            watch.update()

    def unset(self) -> None:
        """Replace the parameters by placeholders with one element of memory, which refuse reads and writes."""
        # Before the buffer's memory is freed: a view of it would have the values of its next owner (ordering rule 1).
        for parameter in self.parameters:
            parameter.unset(self.placeholder)
        # Torch allows writes of all elements of a placeholder at once (`fill_`): undo them.
        self.placeholder.copy_(self._nothing)
        for watch in self.reads:
            watch.update()

    @property
    def is_whole(self) -> bool:
        """True if the parameters hold all of their values: there are neither master weights nor staging."""
        copies = (self.trained.master, self.trained.param_staging) if self.trained else ()
        return not any(plan.cells for storage in copies for plan in storage.plans)

    def note_versions(self) -> None:
        """Accept the current values of the parameters as those of storage and master: only later writes are refused."""
        for parameter in self.parameters:
            parameter.note_version()

    def count_writes(self, slots: Iterable[int] | None = None) -> None:
        """Increment torch's version of the parameters in these slots, or of all, so that it refuses older graphs.

        Torch does not see the updates, which write storages. Without the count, a backward through a graph from before
        a step would give gradients of values that are gone, and no error.
        """
        parameters = self.parameters if slots is None else [self.parameters[index] for index in slots]
        torch.autograd.graph.increment_version([parameter.tensor for parameter in parameters])  # one call for all
        for parameter in parameters:  # else the next step would take this count for a user's write, and refuse it
            parameter.note_version()

    def check_written(self) -> None:
        """Refuse a parameter that the user wrote where no update starts from.

        Raises:
            EngineError: names the parameter.
        """
        if self.resident and self.is_whole:
            return  # the update starts from the parameters themselves
        # Else a gathered copy was written, or a parameter without its master: the update starts from storage and
        # master, and would undo the write in silence.
        for parameter in self.parameters:
            parameter.check_written()

    def outdate_parts(self) -> None:
        """Record that this rank's part was written: its copies of other shards are outdated until they are gathered."""
        self.other_shards_outdated = self.layout.shards > 1 and (self.replica is not None or self.secondary is not None)

    @property
    def is_dropped(self) -> bool:
        """True if every tensor was dropped."""
        return self.params is None

    def drop(self) -> None:
        """Drop every tensor. The work on them is over: this waits for nothing."""
        self.trained = None
        self.gathered_buffer = torch.empty(0, dtype=self.spec.dtype, device="cpu")
        self.params = self.replica = self.secondary = None  # type: ignore[assignment]

    def contains(self, other: "Unit") -> bool:
        """Return True if the other unit's forward runs inside a forward of this one."""
        return self.spec.contains(other.spec)

    def shares_forward(self, other: "Unit") -> bool:
        """Return True if a forward of one is, or runs inside, a forward of the other."""
        return self.spec.spans(other.spec) or other.contains(self)

    def parts(self) -> list[SlotPiece]:
        """List the parts of slots that are in this rank's shard, counted from its start."""
        return self.layout.parts(self.rank)

    def pieces(self, number: int, count: int) -> Iterator[SlotPiece]:
        """Yield the pieces of slots that lie in `count` tiles from tile `number` on, each parameter's in one piece."""
        first = number * self.params.segments[0].tile_numel
        last = first + count * self.params.segments[0].tile_numel
        # Not tile by tile: a parameter that lies in several tiles would be cut into as many pieces.
        for slot, start, stop in self.parts():
            if max(start, first) < min(stop, last):
                yield SlotPiece(slot, max(start, first), min(stop, last))


# ----------------------------------------------------------------------------------------------------------------------
# Parameters of a model without an optimizer: frozen, whatever they were, until `close`.
#
# A forward without inputs that require gradients records no graph then, and a backward through the model reaches its
# inputs alone.
# ----------------------------------------------------------------------------------------------------------------------


class FrozenParameters:
    """Freeze every parameter.

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
        """Restore `requires_grad`."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for parameter in self._frozen:
            parameter.tensor.requires_grad_(parameter.required_grad)


def _refuse_gradient(name: str, parameter: nn.Parameter) -> None:
    """Refuse the gradient of a parameter that was unfrozen: no optimizer would take it, and it is not sharded."""
    parameter.grad = None
    raise EngineError(
        f"Parameter '{name}' was unfrozen and got a gradient, and its model was prepared without an optimizer: nothing "
        "trains it. Leave it frozen, or close() and prepare(model, optimizer)."
    )


# ----------------------------------------------------------------------------------------------------------------------
# A check that modules still hold the prepared parameters, and these the memory that the engine gave them.
#
# A parameter that is put into a module after `prepare` would be computed with and never trained; values that are put
# under a parameter (`parameter.data = ...`) are lost with its next gather. Torch has no hook for either, so this is
# checked at the beginning of each forward of the model and of each step.
# ----------------------------------------------------------------------------------------------------------------------


_PARAMETERS, _CHILDREN = attrgetter("_parameters"), attrgetter("_modules")
_VALUES = methodcaller("values")  # not `dict.values`: a script module's are no dicts


class Membership:
    """The parameters and children of modules, as they were found last.

    Arguments:
        model: the prepared model.
        units: all of its units, which have all of its parameters.
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
        """Refuse a parameter that would not be trained, or values that would be lost.

        Raises:
            EngineError: names the parameter, and the call to use instead.
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
        """Refuse parameters that came after `prepare`. Modules may be moved, wrapped and removed."""
        if _in_functional_call():  # which replaces parameters for one call
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
        """Copy the values of a parameter that was given other memory, where that loses nothing; else refuse."""
        parameter = unit.parameters[index]
        given = parameter.memory
        if given.shape != parameter.slot.shape or given.device != unit.gathered_buffer.device or not unit.resident:
            raise _lost(parameter)
        own = parameter.view_in(unit.gathered_buffer)
        values = given.detach().to(own.dtype)
        if not torch.equal(values, own):  # equal: a module has converted it for its own forward
            if not unit.is_whole or given.dtype != own.dtype:
                raise _lost(parameter)
            own.copy_(values)
        parameter.point_to(unit.gathered_buffer)


def _held_by(modules: Sequence[nn.Module]) -> list[object]:
    """List the parameters and the children of modules."""
    # Without a Python loop: this passes over all of them twice a step.
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
    """Return True inside `torch.func.functional_call`, which replaces parameters by the caller's tensors."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not torch.nn.utils.stateless._functional_call.__code__:
        frame = frame.f_back
    return frame is not None
