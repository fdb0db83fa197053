"""An exponential moving average of fp32 values, and how it changes places with the parameters that it is of.

    average = average - (1 - decay) * (average - value)

is the update of plain SGD with a weight decay of 1 by minus the values, so the rule of SGD computes it: with the same
bits on every back end and in every partition, in one pass.

In the place of parameters the average takes their dtype, and nothing of either is lost meanwhile. Where the master
completes the parameter, or is the parameter, the two change places as fp32 values. A bf16 parameter without a master
has no room for what the average is more precise by, and the average's 32 bits have room for that and for the parameter:

    param      | the average, in bf16 |
    average    | bits of the parameter | remainder of the average |
"""

import torch
from torch import Tensor

from penstock._native import Pool
from penstock.rules.formats import join_master, read_master, split_master, write_master
from penstock.rules.rule import PIECE_NUMEL, UpdateSlice
from penstock.rules.standard import SgdRule

_SGD = SgdRule("average")


def begin(average: Tensor, param: Tensor, master: Tensor | None) -> None:
    """Begin an average with the values as they are.

    Arguments:
        average: fp32, [n].
        param: the parameters in the compute dtype, [n].
        master: what they lack to their fp32 values: int16 remainders, an fp32 copy, or `None`; [n].
    """
    for part in _pieces(average):
        average[part].copy_(_values(param, master, part))


def follow(average: Tensor, param: Tensor, master: Tensor | None, decay: float, pool: Pool | None) -> None:
    """Update an average by the values as they are.

    Arguments:
        average: fp32, [n].
        param: the parameters in the compute dtype, [n].
        master: what they lack to their fp32 values; see `begin`.
        decay: how much of the average stays, from 0 to 1.
        pool: the threads to use on host memory.
    """
    if decay == 0:  # nothing of it stays, no rounding of what it was either
        begin(average, param, master)
        return
    group = {"lr": 1 - decay, "weight_decay": 1.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False}
    hyper = _SGD.hyper({**group, "maximize": False}, step=1)
    for part in _pieces(average):
        _SGD.update(UpdateSlice(average[part], _values(param, master, part), None, ()), hyper, -1.0, pool)


def show(average: Tensor, param: Tensor, master: Tensor | None) -> None:
    """Put an average in the place of the values, and keep the values where it was, for `hide`."""
    for part in _pieces(average):
        _show(average[part], param[part], None if master is None else master[part])


def hide(average: Tensor, param: Tensor, master: Tensor | None) -> None:
    """Undo `show`, bit for bit."""
    for part in _pieces(average):
        _hide(average[part], param[part], None if master is None else master[part])


def _show(average: Tensor, param: Tensor, master: Tensor | None) -> None:
    if not _packs(param, master):
        _exchange(average, param, master)
        return
    shown, remainder = split_master(average)
    before = param.view(torch.int16).to(torch.int32) << 16
    average.view(torch.int32).copy_(before | (remainder.to(torch.int32) & 0xFFFF))
    param.copy_(shown)


def _hide(average: Tensor, param: Tensor, master: Tensor | None) -> None:
    if not _packs(param, master):
        _exchange(average, param, master)
        return
    packed = average.view(torch.int32)
    before = (packed >> 16).to(torch.int16).view(param.dtype)
    average.copy_(join_master(param, packed.to(torch.int16)))
    param.copy_(before)


def _packs(param: Tensor, master: Tensor | None) -> bool:
    """Whether the parameters have less room than the average."""
    return master is None and param.dtype != torch.float32


def _exchange(average: Tensor, param: Tensor, master: Tensor | None) -> None:
    values = read_master(param, master)
    write_master(param, master, average)
    average.copy_(values)


def _values(param: Tensor, master: Tensor | None, part: slice) -> Tensor:
    """Give the values of a part, in memory of their own only where nothing has them in one piece."""
    if master is None:
        return param[part]
    return master[part] if master.dtype == torch.float32 else join_master(param[part], master[part])


def _pieces(average: Tensor) -> list[slice]:
    """Cut a range into pieces, so that temporaries stay small beside it."""
    return [slice(start, start + PIECE_NUMEL) for start in range(0, average.numel(), PIECE_NUMEL)]
