"""What autograd saves of gathered parameters: not the memory, but where in the unit it was.

    forward     autograd saves a weight, or a view of one -> packed as (unit, range, shape, stride)
    backward    unpacked as the same view of what the unit's buffer holds then, which is gathered if nothing did so yet

So a graph does not keep the buffers of all units, and a unit that is released has views elsewhere only where somebody
else keeps one. Torch compares versions of saved tensors only where there are no hooks, so it is done here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.passes.activations import Activations, Saved
from penstock.engine.units.dtensors import is_divided, own_elements, spec_of, wrapped
from penstock.engine.units.unit import Unit
from penstock.engine.units.versions import Kept, check_version
from penstock.errors import EngineError
from penstock.machine.border import crossing, ours


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

    outside: Any = None

    def rebuilt(self) -> Tensor:
        """Make the same view of the buffer that the unit has now."""
        full = self.unit.full
        view = full.as_strided(self.shape, self.stride, full.storage_offset() + self.start)
        return view if self.outside is None else wrapped(view, self.outside)


class SavedTensors:
    """The hooks for what autograd saves in a forward whose units are released after it.

    Arguments:
        owner_of: finds the unit whose full buffer a tensor is a view of, among those that are released after use.
        owners: which unit each parameter is in.
        bring: makes a unit's parameters usable until the backward that is under way is over.
        activations: takes other tensors; `None` leaves them where they are.
    """

    def __init__(
        self,
        owner_of: Callable[[Tensor], Unit | None],
        owners: Mapping[nn.Parameter, Unit],
        bring: Callable[[Unit], None],
        activations: Activations | None,
    ) -> None:
        self._owner_of = owner_of
        self._bring = bring
        self._activations = activations
        self._owners = owners

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

    def _pack(self, tensor: Tensor) -> SavedView | Saved | Kept:
        view = self._view(tensor)
        if view is not None:
            return view
        taken: Saved | None = None
        if self._activations is not None:
            with ours():
                taken = self._activations.take(tensor)
        return Kept(tensor) if taken is None else taken

    def _unpack(self, packed: SavedView | Saved | Kept) -> Tensor:
        if isinstance(packed, Kept):
            tensor = packed.take()
            unit = self._owners.get(tensor) if isinstance(tensor, nn.Parameter) else None
            return tensor if unit is None else self._shown(tensor, unit)
        return self._brought(packed)

    @crossing
    def _brought(self, packed: SavedView | Saved) -> Tensor:
        if isinstance(packed, SavedView):
            return self._rebuilt(packed)
        assert self._activations is not None
        return self._activations.bring(packed)

    @crossing
    def _shown(self, parameter: Tensor, unit: Unit) -> Tensor:
        """Show a parameter that rested where compute reads it when it was saved, and may have been moved since."""
        if not unit.resident:
            self._bring(unit)
        return parameter

    def _view(self, tensor: Tensor) -> SavedView | None:
        outside, version_of = None, tensor
        if is_divided(tensor):
            outside, tensor = spec_of(tensor), own_elements(tensor)
        unit = self._owner_of(tensor)
        if unit is None or tensor.dtype != unit.full.dtype or tensor.is_conj() or tensor.is_neg():
            return None
        start = int(tensor.storage_offset() - unit.full.storage_offset())
        index = unit.layout.slot_at(start)
        version = unit.parameters[index].tensor._version
        same = version == version_of._version  # else it is of `.data`, which has a count of its own
        return SavedView(unit, index, start, tensor.shape, tensor.stride(), version if same else None, outside)

    def _rebuilt(self, saved: SavedView) -> Tensor:
        parameter = saved.unit.parameters[saved.index]
        if not saved.unit.full.numel():
            raise EngineError(
                f"A backward needs parameter '{parameter.name}', and its optimizer was closed "
                "since the forward. Call backward before close()."
            )
        if saved.version is not None:
            check_version(parameter.tensor, saved.version, parameter.name)
        self._bring(saved.unit)
        return saved.rebuilt()
