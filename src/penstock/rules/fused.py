"""Fused update rules on the host, and checksums taken in their pass."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from penstock import _native
from penstock._native import Pool
from penstock.errors import ConfigError
from penstock.rules.device import DeviceUpdate, Traced, rounds_by_its_place
from penstock.rules.formats import StateFormat, read_master, read_state, rounding_of, step_key, write_param, write_state
from penstock.rules.rule import (
    BLOCK_NUMEL,
    PIECE_NUMEL,
    Elementwise,
    Rule,
    Scalars,
    StateSpec,
    StepScalars,
    UpdateSlice,
    dtype_of,
    fp32,
    master_kind_of,
    storage_of,
)

# ----------------------------------------------------------------------------------------------------------------------
# Checksums of memory that an update reads and writes, taken in its own pass: the bytes are in the cache then.
# ----------------------------------------------------------------------------------------------------------------------


class _SummedPart(NamedTuple):
    """Bytes that a pass has summed: where they are, and their CRC-32C as they were and as they are."""

    start: int
    nbytes: int
    before: int
    after: int


class RecordChecksums:
    """The CRC-32C of some memory, as it was before an update and as it is after it.

    Arguments:
        memory: contiguous tensors on the cpu: what is to be known of.
    """

    def __init__(self, memory: Iterable[Tensor]) -> None:
        self._ranges = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in memory]
        self._parts: list[_SummedPart] = []

    def __bool__(self) -> bool:
        """Whether anything is to be known."""
        return bool(self._ranges)

    def among(self, tensors: Iterable[Tensor | None]) -> list[Tensor]:
        """Pick out the tensors that lie in the memory: a pass over them is to sum these, whole."""
        return [
            tensor
            for tensor in tensors
            if tensor is not None and any(start <= tensor.data_ptr() < stop for start, stop in self._ranges)
        ]

    def note(self, tensors: Sequence[Tensor], sums: Sequence[tuple[int, int]]) -> None:
        """Note what a pass has found of tensors, before and after."""
        for tensor, (before, after) in zip(tensors, sums, strict=True):
            self._parts.append(_SummedPart(tensor.data_ptr(), tensor.nbytes, before, after))

    def of(self, memory: Tensor) -> tuple[int, int]:
        """Compute the CRC-32C of some of the memory before the update and after it, in the order of its bytes.

        What no pass has summed is as it was: padding, gaps between runs, parameters without a gradient.
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


@runtime_checkable
class Summing(Protocol):
    """A rule whose pass over host memory can sum what it touches."""

    def update_summed(
        self,
        segments: Iterable[tuple[UpdateSlice, StepScalars]],
        grad_scale: float,
        pool: Pool | None,
        sums: RecordChecksums,
    ) -> None:
        """Do what `Rule.update_many` does to segments of host memory, and note what of them `sums` asks for."""


def update_many(
    rule: Rule,
    segments: Iterable[tuple[UpdateSlice, StepScalars]],
    grad_scale: float,
    pool: Pool | None,
    sums: RecordChecksums,
) -> None:
    """Apply a rule to segments, as its `update_many` does, and sum what of them is asked for."""
    if sums:
        assert isinstance(rule, Summing)
        rule.update_summed(segments, grad_scale, pool, sums)
    else:
        rule.update_many(segments, grad_scale, pool)


# ----------------------------------------------------------------------------------------------------------------------
# What rules with kernels of their own share: one native pass on the host, and a reference in plain torch.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FusedScalars(StepScalars):
    """The scalars of one update, each a value that fp32 holds.

    Arguments:
        kernel: the native kernel that computes the update.
        sign: -1 to maximize, else 1.
        scalars: a NamedTuple of floats, in the order of the native kernel.
        flags: a NamedTuple of what is fixed for a run, in the order of the native kernel.
        step: the step whose random bits round the values; 0 where no random bits do.
    """

    kernel: _native.Rule
    sign: float
    scalars: Any
    flags: Any
    step: int = 0

    @property
    def keeps_zeros(self) -> bool:
        """Whether zeros stay zero: they do unless a divisor without `eps` makes 0 / 0 of them, a NaN."""
        return bool(getattr(self.scalars, "eps", 1.0) > 0)


