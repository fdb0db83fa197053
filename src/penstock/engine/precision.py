"""The compute dtype at the border of the model."""

from collections.abc import Callable
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


CastInputs = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def input_cast(dtype: torch.dtype) -> CastInputs | None:
    """How the model's inputs are cast: not at all in fp32."""
    if dtype == torch.float32:
        return None

    def cast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return cast_floating(args, dtype), cast_floating(kwargs, dtype)

    return cast
