"""Formats of stored values: dtypes, masters, rounding, 8-bit blocks, and gradients on the host."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from penstock import _native
from penstock._native import Pool
from penstock.rules.rule import BLOCK_NUMEL, StateSpec, dtype_of, fma, fp32, is_imagined

# ----------------------------------------------------------------------------------------------------------------------
# The dtypes that a precision stands for.
# ----------------------------------------------------------------------------------------------------------------------


COMPUTE_DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# ----------------------------------------------------------------------------------------------------------------------
# How gradients get into their storage: one pass writes or accumulates them, and measures the result.
# ----------------------------------------------------------------------------------------------------------------------


Ranges = Sequence[tuple[int, int]]


def deposit(dst: Tensor, src: Tensor, *, add: bool, pool: Pool | None) -> float | Tensor:
    """Write `src` into `dst`, or add it, and return the squared norm of `dst` afterwards.

    Sums are rounded once, to the dtype of `dst`: `dst = round(float(dst) + float(src))`, as torch's `dst.add_(src)`
    does for every mix of dtypes.

    Arguments:
        dst: the gradient's storage: fp32, bf16 or fp16, contiguous, [n].
        src: the new gradient: fp32, bf16 or fp16, contiguous, [n], on the device of `dst`.
        add: True to accumulate instead of overwriting.
        pool: the threads to use on host memory; `None` for the calling thread alone.

    Returns:
        The sum of squares. On the cpu a float, accumulated in fp64, not finite if and only if an element is not, whose
        bits depend on the values alone, not on threads or processor. Elsewhere a 0-dim fp64 tensor on that device, in
        the order of its own reductions; nothing waits for the device.

    Raises:
        ValueError: the tensors are not contiguous, or differ in numel or device.
        TypeError: a dtype is none of the three.
    """
    return deposit_part(dst, 0, dst.numel(), src, add=add, pool=pool)


def deposit_part(dst: Tensor, start: int, stop: int, src: Tensor, *, add: bool, pool: Pool | None) -> float | Tensor:
    """Write or add `src` into elements `start` to `stop` of `dst`, and return their squared norm: see `deposit`.

    On the host no view of them is made: it would take longer than to write a small gradient.
    """
    _check_deposit(dst, start, stop, src)
    if not dst.is_cpu:
        return _deposit_in_torch(dst[start:stop], src, [(0, stop - start)], add=add)[0]
    return _deposit_on_host(dst, start, src, 0, stop - start, add=add, pool=pool)


def deposit_parts(dst: Tensor, src: Tensor, parts: Ranges, *, add: bool, pool: Pool | None) -> Sequence[float | Tensor]:
    """Write or add the whole of `src` into `dst`, and return the squared norm of each part of `dst` afterwards.

    It does what `deposit` does with each part; what lies between the parts is zero in both tensors. On a device it is
    one pass that writes and one that measures, however many parts there are.

    Arguments:
        dst: the gradient's storage: fp32, bf16 or fp16, contiguous, [n].
        src: the new gradient: fp32, bf16 or fp16, contiguous, [n], on the device of `dst`.
        parts: the first element of each part, and the one after its last.
        add: True to accumulate instead of overwriting.
        pool: the threads to use on host memory; `None` for the calling thread alone.

    Returns:
        The sums of squares, one for each part, as `deposit` returns them.
    """
    _check_deposit(dst, 0, dst.numel(), src)
    if not dst.is_cpu:
        return _deposit_in_torch(dst, src, parts, add=add)
    return [_deposit_on_host(dst, first, src, first, last - first, add=add, pool=pool) for first, last in parts]


def _check_deposit(dst: Tensor, start: int, stop: int, src: Tensor) -> None:
    """Refuse tensors that do not fit each other: native code trusts the addresses that it is given."""
    _require_flat(dst, "dst")
    _require_flat(src, "src")
    if src.numel() != stop - start or src.device != dst.device:
        raise ValueError(
            f"dst has {stop - start} elements on {dst.device}, src {src.numel()} on {src.device}: they must be alike"
        )
    if not 0 <= start <= stop <= dst.numel():
        raise ValueError(f"elements {start} to {stop} are not all in dst, which has {dst.numel()}")


def _deposit_on_host(
    dst: Tensor, dst_start: int, src: Tensor, src_start: int, numel: int, *, add: bool, pool: Pool | None
) -> float:
    """Write or add some elements of `src`, and return their squared norm in `dst`."""
    dst_bytes, src_bytes = dst.itemsize, src.itemsize
    if is_imagined("penstock.deposit", numel * (src_bytes + (2 if add else 1) * dst_bytes)):
        return 0.0
    to, source = dst.data_ptr() + dst_start * dst_bytes, src.data_ptr() + src_start * src_bytes
    return _native.deposit(pool, numel, to, dtype_of(dst, "dst"), source, dtype_of(src, "src"), add=add)


def squared_norms(src: Tensor, parts: Ranges, *, pool: Pool | None) -> Sequence[float | Tensor]:
    """Return the sum of squares of each part of `src`, as `deposit_parts` does for what it wrote.

    Arguments:
        src: any gradient: fp32, bf16 or fp16, contiguous, [n].
        parts: the first element of each part, and the one after its last.
        pool: the threads to use on host memory; `None` for the calling thread alone.

    Raises:
        ValueError: `src` is not contiguous.
        TypeError: its dtype is none of the three.
    """
    _require_flat(src, "src")
    if src.device.type != "cpu":
        return _squared_norms_in_torch([src[start:stop] for start, stop in parts])
    dtype, at = dtype_of(src, "src"), src.data_ptr()
    return [
        0.0
        if is_imagined("penstock.norm", (stop - start) * src.itemsize)
        else _native.squared_norm(pool, stop - start, at + start * src.itemsize, dtype)
        for start, stop in parts
    ]


def squared_norms_of(tensors: Sequence[Tensor]) -> Sequence[float | Tensor]:
    """Return the sum of squares of each of several tensors on one device, as `squared_norms` of parts of one."""
    if tensors and tensors[0].device.type != "cpu":
        return _squared_norms_in_torch(tensors)
    return [squared_norm(tensor, pool=None) for tensor in tensors]


def squared_norm(src: Tensor, *, pool: Pool | None) -> float | Tensor:
    """Return the sum of squares of `src`; see `squared_norms`."""
    return squared_norms(src, [(0, src.numel())], pool=pool)[0]


def _deposit_in_torch(dst: Tensor, src: Tensor, parts: Ranges, *, add: bool) -> Sequence[Tensor]:
    """Do in torch operations, on any device, what `deposit_parts` does on the host."""
    if add:
        dst.add_(src)
    else:
        dst.copy_(src)
    return _squared_norms_in_torch([dst[start:stop] for start, stop in parts])


def _squared_norms_in_torch(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the sums of squares of several tensors, by one reduction that reads low precision as it is."""
    if not tensors:
        return ()
    # In fp64, as on the host: what is left of the order of summation is far below the fp32 that a norm is rounded to,
    # so that clipping is the same wherever a gradient was measured.
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float64)).square().unbind()


