"""Block quantization of values between ranks: codes of blocks of 256 elements, each block with an fp32 scale.

    scale = largest magnitude / top        code = round(value * (top / largest magnitude))        value = code * scale

| format | codes | top | bytes of a block |
| --- | --- | --- | --- |
| `int8` | whole numbers of 8 bits | 127 | 4 + 256 |
| `fp8` | e4m3, without infinities | 448 | 4 + 256 |
| `int4` | whole numbers of 4 bits | 7 | 4 + 128 |

A block is its scale and then its codes, so that any range of whole blocks is one range of bytes. Of two codes in a byte
the low one is of the block's first half, the high one of its second. Rounding is to nearest even. No finite value
becomes infinite. A block below 2^-96 becomes zero; one with a value that is not finite becomes NaN, all of it.

Sources: T. Dettmers, M. Lewis, S. Shleifer and L. Zettlemoyer, "8-bit Optimizers via Block-wise Quantization", ICLR
2022; G. Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from penstock import _native
from penstock._native import Pool, Wire
from penstock.rules.device import DevicePass
from penstock.rules.formats import INFINITE_BITS, LEAST_BITS, MAGNITUDE_BITS
from penstock.rules.rule import BLOCK_NUMEL, dtype_of, is_imagined

WireName = Literal["int8", "fp8", "int4"]

_SCALE_BYTES = 4
# Of e4m3 among the bits of fp32: the distance between the exponents, the least number that is not denormal (2^-6), and
# the one whose last place is that of denormals (2^14).
_FP8_BIAS, _FP8_LEAST, _FP8_DENORMAL = 120 << 23, 121 << 23, 0x46800000


class _FormatTraits(NamedTuple):
    """The constants of a format.

    Attributes:
        native: its name in the native module.
        top: the value of the largest code.
        most: the largest scale that `top` times is finite.
        code_bytes: of a block, without its scale.
    """

    native: Wire
    top: float
    most: float
    code_bytes: int


_KINDS = {
    "int8": _FormatTraits(Wire.INT8, 127.0, 0x1020406 * 2.0**97, BLOCK_NUMEL),
    "fp8": _FormatTraits(Wire.FP8, 448.0, 0x1249248 * 2.0**95, BLOCK_NUMEL),
    "int4": _FormatTraits(Wire.INT4, 7.0, 0x1249248 * 2.0**101, BLOCK_NUMEL // 2),
}


class WireFormat:
    """One format, and its passes on the host and on devices.

    Arguments:
        name: `"int8"`, `"fp8"` or `"int4"`.

    Attributes:
        name: the same.
        block: how many elements share a scale.

    Example:
        >>> format = WireFormat("int8")
        >>> packed = torch.empty(format.packed_bytes(256), dtype=torch.uint8)
        >>> values, copied = torch.arange(256.0), torch.empty(256)
        >>> format.pack(values, packed)
        >>> format.unpack(packed, copied)
        >>> float((copied - values).abs().max()) <= 255 / 127 / 2 + 1e-4
        True
    """

    block = BLOCK_NUMEL

    def __init__(self, name: WireName) -> None:
        self.name: WireName = name
        self._kind = _KINDS[name]
        self._pack, self._unpack = (
            DevicePass(function, f"the {name} wire format") for function in (pack_words, unpack_words)
        )

    def packed_bytes(self, numel: int) -> int:
        """Return the bytes of some elements: whole blocks.

        Raises:
            ValueError: they are no whole blocks.
        """
        if numel % BLOCK_NUMEL:
            raise ValueError(f"{numel} elements are no whole blocks of {BLOCK_NUMEL}")
        return numel // BLOCK_NUMEL * (_SCALE_BYTES + self._kind.code_bytes)

    def pack(self, values: Tensor, packed: Tensor, pool: Pool | None = None) -> None:
        """Write values in this format, in one pass.

        Arguments:
            values: fp32, bf16 or fp16, contiguous, [n], whole blocks.
            packed: uint8, contiguous, [packed_bytes(n)], on the same device.
            pool: the threads to use on host memory; `None` for the calling thread alone.

        Raises:
            ValueError: sizes, devices or strides do not fit.
            TypeError: a dtype does not.
        """
        dtype = self._check(values, packed)
        if not values.numel():
            return
        if values.device.type != "cpu":
            self._pack.run(values.device, self.name, values, self._words(packed))
        elif not is_imagined("penstock.pack", values.nbytes + packed.nbytes):
            blocks = values.numel() // BLOCK_NUMEL
            _native.pack(pool, blocks, self._kind.native, packed.data_ptr(), values.data_ptr(), dtype)

    def unpack(self, packed: Tensor, values: Tensor, pool: Pool | None = None, *, add: bool = False) -> None:
        """Write the values of packed codes, in one pass; the reverse of `pack`.

        Arguments:
            packed: uint8, contiguous, [packed_bytes(n)].
            values: fp32, bf16 or fp16, contiguous, [n], whole blocks, on the same device.
            pool: the threads to use on host memory; `None` for the calling thread alone.
            add: True to add to `values`, which are fp32 then.

        Raises:
            ValueError: sizes, devices or strides do not fit.
            TypeError: a dtype does not.
        """
        dtype = self._check(values, packed)
        if add and values.dtype != torch.float32:
            raise TypeError(f"values are {values.dtype}; codes are added to float32 alone")
        if not values.numel():
            return
        if values.device.type != "cpu":
            self._unpack.run(values.device, self.name, values, self._words(packed), add)
        elif not is_imagined("penstock.unpack", (2 if add else 1) * values.nbytes + packed.nbytes):
            blocks = values.numel() // BLOCK_NUMEL
            _native.unpack(pool, blocks, self._kind.native, values.data_ptr(), dtype, packed.data_ptr(), add=add)

    def _check(self, values: Tensor, packed: Tensor) -> _native.DType:
        """Refuse tensors that the native passes, which get addresses alone, would read or write wrongly."""
        dtype = dtype_of(values, "values")
        if packed.dtype != torch.uint8:
            raise TypeError(f"packed is {packed.dtype}; it must be uint8")
        nbytes = self.packed_bytes(values.numel())
        if packed.numel() != nbytes or packed.device != values.device:
            raise ValueError(
                f"packed has {packed.numel()} bytes on {packed.device}; {values.numel()} values on {values.device} "
                f"take {nbytes}"
            )
        if not (values.is_contiguous() and packed.is_contiguous()):
            raise ValueError("values and packed must be contiguous")
        return dtype

    def _words(self, packed: Tensor) -> Tensor:
        """View bytes as 32-bit words, [blocks, words of a block]."""
        return packed.view(torch.int32).view(-1, (_SCALE_BYTES + self._kind.code_bytes) // 4)


def pack_words(name: WireName, values: Tensor, words: Tensor) -> None:
    """Write values in a format: the reference, in torch operations, on any device.

    Arguments:
        name: the format.
        values: fp32, bf16 or fp16, [n], whole blocks.
        words: the packed blocks as 32-bit words, int32, [blocks, words of a block].
    """
    kind = _KINDS[name]
    blocks = values.view(-1, BLOCK_NUMEL).float()
    largest = (blocks.view(torch.int32) & MAGNITUDE_BITS).amax(dim=1)
    finite = largest < INFINITE_BITS
    usable = finite & (largest >= LEAST_BITS)
    magnitude = torch.where(usable, largest, _FP8_DENORMAL).view(torch.float32)  # any number where there are no codes
    # By numbers, and what they know to be numbers, torch and its compiler divide by way of a rounded reciprocal.
    tops = torch.where(usable, kind.top, torch.ones_like(magnitude))
    scale = torch.where(usable, (magnitude / tops).clamp(max=kind.most), torch.where(finite, 0.0, torch.nan))
    scaled = torch.where(usable[:, None], blocks * (tops / magnitude)[:, None], 0.0)
    codes = _fp8_codes(scaled) if name == "fp8" else scaled.round().to(torch.int32)
    if name == "int4":
        low, high = codes.chunk(2, dim=1)
        codes = (low & 15) | (high << 4)
    one, two, three, four = (codes & 255).view(-1, codes.shape[1] // 4, 4).unbind(2)
    packed = one | (two << 8) | (three << 16) | (four << 24)
    words.copy_(torch.cat([scale.view(torch.int32)[:, None], packed], dim=1))


def unpack_words(name: WireName, values: Tensor, words: Tensor, add: bool = False) -> None:
    """Write or add the values of packed codes: the reference, the reverse of `pack_words`."""
    scale = words[:, :1].contiguous().view(torch.float32)
    packed = words[:, 1:]
    # Signed codes: shifting arithmetically keeps the sign of the byte that came to the top.
    codes = torch.stack([packed << 24 >> 24, packed << 16 >> 24, packed << 8 >> 24, packed >> 24], dim=2)
    codes = codes.view(-1, 4 * packed.shape[1])
    if name == "int4":
        codes = torch.cat([codes << 28 >> 28, codes >> 4], dim=1)
    unscaled = _fp8_values(codes) if name == "fp8" else codes.float()
    result = (unscaled * scale).view(-1)
    if add:
        values.add_(result)
    else:
        values.copy_(result)


def _fp8_codes(scaled: Tensor) -> Tensor:
    """Round to e4m3, to nearest even: the low 8 bits of each element are the code.

    Read as integers, magnitudes of e4m3 are those of fp32 without their last 20 bits, with another bias; below 2^-6
    they count 2^-9. Of the two ways to round, the right one is the smaller: both agree up to 2^-5.
    """
    bits = scaled.view(torch.int32)
    magnitude = bits & MAGNITUDE_BITS
    denormal = torch.full((), _FP8_DENORMAL, dtype=torch.int32, device=bits.device).view(torch.float32)
    counted = (magnitude.view(torch.float32) + denormal).view(torch.int32) - _FP8_DENORMAL
    normal = magnitude.clamp(min=_FP8_LEAST)
    rounded = (normal - _FP8_BIAS + 0x7FFFF + (normal >> 20 & 1)) >> 20
    return torch.minimum(rounded, counted) | (bits >> 24 & 0x80)


def _fp8_values(codes: Tensor) -> Tensor:
    """Return the fp32 values of e4m3 codes, which are the low 8 bits of each element."""
    magnitude = codes & 0x7F
    counted = (magnitude.float() * 2**-9).view(torch.int32)
    bits = torch.where(magnitude >= 8, (magnitude << 20) + _FP8_BIAS, counted)
    return (bits | ((codes & 0x80) << 24)).view(torch.float32)
