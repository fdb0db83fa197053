"""What an operation returns and what it costs, from the shapes of what goes in.

Shapes, strides and dtypes are asked of torch, once for each signature. FLOPs are those of `torch.utils.flop_counter`,
with formulas for what it does not know. Bytes are of memory that is touched: what is expanded counts once, and what is
picked from a table counts as much as is picked.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.flop_counter import flop_registry

from penstock.planner.simulation.fake_tensor import Shaped
from penstock.planner.simulation.program import Op

aten = torch.ops.aten

_LOG = logging.getLogger("torch._subclasses.fake_tensor")

#: Of these nothing is computed: they make memory, or tell of it.
FREE = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift", "is_pinned"))

#: What comes of it does not depend on the values of what it is made like.
LIKE = frozenset(f"{values}_like" for values in ("zeros", "ones", "full", "empty", "rand", "randn", "randint")) | {
    f"new_{values}" for values in ("zeros", "ones", "full", "empty", "empty_strided")
}

#: Of their first argument they read what they return.
_PICK = frozenset(("index", "index_select", "gather", "embedding", "take", "_unsafe_index"))

#: Into their first argument they write what they are given, the last tensor among the others.
_PUT = frozenset(
    ("index_put_", "_index_put_impl_", "index_add_", "index_copy_", "scatter_", "scatter_add_", "index_fill_")
)

#: They write their first argument without reading it.
_OVERWRITE = frozenset(("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_"))


def name_of(func: Any) -> str:
    """Return the name of an operation of torch's own, without its overload; an empty one of any other."""
    name: str = func._overloadpacket.__name__
    return name if func.namespace == "aten" else ""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in an operation's arguments or results, in order."""
    return (part for part in tree_iter(value) if isinstance(part, Tensor))


@dataclass(frozen=True, slots=True)
class Argument:
    """One of an operation's tensors, by its number, where it is returned."""

    number: int


class Recipe(NamedTuple):
    """How to run an operation like one that was simulated.

    Attributes:
        func: the overload.
        args: its arguments, a `Shaped` in place of each tensor.
        kwargs: likewise.
    """

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


class Outcome(NamedTuple):
    """What an operation of one signature does.

    Attributes:
        results: what it returns, a `Shaped` or an `Argument` in place of each tensor.
        nbytes: bytes of the tensors that it makes.
        op: what it costs; `None` where torch cannot tell without the values. Then there are no results.
        recipe: how to run another one.
    """

    results: Any
    nbytes: int
    op: Op | None
    recipe: Recipe


class NoShapesError(Exception):
    """Torch has no shapes for an operation."""


