"""LAMB, as a stock class and a rule."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.optim.matrix import register, run_closure, update_by


class LambRule:
    """LAMB's arithmetic, a `MatrixRule`."""

    def states(self, shape: tuple[int, ...], group: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
        """Name the two moments."""
        del group
        return {"exp_avg": shape, "exp_avg_sq": shape}

    def update(
        self, matrix: Tensor, grad: Tensor, states: Mapping[str, Tensor], group: Mapping[str, Any], step: int
    ) -> None:
        """Update a parameter; see `MatrixRule.update`."""
        (beta1, beta2), mean, square = group["betas"], states["exp_avg"], states["exp_avg_sq"]
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        update = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        update = torch.div(mean / (1 - beta1**step), update, out=update)
        update.add_(matrix, alpha=group["weight_decay"])
        size, length = matrix.norm(), update.norm()
        trust = torch.where((size > 0) & (length > 0), size / length, 1.0)
        matrix.sub_(update.mul_(trust * group["lr"]))

    def working_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of two fp32 tensors of the shape."""
        return 8 * torch.Size(shape).numel()


class Lamb(torch.optim.Optimizer):
    """LAMB: Adam whose step is as long as a fraction of each parameter (You et al., "Large batch optimization for deep
    learning: training BERT in 76 minutes", 2020, https://arxiv.org/abs/1904.00962).

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        u = (m / (1 - beta1**t)) / (sqrt(v / (1 - beta2**t)) + eps) + weight_decay * p
        p = p - lr * u * norm(p) / norm(u)          without the norms where one is 0

    The norms are those of a whole parameter.

    Arguments:
        params: the parameters, or groups of them.
        lr: the learning rate; a float or a 0-dim tensor.
        betas: the decays of the two moments.
        eps: what is added to the root.
        weight_decay: the weight decay, inside of the norm.

    Raises:
        ValueError: a value is out of its range.

    Example:
        >>> optimizer = Lamb([torch.nn.Parameter(torch.ones(2))], lr=1e-3, weight_decay=0.01)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"{name}={value!r}: use 0 or more.")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas!r}: use numbers from 0 to below 1.")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Arguments:
            closure: computes the loss and its gradients again; called first, if given.

        Returns:
            What the closure returned, or `None`.
        """
        loss = run_closure(closure)
        update_by(LambRule(), self.param_groups, self.state)
        return loss


register(Lamb, LambRule())