@dataclass(frozen=True)
class FusedRule(Elementwise, ABC):
    """A rule with native kernels.

    Arguments:
        name: the rule's name in reports and checkpoints.
        format: how the states are stored.
        on_device: updates the segments that are on an accelerator.
        unknown: options of the user's class that this rule does not know, each with the value at which it asks for
            nothing.
    """

    name: str
    format: StateFormat = StateFormat()  # noqa: RUF009 - a frozen value
    on_device: DeviceUpdate = field(default_factory=DeviceUpdate, compare=False, repr=False, kw_only=True)
    unknown: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False, kw_only=True)

    #: Options that the update obeys.
    honoured: ClassVar[tuple[str, ...]]
    #: Options that have to be off.
    refused: ClassVar[tuple[str, ...]] = ("differentiable",)
    #: Options that choose among torch's back ends.
    without_effect: ClassVar[tuple[str, ...]] = ("foreach", "fused")

    @property
    @abstractmethod
    def states(self) -> tuple[StateSpec, ...]:
        """The states that some group of the optimizer needs."""

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """None beside the step count."""
        return ()

    def _check(self, group: Mapping[str, Any]) -> None:
        """Refuse a parameter group with an option that the update would not obey.

        Raises:
            ConfigError: it names the first such option.
        """
        for option in self.refused:
            if group.get(option):
                raise ConfigError(
                    f"{option}={group[option]!r} is not supported by Penstock's {self.name}. "
                    f"Set {option}=False in every parameter group."
                )
        for option in self.honoured:
            given = group.get(option)
            values = given if isinstance(given, tuple | list) else (given,)
            for index, value in enumerate(values):
                if isinstance(value, Tensor) and option != "lr":
                    name = f"{option}[{index}]" if len(values) > 1 else option
                    raise ConfigError(
                        f"{name} is a tensor, which Penstock's {self.name} does not support. Make it a float."
                    )
        for option, nothing in self.unknown.items():
            value = group.get(option, nothing)
            if value is not nothing and (isinstance(value, Tensor) or value != nothing):
                raise ConfigError(
                    f"{option}={value!r} is an option of this version of the class that Penstock's {self.name} does "
                    f"not know. Set {option}={nothing!r} in every parameter group."
                )

    def hyper(self, group: Mapping[str, Any], step: int, scalars: Scalars = {}) -> FusedScalars:  # noqa: B006
        """Read a parameter group; see `Rule.hyper`."""
        del scalars
        self._check(group)
        kernel, values, flags = self.read_group(group, step)
        sign = -1.0 if group.get("maximize") else 1.0
        return FusedScalars(kernel, sign, values, flags, step if self.format.stochastic else 0)

    @abstractmethod
    def read_group(self, group: Mapping[str, Any], step: int) -> tuple[_native.Rule, Any, Any]:
        """Read the native kernel of an update, its scalars and its flags from a parameter group.

        Arguments:
            group: the group, which was checked.
            step: how many updates there will have been with this one.

        Raises:
            ConfigError: the group asks for state that `prepare` has made no memory for.
        """

    @abstractmethod
    def arithmetic(self, p: Tensor, g: Tensor, states: list[Tensor], hyper: FusedScalars | Traced) -> Tensor:
        """Return the updated parameter, and put the updated states in the list.

        Each operation rounds on its own, so the order and the grouping of operations decide the bits. A product that is
        added without being rounded is `exact.fma`, and a root `exact.sqrt`.

        Arguments:
            p: the parameter, fp32, [n].
            g: the gradient, scaled and negated as it has to be, fp32, [n].
            states: the states that the update uses, fp32, [n] each.
            hyper: the flags, and scalars that are Python numbers or 0-dim tensors.
        """

    def used(self, hyper: FusedScalars) -> int:
        """Return how many of the states, from the first, this update uses."""
        del hyper
        return len(self.states)

    def advance(self, hyper: StepScalars) -> Scalars:
        """Return nothing: there are no scalars beside the step count."""
        del hyper
        return {}

    def update(self, segment: UpdateSlice, hyper: StepScalars, grad_scale: float, pool: Pool | None) -> None:
        """Apply the rule to one segment, in one pass, in place; see `Rule.update`.

        Raises:
            TypeError: there is no kernel for a dtype of the segment.
        """
        self.update_many([(segment, hyper)], grad_scale, pool)

    def update_many(
        self, segments: Iterable[tuple[UpdateSlice, StepScalars]], grad_scale: float, pool: Pool | None
    ) -> None:
        """Apply the rule to segments of one device; see `Rule.update_many`."""
        elsewhere: list[tuple[UpdateSlice, FusedScalars]] = []
        for segment, hyper in segments:
            assert isinstance(hyper, FusedScalars)
            if segment.param.device.type == "cpu":
                self._update_native(segment, hyper, grad_scale, pool)
            else:
                elsewhere.append((segment, hyper))
        if elsewhere:
            self.on_device(self, elsewhere, grad_scale, update_in_torch)

    def update_summed(
        self,
        segments: Iterable[tuple[UpdateSlice, StepScalars]],
        grad_scale: float,
        pool: Pool | None,
        sums: RecordChecksums,
    ) -> None:
        """Apply the rule to segments of host memory; see `Summing.update_summed`."""
        for segment, hyper in segments:
            assert isinstance(hyper, FusedScalars)
            assert segment.param.device.type == "cpu"
            self._update_native(segment, hyper, grad_scale, pool, sums)

    def _update_native(
        self,
        segment: UpdateSlice,
        hyper: FusedScalars,
        grad_scale: float,
        pool: Pool | None,
        sums: RecordChecksums | None = None,
    ) -> None:
        """Update a segment of host memory by the native kernel."""
        param, stochastic = segment.param, self.format.stochastic
        states = [
            (
                segment.states[k].data_ptr(),
                _address(segment.scale(k)),
                storage_of(spec, segment.states[k], segment.scale(k), stochastic=stochastic),
            )
            for k, spec in enumerate(self.states[: self.used(hyper)])
        ]
        used = segment.states[: len(states)], segment.scales[: len(states)]
        summed = [] if sums is None else sums.among((param, segment.grad, segment.master, *used[0], *used[1]))
        # Addresses alone: a `UpdateSlice` has checked lengths and devices, and the functions around them the dtypes.
        found = _native.update(
            pool,
            hyper.kernel,
            param.numel(),
            param.data_ptr(),
            dtype_of(param, "param"),
            segment.grad.data_ptr(),
            dtype_of(segment.grad, "grad"),
            _address(segment.master),
            master_kind_of(segment.master),
            states,
            [fp32(grad_scale * hyper.sign), *hyper.scalars, *map(float, hyper.flags)],
            param_random=stochastic and segment.master is None and param.dtype == torch.bfloat16,
            random_key=step_key(self.format.seed, hyper.step) if stochastic else 0,
            first_block=segment.first // BLOCK_NUMEL,
            summed=[tensor.data_ptr() for tensor in summed],
        )
        if sums is not None:
            sums.note(summed, found)