def _require_flat(tensor: Tensor, name: str) -> None:
    """Refuse a tensor that is not contiguous: native code gets its address alone."""
    if not tensor.is_contiguous():
        shape, strides = tuple(tensor.shape), tensor.stride()
        raise ValueError(f"{name} must be contiguous; its shape is {shape}, strides {strides}")


# ----------------------------------------------------------------------------------------------------------------------
# The fp32 value behind a parameter: as bf16 and a 16-bit remainder, as a full copy, or as the parameter itself.
#
# The remainder form is exact. With the bits of a value seen as integers:
#
#     bf16 = (fp32 + 0x8000) >> 16        nearest, ties away from zero
#     fp32 = (bf16 << 16) + remainder     the remainder is signed
#
# so the low 16 bits of the value are the remainder's bits, and bf16 is the parameter that a user sees. A NaN is kept as
# a quiet NaN with remainder 0: rounding 0x7FFFFFFF up would make it -0.
#
# Ties away from zero are the one rule for parameters, whatever their master is (`as_param`): the form of the master and
# the way of a value (prepare, update, load, set, export, average) change no bit of a parameter. To nearest even, as
# torch rounds, a value and its 16 bits would not fit: an even bf16 stands for 65,537 values then. The two rules differ
# on half of the ties, one value in 131,072. Gradients, optimizer states and activations are rounded to nearest even.
# ----------------------------------------------------------------------------------------------------------------------


