"""Update rules on a device, compiled with the roundings of the host."""

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import torch
import torch.fx.experimental._config as _shape_config
from torch import Tensor

from penstock.rules.formats import (
    Rounding,
    fp32_values,
    read_state,
    write_param,
    write_state,
)
from penstock.rules.rule import BLOCK_NUMEL, PIECE_NUMEL, StateSpec, UpdateSlice, fp32

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
    """Return True if compiled functions give the host's bits on a device. Code for other devices was not read."""
    return device.type == "cuda" and torch.version.hip is None and _knows_rounding()


def _knows_rounding() -> bool:
    """Return True if this torch has every option of `ROUNDING`."""
    from torch._inductor import config

    return config.get_config_copy().keys() >= ROUNDING.keys()


def has_compiler(device: torch.device) -> bool:
    """Return True if torch compiles kernels for a device: Triton is installed, and is for this type of device.

    A device that Triton does not support makes the first compilation fail, with one warning.
    """
    return device.type in ("cuda", "xpu") and find_spec("triton") is not None


class DevicePass:
    """A function of tensors on a device, compiled where torch has a compiler for it, until compilation fails.

    Compiled, an element is read and written once; as it is, in many passes over memory. Both give the host's bits.
    Where the compiler cannot be told to (`rounds_as_host`), the user is warned.

    Arguments:
        function: the function.
        what: its name in warnings.
        compiled: the compiled function; `None` has it compiled at the first call, if the device has a compiler.
    """

    def __init__(self, function: Callable[..., None], what: str, compiled: Pass | None = None) -> None:
        self._function, self._what, self._compiled = function, what, compiled
        self._decided = compiled is not None
        self._of_thread = threading.local()

    def compiles(self, device: torch.device) -> bool:
        """Return True if the function is compiled for a device."""
        if not self._decided:
            self._decided = True
            if has_compiler(device):
                self._compiled = compile_pass(self._function)
                if not rounds_as_host(device):
                    warnings.warn(
                        f"torch {torch.__version__} compiles {self._what} on {device} and cannot be told to round as "
                        "the host does: the last place of a value may differ. On NVIDIA GPUs torch 2.11 or newer can.",
                        stacklevel=2,
                    )
        return self._compiled is not None

    def __call__(self, device: torch.device, *arguments: Any) -> bool:
        """Run the compiled function. Return True if it ran; else nothing of it has, and the caller runs it as it is."""
        if not self.compiles(device):
            return False
        assert self._compiled is not None
        try:
            with contextlib.ExitStack() as stack:
                for patch in self._patches():
                    stack.enter_context(patch)
                self._compiled(*_as_inputs(arguments))
        except Exception as error:  # compilation fails before anything has run
            warnings.warn(
                f"torch.compile failed for {self._what} on {device} ({_reason(error)}). It runs in plain torch "
                "operations there: the same result in more passes over memory.",
                stacklevel=2,
            )
            self._compiled = None
            return False
        return True

    def _patches(self) -> tuple[contextlib.AbstractContextManager[None], ...]:
        """Return what the compiler is told around each call of this thread; made once, since that takes long.

        Sizes that are equal by chance are not taken for the same: each chance would compile a kernel anew. Floats are
        constants of the code: what changes from call to call is a tensor.
        """
        if not hasattr(self._of_thread, "patches"):
            same_by_chance = _shape_config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
            self._of_thread.patches = same_by_chance, torch._dynamo.config.patch(specialize_float=True)
        found: tuple[contextlib.AbstractContextManager[None], ...] = self._of_thread.patches
        return found

    def run(self, device: torch.device, *arguments: Any) -> None:
        """Run the function, compiled or as it is."""
        if not self(device, *arguments):
            self._function(*arguments)


def _as_inputs(argument: Any) -> Any:
    """Give each tensor of an argument a storage that begins and ends with it, over the same memory.

    The compiler compares tensors of one storage by their elements, whatever their dtypes: it refuses those that seem to
    overlap, and asks at every call whether they do. And for each form of memory that views are of it compiles anew.
    """
    if isinstance(argument, tuple | list) and not hasattr(argument, "_fields"):
        return type(argument)(map(_as_inputs, argument))
    if not isinstance(argument, Tensor):
        return argument
    start = argument.storage_offset() * argument.element_size()
    memory = argument.untyped_storage()[start : start + argument.nbytes]
    tensor = torch.empty(0, dtype=argument.dtype, device=argument.device)
    return tensor.set_(memory, 0, argument.shape)  # type: ignore[call-overload]


