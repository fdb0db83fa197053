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
from penstock.tiers.staging import Buffers, transit_ring
from penstock.tiers.storage import CellPlan, Ring, SegmentPlan, buffer_storage
from penstock.tiers.transfer import Transfers
from penstock.trace import Label

# ----------------------------------------------------------------------------------------------------------------------
# Activation offload: tensors that autograd saves in forward leave the device until backward.
#
#     forward     autograd saves a tensor -> copy to its tier -> its device memory is freed
#     backward    copy the tensor back before it is unpacked, then those that were saved before it
#
# With activation checkpointing these are the inputs of the checkpointed blocks, and tensors outside of the blocks. Only
# tensors that are saved during the model's forward are offloaded. Parameters and small tensors stay. The memory is cut
# from a few allocations for tensors of all sizes (`tiers/allocation.py`).
# ----------------------------------------------------------------------------------------------------------------------


UNIT = "(activations)"  # its unit in `locations()`
LEAST_BYTES = 64 << 10  # smaller tensors are not worth a copy
AHEAD_BYTES = 256 << 20  # at most, on the way to the tier, or on the device ahead of use


@dataclass(eq=False)
class _Bytes:
    """The bytes of a saved tensor on the device. Copies may still use them when the tensor is dropped."""

    values: Tensor | None


@dataclass(eq=False)
class SavedActivation:
    """One saved tensor.

    Attributes:
        cut: its storage on the tier.
        before: returns the tensor that was saved before it, if it is still alive: backward unpacks it after this one.
        shape, stride, dtype, version: those of the tensor when it was saved.
        here: its bytes on the device, while they are copied to the tier or back.
        arrived: the event of the last copy, to the tier or back.
        key: identifies the tensor among others while its bytes leave.
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
        return self.cut.storage.stop


class ActivationOffload:
    """Copies saved tensors to a tier and back.

    Arguments:
        tier: the tier of saved tensors: cpu or nvme.
        tile_bytes: the size of a tile in files.
        folders: the number of folders that the files are in.

    Attributes:
        end_lost: drops a forward that an interrupt has ended; returns True if there was one.
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
        self._transfers = Transfers(self._streams, self._ring)
        self._leaving: deque[SavedActivation] = deque()
        self._known: dict[tuple[object, ...], SavedActivation] = {}  # tensors whose bytes leave, by their keys
        self._last: Callable[[], SavedActivation | None] = lambda: None
        self._takes = False  # a forward is under way
        self.end_lost: Callable[[], bool] = bool

    def begin(self) -> None:
        """Begin to offload saved tensors: the outermost forward begins on this thread."""
        self.end()
        self._kept_storages = {unit.gathered_buffer.untyped_storage()._cdata for unit in self._context.units}
        self._takes = True

    def end(self) -> None:
        """End the forward that is under way: offload no more tensors, and free device memory whose copies are over."""
        if self._takes:
            self._takes = False
            self._let_go(AHEAD_BYTES)

    def release_memory(self) -> None:
        """Free unused memory and files. The next forward allocates some again."""
        self._let_go(0)  # tensors whose bytes leave hold cuts, which hold allocations
        self._cuts.release_memory()

    def close(self) -> None:
        """Drop memory that is freed with the store. Graphs that still exist keep the memory of their tensors."""
        self._leaving.clear()
        self._known.clear()
        self._ring.drop()
        self._cuts.close()

    @engine_entry
    def take(self, tensor: Tensor) -> SavedActivation | None:
        """Start to copy a saved tensor to the tier; return `None` if it stays on the device."""
        if not self._takes or self.end_lost():  # torch reports no forward that an interrupt ended
            return None
        if tensor.device != self._streams.device or not _is_plain(tensor):
            return None
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes < LEAST_BYTES or tensor.untyped_storage()._cdata in self._kept_storages or not _is_dense(tensor):
            return None
        key = (tensor.data_ptr(), tensor._version, tensor.shape, tensor.stride(), tensor.dtype)
        if key in self._known:
            return self._known[key]
        self._let_go(AHEAD_BYTES - nbytes)  # bounds the device memory of tensors whose copies lag behind
        cut = self._cuts.take(nbytes)
        here = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        held = _Bytes(here)
        saved = SavedActivation(
            cut, self._last, tensor.shape, tensor.stride(), tensor.dtype, TensorVersion(tensor), held, key
        )
        weakref.finalize(saved, _give_back, self._cuts, cut, held, weakref.ref(self._streams))
        saved.arrived = self._transfers.copy(buffer_storage(here), cut.storage, Label("save", "activation"))
        self._known[key] = saved
        self._leaving.append(saved)
        self._last = weakref.ref(saved)
        return saved

    @engine_entry
    def bring(self, packed: SavedActivation) -> Tensor:
        """Return a saved tensor to autograd, and start to copy back those that it will unpack next."""
        packed.version.check()
        self._bring(packed)  # if it was not copied ahead: backward may unpack in another order
        packed.arrived.wait()  # site activations.back: compute reads the bytes after the copy has written them
        values, packed.here.values = packed.here.values, None
        assert values is not None
        self._forget(packed)
        ahead, before = 0, packed.before()
        while before is not None and (ahead := ahead + before.nbytes) <= AHEAD_BYTES:
            self._bring(before)
            before = before.before()
        return values.view(packed.dtype).as_strided(packed.shape, packed.stride)

    def _bring(self, saved: SavedActivation) -> None:
        """Start to copy a tensor back if it is not on the device."""
        if saved.here.values is None:
            # The copy starts after all compute so far, which may have used this memory last (ordering rule 1).
            saved.here.values = torch.empty(saved.nbytes, dtype=torch.uint8, device=self._streams.device)
            back = buffer_storage(saved.here.values)
            saved.arrived = self._transfers.copy(saved.cut.storage, back, Label("bring", "activation"))

    def _let_go(self, most_bytes: int) -> None:
        """Free tensors whose copies are over. Above `most_bytes` that leave, compute waits for the first ones."""
        left = sum(saved.nbytes for saved in self._leaving)
        while self._leaving and (left > most_bytes or self._leaving[0].arrived.done()):
            saved = self._leaving.popleft()
            # site activations.away
            saved.arrived.wait()  # the copy reads the device memory that is freed here (ordering rule 1)
            if self._forget(saved):
                saved.here.values = None
            left -= saved.nbytes

    def _forget(self, saved: SavedActivation) -> bool:
        """Forget a tensor whose device memory is freed; return True if it was known until now."""
        return self._known.get(saved.key) is saved and self._known.pop(saved.key) is saved

    def _fill_ring(self) -> None:
        tile = self._cuts.tile_bytes
        cell = CellPlan(UNIT, ACTIVATION, self._tier, torch.uint8, tile)
        plan = SegmentPlan(ACTIVATION, self._tier, (cell,), 0, tile, tile)
        self._ring.fill(Buffers(self._context.store).make_slots(transit_ring([plan])))


