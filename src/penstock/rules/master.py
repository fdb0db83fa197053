"""The fp32 value behind a parameter: as bf16 and a 16-bit remainder, as a full copy, or as the parameter itself.

The remainder form is exact. With the bits of a value seen as integers:

    bf16 = (fp32 + 0x8000) >> 16        nearest, ties away from zero
    fp32 = (bf16 << 16) + remainder     the remainder is signed

so the low 16 bits of the value are the remainder's bits, and bf16 is the parameter that a user sees. A NaN is kept as
a quiet NaN with remainder 0: rounding 0x7FFFFFFF up would make it -0.

Ties away from zero are the one rule for parameters, whatever their master is (`as_param`): the form of the master and
the way of a value (prepare, update, load, set, export, average) change no bit of a parameter. To nearest even, as torch
rounds, a value and its 16 bits would not fit: an even bf16 stands for 65,537 values then. The two rules differ on half
of the ties, one value in 131,072. Gradients, optimizer states and activations are rounded to nearest even.
"""

import torch
from torch import Tensor

from penstock._native import Pool
from penstock.rules.deposit import deposit


def as_param(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert values to the dtype of a parameter: bf16 to nearest with ties away from zero, others as torch does.

    Arguments:
        value: the values, of any dtype and shape.
        dtype: the parameter's.
    """
    if dtype != torch.bfloat16 or value.dtype == torch.bfloat16:
        return value.to(dtype)
    return split_master(value.to(torch.float32))[0]


def split_master(value: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 values into bf16 parameters and int16 remainders, on any device.

    Arguments:
        value: the values, fp32, of any shape.

    Returns:
        The parameters, bf16, and the remainders, int16, each of the same shape. `join_master` gives back the bits of
        every value but a NaN's.
    """
    high, low = _halves(value)
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def _halves(value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bits of the parameters, and those of the remainders in the low 16 of each element, both as int32."""
    bits = value.contiguous().view(torch.int32)
    # Without its low bits a NaN stays one: it is not rounded up, and its remainder is 0.
    bits = torch.where(torch.isnan(value), (bits | 0x400000) & -0x10000, bits)
    return (bits + 0x8000) >> 16, bits


def join_master(param: Tensor, remainder: Tensor) -> Tensor:
    """Put bf16 parameters and int16 remainders together to the fp32 values they came from, on any device.

    Arguments:
        param: the parameters, bf16, of any shape.
        remainder: the remainders, int16, of the same shape.

    Returns:
        The values, fp32, of the same shape.
    """
    high = param.contiguous().view(torch.int16).to(torch.int32) << 16
    return (high + remainder).view(torch.float32)


def read_master(param: Tensor, master: Tensor | None) -> Tensor:
    """Return the fp32 values behind a parameter, in memory of their own.

    Arguments:
        param: where compute reads the parameter, of any shape.
        master: what `param` lacks to the fp32 value: int16 remainders, an fp32 copy, or `None` where it lacks nothing.
    """
    if master is None:
        return param.to(torch.float32, copy=True)
    if master.dtype == torch.int16:
        return join_master(param, master)
    return master.clone()


def write_master(param: Tensor, master: Tensor | None, value: Tensor) -> None:
    """Write fp32 values into a parameter and its master; the reverse of `read_master`.

    Arguments:
        param: where compute reads the parameter, of any shape.
        master: int16 remainders, an fp32 copy, or `None`.
        value: the values, fp32, of the same shape.
    """
    if master is not None and master.dtype == torch.int16:
        high, low = _halves(value)  # the copies below keep the low 16 bits of each element
        param.view(torch.int16).copy_(high)
        master.copy_(low)
        return
    param.copy_(as_param(value, param.dtype))
    if master is not None:
        master.copy_(value)


def write_given(
    param: Tensor, master: Tensor | None, value: Tensor, *, zeroed: bool = False, pool: Pool | None = None
) -> None:
    """Write values as they were given; the same bits as `write_master` of them in fp32, signaling NaNs apart.

    Arguments:
        param: where compute reads the parameter, of any shape.
        master: int16 remainders, an fp32 copy, or `None`.
        value: the values, of any dtype and the same shape, from anywhere.
        zeroed: whether the master is zeros already.
        pool: the threads to use on host memory; `None` for the calling thread alone.
    """
    if master is None or master.dtype != torch.int16 or value.dtype != torch.bfloat16 or not value.numel():
        write_master(param, master, value.float().to(param.device))
        return
    # A bf16 value is the parameter, and nothing is left of it: one pass that copies, instead of ten over fp32.
    if all(each.device.type == "cpu" and each.is_contiguous() for each in (param, value)):
        deposit(param, value, add=False, pool=pool)
    else:
        param.copy_(value)
    if not zeroed:
        master.zero_()
