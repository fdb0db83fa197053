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

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock._native import Pool
from penstock.rules.formats import fp32_values, join_master, read_master, split_master, write_master
from penstock.rules.rule import PIECE_NUMEL, UpdateSlice
from penstock.rules.standard import SgdRule

_SGD = SgdRule("average")


def begin(average: Tensor, param: Tensor, master: Tensor | None) -> None:
    """Begin an average with the values as they are.

    Arguments:
        average: fp32, [n].
        param: the parameters in the compute dtype, [n].
        master: the rest of their fp32 values: int16 remainders, an fp32 copy, or `None`; [n].
    """
    for mean, part, rest in _pieces(average, param, master):
        mean.copy_(fp32_values(part, rest))


def follow(average: Tensor, param: Tensor, master: Tensor | None, decay: float, pool: Pool | None) -> None:
    """Update an average by the values as they are.

    Arguments:
        average: fp32, [n].
        param: the parameters in the compute dtype, [n].
        master: the rest of their fp32 values; see `begin`.
        decay: how much of the average stays, from 0 to 1.
        pool: the threads to use on host memory.
    """
    if decay == 0:  # nothing of it stays, no rounding of what it was either
        begin(average, param, master)
        return
    group = {"lr": 1 - decay, "weight_decay": 1.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False}
    step_scalars = _SGD.step_scalars({**group, "maximize": False}, step=1)
    for mean, part, rest in _pieces(average, param, master):
        _SGD.update(UpdateSlice(mean, fp32_values(part, rest), None, ()), step_scalars, -1.0, pool)


def show(average: Tensor, param: Tensor, master: Tensor | None) -> None:
    """Put an average in the place of the values, and keep the values where it was, for `hide`."""
    for mean, part, rest in _pieces(average, param, master):
        if not _packs(param, master):
            _exchange(mean, part, rest)
            continue
        shown, remainder = split_master(mean)
        before = part.view(torch.int16).to(torch.int32) << 16
        mean.view(torch.int32).copy_(before | (remainder.to(torch.int32) & 0xFFFF))
        part.copy_(shown)


def hide(average: Tensor, param: Tensor, master: Tensor | None) -> None:
    """Undo `show`, bit for bit."""
    for mean, part, rest in _pieces(average, param, master):
        if not _packs(param, master):
            _exchange(mean, part, rest)
            continue
        packed = mean.view(torch.int32)
        before = (packed >> 16).to(torch.int16).view(part.dtype)
        mean.copy_(join_master(part, packed.to(torch.int16)))
        part.copy_(before)


def _packs(param: Tensor, master: Tensor | None) -> bool:
    """Return True if the parameters have less room than the average."""
    return master is None and param.dtype != torch.float32


def _exchange(average: Tensor, param: Tensor, master: Tensor | None) -> None:
    """Exchange an average and the fp32 values behind a parameter."""
    values = read_master(param, master)
    write_master(param, master, average)
    average.copy_(values)


def _pieces(average: Tensor, param: Tensor, master: Tensor | None) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Cut the tensors into pieces, so that temporaries stay small beside them."""
    for start in range(0, average.numel(), PIECE_NUMEL):
        part = slice(start, start + PIECE_NUMEL)
        yield average[part], param[part], None if master is None else master[part]
