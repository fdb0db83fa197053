"""States as they are stored, and the fp32 values that the arithmetic sees."""

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

    Arguments:
        dtype: "fp32", "bf16", or "int8": a dynamic 8-bit map with a scale for each block of 256 elements.
        rounding: how bf16 states, and bf16 parameters without a master, are rounded: "stochastic", or "nearest" (even).
        seed: the seed of the random bits.
    """

    dtype: Literal["fp32", "bf16", "int8"] = "fp32"
    rounding: Literal["stochastic", "nearest"] = "nearest"
    seed: int = 0

    @property
    def stochastic(self) -> bool:
        """Whether anything is rounded by random bits."""
        return self.rounding == "stochastic"

    def spec(self, name: str, *, signed: bool, begins_with_update: bool = False) -> StateSpec:
        """Describe a state that is stored in this format; see `StateSpec`."""
        return StateSpec(name, DTYPES[self.dtype], signed, begins_with_update)


class Rounding:
    """The random bits by which the values of one segment are rounded to bf16 at one step, made when they are asked for.

    Arguments:
        key: the key of the step's random bits (`step_key`); as a tensor int64, 0-dim, with the same bits.
        first: the number of the segment's first element; as a tensor int64, 0-dim.
        numel: how many elements the segment has.
        device: where they are.
    """

    def __init__(self, key: int | Tensor, first: int | Tensor, numel: int, device: torch.device) -> None:
        self._key, self._first, self._numel, self._device = key, first, numel, device
        self._words: dict[int, Tensor] = {}

    def to_bf16(self, value: Tensor, what: int) -> Tensor:
        """Round fp32 values to bf16.

        Arguments:
            value: fp32, [n].
            what: the number of the state that they are of, or `PARAM`.

        Returns:
            bf16, [n].
        """
        draw = what // 2  # one word has the bits for two roundings
        if draw not in self._words:
            self._words[draw] = random_words(self._key, self._first, self._numel, draw, self._device)
        return round_up_by(value, self._words[draw], what)


def rounding_of(segment: Segment, format_: StateFormat, step: int) -> Rounding | None:
    """Return how a segment is rounded to bf16 at a step; `None` to nearest even.

    Arguments:
        segment: the segment.
        format_: says whether random bits are used, and their seed.
        step: the number of the update, 1 at the first.
    """
    if not format_.stochastic:
        return None
    return Rounding(step_key(format_.seed, step), segment.first, segment.param.numel(), segment.param.device)


def read_state(spec: StateSpec, values: Tensor, scale: Tensor | None) -> Tensor:
    """Return the values of a state in fp32, [n], in memory of their own.

    Arguments:
        spec: how the state is stored.
        values: what is stored, [n].
        scale: the scales of an 8-bit state, fp32, [ceil(n / 256)]; else `None`.
    """
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
    """Store fp32 values as a state; the reverse of `read_state`.

    Arguments:
        spec: how the state is stored.
        values: where to store it, [n].
        scale: where to store the scales of an 8-bit state, fp32, [ceil(n / 256)]; else `None`.
        value: the values, fp32, [n].
        rounding: the random bits by which bf16 is rounded; `None` to nearest even.
        what: the number of the state among those of its rule, which chooses among the random bits.
    """
    if spec.dtype == torch.uint8:
        assert scale is not None
        codes, scales = encode_blocks(value, signed=spec.signed)
        values.copy_(codes)
        scale.copy_(scales)
    elif spec.dtype == torch.bfloat16 and rounding is not None:
        values.copy_(rounding.to_bf16(value, what))
    else:
        values.copy_(value)


def write_param(param: Tensor, master: Tensor | None, value: Tensor, rounding: Rounding | None) -> None:
    """Write fp32 values, [n], into a parameter and its master.

    Arguments:
        param: where compute reads the parameter, [n].
        master: what `param` lacks to the fp32 value, [n]; `None` where the parameter is the only copy.
        value: the values, fp32, [n].
        rounding: the random bits by which a bf16 parameter without a master is rounded; `None` to nearest even.
    """
    if rounding is not None and master is None and param.dtype == torch.bfloat16:
        param.copy_(rounding.to_bf16(value, PARAM))
    else:
        write_master(param, master, value)
