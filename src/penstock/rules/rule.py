"""Update rules: the base class, the values of a step, and how native code is called."""

from __future__ import annotations

import ctypes
import inspect
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock import _native
from penstock._native import DType, Master, Pool, Storage
from penstock.errors import ConfigError

# ----------------------------------------------------------------------------------------------------------------------
# Which instruction set the native kernels use here.
# ----------------------------------------------------------------------------------------------------------------------


def instruction_set() -> str:
    """Return the one in use: "avx512", "avx2", "neon" or "generic"."""
    return _native.isa()


# ----------------------------------------------------------------------------------------------------------------------
# The base class of rules: the arithmetic of one optimizer on flat pieces of memory, without transfers.
# ----------------------------------------------------------------------------------------------------------------------


#: How many elements a back end in plain torch takes at once, so that its temporaries stay small beside the tiles.
PIECE_NUMEL = 1 << 22

#: Random bits, and the scales of 8-bit states, belong to blocks of this many elements. Parameters, tiles and shards
#: begin on a block.
BLOCK_NUMEL = 256

#: A parameter's own numbers beside its step count, by name: the 0-dim state of some optimizers.
Scalars = Mapping[str, Any]


@dataclass(frozen=True)
class StateSpec:
    """One per-element state of a rule, and how it is stored.

    Arguments:
        name: its name in torch, such as "exp_avg".
        dtype: the dtype that it is stored in: float32, bfloat16, or uint8 for codes of the dynamic 8-bit map, with one
            fp32 scale per block.
        signed: True if the values may be negative; this chooses the 8-bit map.
        begins_with_update: True if torch has no such state before the first update, which initialises it. Setting
            the state tells that there was an update.
    """

    name: str
    dtype: torch.dtype = torch.float32
    signed: bool = True
    begins_with_update: bool = False

    @property
    def scale_name(self) -> str | None:
        """The name of the kind that holds the scales, one fp32 per block; `None` without scales."""
        return f"{self.name}_scale" if self.dtype == torch.uint8 else None


