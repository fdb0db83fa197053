"""What an operation would return: shapes, strides and dtypes, asked of torch once for each signature."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.forecast.program import Op
from penstock.rehearsal.hollow import extent
from penstock.rehearsal.ops import cost, tensors_in


class Shaped(NamedTuple):
    """A tensor without values: what results are made from, and examples of arguments.

    Attributes:
        shape: its shape.
        strides: its strides, in elements.
        dtype: its dtype.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Shaped":
        """Return a tensor's."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes from its first element to its last one."""
        return extent(self.shape, self.strides) * self.dtype.itemsize


class Outcome(NamedTuple):
    """What an operation of one signature does.

    Attributes:
        results: a `Shaped` for each tensor, in lists and tuples as they are returned; other values as they are.
        nbytes: bytes of the tensors that it makes.
        op: what it costs.
        dependent: whether torch cannot tell without the values. Then there are no results, and no cost.
    """

    results: Any
    nbytes: int
    op: Op
    dependent: bool = False


class Unknown(Exception):
    """Torch has no shapes for an operation."""


UNTOLD = Outcome(None, 0, Op("", 0, 0, ""), dependent=True)


def ask(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outcome:
    """Ask torch what an operation would return, without running it.

    Arguments:
        func: the operation, an overload such as `torch.ops.aten.mm.default`.
        args: as it is called; the values of tensors are not looked at.
        kwargs: likewise.

    Returns:
        What it would do.

    Raises:
        Unknown: torch does not know; the text says why.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    mode = fake_mode()
    with torch.inference_mode(False), torch.no_grad(), mode:
        fake_args, fake_kwargs = as_fake(args), as_fake(kwargs)
        try:
            out = func(*fake_args, **fake_kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return UNTOLD
        except Exception as error:
            raise Unknown(f"{type(error).__name__}: {error}") from error
    given = {id(tensor) for tensor in tensors_in((fake_args, fake_kwargs))}
    nbytes = sum(Shaped.of(tensor).nbytes for tensor in tensors_in(out) if id(tensor) not in given)
    return Outcome(_shaped(out), nbytes, cost(func, fake_args, fake_kwargs, out))


@cache
def fake_mode() -> TorchDispatchMode:
    """Return the mode that knows shapes. What it does not know it must not find out by running the operation."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_fallback_kernels=False)


def as_fake(value: Any) -> Any:
    """Put a tensor without values in place of each tensor and each `Shaped`, under `fake_mode`."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise Unknown(f"a tensor of layout {value.layout} holds no memory in rows")
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    if isinstance(value, Shaped):
        return torch.empty_strided(value.shape, value.strides, dtype=value.dtype, device="cpu")
    return over(value, as_fake)


def over(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to what is in lists, tuples and mappings; return anything else as it is."""
    if type(value) in (list, tuple):
        return type(value)(function(part) for part in value)
    if isinstance(value, dict):
        return {key: function(part) for key, part in value.items()}
    return value


def _shaped(value: Any) -> Any:
    return Shaped.of(value) if isinstance(value, Tensor) else over(value, _shaped)