class Oracle:
    """Tells what operations would return. It runs none: what torch does not know by rule it does not find out.

    Attributes:
        outcomes: what was told, by whatever they depend on.
        recipes: for each kind of operation one example.
    """

    def __init__(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        self.outcomes: dict[Any, Outcome] = {}
        self.recipes: dict[Op, Recipe] = {}
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

        recipe, rule = Recipe(func, *without_values((args, kwargs))), _OWN_RULES.get(func._overloadpacket, _plainly)
        with torch.inference_mode(False), torch.no_grad(), self._mode:
            fake_args, fake_kwargs = tree_map(_as_fake, (recipe.args, recipe.kwargs))
            disabled, _LOG.disabled = _LOG.disabled, True  # of what it has no rule for: whoever asks is told
            try:
                out = rule(func, fake_args, fake_kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException):
                return Outcome(None, 0, None, recipe)
            except Exception as error:
                raise NoShapesError(f"{type(error).__name__}: {error}") from error
            finally:
                _LOG.disabled = disabled
        given = {id(tensor): Argument(number) for number, tensor in enumerate(tensors_in((fake_args, fake_kwargs)))}
        results = without_values(tree_map(lambda part: given.get(id(part), part), out))
        nbytes = sum(part.nbytes for part in tree_iter(results) if isinstance(part, Shaped))
        op = cost(func, fake_args, fake_kwargs, out)
        self.recipes.setdefault(op, recipe)
        return Outcome(results, nbytes, op, recipe)


def without_values(value: Any) -> Any:
    """Put a `Shaped` in place of each tensor, in lists, tuples and mappings."""
    return tree_map(lambda part: _shaped(part) if isinstance(part, Tensor) else part, value)


def _shaped(tensor: Tensor) -> Shaped:
    """Take the values away from a tensor."""
    if tensor.layout is not torch.strided:
        raise NoShapesError(f"a tensor of layout {tensor.layout} does not lie in memory by strides")
    return Shaped(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def _as_fake(part: Any) -> Any:
    """Put a tensor in place of a `Shaped`, under the mode that gives it no values."""
    if not isinstance(part, Shaped):
        return part
    return torch.empty_strided(part.shape, part.strides, dtype=part.dtype, device="cpu")


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


def _grouped_rows(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Ask for products of groups of rows, in bfloat16: torch's rule refuses what its kernels take."""
    dtype = args[0].dtype
    out = func(
        *(part.bfloat16() if isinstance(part, Tensor) and part.dtype == dtype else part for part in args), **kwargs
    )
    return out.to(dtype)


_OWN_RULES: dict[Any, Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]] = {
    aten.native_layer_norm: _normalised,
    aten._grouped_mm: _grouped_rows,
}


def touched_bytes(tensor: Tensor) -> int:
    """Return how many bytes of memory a tensor covers: a dimension that is expanded counts once."""
    if tensor.layout is not torch.strided:
        return tensor._nnz() * tensor.dtype.itemsize
    distinct = prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size)
    return int(distinct) * tensor.dtype.itemsize


def cost(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Op:
    """Return what an operation costs.

    Arguments:
        func: the operation, an overload such as `torch.ops.aten.mm.default`.
        args: as it is called; of tensors shapes, strides and dtypes are looked at alone.
        kwargs: likewise.
        out: what it returns.

    Returns:
        The kind of operation.
    """
    taken = list(tensors_in((args, kwargs)))
    return Op(
        str(func),
        _flops(func, args, kwargs, out),
        _nbytes(func, taken, list(tensors_in(out))),
        _arithmetic([*taken, *tensors_in(out)]),
        ", ".join(_in_words(tensor) for tensor in (taken or tensors_in(out))),
    )


def _in_words(tensor: Tensor) -> str:
    words = "x".join(map(str, tensor.shape)) or "scalar"
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return f"{words} {dtype}"
    return f"{words} {dtype} strided {'x'.join(map(str, tensor.stride()))}"


def _arithmetic(tensors: Sequence[Tensor]) -> str:
    """Name the dtype that is computed in: of the first tensor of floating point, else of the first one."""
    dtypes = [tensor.dtype for tensor in tensors]
    computed = (dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex)
    return str(next(computed, dtypes[0] if dtypes else "")).removeprefix("torch.")


def _flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    formula = _FORMULAS.get(func._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def _nbytes(func: Any, taken: Sequence[Tensor], made: Sequence[Tensor]) -> int:
    """Sum what is read and what is written. What an operation changes in place is both."""
    name = name_of(func)
    if name in FREE:
        return 0
    writes = sum(touched_bytes(tensor) for tensor in made)
    if not taken or name in LIKE:
        return writes
    first, others = taken[0], sum(touched_bytes(tensor) for tensor in taken[1:])
    if name in _PICK:
        return min(touched_bytes(first), writes) + others + writes
    if name in _PUT:
        given = touched_bytes(taken[-1]) if len(taken) > 1 else 0
        return others + 2 * min(given, touched_bytes(first))
    if name in _OVERWRITE:
        return others + touched_bytes(first)
    if not made:  # lists that are changed in place, as `_foreach_add_` does
        schema = func._schema.arguments
        return others + touched_bytes(first) * (2 if any(a.alias_info and a.alias_info.is_write for a in schema) else 1)
    return touched_bytes(first) + others + writes


def _grouped(left: Tensor, right: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    """Count products of groups of rows; groups share the rows, so their sum does not depend on how these are divided.

    Rows of both may be what is divided (rows x k, k x columns -> groups x ...): that is one product over all of k.
    """
    if left.dim() == 2 and right.dim() == 2:
        return 2 * left.shape[0] * left.shape[1] * right.shape[1]
    return 2 * out_val.numel() * left.shape[-1]


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Count the two products of attention, for each head of the query: heads of keys and values may be fewer."""
    return 2 * _scores(query, key) * (query.shape[-1] + value.shape[-1])


def _attention_backward(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> int:
    """Count the scores again, and two products each for the gradients of scores and values, queries and keys."""
    return 2 * _scores(query, key) * (3 * query.shape[-1] + 2 * value.shape[-1])


def _scores(query: Tensor, key: Tensor) -> int:
    """Count the scores of all heads, from [batch, heads, rows, width] and [batch, key heads, columns, width]."""
    return prod(query.shape[:-1]) * key.shape[-2]


#: Formulas of torch, and those that it lacks.
_FORMULAS: Mapping[Any, Callable[..., int]] = {
    **flop_registry,
    aten._grouped_mm: _grouped,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
