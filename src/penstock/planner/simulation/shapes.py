"""What an operation would return: shapes, strides and dtypes, asked of torch once for each signature."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from penstock.planner.simulation.fake_tensor import extent
from penstock.planner.simulation.operation_cost import cost, tensors_in
from penstock.planner.simulation.program import Op

aten = torch.ops.aten

_LOG = logging.getLogger("torch._subclasses.fake_tensor")


@dataclass(frozen=True, slots=True)
class Shaped:
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
        """Return a tensor's.

        Raises:
            NoShapesError: it is not one of rows and columns in memory.
        """
        if tensor.layout is not torch.strided:
            raise NoShapesError(f"a tensor of layout {tensor.layout} does not lie in memory by strides")
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


class NoShapesError(Exception):
    """Torch has no shapes for an operation."""


UNTOLD = Outcome(None, 0, Op("", 0, 0, ""), dependent=True)


class Oracle:
    """Tells what operations would return. It runs none: what torch does not know by rule it does not find out."""

    def __init__(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        self._mode = FakeTensorMode(allow_fallback_kernels=False)

    def ask(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outcome:
        """Ask torch what an operation would return, without running it.

        Arguments:
            func: the operation, an overload such as `torch.ops.aten.mm.default`.
            args: as it is called; the values of tensors are not looked at.
            kwargs: likewise.

        Returns:
            What it would do.

        Raises:
            NoShapesError: torch does not know; the text says why.
        """
        from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

        rule = _OWN_RULES.get(func._overloadpacket, _plainly)
        with torch.inference_mode(False), torch.no_grad(), self._mode:
            fake_args, fake_kwargs = tree_map(_as_fake, (args, kwargs))
            disabled, _LOG.disabled = _LOG.disabled, True  # of what it has no rule for: whoever asks is told
            try:
                out = rule(func, fake_args, fake_kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException):
                return UNTOLD
            except Exception as error:
                raise NoShapesError(f"{type(error).__name__}: {error}") from error
            finally:
                _LOG.disabled = disabled
        given = {id(tensor) for tensor in tensors_in((fake_args, fake_kwargs))}
        nbytes = sum(Shaped.of(tensor).nbytes for tensor in tensors_in(out) if id(tensor) not in given)
        return Outcome(without_values(out), nbytes, cost(func, fake_args, fake_kwargs, out))


def asks_for_shapes() -> bool:
    """Whether somebody else asks torch for shapes right now, as DTensor does before each operation: none is run."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _plainly(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Ask torch. Its rule for contiguous operands of one shape is not that of the kernels where a size is 1."""
    out = func(*args, **kwargs)
    if isinstance(out, Tensor) and torch.Tag.pointwise in func.tags:
        taken = list(tensors_in((args, kwargs)))
        alike = all(tensor.shape == out.shape and tensor.is_contiguous() for tensor in taken)
        if alike and all(out is not tensor for tensor in taken):
            return torch.empty(out.shape, dtype=out.dtype, device=out.device)
    return out


def _normalised(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Ask for a layer norm. A cpu keeps mean and deviation in the dtype of the weight."""
    out, *kept = func(*args, **kwargs)
    weight = args[2]
    return (out, *(each if weight is None else each.to(weight.dtype) for each in kept))


def _grouped(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Ask for products of groups of rows, in bfloat16: torch's rule refuses what its kernels take."""
    dtype = args[0].dtype
    out = func(
        *(part.bfloat16() if isinstance(part, Tensor) and part.dtype == dtype else part for part in args), **kwargs
    )
    return out.to(dtype)


_OWN_RULES: dict[Any, Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]] = {
    aten.native_layer_norm: _normalised,
    aten._grouped_mm: _grouped,
}


def _as_fake(value: Any) -> Any:
    """Put a tensor without values in place of a tensor, under the mode that makes it so."""
    if not isinstance(value, Tensor):
        return value
    shaped = Shaped.of(value)
    return torch.empty_strided(shaped.shape, shaped.strides, dtype=shaped.dtype, device="cpu")


def without_values(value: Any) -> Any:
    """Put a `Shaped` in place of each tensor, in lists, tuples and mappings."""
    return tree_map(lambda part: Shaped.of(part) if isinstance(part, Tensor) else part, value)
