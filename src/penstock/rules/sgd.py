"""Stochastic gradient descent with momentum (Sutskever et al., 2013), with the roundings of torch's CPU kernels.

    g = grad * grad_scale                                     negated to maximize
    g = g + weight_decay * p
    b = g at the first update, then momentum * b + (1 - dampening) * g
    g = g + momentum * b with nesterov, else b
    p = p - lr * g

Without momentum there is no b. Every sum takes its product in without rounding it first, as torch's kernels do, so
parameters and momentum are those of `torch.optim.SGD(foreach=False)`, bit for bit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from penstock import _native
from penstock.errors import ConfigError
from penstock.rules.device import Traced
from penstock.rules.exact import fma, fp32
from penstock.rules.fused import Fused, FusedHyper
from penstock.rules.rule import StateSpec


class PlainScalars(NamedTuple):
    """The scalars without momentum: weight decay and minus the learning rate."""

    l2: float
    neg_lr: float


class PlainFlags(NamedTuple):
    """Whether there is weight decay."""

    l2: bool


class MomentumScalars(NamedTuple):
    """The scalars with momentum; `grad_weight` is 1 - dampening."""

    l2: float
    neg_lr: float
    momentum: float
    grad_weight: float


class MomentumFlags(NamedTuple):
    """Whether there is weight decay, whether this is the first update, and whether to look ahead."""

    l2: bool
    first: bool
    nesterov: bool


@dataclass(frozen=True)
class Sgd(Fused):
    """The rule of `torch.optim.SGD`.

    Arguments:
        momentum: whether some parameter group has momentum, and so the rule has a state.
    """

    momentum: bool = False

    honoured: ClassVar = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """The momentum buffer, where some group has momentum."""
        return (self.format.spec("momentum_buffer", signed=True, begins_with_update=True),) if self.momentum else ()

    def read_group(self, group: Mapping[str, Any], step: int) -> tuple[_native.Rule, Any, Any]:
        """Read the kernel, the scalars and the flags of an update; see `Fused.read_group`."""
        l2, neg_lr = fp32(group["weight_decay"]), fp32(-group["lr"])
        if group["momentum"] == 0:
            return _native.Rule.SGD, PlainScalars(l2, neg_lr), PlainFlags(l2 != 0)
        if not self.momentum:
            raise ConfigError("momentum was turned on after prepare(), which made no memory for it. Prepare again.")
        scalars = MomentumScalars(l2, neg_lr, fp32(group["momentum"]), fp32(1 - group["dampening"]))
        flags = MomentumFlags(l2 != 0, first=step == 1, nesterov=bool(group["nesterov"]))
        return _native.Rule.SGD_MOMENTUM, scalars, flags

    def used(self, hyper: FusedHyper) -> int:
        """Return how many states this update uses: none without momentum."""
        return int(hyper.kernel == _native.Rule.SGD_MOMENTUM)

    def arithmetic(self, p: Tensor, g: Tensor, states: list[Tensor], hyper: FusedHyper | Traced) -> Tensor:
        """Compute one update; see `Fused.arithmetic`."""
        c, flags = hyper.scalars, hyper.flags
        if flags.l2:
            g = fma(c.l2, p, g)
        if states:
            # torch's first momentum is the gradient itself, whatever the dampening.
            states[0] = g if flags.first else fma(c.grad_weight, g, states[0] * c.momentum)
            g = fma(c.momentum, states[0], g) if flags.nesterov else states[0]
        return fma(c.neg_lr, g, p)
