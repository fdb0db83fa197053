"""The fp32 value behind a parameter: as bf16 and a 16-bit remainder, as a full copy, or as the parameter itself.

The remainder form is exact. With the bits of a value seen as integers:

    bf16 = (fp32 + 0x8000) >> 16        nearest, ties away from zero
    fp32 = (bf16 << 16) + remainder     the remainder is signed

so the low 16 bits of the value are the remainder's bits, and bf16 is the parameter that a user sees. It differs from
the nearest even bf16 on half of the ties alone, one value in 131,072, and there either is as near. A NaN is kept as a
quiet NaN with remainder 0: rounding 0x7FFFFFFF up would make it -0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def split_master(value: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 values into bf16 parameters and int16 remainders, on any device.

    Args:
        value: fp32, any shape.

    Returns:
        bf16 and int16, each of the same shape; `join_master` gives back the bits of every value but a NaN's.
    """
    high, low = _halves(value)
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def _halves(value: Tensor) -> tuple[Tensor, Tensor]:
    """The bits of the parameter, and of the remainder in the low 16 of each, as int32."""
    bits = value.contiguous().view(torch.int32)
    # Without its low bits a NaN stays one: it is not rounded up, and its remainder is 0.
    bits = torch.where(torch.isnan(value), (bits | 0x400000) & -0x10000, bits)
    return (bits + 0x8000) >> 16, bits


def join_master(param: Tensor, remainder: Tensor) -> Tensor:
    """Put bf16 parameters and int16 remainders together to the fp32 values they came from, on any device.

    Args:
        param: bf16, any shape.
        remainder: int16, the same shape.

    Returns:
        fp32, the same shape.
    """
    high = param.contiguous().view(torch.int16).to(torch.int32) << 16
    return (high + remainder).view(torch.float32)


def read_master(param: Tensor, master: Tensor | None) -> Tensor:
    """Return a fresh fp32 copy of the values behind `param`, whatever form `master` has."""
    if master is None:
        return param.to(torch.float32, copy=True)
    if master.dtype == torch.int16:
        return join_master(param, master)
    return master.clone()


def write_master(param: Tensor, master: Tensor | None, value: Tensor) -> None:
    """Write fp32 values into `param` and `master`, whatever form `master` has; the reverse of `read_master`."""
    if master is None:
        param.copy_(value)
    elif master.dtype == torch.int16:
        high, low = _halves(value)  # copying keeps the low 16 bits of each
        param.view(torch.int16).copy_(high)
        master.copy_(low)
    else:
        master.copy_(value)
        param.copy_(value)
