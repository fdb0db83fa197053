"""The update of a segment on an accelerator: one function of tensors, compiled into one kernel where that works.

Compiled, an element is read and written once. The bits may differ from the host's in the last place of each operation:
the compiler decides which products it fuses into sums, and its division and square root need not be rounded correctly.
Not compiled, the reference runs: the host's bits, for many passes over memory.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.rules.compiler import has_compiler
from penstock.rules.dither import PARAM, random_words, round_up_by, step_key
from penstock.rules.exact import fp32
from penstock.rules.master import read_master, write_master
from penstock.rules.rule import Segment, StateSpec
from penstock.rules.storage import read_state, write_state

Pass = Callable[..., None]


class Operations(NamedTuple):
    """The two operations whose rounding differs between back ends: a * b + c, and the square root."""

    fma: Callable[[Any, Tensor, Tensor], Tensor]
    sqrt: Callable[[Tensor], Tensor]


class Traced(NamedTuple):
    """The scalars of an update as 0-dim tensors, so that a new learning rate compiles nothing, and its flags."""

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
    """Update in place; everything before `tensors` is fixed for a compilation.

    Args:
        arithmetic: of the rule.
        specs: the states that the update uses.
        make_scalars: the rule's NamedTuple of scalars.
        flags: the rule's NamedTuple of flags.
        stochastic: bf16 is rounded by random bits.
        tensors: param, grad, master, states and their scales.
        numbers: fp32: the factor on the gradient, and the scalars.
        key_and_first: int64: the key of the step's random bits, and the number of the first element.
    """
    param, grad, master, states, scales = tensors
    scale, *scalars = numbers.unbind()
    key, first = key_and_first.unbind()
    values = [read_state(spec, states[k], scales[k]) for k, spec in enumerate(specs)]
    p = read_master(param, master)
    hyper = Traced(make_scalars(*scalars), flags)
    p = arithmetic(p, grad.float() * scale, values, hyper, Operations(_plain_fma, torch.sqrt))
    for k, spec in enumerate(specs):
        if stochastic and spec.dtype == torch.bfloat16:
            words = random_words(key, first, param.numel(), k // 2, param.device)
            states[k].copy_(round_up_by(values[k], words, k))
        else:
            write_state(spec, states[k], scales[k], values[k])
    if stochastic and master is None and param.dtype == torch.bfloat16:
        param.copy_(round_up_by(p, random_words(key, first, param.numel(), PARAM // 2, param.device), PARAM))
    else:
        write_master(param, master, p)


def compile_pass(backend: Any = "inductor") -> Pass:
    """Return `one_pass` compiled, for one rule.

    It is compiled anew for each combination of flags and dtypes, and the compiler gives up after a few of one piece of
    code. So every rule has a copy of its own.
    """
    copy = FunctionType(one_pass.__code__.replace(), one_pass.__globals__, one_pass.__name__)
    compiled: Pass = torch.compile(copy, fullgraph=True, dynamic=True, backend=backend)
    return compiled


class DeviceUpdate:
    """Runs `one_pass` compiled where the device's compiler is there, else what it is given instead.

    Args:
        compiled: `None` decides by the device; tests choose.
    """

    def __init__(self, compiled: Pass | None = None) -> None:
        self._compiled = compiled
        self._decided = compiled is not None

    def __call__(
        self, rule: Any, segments: Sequence[tuple[Segment, Any]], grad_scale: float, otherwise: Callable[..., None]
    ) -> None:
        """Update segments of a rule, each with its hyper.

        Args:
            rule: theirs.
            segments: of one device, one or more.
            grad_scale: factor on the gradient.
            otherwise: `otherwise(rule, segments, grad_scale)` is the way without a compiler.
        """
        device = segments[0][0].param.device
        if not self._decided:
            self._decided = True
            if has_compiler(device):
                self._compiled = compile_pass()
        if self._compiled is None:
            return otherwise(rule, segments, grad_scale)
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
                self._compiled(*arguments)
            except Exception as error:  # compilation fails before anything has run
                warnings.warn(
                    f"torch.compile failed for the update on {device} ({type(error).__name__}: {error}). Updates there "
                    "run in plain torch operations: the same result in more passes over memory.",
                    stacklevel=2,
                )
                self._compiled = None
                return otherwise(rule, segments[done:], grad_scale)
        return None


def _numbers_of(
    rule: Any, segments: Sequence[tuple[Segment, Any]], grad_scale: float, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """What `one_pass` calls `numbers` and `key_and_first`, for each segment.

    All of them are written in host memory that the device copies from without the host waiting for it, and copied at
    once. What is equal is there once.
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
    width += -width % 4  # every row on 16 bytes, as a compiled kernel wants its inputs
    scalars = _on_device([[*row, *[0.0] * (width - len(row))] for row in rows], torch.float32, device)
    keys_and_firsts = _on_device([list(place) for place in places], torch.int64, device)
    for number, length, at in found:
        yield scalars[number, :length], keys_and_firsts[at]


def _on_device(rows: list[list[Any]], dtype: torch.dtype, device: torch.device) -> Tensor:
    values = torch.tensor(rows, dtype=dtype, device="cpu")
    if device.type != "cpu":  # from pageable memory the host would wait for what the device was given before
        with contextlib.suppress(RuntimeError):  # where memory may not be locked, it does
            values = values.pin_memory()
    return values.to(device, non_blocking=True)


def rounds_by_its_place(rule: Any, segment: Segment, hyper: Any) -> bool:
    """Whether some of a segment is rounded by random bits, which its elements' numbers choose."""
    rounded = [spec.dtype for spec in rule.states[: rule.used(hyper)]]
    rounded += [segment.param.dtype] if segment.master is None else []
    return rule.format.stochastic and torch.bfloat16 in rounded


def _plain_fma(a: Any, b: Tensor, c: Tensor) -> Tensor:
    product: Tensor = a * b
    return product + c