def update_reference(rule: FusedRule, segment: UpdateSlice, hyper: FusedScalars, grad_scale: float) -> None:
    """Update a segment in plain torch operations, on any device: what every other back end is compared with."""
    specs = rule.states[: rule.used(hyper)]
    factor = fp32(grad_scale * hyper.sign)
    for piece in segment.pieces():
        # May be the very memory of the parameter: no rule writes into what it is given, each operation makes a tensor.
        p = _fp32_of(piece.param, piece.master)
        g = piece.grad.float() if factor == 1 else piece.grad.float() * factor
        states = [
            piece.states[k] if spec.dtype == torch.float32 else read_state(spec, piece.states[k], piece.scale(k))
            for k, spec in enumerate(specs)
        ]
        p = rule.arithmetic(p, g, states, hyper)
        rounding = rounding_of(piece, rule.format, hyper.step)
        for k, spec in enumerate(specs):
            write_state(spec, piece.states[k], piece.scale(k), states[k], rounding, k)
        write_param(piece.param, piece.master, p, rounding)


def update_in_torch(rule: FusedRule, segments: Sequence[tuple[UpdateSlice, FusedScalars]], grad_scale: float) -> None:
    """Update segments of one device as `update_reference` does, the small ones of equal scalars together.

    An operation of a device costs the host the same for few elements as for many.

    Arguments:
        rule: the rule.
        segments: the segments, each with its scalars.
        grad_scale: the factor on the gradient.
    """
    alike: dict[tuple[Any, ...], list[UpdateSlice]] = {}
    for segment, hyper in segments:
        # Alone: in a batch an element has another number, and other neighbours in its block of 256.
        if segment.param.numel() >= PIECE_NUMEL or _minds_its_place(rule, segment, hyper):
            update_reference(rule, segment, hyper, grad_scale)
        elif segment.param.numel():
            dtypes = segment.param.dtype, segment.grad.dtype, segment.master is not None and segment.master.dtype
            alike.setdefault((hyper, *dtypes), []).append(segment)
    for (hyper, *_), small in alike.items():
        for batch in _batches(small):
            if len(batch) > 1:
                _update_together(rule, batch, hyper, grad_scale)
            else:
                update_reference(rule, batch[0], hyper, grad_scale)


