"""Gradients into their home: one pass that writes or accumulates them and measures what is there afterwards."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock import _native
from penstock._native import Pool
from penstock.rules.native import dtype_of
from penstock.rules.rule import PIECE_NUMEL


def deposit(dst: Tensor, src: Tensor, *, add: bool, pool: Pool | None) -> float | Tensor:
    """Write `src` into `dst`, or add it, and return the squared norm of `dst` afterwards.

    Sums are rounded once, to the dtype of `dst`: `dst = round(float(dst) + float(src))`, as torch's `dst.add_(src)`
    does for every mix of dtypes.

    Args:
        dst: fp32, bf16 or fp16, contiguous, [n].
        src: fp32, bf16 or fp16, contiguous, [n], on the device of `dst`.
        add: accumulate instead of overwriting.
        pool: the threads to use on host memory; None is the calling thread alone.

    Returns:
        The sum of squares, accumulated in fp64; not finite if and only if an element is not. On the cpu a float whose
        bits depend on the values alone, not on threads or processor; elsewhere a 0-dim fp64 tensor on that device, and
        nothing waits for the device.

    Raises:
        ValueError: the tensors are not contiguous, or differ in numel or device.
        TypeError: a dtype is none of the three.
    """
    _require_flat(dst, "dst")
    _require_flat(src, "src")
    if dst.numel() != src.numel() or dst.device != src.device:
        raise ValueError(
            f"dst has {dst.numel()} elements on {dst.device}, src {src.numel()} on {src.device}: they must be alike"
        )
    if dst.device.type != "cpu":
        if add:
            dst.add_(src)
        else:
            dst.copy_(src)
        return _squared_norm_in_torch(dst)
    return _native.deposit(
        pool, dst.numel(), dst.data_ptr(), dtype_of(dst, "dst"), src.data_ptr(), dtype_of(src, "src"), add=add
    )


def squared_norm(src: Tensor, *, pool: Pool | None) -> float | Tensor:
    """Return the sum of squares of `src`, as `deposit` does for what it wrote.

    Args:
        src: fp32, bf16 or fp16, contiguous, [n].
        pool: the threads to use on host memory; None is the calling thread alone.

    Raises:
        ValueError: `src` is not contiguous.
        TypeError: its dtype is none of the three.
    """
    _require_flat(src, "src")
    if src.device.type != "cpu":
        return _squared_norm_in_torch(src)
    return _native.squared_norm(pool, src.numel(), src.data_ptr(), dtype_of(src, "src"))


def _require_flat(tensor: Tensor, what: str) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{what} must be contiguous; its shape is {tuple(tensor.shape)}, strides {tensor.stride()}")


def _squared_norm_in_torch(tensor: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=tensor.device)
    for piece in torch.split(tensor.view(-1), PIECE_NUMEL):
        total += piece.double().square().sum()
    return total
