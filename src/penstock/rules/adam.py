"""Adam (Kingma and Ba, 2015) and AdamW (Loshchilov and Hutter, 2019), with the roundings of torch's CPU kernels.

One update of a parameter p with gradient g, moments m and v, and the step count t after increment:

    g = grad * grad_scale                                     negated to maximize
    g = g + weight_decay * p                                  Adam alone
    p = p * (1 - lr * weight_decay)                           AdamW alone
    m = m + (1 - beta1) * (g - m)
    v = v * beta2 + (1 - beta2) * g * g
    p = p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

The scalars are worked out in fp64, as in torch, and each is rounded to fp32 once. The sums for g, m and v take a
product in without rounding it first (fused multiply-add), as torch's own CPU kernels do on processors that can; square
root and division are rounded correctly. So the bits do not depend on the processor, and from the same gradients AdamW's
moments are those of `torch.optim` with `foreach=False`, bit for bit. Its parameters may differ in the last bit, because
torch's square root on a CPU is not always the nearest value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock import _native
from penstock._native import Pool
from penstock.errors import ConfigError
from penstock.rules.exact import fma, fp32, sqrt
from penstock.rules.master import read_master, write_master
from penstock.rules.native import dtype_of, master_kind_of
from penstock.rules.rule import Hyper, Segment


@dataclass(frozen=True)
class AdamHyper(Hyper):
    """The scalars of one update of Adam or AdamW, each a value that fp32 holds.

    Args:
        sign: -1 to maximize, else 1.
        l2: weight decay that is added to the gradient (Adam), or 0.
        decay: factor on the parameter (AdamW), or 1.
        lerp_weight: 1 - beta1; when `lerp_from_grad`, -beta1.
        lerp_from_grad: start the interpolation of exp_avg at the gradient, which is the more exact end, and torch's
            choice, for 1 - beta1 >= 0.5.
        beta2: decay of exp_avg_sq.
        grad_sq_weight: 1 - beta2.
        bias2_sqrt: sqrt(1 - beta2^t).
        eps: added to the denominator.
        neg_step_size: -lr / (1 - beta1^t).
    """

    sign: float
    l2: float
    decay: float
    lerp_weight: float
    lerp_from_grad: bool
    beta2: float
    grad_sq_weight: float
    bias2_sqrt: float
    eps: float
    neg_step_size: float


@dataclass(frozen=True)
class Adam:
    """The rule of `torch.optim.Adam` and `torch.optim.AdamW`; a group's `decoupled_weight_decay` tells them apart.

    Args:
        name: "adam" or "adamw".

    Example:
        >>> rule = rule_for(optimizer)
        >>> rule.update(segment, rule.hyper(optimizer.param_groups[0], step=1), grad_scale=1.0, pool=None)
    """

    name: str
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def hyper(self, group: Mapping[str, Any], step: int) -> AdamHyper:
        """Read a parameter group. `step` is 1 at the first update. Raises `ConfigError` for what is not honoured."""
        _refuse_unsupported(group)
        beta1, beta2 = group["betas"]
        weight_decay = group["weight_decay"]
        decoupled = group["decoupled_weight_decay"]
        # A learning rate that is a tensor stays one here: torch too works out the scalars in that tensor's dtype.
        lr = group["lr"]
        bias1 = 1 - beta1 ** float(step)
        bias2 = 1 - beta2 ** float(step)
        lerp_weight = fp32(1 - beta1)
        lerp_from_grad = abs(lerp_weight) >= 0.5
        return AdamHyper(
            sign=-1.0 if group["maximize"] else 1.0,
            l2=0.0 if decoupled else fp32(weight_decay),
            decay=fp32(1 - lr * weight_decay) if decoupled else 1.0,
            lerp_weight=fp32(lerp_weight - 1) if lerp_from_grad else lerp_weight,
            lerp_from_grad=lerp_from_grad,
            beta2=fp32(beta2),
            grad_sq_weight=fp32(1 - beta2),
            bias2_sqrt=fp32(bias2**0.5),
            eps=fp32(group["eps"]),
            neg_step_size=fp32(-(lr / bias1)),
        )

    def update(self, segment: Segment, hyper: Hyper, grad_scale: float, pool: Pool | None) -> None:
        """Apply the rule to one segment, in one pass, in place. Raises `TypeError` for dtypes without a kernel."""
        assert isinstance(hyper, AdamHyper)
        if segment.param.device.type == "cpu":
            _update_native(segment, hyper, grad_scale, pool)
        else:
            update_reference(segment, hyper, grad_scale)


def reference(
    p: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, hyper: AdamHyper, grad_scale: float
) -> Tensor:
    """Return the updated fp32 parameter and update both moments in place; every operation rounds on its own.

    Args:
        p: fp32, [n]; not changed.
        grad: fp32, bf16 or fp16, [n].
        exp_avg: fp32, [n].
        exp_avg_sq: fp32, [n].
        hyper: the scalars.
        grad_scale: factor on the gradient, rounded to fp32.
    """
    g = grad.float() * fp32(grad_scale * hyper.sign)
    if hyper.l2 != 0:
        g = fma(hyper.l2, p, g)
    p = p * hyper.decay
    exp_avg.copy_(fma(hyper.lerp_weight, g - exp_avg, g if hyper.lerp_from_grad else exp_avg))
    exp_avg_sq.copy_(fma(hyper.grad_sq_weight * g, g, exp_avg_sq * hyper.beta2))
    # A tensor as divisor: by a Python number some devices multiply with the rounded inverse instead.
    bias2_sqrt = torch.full((), hyper.bias2_sqrt, dtype=torch.float32, device=p.device)
    denominator = sqrt(exp_avg_sq) / bias2_sqrt + hyper.eps
    return p + exp_avg * hyper.neg_step_size / denominator


def update_reference(segment: Segment, hyper: AdamHyper, grad_scale: float) -> None:
    """Update a segment by `reference`, on any device."""
    for piece in segment.pieces():
        p = read_master(piece.param, piece.master)
        exp_avg, exp_avg_sq = piece.states
        p = reference(p, piece.grad, exp_avg, exp_avg_sq, hyper, grad_scale)
        write_master(piece.param, piece.master, p)


def _refuse_unsupported(group: Mapping[str, Any]) -> None:
    for option in ("amsgrad", "capturable", "differentiable"):
        if group[option]:
            raise ConfigError(
                f"{option}={group[option]!r} is not supported by Penstock's Adam and AdamW. "
                f"Set {option}=False in every parameter group."
            )
    beta1, beta2 = group["betas"]
    for option, value in (("betas[0]", beta1), ("betas[1]", beta2), ("weight_decay", group["weight_decay"])):
        if isinstance(value, Tensor):
            raise ConfigError(f"{option} is a tensor, which Penstock's Adam and AdamW do not support. Make it a float.")


def _update_native(segment: Segment, hyper: AdamHyper, grad_scale: float, pool: Pool | None) -> None:
    exp_avg, exp_avg_sq = segment.states
    if exp_avg.dtype != torch.float32 or exp_avg_sq.dtype != torch.float32:
        raise TypeError(f"exp_avg is {exp_avg.dtype} and exp_avg_sq {exp_avg_sq.dtype}; both must be float32")
    _native.adam(
        pool,
        segment.param.numel(),
        segment.param.data_ptr(),
        dtype_of(segment.param, "param"),
        segment.grad.data_ptr(),
        dtype_of(segment.grad, "grad"),
        0 if segment.master is None else segment.master.data_ptr(),
        master_kind_of(segment.master),
        exp_avg.data_ptr(),
        exp_avg_sq.data_ptr(),
        grad_scale=grad_scale * hyper.sign,
        l2=hyper.l2,
        decay=hyper.decay,
        lerp_weight=hyper.lerp_weight,
        lerp_from_grad=hyper.lerp_from_grad,
        beta2=hyper.beta2,
        grad_sq_weight=hyper.grad_sq_weight,
        bias2_sqrt=hyper.bias2_sqrt,
        eps=hyper.eps,
        neg_step_size=hyper.neg_step_size,
    )
