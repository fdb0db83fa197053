"""The compute dtype at the border of the model."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in (nested) lists, tuples and dicts to `dtype`; everything else as it is."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value
    if isinstance(value, dict) and type(value) is dict:
        return {key: cast_floating(item, dtype) for key, item in value.items()}
    if isinstance(value, list) and type(value) is list:
        return [cast_floating(item, dtype) for item in value]
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(cast_floating(item, dtype) for item in value)
    return value


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from tensors_of(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for f in fields(value):
            yield from tensors_of(getattr(value, f.name))


CastInputs = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def input_cast(dtype: torch.dtype) -> CastInputs | None:
    """How the model's inputs are cast: not at all in fp32."""
    if dtype == torch.float32:
        return None

    def cast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return cast_floating(args, dtype), cast_floating(kwargs, dtype)

    return cast
