"""What Triton's interpreter lacks for Inductor's kernels: functions of libdevice, and rounding to bf16."""

from types import ModuleType
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter

_convert_float = interpreter._convert_float


@triton.jit
def isnan(x):
    return (x != x).to(tl.int32)


@triton.jit
def isinf(x):
    return (tl.abs(x) == float("inf")).to(tl.int32)


@triton.jit
def nearbyint(x):
    """Round half to even."""
    floor = tl.floor(x)
    fraction = x - floor
    is_even = (floor.to(tl.int64) % 2) == 0
    at_half = tl.where(is_even, floor, floor + 1.0)
    return tl.where(fraction > 0.5, floor + 1.0, tl.where(fraction < 0.5, floor, at_half))


def _convert_rounded(values: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    """Round fp32 to the nearest bf16, half to even; the interpreter cuts it off."""
    if (source, target) != (tl.float32, tl.bfloat16):
        return _convert_float(values, source, target, rounding)
    bits = np.frombuffer(values.tobytes(), dtype=np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, 0x7FC0, rounded).astype(np.uint16).reshape(values.shape)


def patch(helpers: ModuleType) -> None:
    """Put it where Inductor's kernels and the interpreter look: `helpers` is Inductor's `triton_helpers`."""
    for function in (isnan, isinf, nearbyint):
        setattr(helpers.libdevice, function.__name__, function)
    interpreter._convert_float = _convert_rounded
