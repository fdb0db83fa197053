"""Tensors that autograd saves: views of gathered weights, and activations kept off the device."""

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.config import ACTIVATION, Tier
from penstock.engine.step.context import EngineContext
from penstock.engine.unit.dtensor import is_divided, own_elements, spec_of, wrapped
from penstock.engine.unit.parameter import KeptSavedTensor, TensorVersion, check_version
from penstock.engine.unit.unit import Unit
from penstock.errors import EngineError
from penstock.runtime.modes import engine_entry
from penstock.runtime.streams import DONE, Event, Streams, all_of
from penstock.tiers.allocation import ActivationPool, ActivationStorage
from penstock.tiers.staging import Buffers, transit_slots
from penstock.tiers.storage import CellPlan, Ring, SegmentPlan, buffer_home
from penstock.tiers.transfer import Transfers
from penstock.trace import Label

# ----------------------------------------------------------------------------------------------------------------------
# What forward saves for backward, kept off the device meanwhile.
#
#     forward     compute saves a tensor -> a copy goes to its tier -> its device memory goes
#     backward    before a tensor is wanted it comes back, the ones that were saved before it after it
#
# With activation checkpointing these are the inputs of the checkpointed blocks, and what lies outside of them. Only
# what autograd saves during the model's forward is seen: parameters stay with their units, small tensors where they
# are. Their memory is cut from a few slabs (`tiers/allocation.py`), whatever sizes come.
# ----------------------------------------------------------------------------------------------------------------------


UNIT = "(activations)"  # what the table calls it
LEAST_BYTES = 64 << 10  # smaller ones are not worth a copy
AHEAD_BYTES = 256 << 20  # on their way to the tier, or back before they are wanted


@dataclass(eq=False)
class _Bytes:
    """Bytes of a saved tensor on the device, which may be on their way when the tensor is wanted no longer."""

    values: Tensor | None


@dataclass(eq=False)
class SavedActivation:
    """One saved tensor.

    Attributes:
        cut: its home, until it is gone.
        before: finds the one that was saved before it, if that is still wanted: backward wants it after this one.
        shape, stride, dtype, version: what the tensor had when it was saved.
        here: its bytes on the device, while they leave or once they are coming back.
        arrived: the event after which its home holds its bytes, or `here` does.
        key: what tells it apart from other tensors while its bytes leave.
    """

    cut: ActivationStorage
    before: "Callable[[], SavedActivation | None]"
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    version: TensorVersion
    here: _Bytes
    key: tuple[object, ...]
    arrived: Event = DONE

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.cut.home.stop