def _minds_its_place(rule: FusedRule, segment: UpdateSlice, hyper: FusedScalars) -> bool:
    """Whether what happens to an element depends on its number, or on its neighbours in a block."""
    in_blocks = any(spec.scale_name for spec in rule.states[: rule.used(hyper)])
    return in_blocks or rounds_by_its_place(rule, segment, hyper)


def _batches(segments: Iterable[UpdateSlice]) -> Iterator[list[UpdateSlice]]:
    """Divide segments among batches of at most `PIECE_NUMEL` elements, in order."""
    batch: list[UpdateSlice] = []
    numel = 0
    for segment in segments:
        if batch and numel + segment.param.numel() > PIECE_NUMEL:
            yield batch
            batch, numel = [], 0
        batch.append(segment)
        numel += segment.param.numel()
    if batch:
        yield batch


def _update_together(rule: FusedRule, segments: Sequence[UpdateSlice], hyper: FusedScalars, grad_scale: float) -> None:
    """Update a batch as one segment: copy its segments one after the other, update, and copy back what was written."""
    masters = [segment.master for segment in segments if segment.master is not None]
    states = [[segment.states[k] for segment in segments] for k in range(rule.used(hyper))]
    params = [segment.param for segment in segments]
    batch = UpdateSlice(
        torch.cat(params),
        torch.cat([segment.grad for segment in segments]),
        torch.cat(masters) if masters else None,
        tuple(map(torch.cat, states)),
    )
    update_reference(rule, batch, hyper, grad_scale)
    sizes = [param.numel() for param in params]
    for targets, source in zip([params, masters, *states], [batch.param, batch.master, *batch.states], strict=True):
        if source is not None:  # without masters there is nothing to copy back
            torch._foreach_copy_(targets, torch.split(source, sizes))


def _fp32_of(param: Tensor, master: Tensor | None) -> Tensor:
    """Return the fp32 values behind a parameter, [n]: the very memory where it is fp32, else a copy."""
    values = param if master is None else master
    return values if values.dtype == torch.float32 else read_master(param, master)


def _address(tensor: Tensor | None) -> int:
    """Return where a tensor begins; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


# ----------------------------------------------------------------------------------------------------------------------
# Options that only another version of an optimizer class has.
# ----------------------------------------------------------------------------------------------------------------------


def unknown_options(rule: FusedRule, options: Iterable[str], cls: type[torch.optim.Optimizer]) -> dict[str, Any]:
    """Find options of the user's class that the rule does not know, such as those of a newer torch.

    Arguments:
        rule: the rule.
        options: the options of the class in this version.
        cls: the class.

    Returns:
        The default of the class's constructor for each, at which the option asks for nothing.
    """
    constructor = inspect.signature(cls).parameters
    known = {*rule.honoured, *rule.refused, *rule.without_effect}
    return {name: constructor[name].default if name in constructor else None for name in options if name not in known}
