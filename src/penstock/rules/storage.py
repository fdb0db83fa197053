"""States as they are stored, and the fp32 values that the arithmetic sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from penstock.rules.blockwise import decode_blocks, encode_blocks
from penstock.rules.dither import PARAM, random_words, round_up_by, step_key
from penstock.rules.master import write_master
from penstock.rules.rule import Segment, StateSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}


@dataclass(frozen=True)
class StateFormat:
    """How a rule's states are stored, and how what is stored in bf16 is rounded.

    Args:
        dtype: "fp32", "bf16", or "int8" (a dynamic 8-bit map with a scale for each block of 256).
        rounding: of bf16 states, and of bf16 parameters without master: "stochastic" or "nearest" (even).
        seed: of the random bits.
    """

    dtype: Literal["fp32", "bf16", "int8"] = "fp32"
    rounding: Literal["stochastic", "nearest"] = "nearest"
    seed: int = 0

    @property
    def stochastic(self) -> bool:
        """Whether anything is rounded by random bits."""
        return self.rounding == "stochastic"

    def spec(self, name: str, *, signed: bool, begins_with_update: bool = False) -> StateSpec:
        """A state in this format."""
        return StateSpec(name, DTYPES[self.dtype], signed, begins_with_update)


class Rounding:
    """The random bits of one segment at one step, made when they are asked for."""

    def __init__(self, segment: Segment, format_: StateFormat, step: int) -> None:
        self._segment = segment
        self._format = format_
        self._step = step
        self._words: dict[int, Tensor] = {}

    def words(self, what: int) -> Tensor:
        """The words for a state's number, or for the parameter."""
        draw = what // 2
        if draw not in self._words:
            param = self._segment.param
            key = step_key(self._format.seed, self._step)
            self._words[draw] = random_words(key, self._segment.first, param.numel(), draw, param.device)
        return self._words[draw]

    def to_bf16(self, value: Tensor, what: int) -> Tensor:
        """Round fp32 values in this format's way."""
        if not self._format.stochastic:
            return value.to(torch.bfloat16)
        return round_up_by(value, self.words(what), what)


def read_state(spec: StateSpec, values: Tensor, scale: Tensor | None) -> Tensor:
    """Return a fresh fp32 copy of a state's values."""
    if spec.dtype == torch.uint8:
        assert scale is not None
        return decode_blocks(values, scale, signed=spec.signed)
    return values.to(torch.float32, copy=True)


def write_state(
    spec: StateSpec,
    values: Tensor,
    scale: Tensor | None,
    value: Tensor,
    rounding: Rounding | None = None,
    what: int = 0,
) -> None:
    """Store fp32 values; without `rounding`, bf16 is rounded to nearest even."""
    if spec.dtype == torch.uint8:
        assert scale is not None
        codes, scales = encode_blocks(value, signed=spec.signed)
        values.copy_(codes)
        scale.copy_(scales)
    elif spec.dtype == torch.bfloat16 and rounding is not None:
        values.copy_(rounding.to_bf16(value, what))
    else:
        values.copy_(value)


def write_param(segment: Segment, value: Tensor, rounding: Rounding) -> None:
    """Write fp32 values into a segment's parameter and master."""
    if segment.master is None and segment.param.dtype == torch.bfloat16:
        segment.param.copy_(rounding.to_bf16(value, PARAM))
    else:
        write_master(segment.param, segment.master, value)