class ActivationOffload:
    """Takes saved tensors to a tier and brings them back.

    Arguments:
        context: has the streams where copies run, the table that memory and files are taken from, and the units, whose
            parameters stay where they are.
        tier: where saved tensors go: cpu or nvme.
        tile_bytes: how large a tile of what goes to files is.
        folders: how many folders the files are in.

    Attributes:
        end_lost: lets go of a forward that has ended without a word; returns True if it has.
    """

    def __init__(self, context: EngineContext, tier: Tier, *, tile_bytes: int, folders: int) -> None:
        self._context = context
        self._streams = context.streams
        self._tier = tier
        self._cuts = ActivationPool(
            context.store, tier, unit=UNIT, kind=ACTIVATION, tile_bytes=tile_bytes, folders=folders
        )
        self._kept_storages: set[int] = set()
        self._ring = Ring(self._fill_ring)
        self._movement = Transfers(self._streams, self._ring)
        self._leaving: deque[SavedActivation] = deque()
        self._known: dict[
            tuple[object, ...], SavedActivation
        ] = {}  # those that are leaving, by what tells tensors apart
        self._last: Callable[[], SavedActivation | None] = lambda: None
        self._takes = False  # a forward is under way
        self.end_lost: Callable[[], bool] = bool

    def begin(self) -> None:
        """Begin to take what autograd saves: the outermost forward begins on this thread."""
        self.end()
        self._kept_storages = {unit.full.untyped_storage()._cdata for unit in self._context.units}
        self._takes = True

    def end(self) -> None:
        """End the forward that is under way: nothing more is taken, and what has left gives its memory back."""
        if self._takes:
            self._takes = False
            self._let_go(AHEAD_BYTES)

    def rest(self) -> None:
        """Give memory and files back that hold nothing. The next forward takes some again."""
        self._let_go(0)  # tensors on their way hold cuts, and those their slabs
        self._cuts.rest()

    def close(self) -> None:
        """Let go of memory that goes with the store. Graphs that are left keep theirs."""
        self._leaving.clear()
        self._known.clear()
        self._ring.drop()
        self._cuts.close()

    @engine_entry
    def take(self, tensor: Tensor) -> SavedActivation | None:
        """Take a tensor that autograd saves to the tier; return `None` for one that stays where it is."""
        if not self._takes or self.end_lost():  # torch tells nobody of a forward that an interrupt ended
            return None
        if tensor.device != self._streams.device or not _is_plain(tensor):
            return None
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes < LEAST_BYTES or tensor.untyped_storage()._cdata in self._kept_storages or not _is_dense(tensor):
            return None
        key = (tensor.data_ptr(), tensor._version, tensor.shape, tensor.stride(), tensor.dtype)
        if key in self._known:
            return self._known[key]
        self._let_go(AHEAD_BYTES - nbytes)  # else the device would hold all that was saved while the copies lag behind
        cut = self._cuts.take(nbytes)
        here = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        held = _Bytes(here)
        saved = SavedActivation(
            cut, self._last, tensor.shape, tensor.stride(), tensor.dtype, TensorVersion(tensor), held, key
        )
        weakref.finalize(saved, _give_back, self._cuts, cut, held, weakref.ref(self._streams))
        saved.arrived = self._movement.copy(buffer_home(here), cut.home, Label("save", "activation"))
        self._known[key] = saved
        self._leaving.append(saved)
        self._last = weakref.ref(saved)
        return saved

    @engine_entry
    def bring(self, packed: SavedActivation) -> Tensor:
        """Give a tensor that autograd wants back, and start to bring those that it will want next."""
        packed.version.check()
        self._bring(packed)  # now, where it was not brought ahead: backward may want tensors in another order
        packed.arrived.wait()  # site activations.back: else compute reads what the copy has not brought yet
        values, packed.here.values = packed.here.values, None
        assert values is not None
        self._forget(packed)
        ahead, before = 0, packed.before()
        while before is not None and (ahead := ahead + before.nbytes) <= AHEAD_BYTES:
            self._bring(before)
            before = before.before()
        return values.view(packed.dtype).as_strided(packed.shape, packed.stride)

    def _bring(self, saved: SavedActivation) -> None:
        """Start to bring a tensor back, if it is not on the device."""
        if saved.here.values is None:
            # The copy starts after compute so far, which may have used this memory last.
            saved.here.values = torch.empty(saved.nbytes, dtype=torch.uint8, device=self._streams.device)
            back = buffer_home(saved.here.values)
            saved.arrived = self._movement.copy(saved.cut.home, back, Label("bring", "activation"))

    def _let_go(self, most_bytes: int) -> None:
        """Drop what has left; where more than some bytes are leaving, compute waits for the first of them."""
        left = sum(saved.nbytes for saved in self._leaving)
        while self._leaving and (left > most_bytes or self._leaving[0].arrived.done()):
            saved = self._leaving.popleft()
            # site activations.away
            saved.arrived.wait()  # its device memory goes: compute would fill it anew while the copy still reads it
            if self._forget(saved):
                saved.here.values = None
            left -= saved.nbytes

    def _forget(self, saved: SavedActivation) -> bool:
        """Forget a tensor whose device memory may become another one's; return whether it was known until now."""
        return self._known.get(saved.key) is saved and self._known.pop(saved.key) is saved

    def _fill_ring(self) -> None:
        tile = self._cuts.tile_bytes
        cell = CellPlan(UNIT, ACTIVATION, self._tier, torch.uint8, tile)
        plan = SegmentPlan(ACTIVATION, self._tier, (cell,), 0, tile, tile)
        self._ring.fill(Buffers(self._context.store).make_slots(transit_slots([plan])))


def _give_back(cuts: ActivationPool, cut: ActivationStorage, held: _Bytes, streams: "weakref.ref[Streams]") -> None:
    """Give back what a tensor had that is gone. It may have been coming back for a backward that never wanted it."""
    values, held.values = held.values, None
    back_end = streams()
    if values is not None and back_end is not None:
        # A copy may still read or write the device memory: freed now, it would be somebody else's under that copy.
        # site activations.unwanted_write, activations.unwanted_reads
        back_end.give_up((values,), until=all_of([cut.home.memory.written, cut.home.read]))
    cuts.drop(cut)


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is its bytes: no subclass, nothing sparse or nested, no view that is conjugate or negative."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _is_dense(tensor: Tensor) -> bool:
    """Return True if its elements fill one piece of memory, in whatever order."""
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True)).is_contiguous()


