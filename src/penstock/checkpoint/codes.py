"""Weights in 8 bits: a code for each, and a scale for each row of them; code * scale is exact but for one rounding."""

import torch
from torch import Tensor

from penstock.errors import ConfigError

MOST_CODE = 127
SCALE_DTYPE = torch.bfloat16


def scales_of(weight: Tensor) -> Tensor:
    """Choose the scale of each row of a weight (rows, in): its largest magnitude is the largest code.

    Raises:
        ConfigError: a value is not finite.
    """
    most = weight.abs().amax(1).float()
    if not bool(most.isfinite().all()):  # NaN is the largest to amax
        raise ConfigError("holds a value that is not finite, which no code stands for")
    scale = (most / MOST_CODE).to(SCALE_DTYPE)
    return torch.where(scale > 0, scale, 1)  # a row of zeros


def codes_of(weight: Tensor, scale: Tensor) -> Tensor:
    """Round each value of a weight (rows, in) to its nearest code, int8."""
    # The scale is rounded: the largest value may be a little beyond the largest code.
    return (weight.float() / scale.float()[:, None]).round_().clamp_(-MOST_CODE, MOST_CODE).to(torch.int8)


def decoded(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Make the weight (rows, in) of codes and scales, rounded once: a product of 7 bits and 8."""
    wide = torch.promote_types(dtype, scale.dtype)
    return codes.to(wide).mul_(scale.to(wide)[:, None]).to(dtype)
