"""Random bits that depend on what is rounded alone: on seed, step, element and state, in every partition the same.

Elements are numbered through all parameters of the optimizer, and cut into blocks of 256. With `mix` the finaliser of
SplitMix64, and all products modulo 2^64 or 2^32:

    step_key = mix(mix(seed) ^ step)
    key      = mix(step_key ^ (2 * block + draw))            draw 0 for the first two states, 1 for the rest
    x        = element in block * 0x9E3779B9 + low 32 bits of key
    x        = (x ^ (x >> 16)) * 0x7FEB352D ^ high 32 bits of key
    x        = (x ^ (x >> 15)) * 0x846CA68B
    word     = x ^ (x >> 16)

Each word serves two roundings of 16 bits: of the states 0 and 1, or of state 2 and the parameter.

Source: G. Steele, D. Lea and C. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, for `mix`;
C. Wellons, "Prospecting for hash functions", 2018, for the 32-bit constants.
"""

import torch
from torch import Tensor

from penstock.rules.rule import BLOCK_NUMEL

_MASK64 = (1 << 64) - 1
_MASK32 = (1 << 32) - 1
_STRIDE = 0x9E3779B9
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

#: Number of the parameter among what is rounded; the states are 0, 1 and 2.
PARAM = 3


def step_key(seed: int, step: int) -> int:
    """Return the 64-bit key of a step's random bits."""
    return _mix(_mix(seed & _MASK64) ^ step)


def random_words(key: int | Tensor, first: int | Tensor, numel: int, draw: int, device: torch.device) -> Tensor:
    """Return the 32-bit words of elements `first` to `first + numel`, as int64.

    Arguments:
        key: the step's key (`step_key`); as a tensor int64, 0-dim, with the same bits.
        first: the number of the first element, a multiple of 256; as a tensor int64, 0-dim.
        numel: how many words.
        draw: 0 for the states 0 and 1, 1 for state 2 and the parameter.
        device: where to compute them.
    """
    blocks = torch.arange(-(-numel // BLOCK_NUMEL), dtype=torch.int64, device=device) + first // BLOCK_NUMEL
    key = _signed(key) if isinstance(key, int) else key
    keys = _mix_tensor((2 * blocks + draw) ^ key)[:, None]
    element = torch.arange(BLOCK_NUMEL, dtype=torch.int64, device=device)
    # The product in two halves of 16 bits: Inductor computes with indices in int32, which the whole factor overflows.
    x = ((element * (_STRIDE >> 16) << 16) + element * (_STRIDE & 0xFFFF) + (keys & _MASK32)) & _MASK32
    x = ((x ^ (x >> 16)) * 0x7FEB352D & _MASK32) ^ ((keys >> 32) & _MASK32)
    x = (x ^ (x >> 15)) * 0x846CA68B & _MASK32
    return (x ^ (x >> 16)).view(-1)[:numel]


def round_up_by(value: Tensor, words: Tensor, what: int) -> Tensor:
    """Round fp32 to bf16: up in magnitude with the probability of the distance from below.

    What bf16 holds exactly stays as it is, and so do infinities; a NaN stays one.

    Arguments:
        value: the values, fp32, [n].
        words: a word for each (`random_words`), int64, [n].
        what: the number of the state, or `PARAM`: odd ones take the high 16 bits of a word, even ones the low.

    Returns:
        bf16, [n].
    """
    added = (words >> 16 if what % 2 else words & 0xFFFF).to(torch.int32)
    bits = value.contiguous().view(torch.int32)
    high = torch.where(torch.isnan(value), bits | 0x400000, bits + added) >> 16
    return high.to(torch.int16).view(torch.bfloat16)


def _mix(x: int) -> int:
    """Mix 64 bits, so that every bit of the result depends on every bit of `x`."""
    x = (x ^ (x >> 30)) * _FIRST & _MASK64
    x = (x ^ (x >> 27)) * _SECOND & _MASK64
    return x ^ (x >> 31)


def _mix_tensor(x: Tensor) -> Tensor:
    """Mix the bits of int64 values as `_mix` does: their products wrap around at 2^64."""
    x = (x ^ _shifted(x, 30)) * _signed(_FIRST)
    x = (x ^ _shifted(x, 27)) * _signed(_SECOND)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shift the bits of int64 values to the right and bring in zeros, where `>>` would bring in the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(x: int) -> int:
    """Return the int64 that has the bits of a 64-bit number without sign."""
    return x - (1 << 64) if x >> 63 else x
