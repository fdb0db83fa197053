"""Update rules with native kernels."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from penstock import _native
from penstock._native import Pool
from penstock.rules.device import DeviceUpdate
from penstock.rules.formats import MASK64, StateFormat, step_key
from penstock.rules.rule import (
    BLOCK_NUMEL,
    RecordChecksums,
    Rule,
    Scalars,
    StepScalars,
    UpdateSlice,
    check_options,
    dtype_of,
    fp32,
    master_kind_of,
    storage_of,
)

# ----------------------------------------------------------------------------------------------------------------------
# What rules with native kernels share: one pass on the host, and one function of tensors for devices.
# ----------------------------------------------------------------------------------------------------------------------


class Flags(NamedTuple):
    """The switches of an update, which are fixed for a run, in the order of the native kernels.

    Arguments:
        l2: True to add weight decay to the gradient.
        lerp_from_grad: True to interpolate exp_avg from the gradient. That end is the more exact one for
            1 - beta1 >= 0.5, and then torch's choice.
        first: True at the first update.
        nesterov: True if the momentum looks ahead.
    """

    l2: bool = False
    lerp_from_grad: bool = False
    first: bool = False
    nesterov: bool = False


@dataclass(frozen=True)
class FusedScalars(StepScalars):
    """The scalars of one update, each a value that fp32 holds.

    Arguments:
        kernel: the native kernel that computes the update.
        sign: -1 to maximize, else 1.
        scalars: a NamedTuple of floats, in the order of the native kernel.
        flags: the switches.
        key: the key of the random bits that round the values (`step_key`); 0 where no random bits do.
    """

    kernel: _native.Rule
    sign: float
    scalars: Any
    flags: Flags
    key: int = 0

    @property
    def keeps_zeros(self) -> bool:
        """True if zeros stay zero: a divisor without `eps` makes 0 / 0 of them, a NaN."""
        return bool(getattr(self.scalars, "eps", 1.0) > 0)


@dataclass(frozen=True)
class FusedRule(Rule):
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

    sums = True

    #: Options that the update obeys.
    honoured: ClassVar[tuple[str, ...]]

    def step_scalars(self, group: Mapping[str, Any], step: int, scalars: Scalars = {}) -> FusedScalars:  # noqa: B006
        """Read a parameter group; see `Rule.step_scalars`."""
        del scalars
        check_options(self.name, group, self.honoured, self.unknown)
        kernel, values, flags = self.read_group(group, step)
        sign = -1.0 if group.get("maximize") else 1.0
        key = step_key(self.format.seed, step) if self.format.stochastic else 0
        return FusedScalars(kernel, sign, values, flags, key)

    @abstractmethod
    def read_group(self, group: Mapping[str, Any], step: int) -> tuple[_native.Rule, Any, Flags]:
        """Read the native kernel of an update, its scalars and its flags from a parameter group.

        Arguments:
            group: the group, which was checked.
            step: how many updates there will have been with this one.

        Raises:
            ConfigError: the group asks for state that `prepare` has made no memory for.
        """

    @abstractmethod
    def arithmetic(self, p: Tensor, g: Tensor, states: list[Tensor], c: Any, flags: Flags) -> Tensor:
        """Return the updated parameter, and put the updated states in the list.

        Each operation rounds on its own, so the order and the grouping of operations decide the bits. A product that is
        added without being rounded is `rule.fma`, and a root `rule.sqrt`.

        Arguments:
            p: the parameter, fp32, [n].
            g: the gradient, scaled and negated as it has to be, fp32, [n].
            states: the states that the update uses, fp32, [n] each.
            c: the scalars, Python numbers or 0-dim tensors.
            flags: the flags.
        """

    def used(self, step_scalars: FusedScalars) -> int:
        """Return how many of the states, from the first, this update uses."""
        del step_scalars
        return len(self.states)

    def update(
        self, update_slice: UpdateSlice, step_scalars: StepScalars, grad_scale: float, pool: Pool | None
    ) -> None:
        """Apply the rule to one segment, in one pass, in place; see `Rule.update`.

        Raises:
            TypeError: there is no kernel for a dtype of the segment.
        """
        self.update_many([(update_slice, step_scalars)], grad_scale, pool)

    def update_many(
        self,
        update_slices: Iterable[tuple[UpdateSlice, StepScalars]],
        grad_scale: float,
        pool: Pool | None,
        sums: RecordChecksums | None = None,
    ) -> None:
        """Apply the rule to segments of one device; see `Rule.update_many`."""
        elsewhere: list[tuple[UpdateSlice, FusedScalars]] = []
        for update_slice, step_scalars in update_slices:
            assert isinstance(step_scalars, FusedScalars)
            if update_slice.param.device.type == "cpu":
                self._update_native(update_slice, step_scalars, grad_scale, pool, sums)
            else:
                elsewhere.append((update_slice, step_scalars))
        if elsewhere:
            self.on_device(self, elsewhere, grad_scale)

    def _update_native(
        self,
        update_slice: UpdateSlice,
        step_scalars: FusedScalars,
        grad_scale: float,
        pool: Pool | None,
        sums: RecordChecksums | None,
    ) -> None:
        """Update a segment of host memory by the native kernel."""
        param, stochastic, used = update_slice.param, self.format.stochastic, self.used(step_scalars)
        values, scales = update_slice.states[:used], update_slice.scales[:used] or (None,) * used
        states = [
            (value.data_ptr(), _address(scale), storage_of(spec, value, scale, stochastic=stochastic))
            for spec, value, scale in zip(self.states[:used], values, scales, strict=True)
        ]
        summed = sums.among((param, update_slice.grad, update_slice.master, *values, *scales)) if sums else []
        # Addresses alone: `UpdateSlice` has checked lengths and devices, and the functions around them the dtypes.
        found = _native.update(
            pool,
            step_scalars.kernel,
            param.numel(),
            param.data_ptr(),
            dtype_of(param, "param"),
            update_slice.grad.data_ptr(),
            dtype_of(update_slice.grad, "grad"),
            _address(update_slice.master),
            master_kind_of(update_slice.master),
            states,
            [fp32(grad_scale * step_scalars.sign), *step_scalars.scalars, *map(float, step_scalars.flags)],
            param_random=stochastic and update_slice.master is None and param.dtype == torch.bfloat16,
            random_key=step_scalars.key & MASK64,
            first_block=update_slice.first // BLOCK_NUMEL,
            summed=[tensor.data_ptr() for tensor in summed],
        )
        if sums:
            sums.note(summed, found)


def _address(tensor: Tensor | None) -> int:
    """Return where a tensor begins; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()
