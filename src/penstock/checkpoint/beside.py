"""State beside the tiles of a checkpoint: a model's buffers, and random number generators.

Persistent buffers are stored as tensors:

    dense, of a dtype of safetensors files     as it is
    complex128, complex32                      its real and imaginary parts, one dimension more
    anything else                              refused when the model is prepared

A buffer is written in place, as other modules may hold the same tensor. If its shape differs in the checkpoint, as that
of a memory that grows, it stays the same tensor with new memory.

Random states are those of torch, Python and numpy, stored as JSON.
"""

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from penstock.checkpoint.format import checksum_of, decode, dtype_name, encode
from penstock.checkpoint.tensorfiles import DTYPES, read_tensors, tensors_to_bytes
from penstock.errors import CheckpointError
from penstock.files import Field

WHOLE, PARTS = "buffer.", "parts."  # the beginnings of keys of tensors
_AnyTensor = TypeVar("_AnyTensor", bound=Tensor)  # tensors, or parameters alone
_IN_PARTS = (torch.complex128, torch.complex32)


# Buffers


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of the model's state dict, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def batches(tensors: Iterable[_AnyTensor], most_bytes: int) -> Iterator[list[_AnyTensor]]:
    """Divide tensors into batches of at most some bytes, in order. A larger tensor is a batch of its own."""
    batch: list[_AnyTensor] = []
    batch_bytes = 0
    for tensor in tensors:
        tensor_bytes = tensor.numel() * tensor.element_size()
        if batch and batch_bytes + tensor_bytes > most_bytes:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(tensor)
        batch_bytes += tensor_bytes
    if batch:
        yield batch


def why_not(buffer: Tensor) -> str | None:
    """Return the reason if no checkpoint can hold a buffer, else `None`."""
    if type(buffer).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"is a {type(buffer).__name__}, a tensor subclass with bytes of its own inside"
    if buffer.is_nested:
        return "is a nested tensor"
    if buffer.layout != torch.strided:
        return f"is sparse ({str(buffer.layout).removeprefix('torch.')})"
    if buffer.is_quantized:
        return f"is quantised ({dtype_name(buffer.dtype)})"
    if buffer.dtype not in (*DTYPES.values(), *_IN_PARTS) and not _in_safetensors(buffer.dtype):
        return f"has the dtype {dtype_name(buffer.dtype)}, which no safetensors file has"
    return None


def _in_safetensors(dtype: torch.dtype) -> bool:
    """Return True if the installed safetensors writes and reads a dtype that `DTYPES` does not list."""
    try:
        empty = torch.empty(0, dtype=dtype, device="cpu")
        return read_tensors("", tensors_to_bytes({"it": empty}))["it"].dtype == dtype
    except (CheckpointError, KeyError, ValueError, RuntimeError):
        return False


def to_tensors(buffers: Mapping[str, Tensor]) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Copy buffers for a checkpoint. Return keys by name, and tensors by key."""
    keys: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}
    for name, buffer in buffers.items():
        plain = buffer.detach().as_subclass(Tensor).resolve_conj().resolve_neg().to("cpu", copy=True).contiguous()
        keys[name] = (PARTS if buffer.dtype in _IN_PARTS else WHOLE) + name
        tensors[keys[name]] = torch.view_as_real(plain) if buffer.dtype in _IN_PARTS else plain
    return keys, tensors


def from_tensor(key: str, tensor: Tensor) -> Tensor:
    """Return the buffer's value of a stored tensor."""
    in_parts = key.startswith(PARTS) and tensor.dtype in (torch.float64, torch.float16) and tensor.shape[-1:] == (2,)
    return torch.view_as_complex(tensor.contiguous()) if in_parts else tensor


def fingerprint(tensor: Tensor) -> str:
    """Return a tensor's shape, dtype and checksum as a text."""
    return f"{tuple(tensor.shape)} {tensor.dtype} {checksum_of(tensor)}"


