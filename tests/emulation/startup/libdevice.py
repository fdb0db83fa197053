"""Functions of libdevice that Inductor's kernels call, in Triton's own language: its interpreter has no libdevice."""

from types import ModuleType

import triton
import triton.language as tl


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


def patch(helpers: ModuleType) -> None:
    """Put them where Inductor's kernels look: `torch._inductor.runtime.triton_helpers.libdevice`."""
    for function in (isnan, isinf, nearbyint):
        setattr(helpers.libdevice, function.__name__, function)
