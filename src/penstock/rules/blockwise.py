"""How states are stored in 8 bits: as codes of a dynamic map, with one fp32 scale for each block of 256 elements.

The bits of a positive fp32 number, read as an integer, are 2^23 times its logarithm to base 2, up to a constant and
taken as linear between powers of two; call them L(x). A code of magnitude m > 0 stands for the value whose logarithm is
D times that of m + 1/2, counted from the largest code, which stands for the block's largest magnitude, the scale:

    L(value) = L(scale) - D * (L(M + 1/2) - L(m + 1/2))

with M = 255 and D = 4 without sign, M = 127 and D = 3 with it; m = 0 is zero. So each of 8 (7 with sign) decades of 2^D
has half as many codes as the one above it: small values get few bits but keep their size, down to 1e-9 of the scale
(1e-6 with sign). A negative value has the code 255 - m.

The scale comes back as it went in, and what was decoded is encoded to the same codes. Encoding takes the m that the
logarithm, divided by D, is truncated to. What lies below all of them becomes zero in the signed map; without sign it
becomes the smallest code, so that no second moment vanishes under a first one that does not.

Source: T. Dettmers, M. Lewis, S. Shleifer and L. Zettlemoyer, "8-bit Optimizers via Block-wise Quantization", ICLR
2022. There a decade is a power of ten, and linear; here codes are spaced evenly in the logarithm, which takes a few
integer operations.
"""

import torch
from torch import Tensor

from penstock.rules.exact import fma, fp32
from penstock.rules.rule import BLOCK_NUMEL

# Of the map without sign and with it: D, and the bits of M + 1/2.
_OCTAVES = {False: 4, True: 3}
_THIRD = fp32(1 / 3)  # worked out once, and outside of what a compiler traces
_TOP_BITS = {False: 0x437F8000, True: 0x42FF0000}
_LEAST_BITS = 31 << 23  # 2^-96: a block below it is zero
_INFINITE_BITS = 255 << 23
_MAGNITUDE_BITS = 0x7FFFFFFF


def encode_blocks(value: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Quantise fp32 values.

    Arguments:
        value: the values, fp32, [n], not negative unless `signed`. A block with a value that is not finite is NaN
            afterwards.
        signed: whether to use the map with a sign.

    Returns:
        The codes, uint8, [n], and the scales, fp32, [ceil(n / 256)].
    """
    numel = value.numel()
    padded = torch.nn.functional.pad(value, (0, -numel % BLOCK_NUMEL)).view(-1, BLOCK_NUMEL)
    bits = padded.view(torch.int32)
    magnitude = bits & _MAGNITUDE_BITS
    largest = magnitude.amax(dim=1)
    finite = largest < _INFINITE_BITS
    usable = finite & (largest >= _LEAST_BITS)
    scale = torch.where(usable, largest.view(torch.float32), torch.where(finite, 0.0, torch.nan))

    distance = magnitude - largest[:, None]
    if signed:
        top = torch.full_like(padded, float(_TOP_BITS[signed]))
        log = fma(_THIRD, distance.float(), top).to(torch.int32)
        code = log.view(torch.float32).to(torch.int32) ^ (bits >> 31)
    else:
        log = (distance >> 2) + _TOP_BITS[signed]
        code = torch.maximum(log.view(torch.float32).to(torch.int32), magnitude.clamp(max=1))
    code = torch.where(usable[:, None], code & 255, 0)
    return code.to(torch.uint8).view(-1)[:numel], scale


def decode_blocks(codes: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
    """Return the fp32 values of codes; the reverse of `encode_blocks`.

    Arguments:
        codes: the codes, uint8, [n].
        scale: the scales, fp32, [ceil(n / 256)].
        signed: whether the codes are of the map with a sign.

    Returns:
        fp32, [n].
    """
    numel = codes.numel()
    padded = torch.nn.functional.pad(codes, (0, -numel % BLOCK_NUMEL)).view(-1, BLOCK_NUMEL).int()
    magnitude = torch.where(padded > 127, 255 - padded, padded) if signed else padded
    log = (magnitude.float() + 0.5).view(torch.int32)
    bits = scale.view(torch.int32)[:, None] - _OCTAVES[signed] * (_TOP_BITS[signed] - log)
    value = torch.where(magnitude == 0, 0.0 * scale[:, None], bits.view(torch.float32))
    if signed:
        value = torch.where((padded > 127) & (magnitude > 0), -value, value)
    return value.view(-1)[:numel].contiguous()