@dataclass(frozen=True)
class UpdateSlice:
    """A piece of a tile whose elements share a parameter group and a step count. It is updated in place.

    All tensors are one-dimensional, contiguous, on one device and, the scales apart, of one length, [n].

    Arguments:
        param: the parameter in the compute dtype, fp32, bf16 or fp16; the update writes it.
        grad: the gradient, fp32, bf16 or fp16; the update reads it.
        master: the rest of the fp32 value: int16 remainders (of bf16 parameters), a full fp32 copy, or `None`
            where the parameter is the only copy (fp32, or bf16 that is rounded at every step).
        states: the states, in the order and the dtypes of the rule's `states`.
        scales: the scales of each 8-bit state, fp32, [ceil(n / 256)], and `None` for the other states; it may be left
            out where all are `None`.
        first: the number of the first element among all elements of the optimizer: a multiple of 256, the same in every
            partition. It chooses the random bits.
        shape: the parameter's shape, where the segment is one whole parameter and the rule looks at whole ones. Then
            a state has as many elements as the rule's `state_shape` says, or more, which are padding; and scales are
            for those states that have the parameter's shape. Else ().

    Raises:
        ValueError: a tensor is not contiguous, or tensors differ in numel or device, or `shape` in numel.
    """

    param: Tensor
    grad: Tensor
    master: Tensor | None
    states: tuple[Tensor, ...]
    scales: tuple[Tensor | None, ...] = ()
    first: int = 0
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # The native update trusts these addresses and lengths with memory that is not its own.
        numel, device = self.param.numel(), self.param.device
        if self.shape and math.prod(self.shape) != numel:
            raise ValueError(f"a segment of {numel} elements is no parameter of shape {self.shape}")
        if self.first % BLOCK_NUMEL:
            raise ValueError(f"a segment begins on a block of {BLOCK_NUMEL} elements, not at element {self.first}")
        # States of a whole parameter have sizes of their own.
        states = [(state, state.numel() if self.shape else numel) for state in self.states]
        scales = [(scale, -(-numel // BLOCK_NUMEL)) for scale in self.scales]
        for tensor, wanted in ((self.param, numel), (self.grad, numel), (self.master, numel), *states, *scales):
            if tensor is None:
                continue
            if tensor.numel() != wanted or tensor.device != device or not tensor.is_contiguous():
                raise ValueError(
                    f"a segment takes contiguous tensors that are alike: param has {numel} elements on {device}, "
                    f"this {tensor.dtype} tensor {tensor.numel()} on {tensor.device} with strides {tensor.stride()}"
                )

    def scale(self, index: int) -> Tensor | None:
        """Return the scales of a state by its index; `None` where it has none."""
        return self.scales[index] if self.scales else None

    def pieces(self, numel: int = PIECE_NUMEL) -> Iterator[UpdateSlice]:
        """Cut the segment into views of at most `numel` elements, whole blocks, in order."""
        for start in range(0, self.param.numel(), numel):
            part = slice(start, start + numel)
            blocks = slice(start // BLOCK_NUMEL, (start + numel) // BLOCK_NUMEL)
            yield UpdateSlice(
                self.param[part],
                self.grad[part],
                None if self.master is None else self.master[part],
                tuple(state[part] for state in self.states),
                tuple(None if scale is None else scale[blocks] for scale in self.scales),
                self.first + start,
            )


class _SummedPart(NamedTuple):
    """Bytes that a pass has summed: where they are, and their CRC-32C as they were and as they are."""

    start: int
    nbytes: int
    before: int
    after: int


class RecordChecksums:
    """The CRC-32C of some memory, as it was before an update and as it is after it.

    Arguments:
        memory: contiguous tensors on the cpu.
    """

    def __init__(self, memory: Iterable[Tensor]) -> None:
        self._ranges = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in memory]
        self._parts: list[_SummedPart] = []

    def __bool__(self) -> bool:
        """Return True if there is memory to sum."""
        return bool(self._ranges)

    def among(self, tensors: Iterable[Tensor | None]) -> list[Tensor]:
        """Return the tensors that lie in the memory: a pass over them sums each of these as a whole."""
        return [
            tensor
            for tensor in tensors
            if tensor is not None and any(start <= tensor.data_ptr() < stop for start, stop in self._ranges)
        ]

    def note(self, tensors: Sequence[Tensor], sums: Sequence[tuple[int, int]]) -> None:
        """Note the checksums that a pass has taken of tensors, before and after."""
        for tensor, (before, after) in zip(tensors, sums, strict=True):
            self._parts.append(_SummedPart(tensor.data_ptr(), tensor.nbytes, before, after))

    def of(self, memory: Tensor) -> tuple[int, int]:
        """Compute the CRC-32C of some of the memory before the update and after it, in the order of its bytes.

        Bytes that no pass has summed are unchanged: padding, gaps between runs, parameters without a gradient.
        """
        at, stop = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        before = after = 0
        inside = sorted(part for part in self._parts if at <= part.start < stop)
        for part in (*inside, _SummedPart(stop, 0, 0, 0)):
            nbytes = part.start - at
            between = _native.crc32c(at, nbytes)
            before = _native.crc32c_join(_native.crc32c_join(before, between, nbytes), part.before, part.nbytes)
            after = _native.crc32c_join(_native.crc32c_join(after, between, nbytes), part.after, part.nbytes)
            at = part.start + part.nbytes
        return before, after


@dataclass(frozen=True, eq=False)  # without fields all would be equal, also of subclasses that do not compare theirs
class StepScalars:
    """The scalars of one update, ready for use: they are read from a parameter group once and do not change."""

    @property
    def keeps_zeros(self) -> bool:
        """True if elements that are zero in every tensor stay zero: then gaps between parameters may be updated too."""
        return True


class Rule(ABC):
    """The arithmetic of one optimizer.

    Most are element-wise: the same bits on every back end and in every partition. Those that look at whole parameters
    say so by `whole`. An optimizer with several parameter groups of different arithmetic has a rule of several parts:
    `states` and `scalar_names` are the union, and updates are asked of `part(group)` alone.

    Attributes:
        name: the name in reports and checkpoints, such as "adamw".
        scalar_names: the names of a parameter's own scalars, beside its step count.
        whole: True if some update looks at whole parameters: a tile is one, and its segment has the parameter's shape.
        sums: True if `update_many` can sum the host memory that it touches.
    """

    name: str
    scalar_names: tuple[str, ...] = ()
    whole: bool = False
    sums: bool = False

    @property
    @abstractmethod
    def states(self) -> tuple[StateSpec, ...]:
        """The states that some parameter group needs, and how they are stored."""

    def part(self, group: Mapping[str, Any]) -> Rule:
        """Return the rule of one parameter group: this one itself, unless the optimizer has several.

        Raises:
            ConfigError: the group does not say which.
        """
        del group
        return self

    def state_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape of a state of a parameter of that shape; `None` where it has no such state.

        Arguments:
            name: the state's name, one of `states`.
            shape: the parameter's shape, which every state of an element-wise rule has.
        """
        return shape if name in (spec.name for spec in self.states) else None

    def working_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the most bytes that an update of a whole parameter holds beside its segment.

        0 where the rule is element-wise: its temporaries are of pieces.
        """
        del shape
        return 0

    @abstractmethod
    def step_scalars(self, group: Mapping[str, Any], step: int, scalars: Scalars = {}) -> StepScalars:  # noqa: B006 - never changed
        """Read the scalars of an update from a parameter group.

        Arguments:
            group: one of the optimizer's `param_groups`, as it is now.
            step: how many updates these parameters will have had with this one; 1 at the first.
            scalars: the parameters' own scalars, as `advance` returned them at their last update.

        Raises:
            ConfigError: the group asks for an option that this rule does not honour.
        """

    def advance(self, step_scalars: StepScalars) -> Scalars:
        """Return the parameter's own scalars after the update."""
        del step_scalars
        return {}

    def advance_group(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what one step writes into a parameter group, whichever of its parameters have a gradient.

        Raises:
            ConfigError: the class writes something that it did not write when it was tried out.
        """
        del group
        return {}

    @abstractmethod
    def update(
        self, update_slice: UpdateSlice, step_scalars: StepScalars, grad_scale: float, pool: Pool | None
    ) -> None:
        """Apply the rule to one segment, in one pass, in place.

        Arguments:
            update_slice: the segment.
            step_scalars: the scalars, as `step_scalars` of the same rule returned them.
            grad_scale: the factor on the gradient: unscaling, averaging and clipping in one.
            pool: the threads to use on host memory; `None` for the calling thread alone.
        """

    def update_many(
        self,
        update_slices: Iterable[tuple[UpdateSlice, StepScalars]],
        grad_scale: float,
        pool: Pool | None,
        sums: RecordChecksums | None = None,
    ) -> None:
        """Apply the rule to segments of one device, each with its scalars, as `update` does to each of them.

        Arguments:
            update_slices: the segments, each with its scalars.
            grad_scale: as `update` takes it.
            pool: as `update` takes it.
            sums: takes the checksums of its memory in the segments; of rules with `sums` alone.
        """
        assert not sums
        for update_slice, step_scalars in update_slices:
            self.update(update_slice, step_scalars, grad_scale, pool)


# ----------------------------------------------------------------------------------------------------------------------
# Options of an optimizer class.
# ----------------------------------------------------------------------------------------------------------------------


#: Options that change how torch runs a class, and have to be off.
_REFUSED = ("capturable", "differentiable")
#: Options that choose among torch's back ends.
_WITHOUT_EFFECT = ("foreach", "fused")


def check_options(
    title: str, group: Mapping[str, Any], honoured: Iterable[str] = (), unknown: Mapping[str, Any] = {}
) -> None:
    """Refuse a parameter group with an option that the update would not obey.

    Arguments:
        title: the rule, for messages.
        group: the group.
        honoured: options that the update obeys: numbers, of which `lr` alone may be a tensor.
        unknown: options that the rule does not know; see `unknown_options`.

    Raises:
        ConfigError: it names the first such option.
    """
    for option in _REFUSED:
        if group.get(option):
            raise ConfigError(
                f"{option}={group[option]!r} is not supported by Penstock's {title}. "
                f"Set {option}=False in every parameter group."
            )
    for option in honoured:
        given = group.get(option)
        values = given if isinstance(given, tuple | list) else (given,)
        for index, value in enumerate(values):
            if isinstance(value, Tensor) and option != "lr":
                name = f"{option}[{index}]" if len(values) > 1 else option
                raise ConfigError(f"{name} is a tensor, which Penstock's {title} does not support. Make it a float.")
    for option, nothing in unknown.items():
        value = group.get(option, nothing)
        if value is not nothing and (isinstance(value, Tensor) or value != nothing):
            raise ConfigError(
                f"{option}={value!r} is an option of this version of the class that Penstock's {title} does "
                f"not know. Set {option}={nothing!r} in every parameter group."
            )


def unknown_options(
    cls: type[torch.optim.Optimizer], options: Iterable[str], honoured: Iterable[str]
) -> dict[str, Any]:
    """Return the options of a class that a rule does not know, such as those of a newer torch.

    Arguments:
        cls: the class.
        options: its options in this version.
        honoured: those that the rule obeys.

    Returns:
        The default of the class's constructor for each, at which the option asks for nothing.
    """
    constructor = inspect.signature(cls).parameters
    known = {*honoured, *_REFUSED, *_WITHOUT_EFFECT}
    return {name: constructor[name].default if name in constructor else None for name in options if name not in known}


# ----------------------------------------------------------------------------------------------------------------------
# Arithmetic that plain torch does not offer with a known rounding.
#
# Run by torch, `sqrt` and `fma` go by way of fp64. Under `torch.compile` each is the one instruction that it stands
# for: `rules.compiler` has the compiler round it as the host does.
# ----------------------------------------------------------------------------------------------------------------------


def fp32(value: float) -> float:
    """Round a Python number to fp32, as every kernel does with its scalars; beyond the range it becomes infinite."""
    return ctypes.c_float(value).value


def sqrt(value: Tensor) -> Tensor:
    """Return the correctly rounded square root of fp32 values, on any device.

    `torch.sqrt` is one unit in the last place away from it for some values where a vendor's vector library computes it.
    The root of an fp32 value is never so near the middle between two others that fp64's own rounding could matter.
    """
    if torch.compiler.is_compiling():
        return value.sqrt()
    return value.double().sqrt().float()


def fma(a: float | Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return `a * b + c` rounded once, for fp32 values, on any device.

    The product of two fp32 values is exact in fp64. The sum is rounded to odd there (the last bit tells whether
    anything was lost), after which rounding to fp32 gives what one rounding of the exact sum gives.

    Arguments:
        a: the first factor, fp32, of the shape of `b` or 0-dim; or a Python number that fp32 can hold.
        b: the second factor, fp32, of any shape.
        c: the summand, fp32, of the same shape.

    Returns:
        fp32, of the same shape.

    Source:
        S. Boldo and G. Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to
        odd", IEEE Transactions on Computers, 2008.
    """
    if torch.compiler.is_compiling():
        factor = a if isinstance(a, Tensor) else torch.full((), a, dtype=torch.float32, device=b.device)
        compiled: Tensor = torch.ops.prims.fma(factor, b, c)  # one of Inductor's own, there since 2.8
        return compiled
    product = b.double() * a
    total = product + c
    # Two-sum: `error` is exactly what the addition lost. It is NaN where the total is not finite, and then unused.
    rest = total - product
    error = (product - (total - rest)) + (c - rest)
    # To odd: toward zero, and the last bit set, where anything was lost. The product is far from fp64's limits.
    signed = error * total
    outward = signed < 0
    bits = total.view(torch.int64) - outward.to(torch.int64)
    return (bits | (outward | (signed > 0))).view(torch.float64).float()


# ----------------------------------------------------------------------------------------------------------------------
# What all rules answer alike that update each element by itself.
# ----------------------------------------------------------------------------------------------------------------------


# ----------------------------------------------------------------------------------------------------------------------
# Arithmetic of native code that is noted and not done: tensors of a simulation have no values.
#
# It is state of one thread: other threads compute meanwhile.
# ----------------------------------------------------------------------------------------------------------------------


#: Takes the name of a pass over memory, and the bytes that it would read and write.
Note = Callable[[str, int], None]


class _ThreadContext(threading.local):
    note: Note | None = None


_thread = _ThreadContext()


@contextmanager
def noting(note: Note) -> Iterator[None]:
    """Have this thread's native passes noted, inside of a `with` block, in place of done."""
    before, _thread.note = _thread.note, note
    try:
        yield
    finally:
        _thread.note = before


def is_imagined(name: str, nbytes: int) -> bool:
    """Return True if a pass was noted, and is not to be done."""
    if _thread.note is None:
        return False
    _thread.note(name, nbytes)
    return True


# ----------------------------------------------------------------------------------------------------------------------
# How tensors are described to the native module, which gets their addresses and trusts the description.
# ----------------------------------------------------------------------------------------------------------------------


DTYPES = {torch.float32: DType.FP32, torch.bfloat16: DType.BF16, torch.float16: DType.FP16}


def dtype_of(tensor: Tensor, what: str) -> DType:
    """Return the native name of a tensor's dtype.

    Arguments:
        tensor: any tensor.
        what: its name, for the message.

    Raises:
        TypeError: the native kernels know no such dtype.
    """
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise TypeError(f"{what} is {tensor.dtype}; use float32, bfloat16 or float16")
    return dtype


def master_kind_of(master: Tensor | None) -> Master:
    """Return in which form a master keeps the fp32 value behind a parameter.

    Raises:
        TypeError: `master` is neither `None`, int16 nor fp32.
    """
    if master is None:
        return Master.NONE
    if master.dtype == torch.int16:
        return Master.REMAINDER
    if master.dtype == torch.float32:
        return Master.FP32
    raise TypeError(f"master is {master.dtype}; use int16 (the remainder) or float32 (a full copy)")


def storage_of(spec: StateSpec, values: Tensor, scale: Tensor | None, *, stochastic: bool) -> Storage:
    """Return how a state is stored.

    Arguments:
        spec: how the rule says that it is stored.
        values: the stored values.
        scale: the scales of an 8-bit state; else `None`.
        stochastic: True if bf16 is rounded by random bits.

    Raises:
        TypeError: the tensors are not what `spec` says.
    """
    scaled = spec.dtype == torch.uint8
    if (
        values.dtype != spec.dtype
        or (scale is not None) != scaled
        or (scale is not None and scale.dtype != torch.float32)
    ):
        raise TypeError(
            f"{spec.name} is {values.dtype} with scales {None if scale is None else scale.dtype}; it must be "
            f"{spec.dtype} {'with float32 scales' if scaled else 'without scales'}"
        )
    if scaled:
        return Storage.INT8_SIGNED if spec.signed else Storage.INT8_UNSIGNED
    if spec.dtype == torch.bfloat16:
        return Storage.BF16_RANDOM if stochastic else Storage.BF16
    return Storage.FP32