def _reason(error: Exception) -> str:
    """Return why a compilation failed, and what to do where there were too many."""
    reason = f"{type(error).__name__}: {error}"
    if type(error).__name__ == "FailOnRecompileLimitHit":
        limit = torch._dynamo.config.recompile_limit
        reason += (
            f"; it was compiled {limit} times, which is torch's limit: raise torch._dynamo.config.recompile_limit, "
            "or see with TORCH_LOGS=recompiles what changes"
        )
    return reason


# ----------------------------------------------------------------------------------------------------------------------
# The update of a segment in one function of tensors, which an accelerator runs compiled into one kernel.
# ----------------------------------------------------------------------------------------------------------------------


#: For a size of 1 the compiler would make a kernel of its own.
_LEAST_NUMEL = 2 * BLOCK_NUMEL
#: Numbers of a few parameter groups and streams are kept on the device.
_MOST_SENT = 16


def one_pass(  # noqa: PLR0913 (all that makes a compiled pass another one)
    arithmetic: Callable[..., Tensor],
    specs: tuple[StateSpec, ...],
    make_scalars: Callable[..., Any],
    flags: Any,
    stochastic: bool,
    tensors: tuple[Tensor, Tensor, Tensor | None, list[Tensor], list[Tensor | None]],
    blocks: int,
    numbers: Tensor | Sequence[float],
    key_and_first: Tensor | Sequence[int],
) -> None:
    """Update one segment in place. Everything before `tensors` is fixed for a compilation.

    Arguments:
        arithmetic: the rule's `FusedRule.arithmetic`.
        specs: the states that the update uses.
        make_scalars: the rule's NamedTuple of scalars.
        flags: the rule's flags, a NamedTuple.
        stochastic: True to round bf16 by random bits.
        tensors: param, grad, master, states and their scales, as a `UpdateSlice` has them.
        blocks: how many blocks of 256 elements the segment has. Compiled, it has whole ones.
        numbers: the factor on the gradient, then the scalars; as a tensor fp32, [1 + scalars].
        key_and_first: the key of the step's random bits, and the number of the first element; as a tensor int64, [2].
    """
    param, grad, master, states, scales = tensors
    if torch.compiler.is_compiling():
        # The compiler takes sizes as multiples of 256 from here on: it reads and writes vectors, and nothing is padded.
        torch._check(param.numel() == BLOCK_NUMEL * blocks)  # type: ignore[no-untyped-call]
    scale, *scalars = numbers.unbind() if isinstance(numbers, Tensor) else numbers
    key, first = key_and_first.unbind() if isinstance(key_and_first, Tensor) else key_and_first
    # May be the very memory of the segment: arithmetic writes into nothing, each operation makes a tensor.
    p = fp32_values(param, master)
    values = [
        states[k] if spec.dtype == torch.float32 else read_state(spec, states[k], scales[k])
        for k, spec in enumerate(specs)
    ]
    # Compiled, scalars are 0-dim tensors, so that a new learning rate compiles nothing.
    p = arithmetic(p, grad.float() * scale, values, make_scalars(*scalars), flags)
    rounding = Rounding(key, first, param.numel(), param.device) if stochastic else None
    for k, spec in enumerate(specs):
        write_state(spec, states[k], scales[k], values[k], rounding, k)
    write_param(param, master, p, rounding)


def _arguments(
    rule: Any, update_slice: UpdateSlice, step_scalars: Any, numbers: Any, key_and_first: Any
) -> tuple[Any, ...]:
    """Return what `one_pass` takes for a segment."""
    specs = rule.states[: rule.used(step_scalars)]
    scales = [update_slice.scale(k) for k in range(len(specs))]
    states = list(update_slice.states[: len(specs)])
    tensors = update_slice.param, update_slice.grad, update_slice.master, states, scales
    fixed = rule.arithmetic, specs, type(step_scalars.scalars), step_scalars.flags, rule.format.stochastic
    return *fixed, tensors, update_slice.param.numel() // BLOCK_NUMEL, numbers, key_and_first


