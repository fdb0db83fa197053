"""One parameter of a unit: its place in the full buffer, what it shows now, and what it was before `prepare`.

    shown     a view of its slot in a buffer of the unit
    hidden    a placeholder: its real shape, one element of memory, and a class that refuses reads and writes
    left      the values that the engine leaves it with, or none

Its `.grad` is empty, or a handle of ours that stands for the gradient (`engine/passes/handles.py`), or a tensor that
somebody has set. Only this module and `dtensors.py` write `parameter.data`. These methods run
for every parameter in every forward.
"""

import torch
from torch import Tensor, nn

from penstock.engine.units.released import released_class
from penstock.engine.units.versions import count_write
from penstock.errors import EngineError
from penstock.layout import Slot
from penstock.rules.master import as_param


class UnitParameter:
    """One parameter of a unit.

    Arguments:
        tensor: the user's own parameter, which still has memory of its own.
        index: the number of its slot.
        slot: where its elements are in the unit's flat buffer.

    Attributes:
        name: its name in the model.
        required_grad: whether it was trained, and not frozen, when it was prepared.
        handle: what stands for its gradient in `.grad`, once one was made.
        shows_gradient: whether the handle was put there, and not taken away by us.
        arrived: the gradient that autograd has added to the handle, until it is taken.
        counts: whether this rank's elements count in a norm: of those that `tp` ranks have alike, the first one's do.
    """

    __slots__ = (
        "__weakref__",
        "_device",
        "_dtype",
        "_kind",
        "_released",
        "_version",
        "arrived",
        "counts",
        "handle",
        "index",
        "name",
        "required_grad",
        "shows_gradient",
        "slot",
        "tensor",
    )

    def __init__(self, tensor: nn.Parameter, index: int, slot: Slot) -> None:
        self.tensor = tensor
        self.index = index
        self.slot = slot
        self.name = slot.name
        self.required_grad = tensor.requires_grad
        self.handle: Tensor | None = None
        self.shows_gradient = False
        self.arrived: Tensor | None = None
        self.counts = True
        self._kind = type(tensor)
        self._released = released_class(self._kind)
        self._dtype = tensor.dtype
        self._device = tensor.device
        # Torch counts every write but those through `.data`, which are ours: another number tells that people wrote.
        self._version = tensor._version

    def placed(self, slot: Slot, index: int) -> "UnitParameter":
        """Note the same parameter in another place. What it was before `prepare` stays noted."""
        other = type(self)(self.tensor, index, slot)
        other._dtype, other._device, other._version = self._dtype, self._device, self._version
        other._kind, other._released = self._kind, self._released
        other.required_grad, other.counts = self.required_grad, self.counts
        return other

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Its shape; of one that ranks divide, that of the whole."""
        region = self.slot.region
        return self.slot.shape if region is None else region.shape

    @property
    def memory(self) -> Tensor:
        """The tensor whose memory it shows."""
        return self.tensor

    def view_in(self, buffer: Tensor) -> Tensor:
        """View its elements in the unit's full buffer, or in another one like it, in its shape."""
        slot = self.slot
        return buffer[slot.start : slot.stop].view(slot.shape)

    def expose(self, buffer: Tensor) -> None:
        """Make it a view of its slot in a buffer of the unit."""
        self.tensor.__class__ = self._kind
        if not self._is_view_in(buffer):
            self.tensor.data = self.view_in(buffer)

    def _is_view_in(self, buffer: Tensor) -> bool:
        """Whether it is that view already, as a resident one is after each step."""
        tensor, slot = self.tensor, self.slot
        address = tensor.data_ptr()  # 0 says nothing: what has no elements has no address
        return (
            address == buffer.data_ptr() + slot.start * buffer.itemsize
            and address != 0
            and tensor.dtype is buffer.dtype
            and tensor.shape == slot.shape
            and tensor.is_contiguous()
        )

    def hide(self, placeholder: Tensor) -> None:
        """Make it a placeholder: one element that stands for all of them."""
        self.tensor.__class__ = self._kind
        self.tensor.data = placeholder.expand(self.slot.shape)
        self.tensor.__class__ = self._released

    @property
    def is_hidden(self) -> bool:
        """Return True if it is a placeholder now."""
        return type(self.tensor) is self._released

    def take_in(self, full: Tensor) -> None:
        """Put values that were given to it with other memory (`parameter.data = ...`) into the full buffer.

        Raises:
            EngineError: they have another shape.
        """
        own = self.view_in(full)
        if self.tensor.shape != own.shape:
            raise EngineError(
                f"Parameter '{self.name}' was given values of shape {tuple(self.tensor.shape)}; it has "
                f"{self.slot.shape}."
            )
        if self.tensor.data_ptr() != own.data_ptr():
            own.copy_(as_param(self.tensor.detach(), own.dtype))
            self.tensor.data = own

    def leave(self, value: Tensor | None) -> None:
        """Leave it to the user: with a value that is `as_before`, or without elements."""
        self.hide_gradient()
        self.handle = None
        self.tensor.__class__ = self._kind
        self.tensor.data = torch.empty(0, dtype=self._dtype, device=self._device) if value is None else value

    def as_before(self, value: Tensor) -> Tensor:
        """Bring a value to the dtype and to the device that the parameter had before `prepare`."""
        return as_param(value, self._dtype).to(self._device)

    def note_version(self) -> None:
        """Take what it shows for what its home and its master say: only writes after this are refused."""
        self._version = self.tensor._version

    def check_written(self) -> None:
        """Refuse values that somebody wrote where no update starts from: in a gathered copy, or half its master.

        Raises:
            EngineError: torch has counted a write since `note_version`.
        """
        if self.tensor._version != self._version:
            raise EngineError(
                f"Parameter '{self.name}' was written outside gathered(modify=True), and its master weights were not. "
                "Set it again with set_full_param(), or write it inside."
            )

    def check_frozen(self) -> None:
        """Refuse a parameter that was unfrozen after `prepare`: it has no optimizer state.

        Raises:
            EngineError: it requires a gradient now.
        """
        if self.tensor.requires_grad and not self.required_grad:
            raise EngineError(
                f"Parameter '{self.name}' was frozen when the model was prepared, so it has no optimizer state, "
                "and requires a gradient now. Have it trained with optimizer.add_param_group({'params': [...]}) before "
                "its forward. What is to be frozen for a while only is frozen after prepare(), which keeps its state."
            )

    def take_gradient(self) -> Tensor:
        """Take the gradient that autograd has just left in `.grad`, which is empty afterwards.

        Raises:
            EngineError: it is sparse.
        """
        grad, self.arrived = self.tensor.grad if self.arrived is None else self.arrived, None
        assert grad is not None
        # Now, not after the step: gradients of all units would be on the device at once, in memory that no tier counts.
        self.tensor.grad = None
        self.shows_gradient = False
        if grad.is_sparse:
            raise EngineError(f"Parameter '{self.name}' got a sparse gradient. Build its embedding with sparse=False.")
        return grad

    def drop_gradient(self) -> None:
        """Forget a `.grad` that autograd has left, or somebody has set, or that stands for ours."""
        self.tensor.grad = None
        self.shows_gradient = False

    def show_gradient(self) -> None:
        """Put the handle into `.grad`."""
        self.tensor.grad = self.handle
        self.shows_gradient = True

    def hide_gradient(self) -> None:
        """Take the handle out of `.grad`; what somebody has set stays."""
        if self.handle is not None and type(self.tensor.grad) is type(self.handle):
            self.tensor.grad = None
        self.shows_gradient = False

    @property
    def gradient_is_as_left(self) -> bool:
        """Whether `.grad` is what we have left there: the handle, or nothing."""
        return self.tensor.grad is (self.handle if self.shows_gradient else None)


def count_writes(parameters: list[UnitParameter]) -> None:
    """Have torch count a write of these parameters: a graph from before it cannot be used any more."""
    count_write(parameter.tensor for parameter in parameters)  # one call for all of them
    for parameter in parameters:  # else the next step would take this count for a write by people, and refuse it
        parameter.note_version()
