"""What an operation costs: its FLOPs, and the bytes that it reads and writes, from the shapes of what goes in and out.

FLOPs are those of `torch.utils.flop_counter`, with formulas for what it does not know. Bytes are of memory that is
touched: what is expanded counts once, and what is picked from a table counts as much as is picked.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from penstock.planner.simulation.program import Op

aten = torch.ops.aten

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


def _arithmetic(tensors: Iterable[Tensor]) -> str:
    """Name the dtype that is computed in: of the first tensor of floating point, else of the first one."""
    first = ""
    for tensor in tensors:
        name = str(tensor.dtype).removeprefix("torch.")
        if tensor.is_floating_point() or tensor.is_complex():
            return name
        first = first or name
    return first


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
