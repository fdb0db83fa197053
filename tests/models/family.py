"""A row of the table of model families, and what its step consumes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Backward = Callable[..., None]  # (loss, retain_graph=False)


@dataclass
class Batch:
    """The data of one step of one rank: the same numbers every time, floats in the dtype of the run."""

    step: int
    rank: int = 0
    dtype: torch.dtype = torch.float32
    _generator: torch.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(1000 * self.rank + self.step)

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator).to(self.dtype)

    def ids(self, below: int, *shape: int) -> Tensor:
        return torch.randint(0, below, shape, generator=self._generator)


Work = Callable[[nn.Module, Batch, Backward], list[Tensor]]


def one_loss(loss: Callable[[nn.Module, Batch], Tensor]) -> Work:
    """The usual micro-batch: one forward, one loss, one backward."""

    def work(model: nn.Module, batch: Batch, backward: Backward) -> list[Tensor]:
        value = loss(model, batch)
        backward(value)
        return [value.detach()]

    return work


@dataclass(frozen=True)
class Family:
    """One kind of model.

    Attributes:
        build: the model, seeded by the caller.
        work: forwards and backwards of one step; what it returns (losses, gradients of inputs) is compared.
        owned: the parameters that the optimizer gets.
        prepare: further arguments of `prepare`.
        exact: whether plain torch does the same arithmetic: other strides take other kernels.
        warns: text of the warning that `prepare` gives.
        buffers_mix: fp32 buffers take part in the arithmetic: plain torch needs casts for its bf16 layers.
    """

    name: str
    build: Callable[[], nn.Module]
    work: Work
    owned: Callable[[nn.Module], list[nn.Parameter]] = lambda model: list(model.parameters())
    prepare: dict[str, Any] = field(default_factory=dict)
    exact: bool = True
    warns: str | None = None
    buffers_mix: bool = False

    def __str__(self) -> str:
        return self.name
