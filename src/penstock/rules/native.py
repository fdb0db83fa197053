"""How tensors are described to the native module, which gets their addresses and trusts what it is told of them."""

import torch
from torch import Tensor

from penstock._native import DType, Master, Storage
from penstock.rules.rule import StateSpec

DTYPES = {torch.float32: DType.FP32, torch.bfloat16: DType.BF16, torch.float16: DType.FP16}


def dtype_of(tensor: Tensor, what: str) -> DType:
    """Return the native name of a tensor's dtype.

    Arguments:
        tensor: any tensor.
        what: its name, for the message.

    Raises:
        TypeError: the native kernels know no such dtype.
    """
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise TypeError(f"{what} is {tensor.dtype}; use float32, bfloat16 or float16")
    return dtype


def master_kind_of(master: Tensor | None) -> Master:
    """Return in which form a master keeps the fp32 value behind a parameter.

    Raises:
        TypeError: `master` is neither `None`, int16 nor fp32.
    """
    if master is None:
        return Master.NONE
    if master.dtype == torch.int16:
        return Master.REMAINDER
    if master.dtype == torch.float32:
        return Master.FP32
    raise TypeError(f"master is {master.dtype}; use int16 (the remainder) or float32 (a full copy)")


def storage_of(spec: StateSpec, values: Tensor, scale: Tensor | None, *, stochastic: bool) -> Storage:
    """Return how a state is stored.

    Arguments:
        spec: how the rule says that it is stored.
        values: what is stored.
        scale: the scales of an 8-bit state; else `None`.
        stochastic: whether bf16 is rounded by random bits.

    Raises:
        TypeError: the tensors are not what `spec` says.
    """
    scaled = spec.dtype == torch.uint8
    if (
        values.dtype != spec.dtype
        or (scale is not None) != scaled
        or (scale is not None and scale.dtype != torch.float32)
    ):
        raise TypeError(
            f"{spec.name} is {values.dtype} with scales {None if scale is None else scale.dtype}; it must be "
            f"{spec.dtype} {'with float32 scales' if scaled else 'without scales'}"
        )
    if scaled:
        return Storage.INT8_SIGNED if spec.signed else Storage.INT8_UNSIGNED
    if spec.dtype == torch.bfloat16:
        return Storage.BF16_RANDOM if stochastic else Storage.BF16
    return Storage.FP32
