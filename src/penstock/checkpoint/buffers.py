"""A model's persistent buffers on their way to a checkpoint and back.

    dense, of a dtype of safetensors files     as it is
    complex128, complex32                      its real and imaginary parts, one dimension more
    anything else                              refused when the model is prepared

A buffer is written in place, whatever it is: other modules may hold the same tensor.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from penstock.checkpoint.manifest import checksum_of, read_tensors, tensors_to_bytes
from penstock.errors import CheckpointError

WHOLE, PARTS = "buffer.", "parts."  # what keys of tensors begin with
_COMMON = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_IN_PARTS = (torch.complex128, torch.complex32)


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to the model's state, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def why_not(buffer: Tensor) -> str | None:
    """What about a buffer no checkpoint can hold."""
    if type(buffer).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"is a {type(buffer).__name__}, a tensor subclass with bytes of its own inside"
    if buffer.is_nested:
        return "is a nested tensor"
    if buffer.layout != torch.strided:
        return f"is sparse ({str(buffer.layout).removeprefix('torch.')})"
    if buffer.is_quantized:
        return f"is quantised ({str(buffer.dtype).removeprefix('torch.')})"
    if buffer.dtype not in (*_COMMON, *_IN_PARTS) and not _in_safetensors(buffer.dtype):
        return f"has the dtype {str(buffer.dtype).removeprefix('torch.')}, which no safetensors file has"
    return None


def _in_safetensors(dtype: torch.dtype) -> bool:
    try:
        empty = torch.empty(0, dtype=dtype, device="cpu")
        return read_tensors("", tensors_to_bytes({"it": empty}))["it"].dtype == dtype
    except (CheckpointError, KeyError, ValueError, RuntimeError):
        return False


def to_tensors(buffers: Mapping[str, Tensor]) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Copies of buffers, as a checkpoint keeps them: keys by name, and tensors by key."""
    keys: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}
    for name, buffer in buffers.items():
        plain = buffer.detach().as_subclass(Tensor).resolve_conj().resolve_neg().to("cpu", copy=True).contiguous()
        keys[name] = (PARTS if buffer.dtype in _IN_PARTS else WHOLE) + name
        tensors[keys[name]] = torch.view_as_real(plain) if buffer.dtype in _IN_PARTS else plain
    return keys, tensors


def from_tensor(key: str, tensor: Tensor) -> Tensor:
    """The reverse, of one; a tensor that cannot be has a shape that no buffer fits."""
    in_parts = key.startswith(PARTS) and tensor.dtype in (torch.float64, torch.float16) and tensor.shape[-1:] == (2,)
    return torch.view_as_complex(tensor.contiguous()) if in_parts else tensor


def other_than(ours: Mapping[str, Tensor], checksums: Mapping[str, int]) -> dict[str, Tensor]:
    """The tensors that differ from those with these checksums."""
    return {key: tensor for key, tensor in ours.items() if checksums.get(key) != checksum_of(tensor)}


def why_no_fit(buffer: Tensor, value: Tensor) -> str | None:
    """What about a value is not the buffer's; nothing has changed."""
    if value.shape != buffer.shape:
        return f"has shape {tuple(value.shape)}, not {tuple(buffer.shape)}"
    if _number_kind(value) != _number_kind(buffer):
        return f"is {value.dtype}, and the buffer is {buffer.dtype}"
    few = _distinct(buffer, value)
    if few.shape != value.shape and not _alike(few.expand_as(value), value):
        return "has elements that differ, and the buffer is expanded: they are one element of its memory"
    return None


def write_buffer(buffer: Tensor, value: Tensor) -> None:
    """Overwrite a buffer that a value fits, in place: also one that is expanded or of inference mode."""
    with torch.inference_mode(buffer.is_inference()), torch.no_grad():
        _distinct(buffer, buffer).copy_(_distinct(buffer, value))


def _distinct(buffer: Tensor, of: Tensor) -> Tensor:
    """A tensor of the buffer's shape, but for elements that share the buffer's memory with others."""
    for dim, (stride, extent) in enumerate(zip(buffer.stride(), buffer.shape, strict=True)):
        if stride == 0 and extent > 1:
            of = of.narrow(dim, 0, 1)
    return of


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether they have the same bits: not every dtype can be compared."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _number_kind(tensor: Tensor) -> tuple[bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex()