def _numbers(
    rule: Any, update_slice: UpdateSlice, step_scalars: Any, grad_scale: float
) -> tuple[tuple[float, ...], tuple[int, int]]:
    """Return the numbers of `one_pass`, and its key and first element, which are of random bits alone."""
    place = (step_scalars.key, update_slice.first) if rule.format.stochastic else (0, 0)
    return (fp32(grad_scale * step_scalars.sign), *step_scalars.scalars), place


def update_reference(rule: Any, update_slice: UpdateSlice, step_scalars: Any, grad_scale: float) -> None:
    """Update a segment in plain torch operations, on any device: what every other back end is compared with."""
    for piece in update_slice.pieces():
        one_pass(*_arguments(rule, piece, step_scalars, *_numbers(rule, piece, step_scalars, grad_scale)))


def update_in_torch(rule: Any, update_slices: Iterable[tuple[UpdateSlice, Any]], grad_scale: float) -> None:
    """Update slices of one device as `update_reference` does, small ones of equal scalars and dtypes together.

    An operation of a device costs the host the same for few elements as for many.
    """
    batches: dict[tuple[Any, ...], list[UpdateSlice]] = {}
    for update_slice, step_scalars in update_slices:
        # Alone: in a batch an element has another number, and other neighbours in its block of 256.
        if _rounds_by_its_place(rule, update_slice) or any(scale is not None for scale in update_slice.scales):
            update_reference(rule, update_slice, step_scalars, grad_scale)
            continue
        master = None if update_slice.master is None else update_slice.master.dtype
        key = step_scalars, update_slice.param.dtype, update_slice.grad.dtype, master
        batch = batches.setdefault(key, [])
        if batch and sum(each.param.numel() for each in (*batch, update_slice)) > PIECE_NUMEL:
            _update_together(rule, batch, step_scalars, grad_scale)
            batch.clear()
        batch.append(update_slice)
    for (step_scalars, *_), batch in batches.items():
        _update_together(rule, batch, step_scalars, grad_scale)


def _rounds_by_its_place(rule: Any, update_slice: UpdateSlice) -> bool:
    """Return True if random bits round some of a slice: they depend on the number of each element."""
    rounded = [state.dtype for state in update_slice.states]
    rounded += [update_slice.param.dtype] if update_slice.master is None else []
    return rule.format.stochastic and torch.bfloat16 in rounded


def _update_together(rule: Any, batch: Sequence[UpdateSlice], step_scalars: Any, grad_scale: float) -> None:
    """Update slices as one: copy them one after the other, update the copy, and copy back what was written."""
    if len(batch) == 1:
        update_reference(rule, batch[0], step_scalars, grad_scale)
        return
    columns = list(zip(*(_written(update_slice) for update_slice in batch), strict=True))
    param, *others = copies = [torch.cat(column) for column in columns]
    master = others.pop(0) if batch[0].master is not None else None
    grads = torch.cat([update_slice.grad for update_slice in batch])
    update_reference(rule, UpdateSlice(param, grads, master, tuple(others)), step_scalars, grad_scale)
    for column, copy in zip(columns, copies, strict=True):
        torch._foreach_copy_(list(column), list(torch.split(copy, [target.numel() for target in column])))


