"""Reads of values that no operation of torch does: into Python's lists, numpy's arrays, other libraries' memory."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from penstock.planner.simulation.fake_tensor import is_fake

_READS = frozenset((Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__))


class ValueReads(TorchFunctionMode):
    """A block in which values of fake tensors cannot be read past torch's operations: they would read as zeros.

    Arguments:
        refusal: makes the error, of what reads and of why not.
    """

    def __init__(self, refusal: Callable[[Any, str], Exception]) -> None:
        super().__init__()
        self._refusal = refusal

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function of torch, or refuse it."""
        if func in _READS and args and is_fake(args[0]):
            raise self._refusal(f"Tensor.{func.__name__}", "reads a value, and a simulation has none")
        return func(*args, **(kwargs or {}))
