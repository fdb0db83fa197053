"""The update of a segment on an accelerator: one function of tensors, compiled into one kernel where that works.

Compiled, an element is read and written once. The bits may differ from the host's in the last place of each operation:
the compiler decides which products it fuses into sums, and its division and square root need not be rounded correctly.
Not compiled, the reference runs: the host's bits, for many passes over memory.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.fx.experimental._config as _shape_config
from torch import Tensor

from penstock.rules.compiler import has_compiler
from penstock.rules.dither import step_key
from penstock.rules.exact import fp32
from penstock.rules.master import read_master
from penstock.rules.rule import Segment, StateSpec
from penstock.rules.storage import Rounding, read_state, write_param, write_state

Pass = Callable[..., None]


class Operations(NamedTuple):
    """The two operations whose rounding differs between back ends: a * b + c, and the square root."""

    fma: Callable[[Any, Tensor, Tensor], Tensor]
    sqrt: Callable[[Tensor], Tensor]


class Traced(NamedTuple):
    """A hyper inside of a compiled update: scalars are 0-dim tensors, so that a new learning rate compiles nothing."""

    scalars: Any
    flags: Any


def one_pass(
    arithmetic: Callable[..., Tensor],
    specs: tuple[StateSpec, ...],
    make_scalars: Callable[..., Any],
    flags: Any,
    stochastic: bool,
    tensors: tuple[Tensor, Tensor, Tensor | None, list[Tensor], list[Tensor | None]],
    numbers: Tensor,
    key_and_first: Tensor,
) -> None:
    """Update one segment in place. Everything before `tensors` is fixed for a compilation.

    Arguments:
        arithmetic: the rule's `Fused.arithmetic`.
        specs: the states that the update uses.
        make_scalars: the rule's NamedTuple of scalars.
        flags: the rule's flags, a NamedTuple.
        stochastic: whether bf16 is rounded by random bits.
        tensors: param, grad, master, states and their scales, as a `Segment` has them.
        numbers: the factor on the gradient, then the scalars: fp32, [1 + scalars].
        key_and_first: the key of the step's random bits, and the number of the first element: int64, [2].
    """
    param, grad, master, states, scales = tensors
    scale, *scalars = numbers.unbind()
    key, first = key_and_first.unbind()
    values = [read_state(spec, states[k], scales[k]) for k, spec in enumerate(specs)]
    p = read_master(param, master)
    hyper = Traced(make_scalars(*scalars), flags)
    p = arithmetic(p, grad.float() * scale, values, hyper, Operations(_plain_fma, torch.sqrt))
    rounding = Rounding(key, first, param.numel(), param.device) if stochastic else None
    for k, spec in enumerate(specs):
        write_state(spec, states[k], scales[k], values[k], rounding, k)
    write_param(param, master, p, rounding)


def compile_pass(backend: Any = "inductor") -> Pass:
    """Return `one_pass` compiled, for one rule.

    Arguments:
        backend: the compiler's back end, as `torch.compile` takes it.
    """
    # The function is compiled anew for each combination of flags and dtypes, and after a few of one piece of code the
    # compiler gives up. So every rule has a copy of its own.
    copy = FunctionType(one_pass.__code__.replace(), one_pass.__globals__, one_pass.__name__)
    compiled: Pass = torch.compile(copy, fullgraph=True, dynamic=True, backend=backend)
    return compiled


class DeviceUpdate:
    """Runs updates by `one_pass`, compiled, where torch has a compiler for the device, and else in another way.

    Arguments:
        compiled: a compiled `one_pass`; `None` has it compiled at the first update, if the device has a compiler.
    """

    def __init__(self, compiled: Pass | None = None) -> None:
        self._compiled = compiled
        self._decided = compiled is not None

    def __call__(
        self, rule: Any, segments: Sequence[tuple[Segment, Any]], grad_scale: float, otherwise: Callable[..., None]
    ) -> None:
        """Update segments.

        Arguments:
            rule: the rule, a `Fused`.
            segments: the segments, one or more, all on one device, each with its scalars.
            grad_scale: the factor on the gradient.
            otherwise: `otherwise(rule, segments, grad_scale)` updates them without a compiler.
        """
        device = segments[0][0].param.device
        if not self._decided:
            self._decided = True
            if has_compiler(device):
                self._compiled = compile_pass()
        if self._compiled is None:
            return otherwise(rule, segments, grad_scale)
        # For a tensor without elements the compiler would make another kernel.
        segments = [(segment, hyper) for segment, hyper in segments if segment.param.numel()]
        if not segments:
            return None
        numbers = _numbers_of(rule, segments, grad_scale, device)
        for done, ((segment, hyper), (scalars, key_and_first)) in enumerate(zip(segments, numbers, strict=True)):
            specs = rule.states[: rule.used(hyper)]
            arguments = (
                rule.arithmetic,
                specs,
                type(hyper.scalars),
                hyper.flags,
                rule.format.stochastic,
                (
                    segment.param,
                    segment.grad,
                    segment.master,
                    list(segment.states[: len(specs)]),
                    [segment.scale(k) for k in range(len(specs))],
                ),
                scalars,
                key_and_first,
            )
            try:
                # Sizes that are equal by chance are not taken for the same: each chance would compile a kernel anew.
                with _shape_config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
                    self._compiled(*arguments)
            except Exception as error:
                # Compilation fails before anything of this segment has run, so it is updated in the other way, and so
                # are those behind it. Those before it are done: a second update would be one too many.
                warnings.warn(
                    f"torch.compile failed for the update on {device} ({_reason(error)}). Updates there run in plain "
                    "torch operations: the same result in more passes over memory.",
                    stacklevel=2,
                )
                self._compiled = None
                return otherwise(rule, segments[done:], grad_scale)
        return None


def _reason(error: Exception) -> str:
    """Say why a compilation failed, and what to do where it was one too many."""
    reason = f"{type(error).__name__}: {error}"
    if type(error).__name__ == "FailOnRecompileLimitHit":
        limit = torch._dynamo.config.recompile_limit
        reason += (
            f"; the update was compiled {limit} times, which is torch's limit: raise "
            "torch._dynamo.config.recompile_limit, or see with TORCH_LOGS=recompiles what changes"
        )
    return reason


def _numbers_of(
    rule: Any, segments: Sequence[tuple[Segment, Any]], grad_scale: float, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Give what `one_pass` calls `numbers` and `key_and_first`, for each segment, on the device.

    The numbers of all segments are copied together, equal ones once: a copy costs the host as much as a kernel does.
    """
    rows: dict[tuple[float, ...], int] = {}
    places: dict[tuple[int, int], int] = {}
    found: list[tuple[int, int, int]] = []
    for segment, hyper in segments:
        row = fp32(grad_scale * hyper.sign), *hyper.scalars
        place = 0, 0
        if rounds_by_its_place(rule, segment, hyper):
            key = step_key(rule.format.seed, hyper.step)
            place = key - (1 << 64) if key >> 63 else key, segment.first
        found.append((rows.setdefault(row, len(rows)), len(row), places.setdefault(place, len(places))))
    width = max(length for _, length, _ in found)
    # Every row begins on 16 bytes: before a compiled kernel runs, torch copies inputs that do not.
    width += -width % 4
    scalars = _on_device([[*row, *[0.0] * (width - len(row))] for row in rows], torch.float32, device)
    keys_and_firsts = _on_device([list(place) for place in places], torch.int64, device)
    for number, length, at in found:
        yield scalars[number, :length], keys_and_firsts[at]


def _on_device(rows: list[list[Any]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make a tensor of rows of numbers on a device, [rows, columns]."""
    # At least two rows: for a size of 1 the compiler makes a kernel of its own.
    values = torch.tensor(rows if len(rows) > 1 else 2 * rows, dtype=dtype, device="cpu")
    if device.type != "cpu":
        # A copy from pageable memory has the host wait for all that the device was given before. Where memory may not
        # be page-locked, it does wait, and the values are the same.
        with contextlib.suppress(RuntimeError):
            values = values.pin_memory()
    # The pinned values go out of use before the copy is over. torch keeps such memory until then.
    return values.to(device, non_blocking=True)


def rounds_by_its_place(rule: Any, segment: Segment, hyper: Any) -> bool:
    """Whether some of a segment is rounded by random bits, which depend on the number of each element."""
    rounded = [spec.dtype for spec in rule.states[: rule.used(hyper)]]
    rounded += [segment.param.dtype] if segment.master is None else []
    return rule.format.stochastic and torch.bfloat16 in rounded


def _plain_fma(a: Any, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c, rounded once or twice as the compiler likes."""
    product: Tensor = a * b
    return product + c
