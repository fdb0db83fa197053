"""The standard rules: Adam, AdamW, Adagrad, Lion and SGD."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from penstock import _native
from penstock.errors import ConfigError
from penstock.rules.fused import Flags, FusedRule, FusedScalars
from penstock.rules.rule import StateSpec, fma, fp32, sqrt

# ----------------------------------------------------------------------------------------------------------------------
# Adam (Kingma and Ba, 2015) and AdamW (Loshchilov and Hutter, 2019), with the roundings of torch's CPU kernels.
#
# One update of a parameter p with gradient g, moments m and v, and the step count t after increment:
#
#     g = grad * grad_scale                                     negated to maximize
#     g = g + weight_decay * p                                  Adam alone
#     p = p * (1 - lr * weight_decay)                           AdamW alone
#     m = m + (1 - beta1) * (g - m)
#     v = v * beta2 + (1 - beta2) * g * g
#     u = max(u, v) with amsgrad (Reddi, Kale and Kumar, 2018), else v
#     p = p - lr / (1 - beta1^t) * m / (sqrt(u) / sqrt(1 - beta2^t) + eps)
#
# The scalars are worked out in fp64, as in torch, and each is rounded to fp32 once. The sums for g, m and v take a
# product in without rounding it first (fused multiply-add), as torch's own CPU kernels do on processors that can;
# square root and division are rounded correctly. So the bits do not depend on the processor, and from the same
# gradients AdamW's moments are those of `torch.optim` with `foreach=False`, bit for bit. Its parameters may differ in
# the last bit, because torch's square root on a CPU is not always the nearest value.
#
# Where the moments are not kept in fp32, that last bit has no meaning: there one division is saved by the equal
#
#     p = p - lr * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(u) + eps * sqrt(1 - beta2^t))
# ----------------------------------------------------------------------------------------------------------------------


class AdamScalars(NamedTuple):
    """The scalars of one update.

    Arguments:
        l2: weight decay that is added to the gradient (Adam), or 0.
        decay: factor on the parameter (AdamW), or 1.
        lerp_weight: 1 - beta1; with `lerp_from_grad`, -beta1.
        beta2: decay of exp_avg_sq.
        grad_sq_weight: 1 - beta2.
        bias2_sqrt: sqrt(1 - beta2^t), or 1 where the other scalars contain it.
        eps: added to the denominator.
        neg_step_size: -lr / (1 - beta1^t).
    """

    l2: float
    decay: float
    lerp_weight: float
    beta2: float
    grad_sq_weight: float
    bias2_sqrt: float
    eps: float
    neg_step_size: float


@dataclass(frozen=True)
class AdamRule(FusedRule):
    """The rule of `torch.optim.Adam` and `torch.optim.AdamW`; a group's `decoupled_weight_decay` tells them apart.

    Arguments:
        amsgrad: True if some parameter group keeps the largest exp_avg_sq: then the rule has a third state.

    Example:
        >>> rule = rule_for(optimizer)
        >>> rule.update(segment, rule.hyper(optimizer.param_groups[0], step=1), grad_scale=1.0, pool=None)
    """

    amsgrad: bool = False

    honoured: ClassVar = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay")

    @cached_property
    def states(self) -> tuple[StateSpec, ...]:
        """Both moments, and with amsgrad the largest second moment so far."""
        squares = ("exp_avg_sq", "max_exp_avg_sq") if self.amsgrad else ("exp_avg_sq",)
        return (self.format.spec("exp_avg", signed=True), *(self.format.spec(name, signed=False) for name in squares))

    def read_group(self, group: Mapping[str, Any], step: int) -> tuple[_native.Rule, AdamScalars, Flags]:
        """Read the kernel, the scalars and the flags of an update; see `FusedRule.read_group`."""
        if group["amsgrad"] and not self.amsgrad:
            raise ConfigError("amsgrad was turned on after prepare(), which made no memory for it. Prepare again.")
        beta1, beta2 = group["betas"]
        weight_decay = group["weight_decay"]
        decoupled = group["decoupled_weight_decay"]
        # A learning rate that is a tensor stays one here: torch too works out the scalars in that tensor's dtype.
        lr = group["lr"]
        bias1 = 1 - beta1 ** float(step)
        bias2_sqrt = (1 - beta2 ** float(step)) ** 0.5
        eps, step_size = group["eps"], lr / bias1
        if self.format.dtype != "fp32":  # the equation with one division less
            eps, step_size, bias2_sqrt = eps * bias2_sqrt, step_size * bias2_sqrt, 1.0
        lerp_weight = fp32(1 - beta1)
        lerp_from_grad = abs(lerp_weight) >= 0.5
        l2 = 0.0 if decoupled else fp32(weight_decay)
        scalars = AdamScalars(
            l2=l2,
            decay=fp32(1 - lr * weight_decay) if decoupled else 1.0,
            lerp_weight=fp32(lerp_weight - 1) if lerp_from_grad else lerp_weight,
            beta2=fp32(beta2),
            grad_sq_weight=fp32(1 - beta2),
            bias2_sqrt=fp32(bias2_sqrt),
            eps=fp32(eps),
            neg_step_size=fp32(-step_size),
        )
        kernel = _native.Rule.AMSGRAD if group["amsgrad"] else _native.Rule.ADAM
        return kernel, scalars, Flags(l2=l2 != 0, lerp_from_grad=lerp_from_grad)

    def used(self, step_scalars: FusedScalars) -> int:
        """Return how many states this update uses: two, three with amsgrad."""
        return 3 if step_scalars.kernel == _native.Rule.AMSGRAD else 2

    def arithmetic(self, p: Tensor, g: Tensor, states: list[Tensor], c: Any, flags: Flags) -> Tensor:
        """Compute one update; see `FusedRule.arithmetic`."""
        exp_avg, exp_avg_sq = states[:2]
        if flags.l2:
            g = fma(c.l2, p, g)
        p = p * c.decay
        exp_avg = states[0] = fma(c.lerp_weight, g - exp_avg, g if flags.lerp_from_grad else exp_avg)
        exp_avg_sq = states[1] = fma(c.grad_sq_weight * g, g, exp_avg_sq * c.beta2)
        if len(states) > 2:
            largest = states[2]
            exp_avg_sq = states[2] = torch.where((largest > exp_avg_sq) | largest.isnan(), largest, exp_avg_sq)
        # A tensor as divisor: by a Python number some devices multiply with the rounded inverse instead.
        bias2_sqrt = c.bias2_sqrt
        if not isinstance(bias2_sqrt, Tensor):
            bias2_sqrt = torch.full((), bias2_sqrt, dtype=torch.float32, device=p.device)
        update: Tensor = exp_avg * c.neg_step_size / (sqrt(exp_avg_sq) / bias2_sqrt + c.eps)
        return p + update


# ----------------------------------------------------------------------------------------------------------------------
# Adagrad (Duchi, Hazan and Singer, 2011), with the roundings of torch's CPU kernels.
#
#     g = grad * grad_scale                                     negated to maximize
#     g = g + weight_decay * p
#     s = s + g * g                                             from initial_accumulator_value
#     p = p - lr / (1 + (t - 1) * lr_decay) * g / (sqrt(s) + eps)
#
# torch makes the state, with its initial value, when the optimizer is made; `prepare` takes it over from there.
# ----------------------------------------------------------------------------------------------------------------------


class AdagradScalars(NamedTuple):
    """Weight decay, what is added to the divisor, and minus the decayed learning rate."""

    l2: float
    eps: float
    neg_lr: float


@dataclass(frozen=True)
class AdagradRule(FusedRule):
    """The rule of `torch.optim.Adagrad`."""

    # The initial value is in the state by now.
    honoured: ClassVar = ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps", "maximize")

    @cached_property
    def states(self) -> tuple[StateSpec, ...]:
        """The sum of squares."""
        return (self.format.spec("sum", signed=False),)

    def read_group(self, group: Mapping[str, Any], step: int) -> tuple[_native.Rule, AdagradScalars, Flags]:
        """Read the kernel, the scalars and the flags of an update; see `FusedRule.read_group`."""
        l2 = fp32(group["weight_decay"])
        neg_lr = fp32(-(group["lr"] / (1 + (step - 1) * group["lr_decay"])))
        return _native.Rule.ADAGRAD, AdagradScalars(l2, fp32(group["eps"]), neg_lr), Flags(l2 != 0)

    def arithmetic(self, p: Tensor, g: Tensor, states: list[Tensor], c: Any, flags: Flags) -> Tensor:
        """Compute one update; see `FusedRule.arithmetic`."""
        if flags.l2:
            g = fma(c.l2, p, g)
        states[0] = fma(g, g, states[0])
        update: Tensor = g * c.neg_lr / (sqrt(states[0]) + c.eps)
        return p + update


# ----------------------------------------------------------------------------------------------------------------------
# Lion (Chen et al., "Symbolic discovery of optimization algorithms", 2023).
#
#     g = grad * grad_scale                                     negated to maximize
#     u = sign(beta1 * m + (1 - beta1) * g)
#     m = beta2 * m + (1 - beta2) * g
#     p = p * (1 - lr * weight_decay) - lr * u
#
# Both sums take the gradient's product in without rounding it first. The equations and their roundings are those of
# `penstock.optim.Lion` and of `lion_pytorch.Lion` in torch operations, bit for bit.
# ----------------------------------------------------------------------------------------------------------------------


class LionScalars(NamedTuple):
    """The factor on the parameter, both decays with the weights of the gradient, and minus the learning rate."""

    decay: float
    beta1: float
    grad_weight1: float
    beta2: float
    grad_weight2: float
    neg_lr: float


@dataclass(frozen=True)
class LionUpdateRule(FusedRule):
    """The rule of `penstock.optim.Lion` and `lion_pytorch.Lion`."""

    honoured: ClassVar = ("lr", "betas", "weight_decay", "maximize")

    @cached_property
    def states(self) -> tuple[StateSpec, ...]:
        """The moving average."""
        return (self.format.spec("exp_avg", signed=True),)

    def read_group(self, group: Mapping[str, Any], step: int) -> tuple[_native.Rule, LionScalars, Flags]:
        """Read the kernel, the scalars and the flags of an update; see `FusedRule.read_group`."""
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
        return _native.Rule.LION, scalars, Flags()

    def arithmetic(self, p: Tensor, g: Tensor, states: list[Tensor], c: Any, flags: Flags) -> Tensor:
        """Compute one update; see `FusedRule.arithmetic`."""
        u = fma(c.grad_weight1, g, states[0] * c.beta1)
        states[0] = fma(c.grad_weight2, g, states[0] * c.beta2)
        direction = (u > 0).to(torch.float32) - (u < 0).to(torch.float32)
        return fma(c.neg_lr, direction, p * c.decay)


# ----------------------------------------------------------------------------------------------------------------------
# Stochastic gradient descent with momentum (Sutskever et al., 2013), with the roundings of torch's CPU kernels.
#
#     g = grad * grad_scale                                     negated to maximize
#     g = g + weight_decay * p
#     b = g at the first update, then momentum * b + (1 - dampening) * g
#     g = g + momentum * b with nesterov, else b
#     p = p - lr * g
#
# Without momentum there is no b. Every sum takes its product in without rounding it first, as torch's kernels do, so
# parameters and momentum are those of `torch.optim.SGD(foreach=False)`, bit for bit.
# ----------------------------------------------------------------------------------------------------------------------


class SgdScalars(NamedTuple):
    """Weight decay, minus the learning rate, the momentum, and 1 - dampening."""

    l2: float
    neg_lr: float
    momentum: float
    grad_weight: float


@dataclass(frozen=True)
class SgdRule(FusedRule):
    """The rule of `torch.optim.SGD`.

    Arguments:
        momentum: True if some parameter group has momentum: then the rule has a state.
    """

    momentum: bool = False

    honoured: ClassVar = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")

    @cached_property
    def states(self) -> tuple[StateSpec, ...]:
        """The momentum buffer, where some group has momentum."""
        return (self.format.spec("momentum_buffer", signed=True, begins_with_update=True),) if self.momentum else ()

    def read_group(self, group: Mapping[str, Any], step: int) -> tuple[_native.Rule, SgdScalars, Flags]:
        """Read the kernel, the scalars and the flags of an update; see `FusedRule.read_group`."""
        momentum = group["momentum"] != 0
        if momentum and not self.momentum:
            raise ConfigError("momentum was turned on after prepare(), which made no memory for it. Prepare again.")
        l2, neg_lr = fp32(group["weight_decay"]), fp32(-group["lr"])
        scalars = SgdScalars(l2, neg_lr, fp32(group["momentum"]), fp32(1 - group["dampening"]))
        flags = Flags(l2 != 0, first=step == 1, nesterov=bool(group["nesterov"])) if momentum else Flags(l2 != 0)
        return _native.Rule.SGD_MOMENTUM if momentum else _native.Rule.SGD, scalars, flags

    def used(self, step_scalars: FusedScalars) -> int:
        """Return how many states this update uses: none without momentum."""
        return int(step_scalars.kernel == _native.Rule.SGD_MOMENTUM)

    def arithmetic(self, p: Tensor, g: Tensor, states: list[Tensor], c: Any, flags: Flags) -> Tensor:
        """Compute one update; see `FusedRule.arithmetic`."""
        if flags.l2:
            g = fma(c.l2, p, g)
        if states:
            # torch's first momentum is the gradient itself, whatever the dampening.
            states[0] = g if flags.first else fma(c.grad_weight, g, states[0] * c.momentum)
            g = fma(c.momentum, states[0], g) if flags.nesterov else states[0]
        return fma(c.neg_lr, g, p)
