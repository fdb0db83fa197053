"""Buffers of the model at `prepare`: on the device, in their own dtype, the same on every rank."""

import torch
from torch import Tensor, nn

from penstock.checkpoint.beside import batches
from penstock.machine.collectives import Ranks, as_bytes

_MOST_BYTES = 1 << 26  # that travel at once


def align_buffers(model: nn.Module, ranks: Ranks, device: torch.device) -> None:
    """Put the buffers on the device; every rank takes those of the first one, as it does with parameters. Collective.

    Sparse and quantised buffers, and tensor subclasses, have no plain memory: they stay as each rank has them.
    """
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    if ranks.world_size == 1:
        return
    buffers = [buffer for buffer in model.buffers() if _is_plain(buffer)]
    # One broadcast for many: a model has hundreds of small buffers. Every rank divides them alike, by their sizes: one
    # that sent another size than is expected would end the process group.
    for batch in batches(buffers, _MOST_BYTES):
        packed = torch.cat([_packed(buffer) for buffer in batch])
        ranks.broadcast(packed)
        cursor = 0
        for buffer in batch:
            nbytes = buffer.numel() * buffer.element_size()
            values = packed[cursor : cursor + nbytes].clone().view(buffer.dtype).view(buffer.shape)
            cursor += nbytes
            _replace(model, buffer, values)


def _is_plain(buffer: Tensor) -> bool:
    plain = type(buffer).__torch_dispatch__ is Tensor.__torch_dispatch__ and buffer.layout is torch.strided
    return plain and not buffer.is_quantized and buffer.numel() > 0


def _packed(buffer: Tensor) -> Tensor:
    """Give a buffer's values as bytes, whatever its strides are, and where it is a conjugate or negative view, too."""
    values = buffer.detach().resolve_conj().resolve_neg().contiguous()
    return as_bytes(values.view(-1))


def _replace(model: nn.Module, buffer: Tensor, values: Tensor) -> None:
    """Write the values, in place where that is possible: others may hold the buffer too."""
    if torch.equal(_packed(buffer), _packed(values)):
        return
    if buffer.is_inference() or _overlaps(buffer):
        for module in model.modules():
            for name, other in module._buffers.items():
                if other is buffer:
                    module._buffers[name] = values
    else:
        with torch.no_grad():
            buffer.detach().copy_(values)


def _overlaps(buffer: Tensor) -> bool:
    """Whether elements share memory, as those of an expanded tensor do."""
    return any(stride == 0 and size > 1 for size, stride in zip(buffer.shape, buffer.stride(), strict=True))
