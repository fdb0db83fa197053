"""What Triton's interpreter lacks for Inductor's kernels: functions of libdevice, and the roundings of a GPU."""

from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


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


def _fma(builder: Any, *operands: Any) -> Any:
    """Compute a * b + c, rounded once; the interpreter takes two steps."""
    from penstock.rules import rule  # not at the start of every process

    shape = np.broadcast_shapes(*(operand.data.shape for operand in operands))
    a, b, c = (torch.tensor(np.broadcast_to(operand.data, shape)) for operand in operands)
    assert a.dtype == torch.float32
    return interpreter.TensorHandle(rule.fma(a, b, c).numpy(), operands[2].dtype.scalar)


def _convert(values: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    """Round to the nearest value, half to even, and keep denormals; the interpreter cuts bf16 off and flushes them."""
    words = np.frombuffer(values.tobytes(), dtype=f"int{source.primitive_bitwidth}").copy()
    converted = torch.from_numpy(words).view(_DTYPES[str(source)]).to(_DTYPES[str(target)])
    bits = converted.view(torch.int16 if target.primitive_bitwidth == 16 else torch.int32).numpy()
    return bits.view(f"uint{target.primitive_bitwidth}").reshape(values.shape)


def patch(helpers: ModuleType) -> None:
    """Put it where Inductor's kernels and the interpreter look: `helpers` is Inductor's `triton_helpers`."""
    for function in (isnan, isinf, nearbyint):
        setattr(helpers.libdevice, function.__name__, function)
    interpreter._convert_float = _convert
    interpreter.InterpreterBuilder.create_fma = _fma