def other_than(ours: Mapping[str, Tensor], fingerprints: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the tensors whose fingerprints differ from these."""
    return {key: tensor for key, tensor in ours.items() if fingerprints.get(key) != fingerprint(tensor)}


def why_no_fit(buffer: Tensor, value: Tensor) -> str | None:
    """Return the reason if a value does not fit a buffer, else `None`. Nothing changes."""
    if _number_kind(value) != _number_kind(buffer):
        return f"is {value.dtype}, and the buffer is {buffer.dtype}"
    if value.shape != buffer.shape:
        is_view = buffer.is_conj() or buffer.is_neg()
        shapes = f"has shape {tuple(value.shape)}, not {tuple(buffer.shape)}"
        return f"{shapes}, and the buffer is a conjugate or negative view of other memory" if is_view else None
    few = _distinct(buffer, value)
    if few.shape != value.shape and not _alike(few.expand_as(value), value):
        return "has elements that differ, and the buffer is expanded: they are one element of its memory"
    return None


def write_buffer(buffer: Tensor, value: Tensor) -> None:
    """Overwrite a buffer in place by a value that fits, also one that is expanded or an inference tensor.

    A value of another shape has the buffer's dtype and device. Its memory becomes the buffer's.
    """
    with torch.inference_mode(buffer.is_inference()), torch.no_grad():
        if value.shape != buffer.shape:
            buffer.grad = None
            buffer.set_(value)  # type: ignore[call-overload]
            return
        _distinct(buffer, buffer).copy_(_distinct(buffer, value))


def _distinct(buffer: Tensor, of: Tensor) -> Tensor:
    """Select one element of a tensor of the buffer's shape for each element of the buffer's memory."""
    for dim, (stride, size) in enumerate(zip(buffer.stride(), buffer.shape, strict=True)):
        if stride == 0 and size > 1:
            of = of.narrow(dim, 0, 1)
    return of


def _alike(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors have the same bits. Not every dtype has a comparison."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _number_kind(tensor: Tensor) -> tuple[bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex()


# Random number generators


def read_random(device: torch.device) -> object:
    """Return the random states of this process as JSON values. A `device` other than a cpu has its own generator."""
    states: dict[str, object] = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": random.getstate(),
    }
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device).cpu().numpy().tobytes()
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = (name, [int(key) for key in keys], *rest)
    return encode(states, {}, what="random")


def decode_random(field: Field, device: torch.device) -> Sequence[Callable[[], object]]:
    """Check random states, and return functions that set the generators of this process. None has changed yet.

    Generators without a saved state keep their own.

    Raises:
        CheckpointError: these are no states.
    """
    found: Any = decode(field, {})
    try:
        # Tried on new generators first: invalid states are refused before one of the process has changed.
        state = _state(found["torch"])
        torch.Generator().set_state(state)
        random.Random().setstate(found["python"])
        setters: list[Callable[[], object]] = [
            partial(torch.set_rng_state, state),
            partial(random.setstate, found["python"]),
        ]
        if device.type != "cpu" and found.get(device.type) is not None:
            state = _state(found[device.type])
            torch.Generator(device).set_state(state)
            setters.append(partial(torch.get_device_module(device).set_rng_state, state, device))
        if "numpy" in sys.modules and found.get("numpy") is not None:
            numpy, state = sys.modules["numpy"].random, found["numpy"]
            numpy.RandomState().set_state(state)
            if not 0 <= state[2] <= len(state[1]):  # numpy reads at this position without a check
                raise ValueError(f"position {state[2]}")
            setters.append(partial(numpy.set_state, state))
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise field.fail(f"is no state of a random number generator ({error})") from error
    return setters


def _state(state: object) -> Tensor:
    if not isinstance(state, bytes):  # `bytearray` of a number makes that many zeros
        raise TypeError(f"{type(state).__name__} in place of bytes")
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
