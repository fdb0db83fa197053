"""What autograd saves of gathered parameters: not the memory, but where in the unit it was.

    forward     autograd saves a weight, or a view of one -> packed as (unit, range, shape, stride)
    backward    unpacked as the same view of what the unit's buffer holds then, which is gathered if nothing did so yet

So a graph does not keep the buffers of all units, and a unit that is released has views elsewhere only where somebody
else keeps one. Torch compares versions of saved tensors only where there are no hooks, so it is done here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.engine.activations import Activations
from penstock.engine.unit import Unit
from penstock.errors import EngineError


@dataclass(frozen=True, slots=True)
class SavedView:
    """A view of a unit's full buffer.

    Attributes:
        index: the slot that it begins in.
        start: its first element, counted from the beginning of the buffer.
        version: of the slot's parameter when it was saved; `None` where it counts its own.
    """

    unit: Unit
    index: int
    start: int
    shape: torch.Size
    stride: tuple[int, ...]
    version: int | None

    def rebuilt(self) -> Tensor:
        """The same view of the buffer as it is now."""
        full = self.unit.full
        return full.as_strided(self.shape, self.stride, full.storage_offset() + self.start)

    def check_version(self) -> None:
        """Refuse what was written since."""
        _check_version(self.version, self.unit.spec.parameters[self.index], self.unit.spec.names[self.index])


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """Another tensor, and its version when it was saved."""

    tensor: Tensor
    version: int


class SavedWeights:
    """Hooks for what autograd saves while a forward runs whose units are released after it.

    Arguments:
        owner_of: the unit, of those that are released after use, whose full buffer a tensor is a view of.
        bring: makes a unit's parameters usable until the backward that is under way is over.
        activations: takes other tensors; `None` leaves them.
    """

    def __init__(
        self, owner_of: Callable[[Tensor], Unit | None], bring: Callable[[Unit], None], activations: Activations | None
    ) -> None:
        self._owner_of = owner_of
        self._bring = bring
        self._activations = activations

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks | None:
        """To be entered and left on the thread that computes; `None` where they would be in the way.

        Where a user has hooks of his own they stay alone: activation checkpointing counts what it sees. Views that they
        keep keep memory. Transforms of torch.func take none, and the unit that is called says so.
        """
        native: Any = torch._C._autograd
        before = native._top_saved_tensors_default_hooks(True)
        if before is not None and (self._activations is None or not self._activations.is_taking):
            return None
        if not native._saved_tensors_hooks_is_enabled():
            return None
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Any:
        saved = self._view(tensor)
        if saved is not None:
            return saved
        return SavedTensor(tensor, tensor._version) if self._activations is None else self._activations.pack(tensor)

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, SavedView):
            return self._rebuilt(packed)
        if isinstance(packed, SavedTensor):
            _check_version(packed.version, packed.tensor, f"{tuple(packed.tensor.shape)} {packed.tensor.dtype}")
            return packed.tensor
        assert self._activations is not None
        return self._activations.unpack(packed)

    def _view(self, tensor: Tensor) -> SavedView | None:
        unit = self._owner_of(tensor)
        if unit is None or tensor.dtype != unit.full.dtype or tensor.is_conj() or tensor.is_neg():
            return None
        start = int(tensor.storage_offset() - unit.full.storage_offset())
        index = unit.layout.slot_at(start)
        version = unit.spec.parameters[index]._version
        same = version == tensor._version  # else it is of `.data`, which has a count of its own
        return SavedView(unit, index, start, tensor.shape, tensor.stride(), version if same else None)

    def _rebuilt(self, saved: SavedView) -> Tensor:
        if not saved.unit.full.numel():
            raise EngineError(
                f"A backward needs parameter '{saved.unit.spec.names[saved.index]}', and its optimizer was closed "
                "since the forward. Call backward before close()."
            )
        saved.check_version()
        self._bring(saved.unit)
        return saved.rebuilt()


def _check_version(version: int | None, tensor: Tensor, what: str) -> None:
    """As torch does, where it has no hooks.

    Raises:
        RuntimeError: torch's own, in its words.
    """
    if version is not None and tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{what} is at version {tensor._version}; expected version {version} instead."
        )
