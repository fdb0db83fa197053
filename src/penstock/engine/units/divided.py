"""One parameter of a unit that is a DTensor: the seam of `parameter.py`, to this rank's elements of it."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from penstock.engine.units.dtensors import counts_once, give_elements, is_divided, own_elements, own_part
from penstock.engine.units.parameter import UnitParameter
from penstock.engine.units.released import released_alias
from penstock.errors import EngineError
from penstock.layout import FlatLayout, Slot
from penstock.rules.master import as_param


class DividedParameter(UnitParameter):
    """A parameter whose slot holds this rank's elements of it."""

    __slots__ = ()

    @property
    def memory(self) -> Tensor:
        """The tensor of this rank's elements, as they are shown."""
        return own_elements(self.tensor)

    def expose(self, buffer: Tensor) -> None:
        """Make its elements a view of its slot in a buffer of the unit."""
        self.tensor.__class__ = self._kind
        give_elements(self.tensor, self.view_in(buffer))

    def hide(self, placeholder: Tensor) -> None:
        """Make its elements a placeholder."""
        self.tensor.__class__ = self._kind
        # `to_local()` and `full_tensor()` do not ask the class of the parameter, but that of its elements.
        give_elements(self.tensor, released_alias(placeholder.expand(self.slot.shape), self.name))
        self.tensor.__class__ = self._released

    def take_in(self, full: Tensor) -> None:
        """Put elements that were given to it with other memory into the full buffer.

        Raises:
            EngineError: they have another shape.
        """
        own, given = self.view_in(full), self.memory
        if given.shape != own.shape:
            raise EngineError(
                f"Parameter '{self.name}' was given {tuple(given.shape)} elements on this rank; it has "
                f"{self.slot.shape}."
            )
        if given.data_ptr() != own.data_ptr():
            own.copy_(as_param(given.detach(), own.dtype))
            give_elements(self.tensor, own)

    def leave(self, value: Tensor | None) -> None:
        """Leave it to the user: with this rank's elements that are `as_before`, or without elements."""
        self.hide_gradient()
        self.handle = None
        self.tensor.__class__ = self._kind
        empty = torch.empty(0, dtype=self._dtype, device=self._device)
        give_elements(self.tensor, empty if value is None else value)

    def take_gradient(self) -> Tensor:
        """Take the gradient that autograd has left, and give this rank's elements of it. Collective over `tp` ranks.

        Raises:
            EngineError: it is sparse.
        """
        grad = super().take_gradient()
        return own_part(grad, self.tensor) if is_divided(grad) else grad


def make_parameter(tensor: nn.Parameter, index: int, slot: Slot) -> UnitParameter:
    """Note what a parameter is, before it gives up its own memory."""
    return (DividedParameter if is_divided(tensor) else UnitParameter)(tensor, index, slot)


def make_parameters(
    tensors: tuple[nn.Parameter, ...], layout: FlatLayout, lines: Sequence[Sequence[int]] = (), rank: int = 0
) -> tuple[UnitParameter, ...]:
    """Note what the parameters of a unit are, before they give up their own memory.

    Arguments:
        tensors: the parameters.
        layout: their places.
        lines: the ranks of each dimension of the mesh over which parameters are divided, this one among them.
        rank: this one.
    """
    made = []
    for index, (tensor, slot) in enumerate(zip(tensors, layout.slots, strict=True)):
        parameter = make_parameter(tensor, index, slot)
        parameter.counts = counts_once(tensor, lines, rank)
        made.append(parameter)
    return tuple(made)
