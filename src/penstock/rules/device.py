"""Update rules on a device, compiled with the roundings of the host."""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.fx.experimental._config as _shape_config
from torch import Tensor

from penstock.rules.formats import Rounding, read_master, read_state, step_key, write_param, write_state
from penstock.rules.rule import BLOCK_NUMEL, StateSpec, UpdateSlice, fp32

# ----------------------------------------------------------------------------------------------------------------------
# Which devices torch compiles kernels for, and how to have these kernels round as the host's do.
# ----------------------------------------------------------------------------------------------------------------------


Pass = Callable[..., None]

#: What Inductor is told of our functions alone. No product is contracted with a sum that it flows into; a quotient is
#: the nearest value; functions of the device's library keep denormals. Triton keeps them in plain operations, and its
#: square root is the nearest value without being told. torch 2.11 is the first release with all three.
ROUNDING: dict[str, Any] = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
}


def compile_pass(function: Callable[..., None], backend: Any = "inductor") -> Pass:
    """Return a compiled copy of a function, which rounds as the host does where `rounds_as_host` says so.

    Arguments:
        function: what to compile, in one graph for all sizes.
        backend: the compiler's back end, as `torch.compile` takes it.
    """
    assert isinstance(function, FunctionType)
    import torch._inductor.inductor_prims  # registers the fused multiply-add of `rules.exact`

    # A function is compiled anew for each combination of flags and dtypes, and after a few of one piece of code the
    # compiler gives up. So every rule and every format has a copy of its own.
    copy = FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__)
    options = ROUNDING if backend == "inductor" and _knows_rounding() else None
    compiled: Pass = torch.compile(copy, fullgraph=True, dynamic=True, backend=backend, options=options)
    return compiled


def rounds_as_host(device: torch.device) -> bool:
    """Return True if compiled functions give the host's bits on a device: what is compiled for others was not read."""
    return device.type == "cuda" and torch.version.hip is None and _knows_rounding()


def _knows_rounding() -> bool:
    """Return True if this torch has every option of `ROUNDING`."""
    from torch._inductor import config

    return config.get_config_copy().keys() >= ROUNDING.keys()


def has_compiler(device: torch.device) -> bool:
    """Whether inductor makes kernels for a device: it knows the type of device, and the compiler behind it is there.

    The answer for a cpu is no: our native kernels are for the host. What is not seen here makes the first compilation
    fail, of which the user is warned once.
    """
    if device.type == "cpu":
        return False
    try:  # none of it is public: torch 2.8 to 2.13 have all of it, and what another one lacks is no reason to fail here
        from torch._dynamo.device_interface import DeviceInterface, get_registered_device_interfaces

        interface = dict(get_registered_device_interfaces()).get(device.type)
        if interface is None:
            return False
        from torch._inductor.codegen import common  # slow to import: not for devices that the compiler never heard of

        common.init_backend_registration()
        if common.get_scheduling_for_device(device.type) is None:
            return False
        if interface.is_triton_capable is DeviceInterface.is_triton_capable:
            return True  # its kernels are of another language
        if find_spec("triton") is None or not interface.is_triton_capable(device):
            return False
    except Exception:
        return device.type == "cuda" and find_spec("triton") is not None
    try:
        interface.raise_if_triton_unavailable(device)  # a triton of another make
    except Exception:
        return False
    return True


# ----------------------------------------------------------------------------------------------------------------------
# The update of a segment on an accelerator: one function of tensors, compiled into one kernel where that works.
#
# Compiled, an element is read and written once. Not compiled, the reference runs, in many passes over memory. Both give
# the host's bits; where the compiler cannot be told to (`rules.compiler.rounds_as_host`), the user is warned.
# ----------------------------------------------------------------------------------------------------------------------


#: For a size of 1 the compiler would make a kernel of its own.
_LEAST_NUMEL = 2 * BLOCK_NUMEL


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
    blocks: int,
    numbers: Tensor,
    key_and_first: Tensor,
) -> None:
    """Update one segment of whole blocks in place. Everything before `tensors` is fixed for a compilation.

    Arguments:
        arithmetic: the rule's `Fused.arithmetic`.
        specs: the states that the update uses.
        make_scalars: the rule's NamedTuple of scalars.
        flags: the rule's flags, a NamedTuple.
        stochastic: whether bf16 is rounded by random bits.
        tensors: param, grad, master, states and their scales, as a `UpdateSlice` has them.
        blocks: how many blocks of 256 elements the segment has.
        numbers: the factor on the gradient, then the scalars: fp32, [1 + scalars].
        key_and_first: the key of the step's random bits, and the number of the first element: int64, [2].
    """
    param, grad, master, states, scales = tensors
    # The compiler takes sizes as multiples of 256 from here on: it reads and writes vectors, and nothing is padded.
    torch._check(param.numel() == BLOCK_NUMEL * blocks)  # type: ignore[no-untyped-call]
    scale, *scalars = numbers.unbind()
    key, first = key_and_first.unbind()
    values = [read_state(spec, states[k], scales[k]) for k, spec in enumerate(specs)]
    p = read_master(param, master)
    hyper = Traced(make_scalars(*scalars), flags)
    p = arithmetic(p, grad.float() * scale, values, hyper)
    rounding = Rounding(key, first, param.numel(), param.device) if stochastic else None
    for k, spec in enumerate(specs):
        write_state(spec, states[k], scales[k], values[k], rounding, k)
    write_param(param, master, p, rounding)


