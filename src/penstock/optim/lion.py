"""Lion, as a stock class."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from penstock.optim.matrix import run_closure


class Lion(torch.optim.Optimizer):
    """Lion: the sign of an interpolated momentum (Chen et al., "Symbolic discovery of optimization algorithms", 2023).

        u = sign(beta1 * m + (1 - beta1) * g)
        m = beta2 * m + (1 - beta2) * g
        p = p * (1 - lr * weight_decay) - lr * u

    Arguments:
        params: the parameters, or groups of them.
        lr: the learning rate, typically a tenth to a third of AdamW's; a float or a 0-dim tensor.
        betas: the decays of the interpolation and of the momentum.
        weight_decay: the decoupled weight decay, typically three to ten times AdamW's.
        maximize: whether to ascend instead of descend.

    Raises:
        ValueError: a value is out of its range.

    Example:
        >>> optimizer = Lion([torch.nn.Parameter(torch.ones(2))], lr=1e-4, weight_decay=0.1)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if not lr >= 0:
            raise ValueError(f"lr={lr!r}: use 0 or more.")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas!r}: use numbers from 0 to below 1.")
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay={weight_decay!r}: use 0 or more.")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Arguments:
            closure: computes the loss and its gradients again; called first, if given.

        Returns:
            What the closure returned, or `None`.
        """
        loss = run_closure(closure)
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = -p.grad if group["maximize"] else p.grad
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                exp_avg = state["exp_avg"]
                p.mul_(1 - lr * group["weight_decay"])
                p.add_((exp_avg * beta1).add_(grad, alpha=1 - beta1).sign_(), alpha=-lr)
                exp_avg.mul_(beta2).add_(grad, alpha=1 - beta2)
        return loss