# ----------------------------------------------------------------------------------------------------------------------
# What autograd saves of gathered parameters: not the memory, but where in the unit it was.
#
#     forward     autograd saves a weight, or a view of one -> packed as (unit, range, shape, stride)
#     backward    unpacked as the same view of what the unit's buffer holds then, which is gathered if nothing did so
# yet
#
# So a graph does not keep the buffers of all units, and a unit that is released has views elsewhere only where somebody
# else keeps one. Torch compares versions of saved tensors only where there are no hooks, so it is done here.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SavedView:
    """A view of a unit's full buffer.

    Attributes:
        index: the number of the slot that it begins in.
        start: its first element, counted from the beginning of the buffer.
        version: what the slot's parameter had when it was saved; `None` where the view counts writes of its own.
        outside: how ranks divide the tensor of which these are this rank's elements; `None` for a plain one.
    """

    unit: Unit
    index: int
    start: int
    shape: torch.Size
    stride: tuple[int, ...]
    version: int | None
    outside: Any


@dataclass(eq=False)
class SavedTensors:
    """The hooks for what autograd saves in a forward whose units are released after it.

    Attributes:
        owner_of: finds the unit whose full buffer a tensor is a view of, among those that are released after use.
        owners: which unit each parameter is in.
        bring: makes a unit's parameters usable until the backward that is under way is over.
        activations: takes other tensors; `None` leaves them where they are.
    """

    owner_of: Callable[[Tensor], Unit | None]
    owners: Mapping[nn.Parameter, Unit]
    bring: Callable[[Unit], None]
    activations: ActivationOffload | None

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks | None:
        """Make the hooks, to be entered and left on the thread that computes; `None` where they would be in the way.

        Where a user has hooks of his own they stay alone: activation checkpointing counts what it sees. Views that they
        keep keep memory. Transforms of torch.func take none, and the unit that is called says so.
        """
        native: Any = torch._C._autograd
        if native._top_saved_tensors_default_hooks(True) is not None:
            return None
        if not native._saved_tensors_hooks_is_enabled():
            return None
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def are_innermost(self) -> bool:
        """Whether the hooks that autograd would call now, on this thread, are these."""
        top: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return top is not None and bool(top[0] == self._pack)

    # Both run for each saved tensor: what needs a fixed state of the thread enters it, the rest reads attributes.

    def _pack(self, tensor: Tensor) -> SavedView | SavedActivation | KeptSavedTensor:
        own, outside = (own_elements(tensor), spec_of(tensor)) if is_divided(tensor) else (tensor, None)
        unit = self.owner_of(own)
        if unit is not None and own.dtype == unit.full.dtype and not (own.is_conj() or own.is_neg()):
            start = int(own.storage_offset() - unit.full.storage_offset())
            index = unit.layout.slot_at(start)
            version = unit.parameters[index].tensor._version
            same = version == tensor._version  # else it is of `.data`, which has a count of its own
            return SavedView(unit, index, start, own.shape, own.stride(), version if same else None, outside)
        taken = None if self.activations is None else self.activations.take(tensor)
        return KeptSavedTensor(tensor) if taken is None else taken

    def _unpack(self, packed: SavedView | SavedActivation | KeptSavedTensor) -> Tensor:
        if isinstance(packed, SavedView):
            return self._rebuilt(packed)
        if isinstance(packed, SavedActivation):
            assert self.activations is not None
            return self.activations.bring(packed)
        tensor = packed.take()
        unit = self.owners.get(tensor) if isinstance(tensor, nn.Parameter) else None
        if unit is not None:
            self._show(unit)
        return tensor

    @engine_entry
    def _show(self, unit: Unit) -> None:
        """Show parameters that rested where compute reads them when one was saved, and may have been moved since."""
        if not unit.resident:
            self.bring(unit)

    @engine_entry
    def _rebuilt(self, saved: SavedView) -> Tensor:
        """Make the same view of the buffer that the unit has now."""
        unit, parameter = saved.unit, saved.unit.parameters[saved.index]
        if not unit.full.numel():
            raise EngineError(
                f"A backward needs parameter '{parameter.name}', and its optimizer was closed "
                "since the forward. Call backward before close()."
            )
        if saved.version is not None:
            check_version(parameter.tensor, saved.version, parameter.name)
        self.bring(unit)
        view = unit.full.as_strided(saved.shape, saved.stride, unit.full.storage_offset() + saved.start)
        return view if saved.outside is None else wrapped(view, saved.outside)