def _give_back(cuts: ActivationPool, cut: ActivationStorage, held: _Bytes, streams: "weakref.ref[Streams]") -> None:
    """Free the memory of a tensor that is gone. It may have been copied back for a backward that never unpacked it."""
    values, held.values = held.values, None
    back_end = streams()
    if values is not None and back_end is not None:
        # A copy may still read or write the device memory (ordering rule 1).
        # site activations.unwanted_write, activations.unwanted_reads
        back_end.keep_alive((values,), until=all_of([cut.storage.memory.written, cut.storage.read]))
    cuts.drop(cut)


def _is_plain(tensor: Tensor) -> bool:
    """Return True if a tensor is given by its bytes: no subclass, strided, not nested, conjugate or negative."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _is_dense(tensor: Tensor) -> bool:
    """Return True if the elements of a tensor fill one range of memory, in any order."""
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True)).is_contiguous()


# ----------------------------------------------------------------------------------------------------------------------
# Views of gathered parameters: autograd saves their position in the unit instead of the memory.
#
#     forward     autograd saves a weight, or a view of one -> packed as (unit, range, shape, stride)
#     backward    unpacked as the same view of the unit's buffer at that time, which is gathered first
#
# So a graph does not keep the buffers of all units, and a released unit has views elsewhere only if the user keeps one.
# Torch compares versions of saved tensors only without hooks, so it is done here.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SavedView:
    """A view of a unit's full buffer.

    Attributes:
        index: the number of the slot that it begins in.
        start: its first element, counted from the beginning of the buffer.
        version: the version of the slot's parameter when it was saved; `None` if the view has a counter of its own.
        outside: the spec of the DTensor whose local elements these are; `None` for a plain tensor.
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
    """The saved-tensor hooks of a forward whose units are released after it.

    Attributes:
        owner_of: finds the unit whose full buffer a tensor is a view of, among units that are released after use.
        owners: the unit of each parameter.
        bring: gathers a unit until the backward under way is over.
        activations: offloads other tensors; `None` leaves them on the device.
    """

    owner_of: Callable[[Tensor], Unit | None]
    owners: Mapping[nn.Parameter, Unit]
    bring: Callable[[Unit], None]
    activations: ActivationOffload | None

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks | None:
        """Make the hooks, to be entered on the thread that computes; `None` if there must be none.

        Hooks of the user stay alone: activation checkpointing counts the tensors that it sees. Views that they keep
        keep memory. Transforms of torch.func take no hooks; `check_transform` refuses those that need them.
        """
        native: Any = torch._C._autograd
        if native._top_saved_tensors_default_hooks(True) is not None:
            return None
        if not native._saved_tensors_hooks_is_enabled():
            return None
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def are_innermost(self) -> bool:
        """Return True if autograd would call these hooks now, on this thread."""
        top: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return top is not None and bool(top[0] == self._pack)

    # Both run for each saved tensor, in user mode: only work that needs engine mode enters it.

    def _pack(self, tensor: Tensor) -> SavedView | SavedActivation | KeptSavedTensor:
        own, outside = (own_elements(tensor), spec_of(tensor)) if is_divided(tensor) else (tensor, None)
        unit = self.owner_of(own)
        if unit is not None and own.dtype == unit.gathered_buffer.dtype and not (own.is_conj() or own.is_neg()):
            start = int(own.storage_offset() - unit.gathered_buffer.storage_offset())
            index = unit.layout.slot_at(start)
            version = unit.parameters[index].tensor._version
            same = version == tensor._version  # otherwise it is a view of `.data`, which has its own counter
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
        """Gather a unit that was resident when its parameter was saved, and may have moved since."""
        if not unit.resident:
            self.bring(unit)

    @engine_entry
    def _rebuilt(self, saved: SavedView) -> Tensor:
        """Gather the unit, and make the same view of its present buffer."""
        unit, parameter = saved.unit, saved.unit.parameters[saved.index]
        if not unit.gathered_buffer.numel():
            raise EngineError(
                f"A backward needs parameter '{parameter.name}', and its optimizer was closed "
                "since the forward. Call backward before close()."
            )
        if saved.version is not None:
            check_version(parameter.tensor, saved.version, parameter.name)
        self.bring(unit)
        view = unit.gathered_buffer.as_strided(
            saved.shape, saved.stride, unit.gathered_buffer.storage_offset() + saved.start
        )
        return view if saved.outside is None else wrapped(view, saved.outside)