class DeviceUpdate:
    """Runs updates by `one_pass`, compiled, where torch has a compiler for the device, and else in another way.

    Arguments:
        compiled: a compiled `one_pass`; `None` has it compiled at the first update, if the device has a compiler.
    """

    def __init__(self, compiled: Pass | None = None) -> None:
        self._compiled = compiled
        self._decided = compiled is not None

    def __call__(
        self, rule: Any, segments: Sequence[tuple[UpdateSlice, Any]], grad_scale: float, otherwise: Callable[..., None]
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
                self._compiled = compile_pass(one_pass)
                if not rounds_as_host(device):
                    warnings.warn(
                        f"Updates on {device} may differ from the host's in the last place of a value: torch "
                        f"{torch.__version__} compiles them and cannot be told to round as the host does. On NVIDIA "
                        "GPUs torch 2.11 or newer can.",
                        stacklevel=2,
                    )
        if self._compiled is None:
            otherwise(rule, segments, grad_scale)
            return
        whole, filled = _in_blocks(segments)
        if whole:
            self._update(rule, whole, grad_scale, otherwise)
        for piece, copy in filled:
            for target, source in zip(_written(piece), _written(copy), strict=True):
                target.copy_(source[: target.numel()])

    def _update(
        self, rule: Any, segments: Sequence[tuple[UpdateSlice, Any]], grad_scale: float, otherwise: Callable[..., None]
    ) -> None:
        """Update segments of whole blocks, two or more each; see `__call__`."""
        assert self._compiled is not None
        device = segments[0][0].param.device
        numbers = _numbers_of(rule, segments, grad_scale, device)
        for done, ((segment, hyper), (scalars, key_and_first)) in enumerate(zip(segments, numbers, strict=True)):
            specs = rule.states[: rule.used(hyper)]
            scales = [segment.scale(k) for k in range(len(specs))]
            # `data` is no view of anything: for each form of memory that views are of, a kernel would be compiled anew.
            arguments = (
                rule.arithmetic,
                specs,
                type(hyper.scalars),
                hyper.flags,
                rule.format.stochastic,
                (
                    segment.param.data,
                    segment.grad.data,
                    None if segment.master is None else segment.master.data,
                    [state.data for state in segment.states[: len(specs)]],
                    [None if scale is None else scale.data for scale in scales],
                ),
                segment.param.numel() // BLOCK_NUMEL,
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
                otherwise(rule, segments[done:], grad_scale)
                return


def _in_blocks(
    segments: Iterable[tuple[UpdateSlice, Any]],
) -> tuple[list[tuple[UpdateSlice, Any]], list[tuple[UpdateSlice, UpdateSlice]]]:
    """Cut segments into what has whole blocks, two or more, and the rest, which is copied and filled up with zeros.

    Returns:
        What to update, with its scalars; and each rest with its copy, from which it has to be copied back.
    """
    whole: list[tuple[UpdateSlice, Any]] = []
    filled = []
    for segment, hyper in segments:
        if _is_whole(segment):
            whole.append((segment, hyper))
            continue
        numel = segment.param.numel()
        for piece in segment.pieces(max(numel - numel % BLOCK_NUMEL, _LEAST_NUMEL)):
            if _is_whole(piece):
                whole.append((piece, hyper))
            else:
                copy = UpdateSlice(
                    _filled(piece.param),
                    _filled(piece.grad),
                    None if piece.master is None else _filled(piece.master),
                    tuple(map(_filled, piece.states)),
                    tuple(None if scale is None else _filled(scale, blocks=True) for scale in piece.scales),
                    piece.first,
                )
                filled.append((piece, copy))
                whole.append((copy, hyper))
    return whole, filled


def _is_whole(segment: UpdateSlice) -> bool:
    """Return True if a segment has whole blocks, and two or more."""
    numel = segment.param.numel()
    return numel % BLOCK_NUMEL == 0 and numel >= _LEAST_NUMEL


def _filled(values: Tensor, *, blocks: bool = False) -> Tensor:
    """Return a copy that is filled up with zeros to the least length, in elements or in blocks."""
    numel = _LEAST_NUMEL // BLOCK_NUMEL if blocks else _LEAST_NUMEL
    return torch.nn.functional.pad(values, (0, numel - values.numel()))


def _written(segment: UpdateSlice) -> list[Tensor]:
    """List the tensors that an update writes."""
    tensors = segment.param, segment.master, *segment.states, *segment.scales
    return [tensor for tensor in tensors if tensor is not None]


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
    rule: Any, segments: Sequence[tuple[UpdateSlice, Any]], grad_scale: float, device: torch.device
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


def rounds_by_its_place(rule: Any, segment: UpdateSlice, hyper: Any) -> bool:
    """Whether some of a segment is rounded by random bits, which depend on the number of each element."""
    rounded = [spec.dtype for spec in rule.states[: rule.used(hyper)]]
    rounded += [segment.param.dtype] if segment.master is None else []
    return rule.format.stochastic and torch.bfloat16 in rounded
