"""What rules with kernels of their own share: one native pass on the host, and a reference in plain torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock import _native
from penstock._native import Pool
from penstock.errors import ConfigError
from penstock.rules import exact
from penstock.rules.device import DeviceUpdate, Operations, Traced, rounds_by_its_place
from penstock.rules.dither import step_key
from penstock.rules.exact import fp32
from penstock.rules.master import read_master
from penstock.rules.native import dtype_of, master_kind_of, storage_of
from penstock.rules.rule import BLOCK_NUMEL, PIECE_NUMEL, Hyper, Scalars, Segment, StateSpec
from penstock.rules.storage import Rounding, StateFormat, read_state, write_param, write_state


@dataclass(frozen=True)
class FusedHyper(Hyper):
    """The scalars of one update, each a value that fp32 holds.

    Args:
        kernel: the native kernel.
        sign: -1 to maximize, else 1.
        scalars: a NamedTuple of floats, in the order of the native kernel.
        flags: a NamedTuple of what is fixed for a run, in the order of the native kernel.
        step: which step's random bits; 0 where there are none.
    """

    kernel: _native.Rule
    sign: float
    scalars: Any
    flags: Any
    step: int = 0

    @property
    def keeps_zeros(self) -> bool:
        """Zero over zero is a NaN: a divisor needs eps."""
        return bool(getattr(self.scalars, "eps", 1.0) > 0)


#: Every operation rounded once.
EXACT = Operations(exact.fma, exact.sqrt)


@dataclass(frozen=True)
class Fused(ABC):
    """A rule with native kernels.

    Args:
        name: as in reports.
        format: how the states are stored.
        on_device: how segments on an accelerator are updated.
        unknown: options of the user's class that this rule does not know, and the value at which each asks for nothing.
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

    def check(self, group: Mapping[str, Any]) -> None:
        """Raise `ConfigError` for the first option of a parameter group that the update would not obey, by name."""
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

    @abstractmethod
    def hyper(self, group: Mapping[str, Any], step: int, scalars: Scalars = {}) -> FusedHyper:  # noqa: B006
        """Read a parameter group; see `Rule.hyper`."""

    @abstractmethod
    def arithmetic(
        self, p: Tensor, g: Tensor, states: list[Tensor], hyper: FusedHyper | Traced, ops: Operations
    ) -> Tensor:
        """Return the updated parameter, and put the updated states in the list; every operation rounds on its own.

        Args:
            p: fp32, [n].
            g: the gradient, scaled and negated as it has to be, fp32, [n].
            states: fp32, [n] each.
            hyper: flags, and scalars that are Python numbers or 0-dim tensors.
            ops: the operations of the back end.
        """

    def used(self, hyper: FusedHyper) -> int:
        """How many of the states, from the first, this update uses."""
        del hyper
        return len(self.states)

    def advance(self, hyper: Hyper) -> Scalars:
        """No scalars beside the step count."""
        del hyper
        return {}

    def update(self, segment: Segment, hyper: Hyper, grad_scale: float, pool: Pool | None) -> None:
        """Apply the rule to one segment, in one pass, in place. Raises `TypeError` for dtypes without a kernel."""
        self.update_many([(segment, hyper)], grad_scale, pool)

    def update_many(self, segments: Iterable[tuple[Segment, Hyper]], grad_scale: float, pool: Pool | None) -> None:
        """Apply the rule to segments of one device; see `Rule.update_many`."""
        elsewhere: list[tuple[Segment, FusedHyper]] = []
        for segment, hyper in segments:
            assert isinstance(hyper, FusedHyper)
            if segment.param.device.type == "cpu":
                self._update_native(segment, hyper, grad_scale, pool)
            else:
                elsewhere.append((segment, hyper))
        if elsewhere:
            self.on_device(self, elsewhere, grad_scale, update_in_torch)

    def _update_native(self, segment: Segment, hyper: FusedHyper, grad_scale: float, pool: Pool | None) -> None:
        param, stochastic = segment.param, self.format.stochastic
        states = [
            (
                segment.states[k].data_ptr(),
                _address(segment.scale(k)),
                storage_of(spec, segment.states[k], segment.scale(k), stochastic=stochastic),
            )
            for k, spec in enumerate(self.states[: self.used(hyper)])
        ]
        _native.update(
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
        )


def update_reference(rule: Fused, segment: Segment, hyper: FusedHyper, grad_scale: float) -> None:
    """Update a segment in plain torch operations, on any device: what every other back end is compared with."""
    specs = rule.states[: rule.used(hyper)]
    factor = fp32(grad_scale * hyper.sign)
    for piece in segment.pieces():
        p = _fp32_of(piece.param, piece.master)
        g = piece.grad.float() if factor == 1 else piece.grad.float() * factor
        states = [
            piece.states[k] if spec.dtype == torch.float32 else read_state(spec, piece.states[k], piece.scale(k))
            for k, spec in enumerate(specs)
        ]
        p = rule.arithmetic(p, g, states, hyper, EXACT)
        rounding = Rounding(piece, rule.format, hyper.step)
        for k, spec in enumerate(specs):
            write_state(spec, piece.states[k], piece.scale(k), states[k], rounding, k)
        write_param(piece, p, rounding)


def update_in_torch(rule: Fused, segments: Sequence[tuple[Segment, FusedHyper]], grad_scale: float) -> None:
    """Update segments of one device as `update_reference` does, the small ones of equal scalars together.

    An operation of a device costs its host the same for few elements as for many.
    """
    alike: dict[tuple[Any, ...], list[Segment]] = {}
    for segment, hyper in segments:
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


def _minds_its_place(rule: Fused, segment: Segment, hyper: FusedHyper) -> bool:
    """Whether what happens to an element depends on its number, or on its neighbours in a block."""
    in_blocks = any(spec.scale_name for spec in rule.states[: rule.used(hyper)])
    return in_blocks or rounds_by_its_place(rule, segment, hyper)


def _batches(segments: Iterable[Segment]) -> Iterator[list[Segment]]:
    """Neighbours of at most `PIECE_NUMEL` elements together."""
    batch: list[Segment] = []
    numel = 0
    for segment in segments:
        if batch and numel + segment.param.numel() > PIECE_NUMEL:
            yield batch
            batch, numel = [], 0
        batch.append(segment)
        numel += segment.param.numel()
    if batch:
        yield batch


def _update_together(rule: Fused, segments: Sequence[Segment], hyper: FusedHyper, grad_scale: float) -> None:
    """Update a batch as one segment: a copy of all of them, one after the other, and back what was written."""
    masters = [segment.master for segment in segments if segment.master is not None]
    states = [[segment.states[k] for segment in segments] for k in range(rule.used(hyper))]
    params = [segment.param for segment in segments]
    batch = Segment(
        torch.cat(params),
        torch.cat([segment.grad for segment in segments]),
        torch.cat(masters) if masters else None,
        tuple(map(torch.cat, states)),
    )
    update_reference(rule, batch, hyper, grad_scale)
    sizes = [param.numel() for param in params]
    for targets, source in zip([params, masters, *states], [batch.param, batch.master, *batch.states], strict=True):
        if source is not None:
            torch._foreach_copy_(targets, torch.split(source, sizes))


def _fp32_of(param: Tensor, master: Tensor | None) -> Tensor:
    """The values behind a parameter: where they lie as fp32, not a copy."""
    values = param if master is None else master
    return values if values.dtype == torch.float32 else read_master(param, master)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
