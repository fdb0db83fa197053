"""Lion (Chen et al., "Symbolic discovery of optimization algorithms", 2023).

    g = grad * grad_scale                                     negated to maximize
    u = sign(beta1 * m + (1 - beta1) * g)
    m = beta2 * m + (1 - beta2) * g
    p = p * (1 - lr * weight_decay) - lr * u

Both sums take the gradient's product in without rounding it first. The equations and their roundings are those of
`penstock.optim.Lion` and of `lion_pytorch.Lion` in torch operations, bit for bit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from penstock import _native
from penstock.errors import ConfigError
from penstock.rules.device import Traced
from penstock.rules.exact import fma, fp32
from penstock.rules.fused import Fused, FusedHyper
from penstock.rules.rule import StateSpec


class LionScalars(NamedTuple):
    """The factor on the parameter, both decays with the weights of the gradient, and minus the learning rate."""

    decay: float
    beta1: float
    grad_weight1: float
    beta2: float
    grad_weight2: float
    neg_lr: float


class LionFlags(NamedTuple):
    """No flags: the same operations at every step."""


@dataclass(frozen=True)
class Lion(Fused):
    """The rule of `penstock.optim.Lion` and `lion_pytorch.Lion`."""

    honoured: ClassVar = ("lr", "betas", "weight_decay", "maximize")
    refused: ClassVar = ()

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """The moving average."""
        return (self.format.spec("exp_avg", signed=True),)

    def read_group(self, group: Mapping[str, Any], step: int) -> tuple[_native.Rule, LionScalars, LionFlags]:
        """Read the kernel, the scalars and the flags of an update; see `Fused.read_group`."""
        del step
        if group.get("cautious_factor", 1) != 1:
            raise ConfigError(f"cautious_factor={group['cautious_factor']!r} is not supported by Penstock's Lion.")
        beta1, beta2 = group["betas"]
        lr = group["lr"]
        scalars = LionScalars(
            decay=fp32(1 - lr * group["weight_decay"]),
            beta1=fp32(beta1),
            grad_weight1=fp32(1 - beta1),
            beta2=fp32(beta2),
            grad_weight2=fp32(1 - beta2),
            neg_lr=fp32(-lr),
        )
        return _native.Rule.LION, scalars, LionFlags()

    def arithmetic(self, p: Tensor, g: Tensor, states: list[Tensor], hyper: FusedHyper | Traced) -> Tensor:
        """Compute one update; see `Fused.arithmetic`."""
        c = hyper.scalars
        u = fma(c.grad_weight1, g, states[0] * c.beta1)
        states[0] = fma(c.grad_weight2, g, states[0] * c.beta2)
        direction = (u > 0).to(torch.float32) - (u < 0).to(torch.float32)
        return fma(c.neg_lr, direction, p * c.decay)
