"""What every rule is: the arithmetic of one optimizer on flat pieces of memory, without movement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from penstock._native import Pool

__all__ = ["PIECE_NUMEL", "Hyper", "Pool", "Rule", "Segment"]

#: Elements that a back end in plain torch takes at once: its temporaries stay small beside the tiles.
PIECE_NUMEL = 1 << 22


@dataclass(frozen=True)
class Segment:
    """A piece of a tile whose elements share a parameter group and a step count. Updated in place.

    All tensors are one-dimensional, contiguous, on one device and of equal numel, [n].

    Args:
        param: compute dtype, fp32, bf16 or fp16; written by the update.
        grad: fp32, bf16 or fp16; read only.
        master: what `param` lacks to the fp32 value: int16 remainder (bf16 parameters), full fp32 copy, or None where
            the parameter is the only copy (fp32, or bf16 rounded at every step).
        states: fp32, in the order of the rule's `state_names`.

    Raises:
        ValueError: a tensor is not contiguous, or the tensors differ in numel or device.
    """

    param: Tensor
    grad: Tensor
    master: Tensor | None
    states: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        # The native update trusts these addresses and lengths with memory that is not its own.
        numel, device = self.param.numel(), self.param.device
        for tensor in (self.param, self.grad, *self.states, *([] if self.master is None else [self.master])):
            if tensor.numel() != numel or tensor.device != device or not tensor.is_contiguous():
                raise ValueError(
                    f"a segment takes contiguous tensors that are alike: param has {numel} elements on {device}, "
                    f"this {tensor.dtype} tensor {tensor.numel()} on {tensor.device} with strides {tensor.stride()}"
                )

    def pieces(self) -> Iterator[Segment]:
        """Cut the segment into views of at most `PIECE_NUMEL` elements, in order."""
        for start in range(0, self.param.numel(), PIECE_NUMEL):
            part = slice(start, start + PIECE_NUMEL)
            yield Segment(
                self.param[part],
                self.grad[part],
                None if self.master is None else self.master[part],
                tuple(state[part] for state in self.states),
            )


@dataclass(frozen=True)
class Hyper:
    """The scalars of one update, ready for use: read from a parameter group once, then a value."""


class Rule(Protocol):
    """The arithmetic of one optimizer: element-wise, the same bits on every back end and in every partition."""

    @property
    def name(self) -> str:
        """As in reports and checkpoints: "adamw"."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """The per-element states, under the names that torch gives them."""

    def hyper(self, group: Mapping[str, Any], step: int) -> Hyper:
        """Read a parameter group.

        Args:
            group: one of the optimizer's `param_groups`, as it is now.
            step: how many updates these parameters will have had with this one; 1 at the first.

        Raises:
            ConfigError: the group asks for an option that this rule does not honour.
        """

    def update(self, segment: Segment, hyper: Hyper, grad_scale: float, pool: Pool | None) -> None:
        """Apply the rule to one segment, in one pass, in place.

        Args:
            segment: what to update.
            hyper: from `hyper` of the same rule.
            grad_scale: the gradient is `float(grad) * grad_scale`: unscaling, averaging and clipping in one factor.
            pool: the threads to use on host memory; None is the calling thread alone.
        """
