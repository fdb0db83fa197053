"""What rules with kernels of their own share: one native pass on the host, and a reference in plain torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock import _native
from penstock._native import Pool
from penstock.errors import ConfigError
from penstock.rules import exact
from penstock.rules.device import DeviceUpdate, Operations, Traced
from penstock.rules.dither import step_key
from penstock.rules.exact import fp32
from penstock.rules.master import read_master
from penstock.rules.native import dtype_of, master_kind_of, storage_of
from penstock.rules.rule import BLOCK_NUMEL, Hyper, Scalars, Segment, StateSpec
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
    """

    name: str
    format: StateFormat = StateFormat()  # noqa: RUF009 - a frozen value
    on_device: DeviceUpdate = field(default_factory=DeviceUpdate, compare=False, repr=False, kw_only=True)

    @property
    @abstractmethod
    def states(self) -> tuple[StateSpec, ...]:
        """The states that some group of the optimizer needs."""

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """None beside the step count."""
        return ()

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
        assert isinstance(hyper, FusedHyper)
        if segment.param.device.type == "cpu":
            self._update_native(segment, hyper, grad_scale, pool)
        else:
            self.on_device(self, segment, hyper, grad_scale, update_reference)

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
    for piece in segment.pieces():
        p = read_master(piece.param, piece.master)
        g = piece.grad.float() * fp32(grad_scale * hyper.sign)
        states = [read_state(spec, piece.states[k], piece.scale(k)) for k, spec in enumerate(specs)]
        p = rule.arithmetic(p, g, states, hyper, EXACT)
        rounding = Rounding(piece, rule.format, hyper.step)
        for k, spec in enumerate(specs):
            write_state(spec, piece.states[k], piece.scale(k), states[k], rounding, k)
        write_param(piece, p, rounding)


def refuse(what: str, group: Mapping[str, Any], *, set_options: tuple[str, ...], tensors: tuple[str, ...]) -> None:
    """Refuse options that a rule does not honour, by name.

    Args:
        what: the rule.
        group: the parameter group.
        set_options: options that must be false.
        tensors: options that must be no tensors.

    Raises:
        ConfigError: names the first.
    """
    for option in set_options:
        if group.get(option):
            raise ConfigError(
                f"{option}={group[option]!r} is not supported by Penstock's {what}. "
                f"Set {option}=False in every parameter group."
            )
    for option in tensors:
        values = group[option] if isinstance(group[option], tuple) else (group[option],)
        for index, value in enumerate(values):
            if isinstance(value, Tensor):
                name = f"{option}[{index}]" if len(values) > 1 else option
                raise ConfigError(f"{name} is a tensor, which Penstock's {what} does not support. Make it a float.")


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