def as_param(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert values to the dtype of a parameter: bf16 to nearest with ties away from zero, others as torch does.

    Arguments:
        value: the values, of any dtype and shape.
        dtype: the parameter's.
    """
    if dtype != torch.bfloat16 or value.dtype == torch.bfloat16:
        return value.to(dtype)
    return split_master(value.to(torch.float32))[0]


def split_master(value: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 values into bf16 parameters and int16 remainders, on any device.

    Arguments:
        value: the values, fp32, of any shape.

    Returns:
        The parameters, bf16, and the remainders, int16, each of the same shape. `join_master` gives back the bits of
        every value but a NaN's.
    """
    high, low = _halves(value)
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def _halves(value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bits of the parameters, and those of the remainders in the low 16 of each element, both as int32."""
    bits = value.contiguous().view(torch.int32)
    # Without its low bits a NaN stays one: it is not rounded up, and its remainder is 0.
    bits = torch.where(torch.isnan(value), (bits | 0x400000) & -0x10000, bits)
    return (bits + 0x8000) >> 16, bits


def join_master(param: Tensor, remainder: Tensor) -> Tensor:
    """Put bf16 parameters and int16 remainders together to the fp32 values they came from, on any device.

    Arguments:
        param: the parameters, bf16, of any shape.
        remainder: the remainders, int16, of the same shape.

    Returns:
        The values, fp32, of the same shape.
    """
    high = param.contiguous().view(torch.int16).to(torch.int32) << 16
    return (high + remainder).view(torch.float32)


def read_master(param: Tensor, master: Tensor | None) -> Tensor:
    """Return the fp32 values behind a parameter, in memory of their own.

    Arguments:
        param: where compute reads the parameter, of any shape.
        master: the rest of the fp32 value: int16 remainders, an fp32 copy, or `None` where `param` is the only copy.
    """
    if master is None:
        return param.to(torch.float32, copy=True)
    if master.dtype == torch.int16:
        return join_master(param, master)
    return master.clone()


def fp32_values(param: Tensor, master: Tensor | None) -> Tensor:
    """Return the fp32 values behind a parameter: the very memory where they are kept in fp32, else a copy."""
    values = param if master is None else master
    return values if values.dtype == torch.float32 else read_master(param, master)


def write_master(param: Tensor, master: Tensor | None, value: Tensor) -> None:
    """Write fp32 values into a parameter and its master; the reverse of `read_master`.

    Arguments:
        param: where compute reads the parameter, of any shape.
        master: int16 remainders, an fp32 copy, or `None`.
        value: the values, fp32, of the same shape.
    """
    if master is not None and master.dtype == torch.int16:
        high, low = _halves(value)  # the copies below keep the low 16 bits of each element
        param.view(torch.int16).copy_(high)
        master.copy_(low)
        return
    param.copy_(as_param(value, param.dtype))
    if master is not None:
        master.copy_(value)


def write_given(param: Tensor, master: Tensor | None, value: Tensor) -> None:
    """Write values as they were given; the same bits as `write_master` of them in fp32, signaling NaNs apart.

    Arguments:
        param: where compute reads the parameter, of any shape.
        master: int16 remainders, which are zeros, an fp32 copy, or `None`.
        value: the values, of any dtype and the same shape, on any device.
    """
    if master is not None and master.dtype == torch.int16 and value.dtype == torch.bfloat16:
        param.copy_(value)  # the value is the parameter, and nothing is left of it: one pass, instead of ten over fp32
    else:
        write_master(param, master, value.float().to(param.device))


# ----------------------------------------------------------------------------------------------------------------------
# Random bits that depend on what is rounded alone: on seed, step, element and state, in every partition the same.
#
# Elements are numbered through all parameters of the optimizer, and cut into blocks of 256. With `mix` the finaliser of
# SplitMix64, and all products modulo 2^64 or 2^32:
#
#     step_key = mix(mix(seed) ^ step)
#     key      = mix(step_key ^ (2 * block + draw))            draw 0 for the first two states, 1 for the rest
#     x        = element in block * 0x9E3779B9 + low 32 bits of key
#     x        = (x ^ (x >> 16)) * 0x7FEB352D ^ high 32 bits of key
#     x        = (x ^ (x >> 15)) * 0x846CA68B
#     word     = x ^ (x >> 16)
#
# Each word serves two roundings of 16 bits: of the states 0 and 1, or of state 2 and the parameter.
#
# Source: G. Steele, D. Lea and C. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, for `mix`;
# C. Wellons, "Prospecting for hash functions", 2018, for the 32-bit constants.
# ----------------------------------------------------------------------------------------------------------------------


MASK64 = (1 << 64) - 1
_MASK32 = (1 << 32) - 1
_STRIDE = 0x9E3779B9

#: Number of the parameter among what is rounded; the states are 0, 1 and 2.
PARAM = 3


def step_key(seed: int, step: int) -> int:
    """Return the key of a step's random bits: 64 bits, as int64 has them."""
    key: int = _mix(_mix((seed & MASK64 ^ 1 << 63) - (1 << 63)) ^ step)
    return key


def random_words(key: int | Tensor, first: int | Tensor, numel: int, draw: int, device: torch.device) -> Tensor:
    """Return the 32-bit words of elements `first` to `first + numel`, as int64.

    Arguments:
        key: the step's key (`step_key`); as a tensor int64, 0-dim.
        first: the number of the first element, a multiple of 256; as a tensor int64, 0-dim.
        numel: how many words.
        draw: 0 for the states 0 and 1, 1 for state 2 and the parameter.
        device: where to compute them.
    """
    blocks = torch.arange(-(-numel // BLOCK_NUMEL), dtype=torch.int64, device=device) + first // BLOCK_NUMEL
    keys = _mix((2 * blocks + draw) ^ key)[:, None]
    element = torch.arange(BLOCK_NUMEL, dtype=torch.int64, device=device)
    # The product in two halves of 16 bits: Inductor computes with indices in int32, which the whole factor overflows.
    x = ((element * (_STRIDE >> 16) << 16) + element * (_STRIDE & 0xFFFF) + (keys & _MASK32)) & _MASK32
    x = ((x ^ (x >> 16)) * 0x7FEB352D & _MASK32) ^ ((keys >> 32) & _MASK32)
    x = (x ^ (x >> 15)) * 0x846CA68B & _MASK32
    words: Tensor = (x ^ (x >> 16)).view(-1)[:numel]
    return words


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


def _mix(x: Any) -> Any:
    """Mix 64 bits, so that every bit of the result depends on every bit of `x`: int64 values, or a number."""
    for by, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        # `>>` brings in the sign, and zeros are wanted. Products of tensors wrap around by themselves.
        x = (x ^ (x >> by & (1 << 64 - by) - 1)) * (factor - (1 << 64))
        if isinstance(x, int):
            x = (x & MASK64 ^ 1 << 63) - (1 << 63)
    return x ^ (x >> 31 & (1 << 33) - 1)


# ----------------------------------------------------------------------------------------------------------------------
# How states are stored in 8 bits: as codes of a dynamic map, with one fp32 scale for each block of 256 elements.
#
# The bits of a positive fp32 number, read as an integer, are 2^23 times its logarithm to base 2, up to a constant and
# taken as linear between powers of two; call them L(x). A code of magnitude m > 0 stands for the value whose logarithm
# is D times that of m + 1/2, counted from the largest code, which stands for the block's largest magnitude, the scale:
#
#     L(value) = L(scale) - D * (L(M + 1/2) - L(m + 1/2))
#
# with M = 255 and D = 4 without sign, M = 127 and D = 3 with it; m = 0 is zero. So each of 8 (7 with sign) decades of
# 2^D has half as many codes as the one above it: small values get few bits but keep their size, down to 1e-9 of the
# scale (1e-6 with sign). A negative value has the code 255 - m.
#
# The scale comes back as it went in, and what was decoded is encoded to the same codes. Encoding takes the m that the
# logarithm, divided by D, is truncated to. What lies below all of them becomes zero in the signed map; without sign it
# becomes the smallest code, so that no second moment vanishes under a first one that does not.
#
# Source: T. Dettmers, M. Lewis, S. Shleifer and L. Zettlemoyer, "8-bit Optimizers via Block-wise Quantization", ICLR
# 2022. There a decade is a power of ten, and linear; here codes are spaced evenly in the logarithm, which takes a few
# integer operations.
# ----------------------------------------------------------------------------------------------------------------------


# Of the map without sign and with it: D, and the bits of M + 1/2.
_OCTAVES = {False: 4, True: 3}
_THIRD = fp32(1 / 3)  # worked out once, and outside of what a compiler traces
_TOP_BITS = {False: 0x437F8000, True: 0x42FF0000}
LEAST_BITS = 31 << 23  # 2^-96: a block below it is zero
INFINITE_BITS = 255 << 23
MAGNITUDE_BITS = 0x7FFFFFFF


def encode_blocks(value: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Quantise fp32 values.

    Arguments:
        value: the values, fp32, [n], not negative unless `signed`. A block with a value that is not finite is NaN
            afterwards.
        signed: True for the map with a sign.

    Returns:
        The codes, uint8, [n], and the scales, fp32, [ceil(n / 256)].
    """
    numel = value.numel()
    padded = torch.nn.functional.pad(value, (0, -numel % BLOCK_NUMEL)).view(-1, BLOCK_NUMEL)
    bits = padded.view(torch.int32)
    magnitude = bits & MAGNITUDE_BITS
    largest = magnitude.amax(dim=1)
    finite = largest < INFINITE_BITS
    usable = finite & (largest >= LEAST_BITS)
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
        signed: True if the codes are of the map with a sign.

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


# ----------------------------------------------------------------------------------------------------------------------
# States as they are stored, and the fp32 values that the arithmetic sees.
# ----------------------------------------------------------------------------------------------------------------------


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
        """True if anything is rounded by random bits."""
        return self.rounding == "stochastic"

    def rounding_at(self, step: int, first: int, numel: int, device: torch.device) -> "Rounding | None":
        """Return how a segment is rounded to bf16 at a step; `None` to nearest even. See `Rounding`."""
        return Rounding(step_key(self.seed, step), first, numel, device) if self.stochastic else None

    def spec(self, name: str, *, signed: bool, begins_with_update: bool = False) -> StateSpec:
        """Describe a state that is stored in this format; see `StateSpec`."""
        return StateSpec(name, DTYPES[self.dtype], signed, begins_with_update)


class Rounding:
    """The random bits by which the values of one segment are rounded to bf16 at one step, made when they are asked for.

    Arguments:
        key: the key of the step's random bits (`step_key`); as a tensor int64, 0-dim.
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


def read_state(spec: StateSpec, values: Tensor, scale: Tensor | None) -> Tensor:
    """Return the values of a state in fp32, [n], in memory of their own.

    Arguments:
        spec: how the state is stored.
        values: the stored values, [n].
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
        master: the rest of the fp32 value, [n]; `None` where the parameter is the only copy.
        value: the values, fp32, [n].
        rounding: the random bits by which a bf16 parameter without a master is rounded; `None` to nearest even.
    """
    if rounding is not None and master is None and param.dtype == torch.bfloat16:
        param.copy_(rounding.to_bf16(value, PARAM))
    else:
        write_master(param, master, value)
