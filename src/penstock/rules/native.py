"""The border to the native module: tensors become addresses here, after everything that could break was checked."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock._native import DType, Master

DTYPES = {torch.float32: DType.FP32, torch.bfloat16: DType.BF16, torch.float16: DType.FP16}


def dtype_of(tensor: Tensor, what: str) -> DType:
    """Return the native name of a tensor's dtype.

    Raises:
        TypeError: the native kernels know no such dtype; `what` names the tensor.
    """
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise TypeError(f"{what} is {tensor.dtype}; use float32, bfloat16 or float16")
    return dtype


def master_kind_of(master: Tensor | None) -> Master:
    """Return how `master` keeps the fp32 value behind a parameter.

    Raises:
        TypeError: `master` is neither None, int16 nor fp32.
    """
    if master is None:
        return Master.NONE
    if master.dtype == torch.int16:
        return Master.REMAINDER
    if master.dtype == torch.float32:
        return Master.FP32
    raise TypeError(f"master is {master.dtype}; use int16 (the remainder) or float32 (a full copy)")
