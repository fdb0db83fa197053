"""Adagrad (Duchi, Hazan and Singer, 2011), with the roundings of torch's CPU kernels.

    g = grad * grad_scale                                     negated to maximize
    g = g + weight_decay * p
    s = s + g * g                                             from initial_accumulator_value
    p = p - lr / (1 + (t - 1) * lr_decay) * g / (sqrt(s) + eps)

torch makes the state, with its initial value, when the optimizer is made; `prepare` takes it over from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from penstock import _native
from penstock.rules.device import Operations, Traced
from penstock.rules.exact import fp32
from penstock.rules.fused import Fused, FusedHyper
from penstock.rules.rule import Scalars, StateSpec


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

    def hyper(self, group: Mapping[str, Any], step: int, scalars: Scalars = {}) -> FusedHyper:  # noqa: B006
        """Read a parameter group; see `Rule.hyper`."""
        self.check(group)
        l2 = fp32(group["weight_decay"])
        neg_lr = fp32(-(group["lr"] / (1 + (step - 1) * group["lr_decay"])))
        return FusedHyper(
            _native.Rule.ADAGRAD,
            -1.0 if group["maximize"] else 1.0,
            AdagradScalars(l2, fp32(group["eps"]), neg_lr),
            AdagradFlags(l2 != 0),
            step if self.format.stochastic else 0,
        )

    def arithmetic(
        self, p: Tensor, g: Tensor, states: list[Tensor], hyper: FusedHyper | Traced, ops: Operations
    ) -> Tensor:
        """One update; see `Fused.arithmetic`."""
        c = hyper.scalars
        if hyper.flags.l2:
            g = ops.fma(c.l2, p, g)
        states[0] = ops.fma(g, g, states[0])
        update: Tensor = g * c.neg_lr / (ops.sqrt(states[0]) + c.eps)
        return p + update
