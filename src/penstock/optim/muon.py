"""The arithmetic of Muon on one parameter: torch's, with cuts of fused parameters and stacks.

Source:
    K. Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024,
    https://kellerjordan.github.io/posts/muon/, and `torch/optim/_muon.py`, whose operations these are, one by one.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError

#: How the rows of a matrix are cut: into so many equal parts, or into parts of these sizes; `None`: not at all.
Split = int | tuple[int, ...] | None

NS_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
ADJUSTMENTS = (None, "original", "match_rms_adamw")


class MuonRule:
    """Muon's arithmetic, a `MatrixRule`: momentum whose matrices are made orthogonal.

    A parameter of two dimensions is a matrix; one of three is a stack of matrices along the first, each updated by
    itself. `group["split"]` cuts the rows of each matrix further.
    """

    def states(self, shape: tuple[int, ...], group: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
        """Name the momentum.

        Raises:
            ConfigError: the parameter is no matrix, and no stack of them.
        """
        del group
        require_matrix(shape)
        return {"momentum_buffer": shape}

    def update(
        self, matrix: Tensor, grad: Tensor, states: Mapping[str, Tensor], group: Mapping[str, Any], step: int
    ) -> None:
        """Update a parameter; see `MatrixRule.update`."""
        del step
        lr, momentum = group["lr"], group["momentum"]
        if isinstance(lr, Tensor):
            lr = lr.squeeze()
        split, dtype = group.get("split"), NS_DTYPES[group.get("ns_dtype", "bf16")]
        buffer = states["momentum_buffer"]
        cuts = (parts(tensor, split) for tensor in (matrix, grad, buffer))
        for part, part_grad, part_buffer in zip(*cuts, strict=True):
            part_buffer.lerp_(part_grad, 1 - momentum)
            update = part_grad.lerp(part_buffer, momentum) if group["nesterov"] else part_buffer
            update = orthogonal(update, group["ns_coefficients"], group["ns_steps"], group["eps"], dtype)
            part.mul_(1 - lr * group["weight_decay"])
            part.add_(update, alpha=-lr * ratio(part.shape, group["adjust_lr_fn"]))

    def working_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the most bytes of temporaries of one update: of a whole matrix, as if it were not cut.

        They are the interpolated momentum, two matrices of the iteration and three of its Gram matrices, in fp32.
        """
        require_matrix(shape)
        rows, columns = shape[-2:]
        return 4 * (3 * rows * columns + 3 * min(rows, columns) ** 2)


def check_options(group: Mapping[str, Any]) -> None:
    """Refuse options of a parameter group that the arithmetic does not know.

    Raises:
        ConfigError: it names the first one.
    """
    if group["adjust_lr_fn"] not in ADJUSTMENTS:
        raise ConfigError(f"adjust_lr_fn={group['adjust_lr_fn']!r}: use None, 'original' or 'match_rms_adamw'.")
    if group.get("ns_dtype", "bf16") not in NS_DTYPES:
        raise ConfigError(f"ns_dtype={group['ns_dtype']!r}: use 'bf16' or 'fp32'.")
    if not 0 <= group["ns_steps"] < 100:
        raise ConfigError(f"ns_steps={group['ns_steps']!r}: use 0 to 99.")
    if len(group["ns_coefficients"]) != 3:
        raise ConfigError(f"ns_coefficients={group['ns_coefficients']!r}: use three numbers.")
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ConfigError(f"lr is a tensor of shape {tuple(lr.shape)}: use one of one element.")
    for name in ("lr", "momentum", "weight_decay"):
        if not group[name] >= 0:
            raise ConfigError(f"{name}={group[name]!r}: use 0 or more.")


def require_matrix(shape: tuple[int, ...]) -> None:
    """Refuse a shape that is neither a matrix nor a stack of them.

    Raises:
        ConfigError: the shape has not two or three dimensions.
    """
    if len(shape) not in (2, 3):
        raise ConfigError(
            f"Muon takes matrices, and stacks of them along the first of three dimensions, not a parameter of shape "
            f"{tuple(shape)}. Give it to AdamW: penstock.optim.MuonAdamW does."
        )


def sizes_of(shape: tuple[int, ...], split: Any) -> tuple[int, ...]:
    """Return the rows of each part of a matrix of the parameter, in order.

    Arguments:
        shape: the parameter's shape, [rows, columns] or [stack, rows, columns].
        split: how the rows of a matrix are cut: a `Split`, or something else, which is refused.

    Raises:
        ConfigError: the rows cannot be cut like that.
    """
    require_matrix(shape)
    rows = shape[-2]
    if split is None:
        return (rows,)
    if isinstance(split, int) and not isinstance(split, bool):
        if split < 1 or rows % split:
            raise ConfigError(f"split={split!r}: a parameter of shape {tuple(shape)} has {rows} rows.")
        return (rows // split,) * split
    if not isinstance(split, tuple) or any(not isinstance(size, int) or size < 1 for size in split):
        raise ConfigError(f"split={split!r}: give a number of equal parts, or the rows of each part as a tuple.")
    if sum(split) != rows:
        raise ConfigError(f"split={split!r} has {sum(split)} rows, a parameter of shape {tuple(shape)} {rows}.")
    return tuple(split)


def parts(tensor: Tensor, split: Split) -> Iterator[Tensor]:
    """Cut a tensor of the parameter's shape into views of the matrices that are made orthogonal by themselves."""
    sizes = sizes_of(tuple(tensor.shape), split)
    for matrix in tensor.unbind() if tensor.dim() == 3 else (tensor,):
        yield from torch.split(matrix, list(sizes))


def ratio(shape: tuple[int, ...], adjust_lr_fn: str | None) -> float:
    """Return the factor on the learning rate of a matrix, as `torch.optim.Muon` has it.

    Arguments:
        shape: [rows, columns].
        adjust_lr_fn: "original" (or `None`), after Jordan; "match_rms_adamw", after Liu et al., "Muon is Scalable for
            LLM Training", 2025, https://arxiv.org/abs/2502.16982.
    """
    rows, columns = shape
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def orthogonal(
    matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float, dtype: torch.dtype
) -> Tensor:
    """Return nearly the orthogonal factor of a matrix, by a quintic Newton-Schulz iteration.

    Arguments:
        matrix: [rows, columns], of any dtype.
        coefficients: of the polynomial that is applied to the singular values at each step.
        steps: how many.
        eps: the least norm that the matrix is divided by.
        dtype: the dtype of the iteration.

    Returns:
        The factor, in `dtype`, of the same shape.
    """
    a, b, c = coefficients
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.to(dtype, copy=True)
    if tall:
        x = x.T
    x.div_(x.norm().clamp(min=eps))  # so that no singular value is above 1
    for _ in range(steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if tall else x