class DeviceUpdate:
    """Updates segments by `one_pass`, compiled, where torch has a compiler for the device, and else as it is.

    Arguments:
        compiled: a compiled `one_pass`; `None` has it compiled at the first update, if the device has a compiler.
    """

    def __init__(self, compiled: Pass | None = None) -> None:
        self._pass = DevicePass(one_pass, "the update", compiled)
        self._sent: dict[tuple[Any, ...], Tensor] = {}  # numbers that a device has, by the stream that they came on

    def __call__(self, rule: Any, update_slices: Sequence[tuple[UpdateSlice, Any]], grad_scale: float) -> None:
        """Update segments.

        Arguments:
            rule: the rule, a `FusedRule`.
            update_slices: the segments, one or more, all on one device, each with its scalars.
            grad_scale: the factor on the gradient.
        """
        device = update_slices[0][0].param.device
        if not self._pass.compiles(device):
            update_in_torch(rule, update_slices, grad_scale)
            return
        whole, filled = _in_blocks(update_slices)
        numbers_of = self._numbers_of(rule, whole, grad_scale, device)
        for (update_slice, step_scalars), numbers in zip(whole, numbers_of, strict=True):
            if not self._pass(device, *_arguments(rule, update_slice, step_scalars, *numbers)):
                update_reference(rule, update_slice, step_scalars, grad_scale)
        for piece, copy in filled:
            for target, source in zip(_written(piece), _written(copy), strict=True):
                target.copy_(source[: target.numel()])

    def _numbers_of(
        self, rule: Any, update_slices: Sequence[tuple[UpdateSlice, Any]], grad_scale: float, device: torch.device
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield `numbers` and `key_and_first` of `one_pass` for each segment, on the device.

        The numbers of all segments are copied together, equal ones once: a copy costs the host as much as a kernel.
        """
        rows: dict[tuple[float, ...], int] = {}
        places: dict[tuple[int, int], int] = {}
        found: list[tuple[int, int, int]] = []
        for update_slice, step_scalars in update_slices:
            row, place = _numbers(rule, update_slice, step_scalars, grad_scale)
            found.append((rows.setdefault(row, len(rows)), len(row), places.setdefault(place, len(places))))
        width = max((length for _, length, _ in found), default=0)
        # Every row begins on 16 bytes: before a compiled kernel runs, torch copies inputs that do not.
        width += -width % 4
        scalars = self._send([(*row, *[0.0] * (width - len(row))) for row in rows], torch.float32, device)
        keys_and_firsts = self._send(list(places), torch.int64, device)
        for number, length, at in found:
            yield scalars[number, :length], keys_and_firsts[at]

    def _send(self, rows: list[tuple[Any, ...]], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return rows of numbers on a device. The tiles of a step have the same ones, which are copied once."""
        stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)
        key = (*rows, dtype, device, stream)
        if key not in self._sent:
            if len(self._sent) >= _MOST_SENT:
                self._sent.clear()
            self._sent[key] = _on_device(rows, dtype, device)
        return self._sent[key]


def _in_blocks(
    update_slices: Iterable[tuple[UpdateSlice, Any]],
) -> tuple[list[tuple[UpdateSlice, Any]], list[tuple[UpdateSlice, UpdateSlice]]]:
    """Cut segments into pieces of whole blocks, two or more, and rests, which are copied and padded with zeros.

    Returns:
        The pieces and copies to update, with their scalars; and each rest with its copy, to be copied back.
    """
    whole: list[tuple[UpdateSlice, Any]] = []
    filled = []
    for update_slice, step_scalars in update_slices:
        if _is_whole(update_slice):
            whole.append((update_slice, step_scalars))
            continue
        numel = update_slice.param.numel()
        for piece in update_slice.pieces(max(numel - numel % BLOCK_NUMEL, _LEAST_NUMEL)):
            if _is_whole(piece):
                whole.append((piece, step_scalars))
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
                whole.append((copy, step_scalars))
    return whole, filled


def _is_whole(update_slice: UpdateSlice) -> bool:
    """Return True if a segment has whole blocks, and two or more."""
    numel = update_slice.param.numel()
    return numel % BLOCK_NUMEL == 0 and numel >= _LEAST_NUMEL


def _filled(values: Tensor, *, blocks: bool = False) -> Tensor:
    """Return a copy that is filled up with zeros to the least length, in elements or in blocks."""
    numel = _LEAST_NUMEL // BLOCK_NUMEL if blocks else _LEAST_NUMEL
    return torch.nn.functional.pad(values, (0, numel - values.numel()))


def _written(update_slice: UpdateSlice) -> list[Tensor]:
    """List the tensors that an update writes."""
    tensors = update_slice.param, update_slice.master, *update_slice.states, *update_slice.scales
    return [tensor for tensor in tensors if tensor is not None]


def _on_device(rows: list[tuple[Any, ...]], dtype: torch.dtype, device: torch.device) -> Tensor:
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
