"""How gradients get into their home: one pass writes or accumulates them, and measures what is there afterwards."""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock import _native
from penstock._native import Pool
from penstock.rules.imagined import is_imagined
from penstock.rules.native import dtype_of

Ranges = Sequence[tuple[int, int]]


def deposit(dst: Tensor, src: Tensor, *, add: bool, pool: Pool | None) -> float | Tensor:
    """Write `src` into `dst`, or add it, and return the squared norm of `dst` afterwards.

    Sums are rounded once, to the dtype of `dst`: `dst = round(float(dst) + float(src))`, as torch's `dst.add_(src)`
    does for every mix of dtypes.

    Arguments:
        dst: the gradient's home: fp32, bf16 or fp16, contiguous, [n].
        src: the new gradient: fp32, bf16 or fp16, contiguous, [n], on the device of `dst`.
        add: whether to accumulate instead of overwriting.
        pool: the threads to use on host memory; `None` for the calling thread alone.

    Returns:
        The sum of squares. On the cpu a float, accumulated in fp64, not finite if and only if an element is not, whose
        bits depend on the values alone, not on threads or processor. Elsewhere a 0-dim fp64 tensor on that device, in
        the order of its own reductions; nothing waits for the device.

    Raises:
        ValueError: the tensors are not contiguous, or differ in numel or device.
        TypeError: a dtype is none of the three.
    """
    return deposit_part(dst, 0, dst.numel(), src, add=add, pool=pool)


def deposit_part(dst: Tensor, start: int, stop: int, src: Tensor, *, add: bool, pool: Pool | None) -> float | Tensor:
    """Write or add `src` into elements `start` to `stop` of `dst`, and return their squared norm: see `deposit`.

    On the host no view of them is made: it would take longer than to write a small gradient.
    """
    _require_flat(dst, "dst")
    _require_flat(src, "src")
    if src.numel() != stop - start or src.device != dst.device:
        raise ValueError(
            f"dst has {stop - start} elements on {dst.device}, src {src.numel()} on {src.device}: they must be alike"
        )
    if not 0 <= start <= stop <= dst.numel():  # native code trusts the addresses that it is given
        raise ValueError(f"elements {start} to {stop} are not all in dst, which has {dst.numel()}")
    if not dst.is_cpu:
        return _deposit_in_torch(dst.view(-1)[start:stop], src.view(-1), [(0, stop - start)], add=add)[0]
    return _deposit_on_host(dst, start, src, 0, stop - start, add=add, pool=pool)


def deposit_parts(dst: Tensor, src: Tensor, parts: Ranges, *, add: bool, pool: Pool | None) -> Sequence[float | Tensor]:
    """Write or add the whole of `src` into `dst`, and return the squared norm of each part of `dst` afterwards.

    It does what `deposit` does with each part; what lies between the parts is zero in both tensors. On a device it is
    one pass that writes and one that measures, however many parts there are.

    Arguments:
        dst: the gradient's home: fp32, bf16 or fp16, contiguous, [n].
        src: the new gradient: fp32, bf16 or fp16, contiguous, [n], on the device of `dst`.
        parts: the first element of each part, and the one after its last.
        add: whether to accumulate instead of overwriting.
        pool: the threads to use on host memory; `None` for the calling thread alone.

    Returns:
        The sums of squares, one for each part, as `deposit` returns them.
    """
    if dst.device.type != "cpu":
        return _deposit_in_torch(dst, src, parts, add=add)
    _require_flat(dst, "dst")
    _require_flat(src, "src")
    if dst.numel() != src.numel() or src.device != dst.device:
        raise ValueError(
            f"dst has {dst.numel()} elements on {dst.device}, src {src.numel()} on {src.device}: they must be alike"
        )
    return [_deposit_on_host(dst, start, src, start, stop - start, add=add, pool=pool) for start, stop in parts]


def squared_norms(src: Tensor, parts: Ranges, *, pool: Pool | None) -> Sequence[float | Tensor]:
    """Return the sum of squares of each part of `src`, as `deposit_parts` does for what it wrote."""
    if src.device.type != "cpu":
        return _squared_norms_in_torch([src[start:stop] for start, stop in parts])
    _require_flat(src, "src")
    return [_squared_norm_on_host(src, start, stop - start, pool=pool) for start, stop in parts]


def squared_norms_of(tensors: Sequence[Tensor]) -> Sequence[float | Tensor]:
    """Return the sum of squares of each of several tensors on one device, as `squared_norms` of parts of one."""
    if tensors and tensors[0].device.type != "cpu":
        return _squared_norms_in_torch(tensors)
    if is_imagined("penstock.norms", sum(tensor.nbytes for tensor in tensors)):
        return [0.0] * len(tensors)
    return [squared_norm(tensor, pool=None) for tensor in tensors]


def squared_norm(src: Tensor, *, pool: Pool | None) -> float | Tensor:
    """Return the sum of squares of `src`, as `deposit` does for what it wrote.

    Arguments:
        src: any gradient: fp32, bf16 or fp16, contiguous, [n].
        pool: the threads to use on host memory; `None` for the calling thread alone.

    Raises:
        ValueError: `src` is not contiguous.
        TypeError: its dtype is none of the three.
    """
    _require_flat(src, "src")
    if src.device.type != "cpu":
        return _squared_norms_in_torch([src])[0]
    return _squared_norm_on_host(src, 0, src.numel(), pool=pool)


def _deposit_on_host(
    dst: Tensor, dst_start: int, src: Tensor, src_start: int, numel: int, *, add: bool, pool: Pool | None
) -> float:
    """Write or add elements of `src` from one on into `dst` from another one on. The ranges were checked."""
    dst_bytes, src_bytes = dst.itemsize, src.itemsize
    if is_imagined("penstock.deposit", numel * (src_bytes + (2 if add else 1) * dst_bytes)):
        return 0.0
    into, source = dst.data_ptr() + dst_start * dst_bytes, src.data_ptr() + src_start * src_bytes
    return _native.deposit(pool, numel, into, dtype_of(dst, "dst"), source, dtype_of(src, "src"), add=add)


def _squared_norm_on_host(src: Tensor, start: int, numel: int, *, pool: Pool | None) -> float:
    """Sum the squares of elements of `src` from one on. The range was checked."""
    if is_imagined("penstock.norm", numel * src.itemsize):
        return 0.0
    return _native.squared_norm(pool, numel, src.data_ptr() + start * src.itemsize, dtype_of(src, "src"))


def _require_flat(tensor: Tensor, what: str) -> None:
    """Refuse a tensor that is not contiguous: native code gets its address alone. `what` names it."""
    if not tensor.is_contiguous():
        raise ValueError(f"{what} must be contiguous; its shape is {tuple(tensor.shape)}, strides {tensor.stride()}")


def _deposit_in_torch(dst: Tensor, src: Tensor, parts: Ranges, *, add: bool) -> Sequence[Tensor]:
    """Do in torch operations, on any device, what `deposit_parts` does on the host."""
    if add:
        dst.add_(src)
    else:
        dst.copy_(src)
    return _squared_norms_in_torch([dst[start:stop] for start, stop in parts])


def _squared_norms_in_torch(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the sums of squares of several tensors, by one reduction that reads low precision as it is."""
    if not tensors:
        return ()
    # In fp64, as on the host: what is left of the order of summation is far below the fp32 that a norm is rounded to,
    # so that clipping is the same wherever a gradient was measured.
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float64)).square().unbind()
