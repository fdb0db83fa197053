"""A backward through a graph from before a change is an error, as in torch: the versions of tensors say so.

torch compares the version of what it saved with the one that it has in backward. Updates write parameters where torch
does not see it, so they are counted here. What passes saved-tensor hooks, or is computed again, torch does not compare.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from penstock.errors import EngineError


def count_write(tensors: Iterable[Tensor]) -> None:
    """Have torch count a write of tensors whose values change where it does not see that."""
    torch.autograd.graph.increment_version(list(tensors))


def check_version(tensor: Tensor, expected: int, what: str = "") -> None:
    """Refuse to compute with a tensor that was written since it had a version.

    Raises:
        EngineError: as torch's own error.
    """
    if not tensor.is_inference() and tensor._version != expected:
        raise EngineError(
            "one of the variables needed for gradient computation has been modified by an inplace operation, or by "
            f"step(): {what or f'[{tensor.type()} {list(tensor.shape)}]'} is at version {tensor._version}; expected "
            f"version {expected} instead. Run the forward again, or backward before what writes."
        )


class Version:
    """The version that a tensor has now. The tensor's counter is kept, and not its memory."""

    __slots__ = ("_counter", "_expected")

    def __init__(self, tensor: Tensor) -> None:
        self._expected = 0 if tensor.is_inference() else tensor._version
        self._counter = tensor.detach()  # it has the same counter
        self._counter.data = tensor.new_empty(0)

    def check(self) -> None:
        """Refuse to compute with the tensor if it was written since. Raises what `check_version` does."""
        check_version(self._counter, self._expected)


class Kept:
    """A tensor that a saved-tensor hook leaves where it is."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        # An output of the node that saves it would keep that node, and with it itself. A parameter has no node, and its
        # values may move.
        self._tensor = tensor if tensor.is_leaf else tensor.detach()
        self._version = 0 if tensor.is_inference() else tensor._version

    def take(self) -> Tensor:
        """Give the tensor back; refuse if it was written since. Raises what `check_version` does."""
        check_version(self._tensor, self._version)
        return self._tensor
