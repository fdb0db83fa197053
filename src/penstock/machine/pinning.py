"""Host memory that a device can copy while nobody waits: page-locked, in the ways that devices have for it.

    register        memory that is there, in exact size and on the device's node: by cuda's runtime (ROCm's in its
                    place), or by `host_register(address, nbytes)` and `host_unregister(address)` of another
                    accelerator's module of torch
    pinned_buffer   torch's own, which most accelerators have, rounded up as it likes: for a few buffers

No other module knows which device has what.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor


def needs_pinning(device: torch.device) -> bool:
    """Whether a device copies from host memory: what is not page-locked it copies only while the host waits."""
    return device.type != "cpu"


def can_register(device: torch.device) -> bool:
    """Whether memory that is there can be page-locked for a device."""
    return device.type == "cuda" or _module(device) is not None


def register(slab: Tensor, device: torch.device) -> bool:
    """Page-lock a slab for a device. Return whether that was possible."""
    if device.type == "cuda":
        return _register_for_cuda(slab, device)
    module = _module(device)
    if module is None:
        return False
    try:
        return module.host_register(slab.data_ptr(), slab.numel()) in (None, True)
    except (RuntimeError, OSError, ValueError):
        return False


def unregister(address: int, device: torch.device) -> None:
    """Undo `register`.

    Arguments:
        address: the address of the slab.
        device: the device that it was registered for.
    """
    module: Any = torch.get_device_module(device)
    # A copy that is still under way would go on with pages that the system may move or give to others.
    module.synchronize(device)
    if device.type == "cuda":
        module.cudart().cudaHostUnregister(address)
    else:
        module.host_unregister(address)


def pinned_buffer(nbytes: int, device: torch.device, alignment: int) -> Tensor | None:
    """Allocate zero bytes of torch's own pinned memory.

    Arguments:
        nbytes: how many.
        device: the device that copies from it.
        alignment: the address is a multiple of it.

    Returns:
        uint8, [nbytes]; `None` where torch has no such memory, and for a cpu.
    """
    if not needs_pinning(device):
        return None
    for spare in (0, alignment):  # mostly it begins on a page, and nothing has to be spared to align it
        try:
            buffer = torch.zeros(nbytes + spare, dtype=torch.uint8, device="cpu", pin_memory=True)
        except (RuntimeError, NotImplementedError):
            return None
        start = -buffer.data_ptr() % alignment
        if start <= spare:
            return buffer[start : start + nbytes]
    return None


def _register_for_cuda(slab: Tensor, device: torch.device) -> bool:
    """Page-lock a slab with cuda's runtime. Return whether that was possible."""
    with torch.cuda.device(device):
        if int(torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.numel(), 0)) == 0:  # type: ignore[no-untyped-call]
            return True
        # The runtime keeps its last error, and torch raises it at the next launch. Have a launch of our own find it:
        # else it would be raised in the middle of the user's forward.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, dtype=torch.uint8, device=device)
    return False


def _module(device: torch.device) -> Any:
    """Return the module of torch that registers memory for a device; `None` where it cannot."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    return module if hasattr(module, "host_register") and hasattr(module, "host_unregister") else None
