"""What an operation costs: its FLOPs, and the bytes that it reads and writes, from the shapes of what goes in and out.

FLOPs are those of `torch.utils.flop_counter`, with formulas for what it does not know. Bytes are of memory that is
touched: what is expanded counts once, and what is picked from a table counts as much as is picked.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from penstock.planner.simulation.program import Op

aten = torch.ops.aten

#: Of these nothing is computed: they make memory, or tell of it.
FREE = frozenset(
    packet
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift", "is_pinned")
    if (packet := getattr(aten, name, None)) is not None
)

#: What comes of it does not depend on the values of what it is made like.
LIKE = frozenset(
    (
        aten.zeros_like,
        aten.ones_like,
        aten.full_like,
        aten.empty_like,
        aten.new_zeros,
        aten.new_ones,
        aten.new_full,
        aten.new_empty,
        aten.new_empty_strided,
        aten.rand_like,
        aten.randn_like,
        aten.randint_like,
    )
)

#: Of their first argument they read what they return.
_PICK = frozenset((aten.index, aten.index_select, aten.gather, aten.embedding, aten.take, aten._unsafe_index))

#: Into their first argument they write what they are given, the last tensor among the others.
_PUT = frozenset(
    (
        aten.index_put_,
        aten._index_put_impl_,
        aten.index_add_,
        aten.index_copy_,
        aten.scatter_,
        aten.scatter_add_,
        aten.index_fill_,
    )
)

#: They write their first argument without reading it.
_OVERWRITE = frozenset((aten.copy_, aten.fill_, aten.zero_, aten.normal_, aten.uniform_, aten.bernoulli_))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in an operation's arguments or results, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)


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
    formula = _FORMULAS.get(getattr(func, "_overloadpacket", None))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def _nbytes(func: Any, taken: Sequence[Tensor], made: Sequence[Tensor]) -> int:
    """Sum what is read and what is written. What an operation changes in place is both."""
    packet = getattr(func, "_overloadpacket", None)
    if packet in FREE:
        return 0
    writes = sum(touched_bytes(tensor) for tensor in made)
    if not taken:
        return writes
    if packet in LIKE:
        return writes
    first, others = taken[0], sum(touched_bytes(tensor) for tensor in taken[1:])
    if packet in _PICK:
        return min(touched_bytes(first), writes) + others + writes
    if packet in _PUT:
        given = touched_bytes(taken[-1]) if len(taken) > 1 else 0
        return others + 2 * min(given, touched_bytes(first))
    if packet in _OVERWRITE:
        return others + touched_bytes(first)
    if not made:  # lists that are changed in place, as `_foreach_add_` does
        schema = func._schema.arguments
        return others + touched_bytes(first) * (2 if any(a.alias_info and a.alias_info.is_write for a in schema) else 1)
    return touched_bytes(first) + others + writes


def _packets(*names: str) -> list[Any]:
    """Return those operations that this torch has."""
    return [packet for name in names if (packet := getattr(aten, name, None)) is not None]


def _mv(matrix: Tensor, vector: Tensor, **_: Any) -> int:
    return 2 * matrix.numel()


def _linear(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    return 2 * x.numel() * weight.shape[0]


def _recurrent(x: Tensor, input_weight: Tensor, hidden_weight: Tensor, *_: Any, **__: Any) -> int:
    """Count one layer of a recurrent network: two matrix products a step, of all gates at once."""
    steps = x.numel() // max(x.shape[-1], 1)
    return 2 * steps * (input_weight.numel() + hidden_weight.numel())


def _grouped(left: Tensor, right: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    """Count products of groups of rows; groups share the rows, so their sum does not depend on how these are divided.

    Rows of both may be what is divided (rows x k, k x columns -> groups x ...): that is one product over all of k.
    """
    if left.dim() == 2 and right.dim() == 2:
        return 2 * left.shape[0] * left.shape[1] * right.shape[1]
    return 2 * out_val.numel() * left.shape[-1]


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Count the two products of attention, for each head of the query: heads of keys and values may be fewer.

    torch's own formula refuses grouped queries before 2.13.
    """
    return 2 * _scores(query, key) * (query.shape[-1] + value.shape[-1])


def _attention_backward(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> int:
    """Count the scores again, and two products each for the gradients of scores and values, queries and keys."""
    return 2 * _scores(query, key) * (3 * query.shape[-1] + 2 * value.shape[-1])


def _scores(query: Tensor, key: Tensor) -> int:
    """Count the scores of all heads, from [batch, heads, rows, width] and [batch, key heads, columns, width]."""
    return prod(query.shape[:-1]) * key.shape[-2]


#: The operations of attention whose keys and values come after their queries in this order of dimensions.
_ATTENTION = tuple(
    f"_scaled_dot_product_{kernel}"
    for kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
)

#: Formulas of torch, and those that it lacks.
_FORMULAS: Mapping[Any, Callable[..., int]] = {
    aten.mv: _mv,
    aten.addmv: lambda _, matrix, vector, **__: _mv(matrix, vector),
    aten.dot: lambda left, right, **_: 2 * left.numel(),
    aten.linear: _linear,
    **dict.fromkeys(_packets("_grouped_mm", "grouped_mm"), _grouped),
    **dict.fromkeys(_packets("mkldnn_rnn_layer"), _recurrent),
    **dict.fromkeys(_packets("mkldnn_rnn_layer_backward"), lambda *args, **kwargs: 2 * _recurrent(*args, **kwargs)),
    **flop_registry,
    **dict.fromkeys(_packets(*_ATTENTION), _attention),
    **dict.fromkeys(_packets(*(f"{name}_backward" for name in _ATTENTION)), _attention_backward),
}
