"""A backward through a graph from before a change is an error, as in torch: the versions of tensors say so.

torch compares the version of what it saved with the one that it has in backward. Updates write parameters where torch
does not see it, so they are counted here. What passes saved-tensor hooks, or is computed again, torch does not compare.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from penstock.errors import EngineError


def count_write(tensors: Iterable[Tensor]) -> None:
    """Their values change, where torch does not see it."""
    torch.autograd.graph.increment_version(list(tensors))


class Version:
    """The version that a tensor has now.

    Arguments:
        tensor: not kept, unless `keeps`: of another one there is the counter alone, without memory.
    """

    __slots__ = ("_counter", "_described", "_expected")

    def __init__(self, tensor: Tensor, *, keeps: bool = False) -> None:
        self._expected = 0 if tensor.is_inference() else tensor._version
        self._described = f"{tensor.type()} {list(tensor.shape)}"
        self._counter = tensor
        if not keeps:
            self._counter = tensor.detach()  # it has the same counter
            self._counter.data = tensor.new_empty(0)

    def check(self) -> None:
        """Refuse to compute with a tensor that was written since.

        Raises:
            EngineError: as torch's own error.
        """
        if not self._counter.is_inference() and self._counter._version != self._expected:
            raise EngineError(
                "one of the variables needed for gradient computation has been modified by an inplace operation, or by "
                f"step(): [{self._described}] is at version {self._counter._version}; expected version "
                f"{self._expected} instead. Run the forward again, or backward before what writes."
            )


class Kept:
    """A tensor that a saved-tensor hook leaves where it is."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        # An output of the node that saves it would keep that node, and with it itself. A parameter has no node, and its
        # values may move.
        self._tensor = tensor if tensor.is_leaf else tensor.detach()
        self._version = Version(self._tensor, keeps=True)

    def take(self) -> Tensor:
        """The tensor; an error if it was written since."""
        self._version.check()
        return self._tensor
