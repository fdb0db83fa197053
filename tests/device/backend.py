"""Makes the strict device one of torch's: `torch.device("strict")`, and `torch.strict` as `torch.cuda` is.

Import it in a process of its own, once `penstock_strict` is loaded (`tests/device/csrc`).
"""

import sys
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch._meta_registrations  # shapes of operators whose meta kernels are written in Python

native: Any = sys.modules["penstock_strict"]

NAME = "strict"


class DeviceModule(ModuleType):
    """`torch.strict`: what libraries expect of a device's module."""

    Stream = torch.Stream
    Event = torch.Event

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _lazy_init(self) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return native.DEVICES

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def set_device(self, device: Any) -> None:
        torch.accelerator.set_device_index(_index(device))

    @contextmanager
    def device(self, device: Any):
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    def current_stream(self, device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(_index(device))

    def set_stream(self, stream: torch.Stream) -> None:
        torch.accelerator.set_stream(stream)

    @contextmanager
    def stream(self, stream: torch.Stream):
        # Not torch.Stream's own block: it keeps what was before in the stream itself, and two threads that are on one
        # stream at a time would each leave it for where the other one came from.
        before = torch.accelerator.current_stream()
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def synchronize(self, device: Any = None) -> None:
        torch.accelerator.synchronize(_index(device))

    def empty_cache(self) -> None:
        native.empty_cache()

    def memory_allocated(self, device: Any = None) -> int:
        return native.memory(_index(device))["allocated"]

    def max_memory_allocated(self, device: Any = None) -> int:
        return native.memory(_index(device))["peak"]

    def memory_reserved(self, device: Any = None) -> int:
        return native.memory(_index(device))["reserved"]

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        native.reset_peak(_index(device))

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return native.HEAP_BYTES - self.memory_reserved(device), native.HEAP_BYTES

    def get_device_name(self, device: Any = None) -> str:
        return "strict"

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    def get_rng_state(self, device: Any = "strict") -> torch.Tensor:
        return self._generator(device).get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = "strict") -> None:
        self._generator(device).set_state(state)

    def manual_seed(self, seed: int) -> None:
        self._generator(None).manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for index in range(self.device_count()):
            self._generator(index).manual_seed(seed)

    def host_register(self, address: int, nbytes: int) -> None:
        """Page-lock host memory: copies between it and the device do not make the host wait."""
        native.host_register(address, nbytes)

    def host_unregister(self, address: int) -> None:
        """Undo it. Nothing may be under way there."""
        native.host_unregister(address)

    def _generator(self, device: Any) -> torch.Generator:
        return native.default_generator(_index(device))


def _index(device: Any) -> int:
    if device is None:
        return torch.accelerator.current_device_index()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


torch.utils.rename_privateuse1_backend(NAME)
torch._register_device_module(NAME, DeviceModule(NAME))
torch.utils.generate_methods_for_privateuse1_backend()
