"""Arithmetic that plain torch does not offer with a known rounding.

Run by torch, `sqrt` and `fma` go by way of fp64. Under `torch.compile` each is the one instruction that it stands for:
`rules.compiler` has the compiler round it as the host does.
"""

import ctypes

import torch
from torch import Tensor


def fp32(value: float) -> float:
    """Round a Python number to fp32, as every kernel does with its scalars; beyond the range it becomes infinite."""
    return ctypes.c_float(value).value


def sqrt(value: Tensor) -> Tensor:
    """Return the correctly rounded square root of fp32 values, on any device.

    `torch.sqrt` is one unit in the last place away from it for some values where a vendor's vector library computes it.
    The root of an fp32 value is never so near the middle between two others that fp64's own rounding could matter.
    """
    if torch.compiler.is_compiling():
        return value.sqrt()
    return value.double().sqrt().float()


def fma(a: float | Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return `a * b + c` rounded once, for fp32 values, on any device.

    The product of two fp32 values is exact in fp64. The sum is rounded to odd there (the last bit tells whether
    anything was lost), after which rounding to fp32 gives what one rounding of the exact sum gives.

    Arguments:
        a: the first factor, fp32, of the shape of `b` or 0-dim; or a Python number that fp32 can hold.
        b: the second factor, fp32, of any shape.
        c: the summand, fp32, of the same shape.

    Returns:
        fp32, of the same shape.

    Source:
        S. Boldo and G. Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to
        odd", IEEE Transactions on Computers, 2008.
    """
    if torch.compiler.is_compiling():
        factor = a if isinstance(a, Tensor) else torch.full((), a, dtype=torch.float32, device=b.device)
        compiled: Tensor = torch.ops.prims.fma(factor, b, c)  # one of Inductor's own, there since 2.8
        return compiled
    product = b.double() * a
    total = product + c
    # Two-sum: `error` is exactly what the addition lost. It is NaN where the total is not finite, and then unused.
    rest = total - product
    error = (product - (total - rest)) + (c - rest)
    # To odd: toward zero, and the last bit set, where anything was lost. The product is far from fp64's limits.
    signed = error * total
    outward = signed < 0
    bits = total.view(torch.int64) - outward.to(torch.int64)
    return (bits | (outward | (signed > 0))).view(torch.float64).float()
