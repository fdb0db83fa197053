"""What every rule is: the arithmetic of one optimizer on flat pieces of memory, without movement."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock._native import Pool

__all__ = ["BLOCK_NUMEL", "PIECE_NUMEL", "Hyper", "Pool", "Rule", "Scalars", "Segment", "StateSpec"]

#: Elements that a back end in plain torch takes at once: its temporaries stay small beside the tiles.
PIECE_NUMEL = 1 << 22

#: Random bits, and the scales of 8-bit states, belong to blocks of this many elements. Parameters, tiles and shards
#: begin on a block.
BLOCK_NUMEL = 256

#: A parameter's own numbers beside its step count, by name: what some optimizers keep as 0-dim state.
Scalars = Mapping[str, Any]


@dataclass(frozen=True)
class StateSpec:
    """One per-element state of a rule, and how it is stored.

    Args:
        name: as torch names it.
        dtype: float32, bfloat16, or uint8: a code of the dynamic 8-bit map, with one fp32 scale per block.
        signed: whether the values may be negative; chooses the 8-bit map.
        begins_with_update: torch has no such state before the first update, which initialises it: whoever sets it says
            that there was one.
    """

    name: str
    dtype: torch.dtype = torch.float32
    signed: bool = True
    begins_with_update: bool = False

    @property
    def scale_name(self) -> str | None:
        """The kind that holds the scales, one fp32 per block; `None` without scales."""
        return f"{self.name}_scale" if self.dtype == torch.uint8 else None


@dataclass(frozen=True)
class Segment:
    """A piece of a tile whose elements share a parameter group and a step count. Updated in place.

    All tensors are one-dimensional, contiguous, on one device and, the scales apart, of equal numel, [n].

    Args:
        param: compute dtype, fp32, bf16 or fp16; written by the update.
        grad: fp32, bf16 or fp16; read only.
        master: what `param` lacks to the fp32 value: int16 remainder (bf16 parameters), full fp32 copy, or None where
            the parameter is the only copy (fp32, or bf16 rounded at every step).
        states: in the order and the dtypes of the rule's `states`.
        scales: for each 8-bit state fp32, [ceil(n / 256)], and None for the others; may be left out where all are None.
        first: index of the first element among all elements of the optimizer: a multiple of 256, the same in every
            partition. It numbers random bits.

    Raises:
        ValueError: a tensor is not contiguous, or the tensors differ in numel or device.
    """

    param: Tensor
    grad: Tensor
    master: Tensor | None
    states: tuple[Tensor, ...]
    scales: tuple[Tensor | None, ...] = ()
    first: int = 0

    def __post_init__(self) -> None:
        # The native update trusts these addresses and lengths with memory that is not its own.
        numel, device = self.param.numel(), self.param.device
        for tensor in (self.param, self.grad, *self.states, *([] if self.master is None else [self.master])):
            _require_alike(tensor, numel, numel, device)
        for scale in self.scales:
            if scale is not None:
                _require_alike(scale, -(-numel // BLOCK_NUMEL), numel, device)
        if self.first % BLOCK_NUMEL:
            raise ValueError(f"a segment begins on a block of {BLOCK_NUMEL} elements, not at element {self.first}")

    def scale(self, index: int) -> Tensor | None:
        """The scales of one state."""
        return self.scales[index] if self.scales else None

    def pieces(self, numel: int = PIECE_NUMEL) -> Iterator[Segment]:
        """Cut the segment into views of at most `numel` elements, whole blocks, in order."""
        for start in range(0, self.param.numel(), numel):
            part = slice(start, start + numel)
            blocks = slice(start // BLOCK_NUMEL, (start + numel) // BLOCK_NUMEL)
            yield Segment(
                self.param[part],
                self.grad[part],
                None if self.master is None else self.master[part],
                tuple(state[part] for state in self.states),
                tuple(None if scale is None else scale[blocks] for scale in self.scales),
                self.first + start,
            )


def _require_alike(tensor: Tensor, wanted: int, numel: int, device: torch.device) -> None:
    if tensor.numel() != wanted or tensor.device != device or not tensor.is_contiguous():
        raise ValueError(
            f"a segment takes contiguous tensors that are alike: param has {numel} elements on {device}, "
            f"this {tensor.dtype} tensor {tensor.numel()} on {tensor.device} with strides {tensor.stride()}"
        )


@dataclass(frozen=True)
class Hyper:
    """The scalars of one update, ready for use: read from a parameter group once, then a value."""

    @property
    def keeps_zeros(self) -> bool:
        """Whether elements that are zero in every kind stay zero: then gaps between parameters may be updated too."""
        return True


class Rule(Protocol):
    """The arithmetic of one optimizer: element-wise, the same bits on every back end and in every partition."""

    @property
    def name(self) -> str:
        """As in reports and checkpoints: "adamw"."""

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """The per-element states, under the names that torch gives them, and how they are stored."""

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """A parameter's own scalars, beside its step count."""

    def hyper(self, group: Mapping[str, Any], step: int, scalars: Scalars = {}) -> Hyper:  # noqa: B006 - never changed
        """Read a parameter group.

        Args:
            group: one of the optimizer's `param_groups`, as it is now.
            step: how many updates these parameters will have had with this one; 1 at the first.
            scalars: the parameter's own, as `advance` returned them at its last update.

        Raises:
            ConfigError: the group asks for an option that this rule does not honour.
        """

    def advance(self, hyper: Hyper) -> Scalars:
        """Return the parameter's own scalars after the update."""

    def update(self, segment: Segment, hyper: Hyper, grad_scale: float, pool: Pool | None) -> None:
        """Apply the rule to one segment, in one pass, in place.

        Args:
            segment: what to update.
            hyper: from `hyper` of the same rule.
            grad_scale: the gradient is `float(grad) * grad_scale`: unscaling, averaging and clipping in one factor.
            pool: the threads to use on host memory; None is the calling thread alone.
        """

    def update_many(self, segments: Iterable[tuple[Segment, Hyper]], grad_scale: float, pool: Pool | None) -> None:
        """Apply the rule to segments of one device, each with its scalars, as `update` does to each of them."""
