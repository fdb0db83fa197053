"""Optimizers as people write them."""

from typing import Any

import torch
from torch import Tensor, nn


class Base(torch.optim.Optimizer):
    """A step that calls `begin` for each group, then `one` for each parameter with a gradient."""

    def __init__(self, params: Any, lr: float = 1e-2, **more: Any) -> None:
        super().__init__(params, {"lr": lr, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            self.begin(group)
            for p in group["params"]:
                if p.grad is not None:
                    self.one(p, p.grad, self.state[p], group)

    def begin(self, group: dict[str, Any]) -> None: ...

    def one(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(grad, alpha=group["lr"])


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape)) for shape in shapes or ((4,),)]
