"""States of 8 bits: codes of a dynamic map, and one fp32 scale for each block of 256 elements.

A code is a magnitude m and, in the signed map, a sign in its highest bit. Where 2^e is the highest power of two in m,
the code stands for the middle of one of 2^e equal intervals of the decade [10^(e - b), 10^(e - b + 1)), with b bits of
magnitude, 8 or 7; m = 0 is zero:

    value = scale * 10^(e - b + 1) * (slope * (m + 1/2) / 2^e - offset)

with slope and offset about 0.9 and 0.8, of so few bits that the largest code is exactly 1.

Small values get few bits but keep their size, over eight decades without sign and seven with it. The scale is the
largest magnitude of the block, which therefore comes back as it went in, and what was decoded is encoded to the same
codes. Encoding takes the interval that a
value lies in. What lies below all of them becomes zero in the signed map; without sign it becomes the smallest code, so
that no second moment vanishes under a first one that does not.

Source: T. Dettmers, M. Lewis, S. Shleifer and L. Zettlemoyer, "8-bit Optimizers via Block-wise Quantization", ICLR
2022. There a code for 1.0 stands beside the intervals of the highest decade; here the largest
code itself is 1, in both signs, and without sign one decade more is covered.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.rules.exact import fma, fp32
from penstock.rules.rule import BLOCK_NUMEL

# Of the map without sign and with it.
_SLOPE = {False: 0.9031982421875, True: 0.9063720703125}
_OFFSET = {False: 0.8028683662414551, True: 0.8056631088256836}
_LEAST = 2.0**-120  # a block below it is zero


def _table(signed: bool) -> list[float]:
    """What each code stands for, at scale 1."""
    bits = 7 if signed else 8
    values = [0.0]
    for m in range(1, 1 << bits):
        e = m.bit_length() - 1
        middle = fp32(_SLOPE[signed] * ((2 * m + 1) / (1 << (e + 1))) - _OFFSET[signed])
        values.append(fp32(middle * fp32(10.0 ** (e - bits + 1))))
    return values + [-v for v in values] if signed else values


def _borders(signed: bool) -> list[float]:
    """Where each decade begins."""
    begin = fp32(_SLOPE[signed] - _OFFSET[signed])
    return [fp32(begin * fp32(10.0**k)) for k in range(-6 if signed else -7, 1)]


# Worked out once, and outside of what a compiler traces.
_TABLE = {signed: _table(signed) for signed in (False, True)}
_BORDERS = {signed: _borders(signed) for signed in (False, True)}
_FACTORS = {signed: [fp32(10.0**-k) for k in range(-6 if signed else -7, 1)] for signed in (False, True)}
_INVERSE_SLOPE = {signed: fp32(1 / _SLOPE[signed]) for signed in (False, True)}
_INVERSE_OFFSET = {signed: fp32(_OFFSET[signed] / _SLOPE[signed]) for signed in (False, True)}


def encode_blocks(value: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Quantise fp32 values.

    Args:
        value: fp32, [n]; a block with a value that is not finite is NaN afterwards.
        signed: which map.

    Returns:
        uint8 codes, [n], and fp32 scales, [ceil(n / 256)].
    """
    numel = value.numel()
    padded = torch.nn.functional.pad(value, (0, -numel % BLOCK_NUMEL)).view(-1, BLOCK_NUMEL)
    magnitude = padded.abs()
    largest = magnitude.amax(dim=1)
    finite = torch.isfinite(largest)  # amax hands a NaN on
    usable = finite & (largest >= _LEAST)
    scale = torch.where(usable, largest, torch.where(finite, 0.0, torch.nan))
    inverse = torch.where(usable, torch.ones_like(scale) / torch.where(usable, scale, 1.0), 0.0)
    x = torch.where(usable[:, None], magnitude, 0.0) * inverse[:, None]

    borders = torch.tensor(_BORDERS[signed], dtype=torch.float32, device=value.device)
    factors = torch.tensor(_FACTORS[signed], dtype=torch.float32, device=value.device)
    decade = torch.bucketize(x, borders, right=True) - 1
    under = decade < 0
    e = decade.clamp(min=0)
    within = fma(_INVERSE_SLOPE[signed], x * factors[e], torch.full_like(x, _INVERSE_OFFSET[signed]))
    within = within.clamp(1.0, 2.0 - 2.0**-23)
    mantissa = (within.view(torch.int32) & 0x7FFFFF) | 0x800000
    code = mantissa >> (23 - e).to(torch.int32)
    nonzero = (magnitude > 0) & usable[:, None]
    code = torch.where(under, torch.zeros_like(code) if signed else nonzero.to(torch.int32), code)
    if signed:
        code = torch.where((padded < 0) & (code > 0), code | 128, code)
    return code.to(torch.uint8).view(-1)[:numel], scale


def decode_blocks(codes: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
    """Return the fp32 values of codes; the reverse of `encode_blocks`.

    Args:
        codes: uint8, [n].
        scale: fp32, [ceil(n / 256)].
        signed: which map.
    """
    table = torch.tensor(_TABLE[signed], dtype=torch.float32, device=codes.device)
    padded = torch.nn.functional.pad(codes, (0, -codes.numel() % BLOCK_NUMEL)).view(-1, BLOCK_NUMEL)
    return (table[padded.int()] * scale[:, None]).view(-1)[: codes.numel()].contiguous()
