"""Adagrad (Duchi, Hazan and Singer, 2011), with the roundings of torch's CPU kernels.

    g = grad * grad_scale                                     negated to maximize
    g = g + weight_decay * p
    s = s + g * g                                             from initial_accumulator_value
    p = p - lr / (1 + (t - 1) * lr_decay) * g / (sqrt(s) + eps)

torch makes the state, with its initial value, when the optimizer is made; `prepare` takes it over from there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from penstock import _native
from penstock.rules.device import Traced
from penstock.rules.exact import fma, fp32, sqrt
from penstock.rules.fused import Fused, FusedHyper
from penstock.rules.rule import StateSpec


class AdagradScalars(NamedTuple):
    """Weight decay, what is added to the divisor, and minus the decayed learning rate."""

    l2: float
    eps: float
    neg_lr: float


class AdagradFlags(NamedTuple):
    """Whether there is weight decay."""

    l2: bool


@dataclass(frozen=True)
class Adagrad(Fused):
    """The rule of `torch.optim.Adagrad`."""

    # The initial value is in the state by now.
    honoured: ClassVar = ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps", "maximize")

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """The sum of squares."""
        return (self.format.spec("sum", signed=False),)

    def read_group(self, group: Mapping[str, Any], step: int) -> tuple[_native.Rule, AdagradScalars, AdagradFlags]:
        """Read the kernel, the scalars and the flags of an update; see `Fused.read_group`."""
        l2 = fp32(group["weight_decay"])
        neg_lr = fp32(-(group["lr"] / (1 + (step - 1) * group["lr_decay"])))
        return _native.Rule.ADAGRAD, AdagradScalars(l2, fp32(group["eps"]), neg_lr), AdagradFlags(l2 != 0)

    def arithmetic(self, p: Tensor, g: Tensor, states: list[Tensor], hyper: FusedHyper | Traced) -> Tensor:
        """Compute one update; see `Fused.arithmetic`."""
        c = hyper.scalars
        if hyper.flags.l2:
            g = fma(c.l2, p, g)
        states[0] = fma(g, g, states[0])
        update: Tensor = g * c.neg_lr / (sqrt(states[0]) + c.eps)
        return p + update
